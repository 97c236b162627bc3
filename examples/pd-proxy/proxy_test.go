package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// fakeEngine keeps what it was asked. answer is how it answers; nil: with ticket.
type fakeEngine struct {
	*httptest.Server
	asked  chan asked
	answer http.HandlerFunc
}

type asked struct {
	url, body string
	header    http.Header
}

const (
	ticketAnswer = `{"id":"1","kv_transfer_params":{"do_remote_prefill":true,"x":{"n":12345678901234567890},"remote_prefill_cached_tokens":7}}`
	ticket       = `{"do_remote_prefill":true,"x":{"n":12345678901234567890}}`
	prefillOnly  = `{"do_remote_decode":true,"do_remote_prefill":false,"remote_block_ids":null,"remote_engine_id":null,"remote_host":null,"remote_port":null}`
)

func newEngine(t *testing.T, answer http.HandlerFunc) *fakeEngine {
	t.Helper()
	f := &fakeEngine{asked: make(chan asked, 100), answer: answer}
	f.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		f.asked <- asked{r.URL.Path, string(b), r.Header}
		f.answer(w, r)
	}))
	t.Cleanup(f.Close)
	return f
}

func says(text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, text)
	}
}

// start serves a proxy before engines, and answers its URL and what it logs.
func start(t *testing.T, c config) (url string, log *bytes.Buffer) {
	t.Helper()
	log = &bytes.Buffer{}
	if c.PrefillTimeout == 0 {
		c.PrefillTimeout = time.Minute
	}
	if c.BodyMax == 0 {
		c.BodyMax = 1 << 20
	}
	c.Log = slog.New(slog.NewTextHandler(log, nil))
	s := httptest.NewServer(newProxy(c))
	t.Cleanup(s.Close)
	return s.URL, log
}

func at(url, peer string) []*engine { return []*engine{{url: url, peer: peer}} }

func post(t *testing.T, url, body string) (int, string) {
	t.Helper()
	r, err := http.Post(url, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(b)
}

func metric(t *testing.T, url, name string) string {
	t.Helper()
	r, err := http.Get(url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, _ := io.ReadAll(r.Body)
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, name+" "); ok {
			return strings.TrimSpace(v)
		}
	}
	return "none"
}

func TestBodiesOfBothLegs(t *testing.T) {
	prefill := newEngine(t, says(ticketAnswer))
	decode := newEngine(t, says(`{"id":"2","kv_transfer_params":{"secret":1},"choices":[{"text":"<a>"}]}`))
	url, log := start(t, config{Prefill: at(prefill.URL, ""), Decode: at(decode.URL, "")})
	for _, c := range []struct{ path, body, prefill, decode string }{
		{
			"/v1/completions",
			`{"model": "m", "prompt": [1, 2], "max_tokens": 16, "min_tokens": 4, "seed": 12345678901234567890, "kv_transfer_params": {"mine": 1}}`,
			`{"kv_transfer_params":` + prefillOnly + `,"max_tokens":1,"model":"m","prompt":[1,2],"seed":12345678901234567890,"stream":false}`,
			`{"kv_transfer_params":` + ticket + `,"max_tokens":16,"min_tokens":4,"model":"m","prompt":[1,2],"seed":12345678901234567890}`,
		},
		{
			"/v1/chat/completions",
			`{"messages":[{"role":"user","content":"a<b"}],"max_completion_tokens":9,"stream":true,"stream_options":{"include_usage":true}}`,
			`{"kv_transfer_params":` + prefillOnly + `,"max_completion_tokens":1,"max_tokens":1,"messages":[{"role":"user","content":"a<b"}],"stream":false}`,
			`{"kv_transfer_params":` + ticket + `,"max_completion_tokens":9,"messages":[{"role":"user","content":"a<b"}],"stream":true,"stream_options":{"include_usage":true}}`,
		},
	} {
		status, answer := post(t, url+c.path, c.body)
		if want := `{"choices":[{"text":"<a>"}],"id":"2"}`; status != 200 || answer != want {
			t.Errorf("%s: %d %s", c.path, status, answer)
		}
		if got := <-prefill.asked; got.url != c.path || got.body != c.prefill {
			t.Errorf("prefill leg: %s %s\nwant %s", got.url, got.body, c.prefill)
		}
		if got := <-decode.asked; got.url != c.path || got.body != c.decode {
			t.Errorf("decode leg: %s %s\nwant %s", got.url, got.body, c.decode)
		}
	}
	if got := strings.Count(log.String(), "path=handoff status=200"); got != 2 {
		t.Error(log.String())
	}
}

