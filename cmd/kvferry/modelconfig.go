package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// model is what a model's config.json says of its KV.
type model struct {
	Type     string
	Layers   int // that keep KV of every token
	Others   int // that do not: recurrent and linear ones
	Sliding  int // of Layers, those that look back only over a window
	Window   int // tokens
	Heads    int // of queries
	KVHeads  int
	HeadDim  int
	Latent   int // of multi-head latent attention: numbers a token and layer; 0: the model has none
	DataType string
}

// Bounds of what is believed of a config.json.
const (
	dimMax         = 1 << 20
	configBytesMax = 16 << 20
)

// nested is where multimodal models keep the language model's part.
var nested = []string{"text_config", "llm_config", "language_config"}

// parseModel reads a config.json as Hugging Face has them. Errors name the field.
func parseModel(b []byte) (model, error) {
	var top fields
	if err := json.Unmarshal(b, &top); err != nil || top == nil {
		return model{}, errors.New("must be a JSON object, such as a model's config.json")
	}
	f := top
	prefix := ""
	for _, name := range nested {
		if _, has := top["num_hidden_layers"]; has {
			break
		}
		if raw, ok := top[name]; ok {
			f = nil
			if err := json.Unmarshal(raw, &f); err != nil || f == nil {
				return model{}, fmt.Errorf("%s: must be an object", name)
			}
			prefix = name + "."
			break
		}
	}
	m, err := f.model()
	if err != nil {
		return model{}, fmt.Errorf("%s%w", prefix, err)
	}
	for _, from := range []fields{f, top} { // the inner one may leave these out
		for _, name := range []string{"torch_dtype", "dtype"} {
			if s, ok := from.text(name); ok && m.DataType == "" {
				m.DataType = s
			}
		}
		if s, ok := from.text("model_type"); ok && m.Type == "" {
			m.Type = s
		}
	}
	return m, nil
}

// fields are those of a JSON object.
type fields map[string]json.RawMessage

func (f fields) has(name string) bool {
	raw, ok := f[name]
	return ok && string(raw) != "null"
}

// count is a field that must be a whole number, at least 1.
func (f fields) count(name string) (int, error) {
	if !f.has(name) {
		return 0, fmt.Errorf("%s: missing", name)
	}
	var v float64
	if err := json.Unmarshal(f[name], &v); err != nil || v != float64(int(v)) || v < 1 || v > dimMax {
		return 0, fmt.Errorf("%s: %.40s: must be a whole number from 1 to %d", name, f[name], dimMax)
	}
	return int(v), nil
}

// countOr is a field that may be missing.
func (f fields) countOr(name string, otherwise int) (int, error) {
	if !f.has(name) {
		return otherwise, nil
	}
	return f.count(name)
}

func (f fields) text(name string) (string, bool) {
	var s string
	err := json.Unmarshal(f[name], &s)
	return s, err == nil && s != ""
}

func (f fields) model() (m model, err error) {
	if m.Layers, err = f.count("num_hidden_layers"); err != nil {
		return m, err
	}
	if m.Heads, err = f.count("num_attention_heads"); err != nil {
		return m, err
	}
	if err = f.layers(&m); err != nil {
		return m, err
	}
	if f.has("kv_lora_rank") {
		rank, err := f.count("kv_lora_rank")
		if err != nil {
			return m, err
		}
		rope, err := f.count("qk_rope_head_dim")
		if err != nil {
			return m, err
		}
		m.Latent = rank + rope
		return m, nil
	}
	if m.KVHeads, err = f.countOr("num_key_value_heads", m.Heads); err != nil {
		return m, err
	}
	if m.KVHeads > m.Heads || m.Heads%m.KVHeads != 0 {
		return m, fmt.Errorf("num_key_value_heads: %d: must divide num_attention_heads, %d", m.KVHeads, m.Heads)
	}
	if f.has("head_dim") {
		m.HeadDim, err = f.count("head_dim")
		return m, err
	}
	hidden, err := f.count("hidden_size")
	if err != nil {
		return m, fmt.Errorf("head_dim: missing, and %w", err)
	}
	if hidden%m.Heads != 0 {
		return m, fmt.Errorf("head_dim: missing, and hidden_size %d is no multiple of num_attention_heads, %d", hidden, m.Heads)
	}
	m.HeadDim = hidden / m.Heads
	return m, nil
}

// layers tells layers that keep KV of all tokens from those that do not.
func (f fields) layers(m *model) error {
	if !f.has("layer_types") {
		return nil
	}
	var types []string
	if err := json.Unmarshal(f["layer_types"], &types); err != nil {
		return fmt.Errorf("layer_types: must be a list of words")
	}
	if len(types) != m.Layers {
		return fmt.Errorf("layer_types: %d of them for num_hidden_layers %d", len(types), m.Layers)
	}
	for _, t := range types {
		switch {
		case t == "linear_attention" || !strings.Contains(t, "attention"):
			m.Layers--
			m.Others++
		case slices.Contains([]string{"sliding_attention", "chunked_attention"}, t):
			m.Sliding++
		}
	}
	if m.Layers == 0 {
		return errors.New("layer_types: no layer keeps KV")
	}
	var err error
	if m.Sliding > 0 {
		name := "sliding_window"
		if f.has("attention_chunk_size") && !f.has(name) {
			name = "attention_chunk_size"
		}
		m.Window, err = f.count(name)
	}
	return err
}

// elementBytes is how long a number of KV is.
func elementBytes(dtype string) (int, bool) {
	switch strings.TrimPrefix(dtype, "torch.") {
	case "float32", "fp32":
		return 4, true
	case "bfloat16", "float16", "bf16", "fp16", "half":
		return 2, true
	case "fp8", "fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "float8_e5m2", "int8":
		return 1, true
	}
	return 0, false
}
