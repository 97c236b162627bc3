package tiers_test

import (
	"runtime"
	"testing"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/tierstest"
)

// BenchmarkMatch looks 8,192 resident hashes up among 10 million blocks (1 million with -short) and tells the ledger's memory per block.
func BenchmarkMatch(b *testing.B) {
	const prompt = 8192
	blocks := 10_000_000
	if testing.Short() {
		blocks = 1_000_000
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	l := tiers.New(tiers.Config{Pool: tierstest.NewSlots(blocks/16000+2, 64<<20), Limits: tiers.DefaultLimits})
	ref, err := l.Space(tiers.SpaceShape{ID: kvferry.SpaceID{1}, Shards: 1, ShardBytes: 4096})
	if err != nil {
		b.Fatal(err)
	}
	now := time.Now()
	for n := range blocks / prompt {
		fills := l.BeginFill(now, ref, 0, tierstest.CheapChain(uint64(n), prompt))
		l.Commit(now, fills, make([]uint32, len(fills)))
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	var asked [][]byte
	for n := range 64 {
		asked = append(asked, tierstest.Pack(tierstest.CheapChain(uint64(n*(blocks/prompt)/64), prompt)))
	}
	i := 0
	for b.Loop() {
		if r := l.Match(now, 1, "r", ref, asked[i%len(asked)], now.Add(time.Second)); r.Blocks != prompt {
			b.Fatalf("found %d of %d", r.Blocks, prompt)
		}
		i++
	}
	// The slots of tierstest keep headers on the heap, which a pool has in its file: 184 bytes a slot that are not the ledger's.
	b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/float64(blocks)-184, "B/block")
}