func TestHeaders(t *testing.T) {
	prefill, decode := newEngine(t, says(ticketAnswer)), newEngine(t, says(`{}`))
	url, _ := start(t, config{Prefill: at(prefill.URL, ""), Decode: at(decode.URL, "")})
	r, _ := http.NewRequest("POST", url+"/v1/completions", strings.NewReader(`{}`))
	for k, v := range map[string]string{"Authorization": "Bearer k", "X-Request-Id": "r1", "Traceparent": "00-1", "Cookie": "c"} {
		r.Header.Set(k, v)
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	_ = answer.Body.Close()
	if answer.Header.Get("X-Request-Id") != "r1" {
		t.Error(answer.Header)
	}
	for _, a := range []asked{<-prefill.asked, <-decode.asked} {
		h := a.header
		if h.Get("Authorization") != "Bearer k" || h.Get("X-Request-Id") != "r1" || h.Get("Traceparent") != "00-1" || h.Get("Cookie") != "" || h.Get("Content-Type") != "application/json" {
			t.Error(h)
		}
	}
	// Without an id of the client's, both legs have the same.
	post(t, url+"/v1/completions", `{}`)
	if a, b := (<-prefill.asked).header.Get("X-Request-Id"), (<-decode.asked).header.Get("X-Request-Id"); a == "" || a != b {
		t.Errorf("%q, %q", a, b)
	}
}

// The engine writes an event only when the client has the one before.
func TestStreamIsNotBuffered(t *testing.T) {
	read := make(chan struct{})
	prefill := newEngine(t, says(ticketAnswer))
	decode := newEngine(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		c := http.NewResponseController(w)
		for _, e := range []string{`{"a":1}`, `{"a":2,"kv_transfer_params":{"x":1}}`, `{"text":"\"kv_transfer_params\""}`, `[DONE]`} {
			_, _ = fmt.Fprintf(w, "data: %s\n\n", e)
			_ = c.Flush()
			<-read
		}
	})
	url, _ := start(t, config{Prefill: at(prefill.URL, ""), Decode: at(decode.URL, "")})
	r, err := http.Post(url+"/v1/completions", "application/json", strings.NewReader(`{"stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	if got := r.Header.Get("Content-Type"); got != "text/event-stream; charset=utf-8" {
		t.Error(got)
	}
	b := bufio.NewReader(r.Body)
	for _, want := range []string{`{"a":1}`, `{"a":2}`, `{"text":"\"kv_transfer_params\""}`, `[DONE]`} {
		for _, line := range []string{"data: " + want + "\n", "\n"} {
			if got, err := b.ReadString('\n'); got != line {
				t.Fatalf("%q (%v), want %q", got, err, line)
			}
		}
		read <- struct{}{}
	}
	if rest, err := io.ReadAll(b); err != nil || len(rest) > 0 {
		t.Errorf("%q, %v", rest, err)
	}
}

func TestPrefillFails(t *testing.T) {
	for name, c := range map[string]struct {
		answer  http.HandlerFunc
		timeout time.Duration
		reason  string
		failed  string
	}{
		"status":  {func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", 500) }, 0, "500 Internal Server Error", "1"},
		"timeout": {func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, 20 * time.Millisecond, "deadline exceeded", "1"},
		"broken":  {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, 0, "EOF", "1"},
		"no JSON": {says("<html>"), 0, "invalid character", "1"},
		"nothing": {says(`{"kv_transfer_params":null}`), 0, "gave no parameters", "0"},
	} {
		t.Run(name, func(t *testing.T) {
			prefill, decode := newEngine(t, c.answer), newEngine(t, says(`{"ok":1}`))
			url, log := start(t, config{Prefill: at(prefill.URL, ""), Decode: at(decode.URL, ""), PrefillTimeout: c.timeout})
			if status, answer := post(t, url+"/v1/completions", `{"max_tokens":5,"kv_transfer_params":{"x":1}}`); status != 200 || answer != `{"ok":1}` {
				t.Error(status, answer)
			}
			if got := <-decode.asked; got.body != `{"max_tokens":5}` {
				t.Error(got.body)
			}
			if !strings.Contains(log.String(), "path=decode_only") || !strings.Contains(log.String(), c.reason) {
				t.Error(log.String())
			}
			if a, b := metric(t, url, `pd_proxy_requests_total{path="decode_only"}`), metric(t, url, "pd_proxy_prefill_failures_total"); a != "1" || b != c.failed {
				t.Error(a, b)
			}
		})
	}
}

// closed is the address of an engine that is not there.
func closed(t *testing.T) *engine {
	t.Helper()
	s := httptest.NewServer(nil)
	s.Close()
	return &engine{url: s.URL}
}

func TestRefusedConnections(t *testing.T) {
	prefill, decode := newEngine(t, says(ticketAnswer)), newEngine(t, says(`{"ok":1}`))
	gone, goneToo := closed(t), closed(t)
	url, log := start(t, config{Prefill: append([]*engine{gone}, at(prefill.URL, "")...), Decode: append([]*engine{goneToo}, at(decode.URL, "")...)})
	for range 4 {
		if status, answer := post(t, url+"/v1/completions", `{}`); status != 200 || answer != `{"ok":1}` {
			t.Error(status, answer)
		}
		if got := <-decode.asked; got.body != `{"kv_transfer_params":`+ticket+`}` {
			t.Error(got.body)
		}
	}
	if n := strings.Count(log.String(), "decode engine does not answer"); n != 1 {
		t.Errorf("%d tries at an engine that is gone:\n%s", n, log)
	}
}

func TestNoDecodeEngine(t *testing.T) {
	prefill := newEngine(t, says(ticketAnswer))
	url, _ := start(t, config{Prefill: at(prefill.URL, ""), Decode: []*engine{closed(t)}})
	if status, answer := post(t, url+"/v1/completions", `{}`); status != 502 || !strings.Contains(answer, "no decode engine answers") {
		t.Error(status, answer)
	}
}

func TestDecodeError(t *testing.T) {
	prefill := newEngine(t, says(ticketAnswer))
	decode := newEngine(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Retry-After", "3")
		w.WriteHeader(429)
		_, _ = io.WriteString(w, `{"error":{"message":"busy"}}`)
	})
	url, _ := start(t, config{Prefill: at(prefill.URL, ""), Decode: at(decode.URL, "")})
	if status, answer := post(t, url+"/v1/completions", `{}`); status != 429 || answer != `{"error":{"message":"busy"}}` {
		t.Error(status, answer)
	}
}

// A stream that breaks off is broken for the client too.
func TestDecodeDiesInStream(t *testing.T) {
	prefill := newEngine(t, says(ticketAnswer))
	decode := newEngine(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: 1\n\n")
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})
	url, _ := start(t, config{Prefill: at(prefill.URL, ""), Decode: at(decode.URL, "")})
	r, err := http.Post(url+"/v1/completions", "application/json", strings.NewReader(`{}`))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	if b, err := io.ReadAll(r.Body); err == nil {
		t.Errorf("ended well with %q", b)
	}
	if got := metric(t, url, "pd_proxy_answers_cut_total"); got != "1" {
		t.Error(got)
	}
}

func TestBadRequests(t *testing.T) {
	prefill, decode := newEngine(t, says(ticketAnswer)), newEngine(t, says(`{}`))
	url, _ := start(t, config{Prefill: at(prefill.URL, ""), Decode: at(decode.URL, ""), BodyMax: 100})
	for _, c := range []struct {
		body   string
		status int
		says   string
	}{
		{`{"model":`, 400, "body: unexpected end"}, {`[]`, 400, "body: json: cannot unmarshal array"}, {`null`, 400, "body: must be an object"}, {``, 400, "body: unexpected end"},
		{`{"prompt":"` + strings.Repeat("a", 100) + `"}`, 413, "body: more than 100 bytes"},
	} {
		status, answer := post(t, url+"/v1/completions", c.body)
		var e struct {
			Error struct{ Message, Type string }
		}
		if err := json.Unmarshal([]byte(answer), &e); err != nil || status != c.status || !strings.HasPrefix(e.Error.Message, c.says) || e.Error.Type != "invalid_request_error" {
			t.Errorf("%q: %d %s", c.body, status, answer)
		}
	}
	if len(prefill.asked)+len(decode.asked) > 0 {
		t.Error("an engine was asked")
	}
	if r, err := http.Get(url + "/v1/completions"); err != nil || r.StatusCode != 405 {
		t.Error(r, err)
	}
}

func TestModels(t *testing.T) {
	decode := newEngine(t, says(`{"data":[]}`))
	url, _ := start(t, config{Prefill: []*engine{closed(t)}, Decode: append([]*engine{closed(t)}, at(decode.URL, "")...)})
	for _, path := range []string{"/v1/models", "/healthz"} {
		r, err := http.Get(url + path)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(r.Body)
		_ = r.Body.Close()
		if want := map[string]string{"/v1/models": `{"data":[]}`, "/healthz": "ok\n"}[path]; r.StatusCode != 200 || string(b) != want {
			t.Errorf("%s: %d %q", path, r.StatusCode, b)
		}
	}
}

// until answers when the request was cancelled.
func until(gone chan<- string, name string, begun chan<- string) http.HandlerFunc {
	return func(_ http.ResponseWriter, r *http.Request) {
		begun <- name
		<-r.Context().Done()
		gone <- name
	}
}

func TestClientGone(t *testing.T) {
	for _, c := range []struct {
		name    string
		overlap bool
		legs    int
	}{{"in the prefill leg", false, 1}, {"with both legs", true, 2}} {
		t.Run(c.name, func(t *testing.T) {
			gone, begun := make(chan string, 2), make(chan string, 2)
			prefill, decode := newEngine(t, until(gone, "prefill", begun)), newEngine(t, until(gone, "decode", begun))
			url, _ := start(t, config{Prefill: at(prefill.URL, "a:1"), Decode: at(decode.URL, ""), Overlap: c.overlap})
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				r, _ := http.NewRequestWithContext(ctx, "POST", url+"/v1/completions", strings.NewReader(`{}`))
				if _, err := http.DefaultClient.Do(r); err == nil {
					t.Error("answered")
				}
			}()
			for range c.legs {
				<-begun
			}
			cancel()
			<-ended
			for range c.legs {
				<-gone
			}
			if !c.overlap && len(decode.asked) > 0 {
				t.Error("decodes for a client that is gone")
			}
		})
	}
}

// Each leg answers only when the other has come.
func TestOverlap(t *testing.T) {
	prefillCame, decodeCame := make(chan struct{}), make(chan struct{})
	prefill := newEngine(t, func(w http.ResponseWriter, r *http.Request) {
		close(prefillCame)
		<-decodeCame
		says(ticketAnswer)(w, r)
	})
	decode := newEngine(t, func(w http.ResponseWriter, r *http.Request) {
		close(decodeCame)
		<-prefillCame
		says(`{"ok":1}`)(w, r)
	})
	url, log := start(t, config{Prefill: at(prefill.URL, "10.0.0.1:7400"), Decode: at(decode.URL, "10.0.0.2:7400"), Overlap: true})
	if status, answer := post(t, url+"/v1/completions", `{"max_tokens":5}`); status != 200 || answer != `{"ok":1}` {
		t.Error(status, answer)
	}
	ids := `"id":"([0-9a-f]{32})","secret":"([0-9a-f]{32})"`
	first := regexp.MustCompile(`^{"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"kvferry_peers":\["10.0.0.2:7400"\],"kvferry_transfer":{` + ids +
		`},"remote_block_ids":null,"remote_engine_id":null,"remote_host":null,"remote_port":null},"max_tokens":1,"stream":false}$`).FindStringSubmatch((<-prefill.asked).body)
	second := regexp.MustCompile(`^{"kv_transfer_params":{"do_remote_decode":false,"do_remote_prefill":true,"kvferry_transfer":{"address":"10.0.0.1:7400",` + ids +
		`}},"max_tokens":5}$`).FindStringSubmatch((<-decode.asked).body)
	if first == nil || second == nil || first[1] != second[1] || first[2] != second[2] || first[1] == first[2] {
		t.Errorf("%q, %q", first, second)
	}
	if !strings.Contains(log.String(), "path=overlap") || strings.Contains(log.String(), first[2]) {
		t.Error(log.String())
	}
}

// In overlap, a prefill leg that fails ends the decode leg that waits for it, and the decode engine is asked to compute; but never when it has begun to answer.
func TestOverlapPrefillFails(t *testing.T) {
	came := make(chan struct{}, 1)
	prefill := newEngine(t, func(w http.ResponseWriter, _ *http.Request) {
		<-came // the decode leg is under way
		http.Error(w, "no", 500)
	})
	var requests atomic.Int32
	decode := newEngine(t, func(w http.ResponseWriter, r *http.Request) {
		if requests.Add(1) == 1 {
			came <- struct{}{}
			<-r.Context().Done() // waits for the prompt
			return
		}
		says(`{"ok":1}`)(w, r)
	})
	url, log := start(t, config{Prefill: at(prefill.URL, "10.0.0.1:7400"), Decode: at(decode.URL, ""), Overlap: true})
	if status, answer := post(t, url+"/v1/completions", `{}`); status != 200 || answer != `{"ok":1}` {
		t.Error(status, answer)
	}
	if !strings.Contains(log.String(), "path=decode_only") || !strings.Contains(log.String(), "500") {
		t.Error(log.String())
	}
	if first, again := <-decode.asked, <-decode.asked; !strings.Contains(first.body, "kvferry_transfer") || again.body != `{}` {
		t.Errorf("%q, then %q", first.body, again.body)
	}
}

func TestOverlapPrefillFailsLate(t *testing.T) {
	begun, failed := make(chan struct{}), make(chan struct{})
	prefill := newEngine(t, func(w http.ResponseWriter, _ *http.Request) {
		<-begun
		http.Error(w, "no", 500)
		close(failed)
	})
	decode := newEngine(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: {}\n\n")
		_ = http.NewResponseController(w).Flush()
		<-failed
		_, _ = io.WriteString(w, "data: [DONE]\n\n")
	})
	url, _ := start(t, config{Prefill: at(prefill.URL, "10.0.0.1:7400"), Decode: at(decode.URL, ""), Overlap: true})
	r, err := http.Post(url+"/v1/completions", "application/json", strings.NewReader(`{"stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	first := make([]byte, len("data: {}\n\n"))
	if _, err := io.ReadFull(r.Body, first); err != nil {
		t.Fatal(err)
	}
	close(begun) // the client has a part of the answer
	if rest, err := io.ReadAll(r.Body); err != nil || string(rest) != "data: [DONE]\n\n" {
		t.Errorf("%q %v", rest, err)
	}
}

func TestPeersUsedLastFirst(t *testing.T) {
	prefill := newEngine(t, says(ticketAnswer))
	var engines []*engine
	for i := range 6 {
		peer := fmt.Sprintf("10.0.0.%d:7400", i/2*2) // two engines on a node
		if i == 5 {
			peer = ""
		}
		engines = append(engines, at(newEngine(t, says(`{}`)).URL, peer)...)
	}
	url, _ := start(t, config{Prefill: at(prefill.URL, ""), Decode: engines})
	for i, want := range []string{"0 2 4", "0 2 4", "0 2 4", "2 0 4", "2 0 4", "4 2 0", "4 2 0", "0 4 2"} {
		post(t, url+"/v1/completions", `{}`)
		var got struct {
			Params struct {
				Peers []string `json:"kvferry_peers"`
			} `json:"kv_transfer_params"`
		}
		if err := json.Unmarshal([]byte((<-prefill.asked).body), &got); err != nil {
			t.Fatal(err)
		}
		short := strings.NewReplacer("10.0.0.", "", ":7400", "").Replace(strings.Join(got.Params.Peers, " "))
		if short != want {
			t.Errorf("request %d: %s, want %s", i, short, want)
		}
	}
	h := newHints([]*engine{{peer: "a"}, {peer: "b"}, {peer: "c"}, {peer: "d"}, {peer: "e"}})
	h.used("e")
	if got := strings.Join(h.first(), ""); got != "eabc" {
		t.Error(got)
	}
}

func TestConfigure(t *testing.T) {
	p, d := "--prefill=http://a:1,peer=h:7400", "--decode=http://b:1/"
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{p, d, "--overlap"}, ""},
		{[]string{d}, "--prefill: at least one must be given"},
		{[]string{p}, "--decode: at least one must be given"},
		{[]string{"--prefill=http://a:1", d, "--overlap"}, "--prefill http://a:1: --overlap needs ,peer=HOST:PORT"},
		{[]string{"--prefill=a:1", d}, "--prefill a:1: "},
		{[]string{"--prefill=http://a:1,x=1", d}, `--prefill http://a:1,x=1: unknown option "x=1"`},
		{[]string{"--prefill=http://a:1,peer=h", d}, `--prefill http://a:1,peer=h: peer: "h": must be HOST:PORT`},
		{[]string{p, d, "--prefill-timeout=0s"}, "--prefill-timeout: 0s: must be above 0"},
		{[]string{p, d, "--body-max=0"}, "--body-max: 0: must be above 0"},
		{[]string{p, d, "x"}, `unexpected argument "x"`},
	} {
		got, _, err := configure(c.args, io.Discard)
		if c.want == "" {
			if err != nil || got.Prefill[0].peer != "h:7400" || got.Decode[0].url != "http://b:1" {
				t.Errorf("%v: %+v, %v", c.args, got, err)
			}
		} else if err == nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%v: %v, want %s", c.args, err, c.want)
		}
	}
}
