package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
)

// sizing is what size prints as JSON.
type sizing struct {
	Model          string     `json:"model"` // the file
	ModelType      string     `json:"model_type"`
	Layers         int        `json:"layers"` // that keep KV of every token
	OtherLayers    int        `json:"other_layers"`
	SlidingLayers  int        `json:"sliding_window_layers"` // of layers
	Window         int        `json:"sliding_window_tokens"`
	Attention      string     `json:"attention"` // mla, mha, mqa or gqa
	KVHeads        int        `json:"kv_heads"`  // 0 with mla
	KVHeadsRank    int        `json:"kv_heads_per_rank"`
	HeadDim        int        `json:"head_dim"` // with mla, the latent's
	KVDataType     string     `json:"kv_dtype"`
	TP             int        `json:"tp"`
	ShardKind      string     `json:"shard_kind"` // replicated: every rank has the same bytes, which are stored once
	BlockTokens    uint64     `json:"block_tokens"`
	BytesTokenRank uint64     `json:"bytes_per_token_rank"`
	BytesToken     uint64     `json:"bytes_per_token"` // as stored, of all ranks
	BytesBlockRank uint64     `json:"bytes_per_block_rank"`
	BytesBlock     uint64     `json:"bytes_per_block"`
	Tiers          []tierRoom `json:"tiers"`
}

// tierRoom is what a tier has room for, headers and rounding left out.
type tierRoom struct {
	Tier   string `json:"tier"`
	Bytes  uint64 `json:"bytes"`
	Blocks uint64 `json:"blocks"`
	Tokens uint64 `json:"tokens"`
}

type sizeFlags struct {
	config, dtype, dram, nvme string
	tp                        int
	blockTokens               uint64
	daemon                    bool
}

func (a *app) size() *cobra.Command {
	var f sizeFlags
	c := &cobra.Command{
		Use:   "size",
		Short: "How much memory a model's KV takes, and how much of it a tier holds (needs no daemon)",
		Long: "size reads a model's config.json and tells the bytes of a token's and a block's KV, for each rank and for all of them, and how many blocks and tokens tiers of a size hold. Sizes are given with --dram and\n" +
			"--nvme, or taken from the running daemon with --daemon.",
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			s, err := f.sizing()
			if err != nil {
				return err
			}
			if err := a.rooms(c.Context(), &f, &s); err != nil {
				return err
			}
			if a.output == "json" {
				return writeJSON(a.out, s)
			}
			return sizingTable(a.out, s)
		},
	}
	c.Flags().StringVar(&f.config, "model-config", "", "the model's config.json")
	c.Flags().IntVar(&f.tp, "tp", 1, "ranks that share the model (tensor parallel)")
	c.Flags().StringVar(&f.dtype, "kv-dtype", "auto", "of the KV: bf16, fp16, fp32, fp8, int8; auto: the model's")
	c.Flags().Uint64Var(&f.blockTokens, "block-tokens", 16, "tokens of a block")
	c.Flags().StringVar(&f.dram, "dram", "", "size of DRAM, such as 64GiB")
	c.Flags().StringVar(&f.nvme, "nvme", "", "size of the drives, such as 2TiB")
	c.Flags().BoolVar(&f.daemon, "daemon", false, "take the sizes that are not given from the running daemon")
	return c
}

// sizing is all that the config tells.
func (f *sizeFlags) sizing() (sizing, error) {
	if f.config == "" {
		return sizing{}, errors.New("--model-config: must be the path of a model's config.json")
	}
	if f.tp < 1 || f.tp > 4096 {
		return sizing{}, fmt.Errorf("--tp %d: must be 1 to 4096", f.tp)
	}
	if f.blockTokens < 1 || f.blockTokens > 65536 {
		return sizing{}, fmt.Errorf("--block-tokens %d: must be 1 to 65536", f.blockTokens)
	}
	b, err := readConfig(f.config)
	if err != nil {
		return sizing{}, fmt.Errorf("--model-config: %w", err)
	}
	m, err := parseModel(b)
	if err != nil {
		return sizing{}, fmt.Errorf("%s: %w", f.config, err)
	}
	dtype := f.dtype
	if dtype == "auto" {
		if dtype = m.DataType; dtype == "" {
			return sizing{}, fmt.Errorf("%s: torch_dtype: missing: give --kv-dtype", f.config)
		}
	}
	element, ok := elementBytes(dtype)
	if !ok && f.dtype == "auto" {
		return sizing{}, fmt.Errorf("%s: torch_dtype: %q is not known: give --kv-dtype", f.config, dtype)
	}
	if !ok {
		return sizing{}, fmt.Errorf("--kv-dtype %q: must be bf16, fp16, fp32, fp8, int8 or auto", f.dtype)
	}
	return f.compute(m, dtype, uint64(element))
}

func readConfig(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, configBytesMax+1))
	if err == nil && len(b) > configBytesMax {
		err = fmt.Errorf("%s: longer than %d MiB", path, configBytesMax>>20)
	}
	return b, err
}

