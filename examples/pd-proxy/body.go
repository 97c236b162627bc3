package main

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"maps"
)

// object is JSON whose values are passed on as they are.
type object map[string]json.RawMessage

const paramsKey = "kv_transfer_params"

func parseObject(b []byte) (object, error) {
	var o object
	if err := json.Unmarshal(b, &o); err != nil {
		return nil, err
	}
	if o == nil {
		return nil, errors.New("must be an object")
	}
	return o, nil
}

func (o object) encode() []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(o); err != nil {
		panic(err) // it consists of what was parsed
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

// with is the object with some keys anew.
func (o object) with(values map[string]any) object {
	out := maps.Clone(o)
	for k, v := range values {
		b, err := json.Marshal(v)
		if err != nil {
			panic(err) // strings, numbers and what was parsed
		}
		out[k] = b
	}
	return out
}

// transfer is a handoff that the proxy names, so that both legs can start at once.
type transfer struct{ id, secret string }

func newTransfer() transfer {
	var b [32]byte
	_, _ = rand.Read(b[:]) // does not fail
	return transfer{hex.EncodeToString(b[:16]), hex.EncodeToString(b[16:])}
}

// prefillBody is the leg that computes the prompt and one token, which nobody sees.
func prefillBody(o object, chat bool, t *transfer, peers []string) []byte {
	params := map[string]any{
		"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": nil, "remote_block_ids": nil, "remote_host": nil, "remote_port": nil,
	}
	if len(peers) > 0 {
		params["kvferry_peers"] = peers
	}
	if t != nil {
		params["kvferry_transfer"] = map[string]string{"id": t.id, "secret": t.secret}
	}
	values := map[string]any{"max_tokens": 1, "stream": false, paramsKey: params}
	if chat {
		values["max_completion_tokens"] = 1
	}
	out := o.with(values)
	delete(out, "stream_options")
	delete(out, "min_tokens") // more than max_tokens is an error
	return out.encode()
}

// decodeBody is the client's request with parameters, or without any: then the engine computes it all.
func decodeBody(o object, params object) []byte {
	if params == nil {
		return o.encode()
	}
	return o.with(map[string]any{paramsKey: params}).encode()
}

// overlapParams tell the decode engine of a transfer that begins now.
func overlapParams(t transfer, address string) object {
	return object{}.with(map[string]any{
		"do_remote_prefill": true, "do_remote_decode": false,
		"kvferry_transfer": map[string]string{"id": t.id, "secret": t.secret, "address": address},
	})
}

// ticketOf is what a prefill engine's answer has for the decode engine; nil where it has nothing.
func ticketOf(answer []byte) (object, error) {
	var a struct {
		Params object `json:"kv_transfer_params"`
	}
	if err := json.Unmarshal(answer, &a); err != nil {
		return nil, err
	}
	// vLLM would report this number, of the prefill engine's cache, instead of what the decode engine did not compute.
	delete(a.Params, "remote_prefill_cached_tokens")
	return a.Params, nil
}

// withoutParams is an answer, or an event of one, without the parameters: they are no client's affair. What is no object stays as it is.
func withoutParams(b []byte) []byte {
	if !bytes.Contains(b, []byte(`"`+paramsKey+`"`)) {
		return b
	}
	o, err := parseObject(b)
	if err != nil {
		return b
	}
	delete(o, paramsKey)
	return o.encode()
}
