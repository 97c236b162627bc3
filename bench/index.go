package main

import (
	"fmt"
	"runtime"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/policy"
	"github.com/kvferry/kvferry/tiers/tierstest"
)

const (
	indexBlocks      = 10_000_000
	indexBytesTarget = 128.0
	// slotsBytes is what tierstest keeps of each slot on the heap, and a pool in its file.
	slotsBytes = 184
)

// index measures the ledger alone with ten million blocks: a look-up of 8,192 that are all there, and what a block takes in memory, the policy's part of it too.
func (b *bench) index() error {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	p, err := policy.New(policy.Default, indexBlocks)
	if err != nil {
		return err
	}
	l := tiers.New(tiers.Config{Pool: tierstest.NewSlots(indexBlocks/16000+2, 64<<20), Policy: p, Limits: tiers.DefaultLimits})
	ref, err := l.Space(tiers.SpaceShape{ID: kvferry.SpaceID{1}, Shards: 1, ShardBytes: 4096})
	if err != nil {
		return err
	}
	now := time.Now()
	prompts := indexBlocks / matchBlocks
	for n := range prompts {
		fills := l.BeginFill(now, ref, 0, tierstest.CheapChain(uint64(n), matchBlocks))
		l.Commit(now, fills, make([]uint32, len(fills)))
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	var took []time.Duration
	found := true
	for i := range matchTimes {
		hashes := tierstest.Pack(tierstest.CheapChain(uint64(i*7919%prompts), matchBlocks))
		start := time.Now()
		r := l.Match(now, 1, "bench", ref, hashes, now.Add(time.Minute))
		took = append(took, time.Since(start))
		found = found && r.Blocks == matchBlocks
	}
	b.latency("match_8192_ledger_10m", took, targetMatch, fmt.Sprintf("the target; p50 of %d, all hits, %d blocks, without gRPC", matchTimes, prompts*matchBlocks), found)
	perBlock := float64(after.HeapAlloc-before.HeapAlloc)/float64(prompts*matchBlocks) - slotsBytes
	b.results = append(b.results, result{Name: "index_memory_10m", Value: perBlock, Unit: "B/block", Limit: indexBytesTarget, Ratio: indexBytesTarget / perBlock, Verified: found, note: "the target", target: 1})
	runtime.KeepAlive(l)
	return nil
}