func (f *sizeFlags) compute(m model, dtype string, element uint64) (sizing, error) {
	s := sizing{
		Model: f.config, ModelType: m.Type, Layers: m.Layers, OtherLayers: m.Others, SlidingLayers: m.Sliding, Window: m.Window, KVDataType: dtype, TP: f.tp, BlockTokens: f.blockTokens,
		ShardKind: "sharded", KVHeads: m.KVHeads, HeadDim: m.HeadDim, Tiers: []tierRoom{},
	}
	if m.Heads%f.tp != 0 {
		return s, fmt.Errorf("--tp %d: does not divide num_attention_heads, %d", f.tp, m.Heads)
	}
	ranks := uint64(f.tp)
	switch {
	case m.Latent > 0:
		s.Attention, s.ShardKind, s.HeadDim, ranks = "mla", "replicated", m.Latent, 1
		s.BytesTokenRank = uint64(m.Layers) * uint64(m.Latent) * element
	case m.KVHeads%f.tp != 0 && f.tp%m.KVHeads != 0:
		return s, fmt.Errorf("--tp %d: neither divides num_key_value_heads, %d, nor is a multiple of it", f.tp, m.KVHeads)
	default:
		s.Attention = "gqa"
		if m.KVHeads == m.Heads {
			s.Attention = "mha"
		} else if m.KVHeads == 1 {
			s.Attention = "mqa"
		}
		s.KVHeadsRank = max(1, m.KVHeads/f.tp) // more ranks than heads: several have the same one, each in a copy of its own
		s.BytesTokenRank = 2 * uint64(m.Layers) * uint64(s.KVHeadsRank) * uint64(m.HeadDim) * element
	}
	s.BytesToken = s.BytesTokenRank * ranks
	s.BytesBlockRank, s.BytesBlock = s.BytesTokenRank*s.BlockTokens, s.BytesToken*s.BlockTokens
	return s, nil
}

// rooms adds the tiers whose sizes are known.
func (a *app) rooms(ctx context.Context, f *sizeFlags, s *sizing) error {
	sizes := map[string]uint64{}
	for name, text := range map[string]string{"dram": f.dram, "nvme": f.nvme} {
		if text == "" {
			continue
		}
		n, err := parseSize(text)
		if err != nil {
			return fmt.Errorf("--%s: %w", name, err)
		}
		sizes[name] = n
	}
	if f.daemon {
		r, err := ask(ctx, a, kvferryv1.AdminClient.Status, &kvferryv1.StatusRequest{})
		if err != nil {
			return err
		}
		for _, t := range r.Tiers {
			if _, given := sizes[t.Tier]; !given {
				sizes[t.Tier] = t.CapacityBytes
			}
		}
	}
	for _, name := range []string{"dram", "nvme"} {
		if n, ok := sizes[name]; ok {
			blocks := n / s.BytesBlock
			s.Tiers = append(s.Tiers, tierRoom{name, n, blocks, blocks * s.BlockTokens})
		}
	}
	return nil
}

// parseSize reads a number of bytes, or one with a unit.
func parseSize(text string) (uint64, error) {
	number, factor := strings.TrimSpace(text), uint64(1)
	for i, unit := range []string{"KiB", "MiB", "GiB", "TiB", "PiB"} {
		if v, ok := strings.CutSuffix(number, unit); ok {
			number, factor = strings.TrimSpace(v), 1<<(10*(i+1))
			break
		}
	}
	n, err := strconv.ParseUint(number, 10, 64)
	if err != nil || n > 1<<62/factor {
		return 0, fmt.Errorf("%q is not a size such as 64GiB (bytes, KiB, MiB, GiB, TiB)", text)
	}
	return n * factor, nil
}

func sizingTable(w io.Writer, s sizing) error {
	heads := fmt.Sprintf("%d heads of %d, %d a rank", s.KVHeads, s.HeadDim, s.KVHeadsRank)
	if s.Attention == "mla" {
		heads = fmt.Sprintf("a latent of %d, the same on every rank", s.HeadDim)
	}
	layers := strconv.Itoa(s.Layers)
	if s.OtherLayers > 0 {
		layers += fmt.Sprintf(", and %d that keep none", s.OtherLayers)
	}
	if s.SlidingLayers > 0 {
		layers += fmt.Sprintf("; %d of them look back %s tokens", s.SlidingLayers, count(uint64(s.Window)))
	}
	if err := table(w, [][]string{
		{"model", plain(s.ModelType)}, {"layers with kv", layers}, {"kv", s.Attention + ": " + heads}, {"kv dtype", plain(s.KVDataType)}, {"tp", strconv.Itoa(s.TP) + ", " + s.ShardKind},
	}); err != nil {
		return err
	}
	fmt.Fprintln(w)
	if err := table(w, [][]string{
		{"BYTES", "A RANK", "ALL, AS STORED"},
		{"token", size(s.BytesTokenRank), size(s.BytesToken)},
		{fmt.Sprintf("block of %d", s.BlockTokens), size(s.BytesBlockRank), size(s.BytesBlock)},
	}); err != nil || len(s.Tiers) == 0 {
		return err
	}
	fmt.Fprintln(w)
	rows := [][]string{{"TIER", "SIZE", "BLOCKS", "TOKENS"}}
	for _, t := range s.Tiers {
		rows = append(rows, []string{t.Tier, size(t.Bytes), count(t.Blocks), count(t.Tokens)})
	}
	return table(w, rows)
}
