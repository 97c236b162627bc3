package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/tiers/replay"
)

// simulation is what simulate prints as JSON. Blocks, but for the ratios: of the blocks asked for, those that were found, each with all before it in its prompt.
type simulation struct {
	Trace           string  `json:"trace"`
	Requests        int     `json:"requests"`
	BlockTokens     int64   `json:"block_tokens"`
	UniqueBlocks    int     `json:"unique_blocks"`
	DurationMs      int64   `json:"duration_ms"`
	Policy          string  `json:"policy"`
	DRAMBlocks      int     `json:"dram_blocks"`
	NVMeBlocks      int     `json:"nvme_blocks"`
	HitRatio        float64 `json:"hit_ratio"`
	HitRatioDRAM    float64 `json:"hit_ratio_dram"`
	HitRatioNVMe    float64 `json:"hit_ratio_nvme"`
	AskedBlocks     int     `json:"asked_blocks"`
	HitBlocks       int     `json:"hit_blocks"`
	HitBlocksDRAM   int     `json:"hit_blocks_dram"`
	HitBlocksNVMe   int     `json:"hit_blocks_nvme"`
	StoredBlocks    int     `json:"stored_blocks"`
	NotStoredBlocks int     `json:"not_stored_blocks"`   // no room: prompts longer than DRAM
	EvictedBlocks   int     `json:"evicted_blocks"`      // left the node
	DemotedBlocks   int     `json:"demoted_blocks"`      // copied from DRAM to NVMe
	PromotedBlocks  int     `json:"promoted_blocks"`     // copied from NVMe to DRAM
	ReleasedBlocks  int     `json:"released_blocks"`     // left DRAM and stayed on NVMe
	NVMeWritten     int     `json:"nvme_written_blocks"` // as many as were demoted
	LRUHitRatio     float64 `json:"lru_hit_ratio"`       // of the same tiers
	BeladyHitRatio  float64 `json:"belady_hit_ratio"`    // of one tier of both sizes that knows what comes
	UnlimitedRatio  float64 `json:"unlimited_hit_ratio"`
}

// What a daemon does unless it is configured otherwise.
const (
	simulateIdle = 5 * time.Minute
	simulateHigh = 0.95
	simulateLow  = 0.90
)

func (a *app) simulate() *cobra.Command {
	var trace string
	var dram, nvme int
	var blockTokens int64
	cfg := replay.Config{}
	c := &cobra.Command{
		Use:   "simulate",
		Short: "What a trace of requests would find in tiers of a size (needs no daemon)",
		Long: "simulate runs a trace through the daemon's own ledger and policy, with a clock of its own, and tells which part of the blocks asked for would have been found, and where. Beside it, for the same room: LRU,\n" +
			"and the offline optimum, which knows what comes.\n\n" +
			"A trace has one JSON object a line, gzipped or not: timestamp (ms), input_length and output_length (tokens), hash_ids (one for each block of the input).",
		Args: noArgs,
		RunE: func(*cobra.Command, []string) error {
			switch {
			case trace == "":
				return errors.New("--trace: must be the path of a trace")
			case dram < 1:
				return fmt.Errorf("--dram %d: must be at least 1 block", dram)
			case nvme < 0:
				return fmt.Errorf("--nvme %d: must be 0 or more blocks", nvme)
			case blockTokens < 0:
				return fmt.Errorf("--block-tokens %d: must be more than 0, or 0 to find it out", blockTokens)
			}
			cfg.DRAM, cfg.NVMe = dram, nvme
			s, err := simulate(trace, blockTokens, cfg)
			if err != nil {
				return err
			}
			if a.output == "json" {
				return writeJSON(a.out, s)
			}
			return simulationTable(a.out, s)
		},
	}
	f := c.Flags()
	f.StringVar(&trace, "trace", "", "the trace")
	f.IntVar(&dram, "dram", 0, "blocks that DRAM has room for")
	f.IntVar(&nvme, "nvme", 0, "blocks that the drives have room for")
	f.StringVar(&cfg.Policy, "policy", replay.DefaultPolicy, "what leaves first: "+replay.Policies)
	f.Int64Var(&blockTokens, "block-tokens", 0, "tokens of a block; 0: what the lines of the trace agree with")
	f.DurationVar(&cfg.Down.Idle, "dram-idle", simulateIdle, "blocks that nobody used for so long are copied to NVMe; 0: none")
	cfg.Down.High, cfg.Down.Low = simulateHigh, simulateLow
	return c
}

