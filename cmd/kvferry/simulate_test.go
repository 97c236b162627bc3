package main

import "testing"

func TestSimulate(t *testing.T) {
	const trace = "testdata/trace.jsonl"
	for name, args := range map[string][]string{
		"simulate":           {"simulate", "--trace", trace, "--dram", "5", "--nvme", "20"},
		"simulate_json":      {"simulate", "--trace", trace, "--dram", "6", "--policy", "lru", "-o", "json"},
		"simulate_no_trace":  {"simulate", "--dram", "5"},
		"simulate_missing":   {"simulate", "--dram", "5", "--trace", "testdata/none.jsonl"},
		"simulate_broken":    {"simulate", "--dram", "5", "--trace", "testdata/trace_broken.jsonl"},
		"simulate_no_dram":   {"simulate", "--trace", trace, "--nvme", "5"},
		"simulate_policy":    {"simulate", "--trace", trace, "--dram", "5", "--policy", "mru"},
		"simulate_tokens":    {"simulate", "--trace", trace, "--dram", "5", "--block-tokens", "64"},
		"simulate_down":      {"simulate", "--trace", trace, "--dram", "5", "--nvme", "-1"},
		"simulate_extra_arg": {"simulate", trace},
	} {
		t.Run(name, func(t *testing.T) { golden(t, name, kvferry(t, "/none/admin.sock", args...)) })
	}
}

func TestSize(t *testing.T) {
	model := func(name string, args ...string) []string {
		return append([]string{"size", "--model-config", "testdata/models/" + name + ".json"}, args...)
	}
	for name, args := range map[string][]string{
		"size_llama":        model("llama", "--tp", "4", "--dram", "512GiB", "--nvme", "7TiB"),
		"size_llama_json":   model("llama", "--tp", "16", "--block-tokens", "64", "--kv-dtype", "fp8", "--dram", "512GiB", "-o", "json"),
		"size_opt":          model("opt"),
		"size_qwen":         model("qwen", "--tp", "2"),
		"size_qwen_vl":      model("qwen-vl"),
		"size_qwen_next":    model("qwen-next"),
		"size_deepseek":     model("deepseek", "--tp", "8", "--nvme", "1TiB"),
		"size_gpt_oss":      model("gpt-oss", "--kv-dtype", "bf16"),
		"size_no_dtype":     model("gpt-oss"),
		"size_no_config":    {"size"},
		"size_missing":      model("none"),
		"size_wrong_tp":     model("llama", "--tp", "3"),
		"size_wrong_tp_kv":  model("qwen", "--tp", "0"),
		"size_wrong_dtype":  model("llama", "--kv-dtype", "fp4"),
		"size_wrong_size":   model("llama", "--dram", "64GB"),
		"size_wrong_tokens": model("llama", "--block-tokens", "0"),
	} {
		t.Run(name, func(t *testing.T) { golden(t, name, kvferry(t, "/none/admin.sock", args...)) })
	}
	t.Run("size_daemon", func(t *testing.T) {
		golden(t, "size_daemon", kvferry(t, listen(t, node()), model("llama", "--daemon", "--nvme", "1TiB")...))
	})
}

// Errors of a config.json name the field.
func TestParseModelErrors(t *testing.T) {
	for text, want := range map[string]string{
		``:                           "must be a JSON object, such as a model's config.json",
		`[]`:                         "must be a JSON object, such as a model's config.json",
		`null`:                       "must be a JSON object, such as a model's config.json",
		`{}`:                         "num_hidden_layers: missing",
		`{"num_hidden_layers": 0}`:   "num_hidden_layers: 0: must be a whole number from 1 to 1048576",
		`{"num_hidden_layers": "2"}`: `num_hidden_layers: "2": must be a whole number from 1 to 1048576`,
		`{"num_hidden_layers": 2}`:   "num_attention_heads: missing",
		`{"text_config": 1}`:         "text_config: must be an object",
		`{"text_config": {"num_hidden_layers": 1e99}}`:                                                                      "text_config.num_hidden_layers: 1e99: must be a whole number from 1 to 1048576",
		`{"num_hidden_layers": 2, "num_attention_heads": 4}`:                                                                "head_dim: missing, and hidden_size: missing",
		`{"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 6}`:                                              "head_dim: missing, and hidden_size 6 is no multiple of num_attention_heads, 4",
		`{"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 1.5}`:                                               "head_dim: 1.5: must be a whole number from 1 to 1048576",
		`{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 3}`:                                      "num_key_value_heads: 3: must divide num_attention_heads, 4",
		`{"num_hidden_layers": 2, "num_attention_heads": 4, "kv_lora_rank": 512}`:                                           "qk_rope_head_dim: missing",
		`{"num_hidden_layers": 2, "num_attention_heads": 4, "kv_lora_rank": -1}`:                                            "kv_lora_rank: -1: must be a whole number from 1 to 1048576",
		`{"num_hidden_layers": 2, "num_attention_heads": 4, "layer_types": [1]}`:                                            "layer_types: must be a list of words",
		`{"num_hidden_layers": 2, "num_attention_heads": 4, "layer_types": ["full_attention"]}`:                             "layer_types: 1 of them for num_hidden_layers 2",
		`{"num_hidden_layers": 1, "num_attention_heads": 4, "layer_types": ["mamba"]}`:                                      "layer_types: no layer keeps KV",
		`{"num_hidden_layers": 1, "num_attention_heads": 4, "layer_types": ["sliding_attention"], "sliding_window": false}`: "sliding_window: false: must be a whole number from 1 to 1048576",
	} {
		if _, err := parseModel([]byte(text)); err == nil || err.Error() != want {
			t.Errorf("%s: %v, must be %q", text, err, want)
		}
	}
}

func FuzzParseModel(f *testing.F) {
	f.Add([]byte(`{"text_config": {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}, "dtype": "bfloat16"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := parseModel(b)
		if err == nil && (m.Layers < 1 || m.Latent == 0 && (m.KVHeads < 1 || m.HeadDim < 1)) {
			t.Fatalf("%+v", m)
		}
	})
}
