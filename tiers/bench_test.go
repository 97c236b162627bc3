package tiers_test

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/policy"
	"github.com/kvferry/kvferry/tiers/tierstest"
)

// BenchmarkMatch looks 8,192 resident hashes up among 10 million blocks (1 million with -short), stored prompt after prompt (the target is a millisecond) and in turns of 32 and of single blocks, and tells the ledger's memory per block.
func BenchmarkMatch(b *testing.B) {
	for _, run := range []int{prompt, 32, 1} {
		b.Run(fmt.Sprintf("stored=%d", run), func(b *testing.B) { benchmarkMatch(b, run) })
	}
}

const prompt = 8192

// fillInTurns stores prompts, each of them a run of blocks at a time.
func fillInTurns(l *tiers.Ledger, now time.Time, ref tiers.SpaceRef, prompts, run int) {
	const together = 64 // chains that are in memory at once
	for first := 0; first < prompts; first += together {
		var chains [][]tiers.Block
		for n := first; n < min(first+together, prompts); n++ {
			chains = append(chains, tierstest.CheapChain(uint64(n), prompt))
		}
		for at := 0; at < prompt; at += run {
			for _, c := range chains {
				fills := l.BeginFill(now, ref, 0, c[at:at+run])
				l.Commit(now, fills, make([]uint32, len(fills)))
			}
		}
	}
}

func benchmarkMatch(b *testing.B, run int) {
	blocks := 10_000_000
	if testing.Short() {
		blocks = 1_000_000
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	p, err := policy.New(policy.Default, blocks)
	if err != nil {
		b.Fatal(err)
	}
	l := tiers.New(tiers.Config{Pool: tierstest.NewSlots(blocks/16000+2, 64<<20), Policy: p, Limits: tiers.DefaultLimits})
	ref, err := l.Space(tiers.SpaceShape{ID: kvferry.SpaceID{1}, Shards: 1, ShardBytes: 4096})
	if err != nil {
		b.Fatal(err)
	}
	now := time.Now()
	prompts := blocks / prompt
	fillInTurns(l, now, ref, prompts, run)
	runtime.GC()
	runtime.ReadMemStats(&after)
	i := 0
	for b.Loop() {
		b.StopTimer()
		asked := tierstest.Pack(tierstest.CheapChain(uint64(i*7919%prompts), prompt))
		b.StartTimer()
		if r := l.Match(now, 1, "r", ref, asked, now.Add(time.Second)); r.Blocks != prompt {
			b.Fatalf("found %d of %d", r.Blocks, prompt)
		}
		i++
	}
	// The slots of tierstest keep headers on the heap, which a pool has in its file: 184 bytes a slot that are not the ledger's.
	b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/float64(prompts*prompt)-184, "B/block")
	runtime.KeepAlive(l)
}