func simulate(path string, blockTokens int64, cfg replay.Config) (simulation, error) {
	f, err := os.Open(path)
	if err != nil {
		return simulation{}, fmt.Errorf("--trace: %w", err)
	}
	defer f.Close()
	t, err := replay.Read(f, blockTokens)
	if err != nil {
		return simulation{}, fmt.Errorf("%s: %w", path, err)
	}
	r, err := replay.Run(t, cfg)
	if err != nil {
		return simulation{}, err
	}
	lru := r
	if cfg.Policy != "lru" {
		plain := cfg
		plain.Policy = "lru"
		if lru, err = replay.Run(t, plain); err != nil {
			return simulation{}, err
		}
	}
	return simulation{
		Trace: path, Requests: r.Requests, BlockTokens: t.BlockTokens, UniqueBlocks: t.Unique(), DurationMs: t.Duration().Milliseconds(),
		Policy: cfg.Policy, DRAMBlocks: cfg.DRAM, NVMeBlocks: cfg.NVMe,
		HitRatio: r.HitRatio(), HitRatioDRAM: replay.Ratio(r.DRAM, r.Asked), HitRatioNVMe: replay.Ratio(r.NVMe, r.Asked),
		AskedBlocks: r.Asked, HitBlocks: r.DRAM + r.NVMe, HitBlocksDRAM: r.DRAM, HitBlocksNVMe: r.NVMe,
		StoredBlocks: r.Stored, NotStoredBlocks: r.NotStored, EvictedBlocks: r.Evicted, DemotedBlocks: r.Demoted, PromotedBlocks: r.Promoted, ReleasedBlocks: r.Released, NVMeWritten: r.Demoted,
		LRUHitRatio: lru.HitRatio(), BeladyHitRatio: replay.Ratio(replay.Optimum(t, cfg.DRAM+cfg.NVMe), r.Asked), UnlimitedRatio: replay.Ratio(replay.Unlimited(t), r.Asked),
	}, nil
}

func simulationTable(w io.Writer, s simulation) error {
	n := func(v int) string { return count(uint64(v)) }
	part := func(v int) string { return percent(uint64(v), uint64(s.AskedBlocks)) }
	ratio := func(v float64) string { return fmt.Sprintf("%.4f", v) }
	if _, err := fmt.Fprintf(w, "%s: %s requests in %s, %s blocks of %d tokens, %s of them different\n\n", plain(s.Trace), n(s.Requests), millis(s.DurationMs), n(s.AskedBlocks), s.BlockTokens, n(s.UniqueBlocks)); err != nil {
		return err
	}
	if err := table(w, [][]string{
		{"TIER", "ROOM", "HITS", "OF ALL ASKED"},
		{"dram", n(s.DRAMBlocks), n(s.HitBlocksDRAM), part(s.HitBlocksDRAM)},
		{"nvme", n(s.NVMeBlocks), n(s.HitBlocksNVMe), part(s.HitBlocksNVMe)},
		{"both", n(s.DRAMBlocks + s.NVMeBlocks), n(s.HitBlocks), part(s.HitBlocks)},
	}); err != nil {
		return err
	}
	fmt.Fprintln(w)
	if err := table(w, [][]string{
		{"POLICY", "HIT RATIO"},
		{s.Policy, ratio(s.HitRatio)},
		{"lru, same tiers", ratio(s.LRUHitRatio)},
		{"optimum, same room", ratio(s.BeladyHitRatio)},
		{"unlimited", ratio(s.UnlimitedRatio)},
	}); err != nil {
		return err
	}
	fmt.Fprintln(w)
	return table(w, [][]string{
		{"BLOCKS", "COUNT"},
		{"stored", n(s.StoredBlocks)}, {"not stored, no room", n(s.NotStoredBlocks)}, {"left the node", n(s.EvictedBlocks)},
		{"written to nvme", n(s.NVMeWritten)}, {"read from nvme", n(s.PromotedBlocks)}, {"left dram, stayed on nvme", n(s.ReleasedBlocks)},
	})
}
