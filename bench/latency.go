package main

import (
	"context"
	"fmt"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/standin"
	"github.com/kvferry/kvferry/standin/process"
)

// Targets of design.md, section 11.
const (
	targetStore   = 300 * time.Microsecond
	targetLoad    = 300 * time.Microsecond
	targetHandoff = time.Millisecond
	targetMatch   = time.Millisecond
	targetPython  = 2 * time.Millisecond
)

// singles is how many single blocks are measured.
const singles = 400

// oneBlock stores, loads and hands over one block at a time.
func (b *bench) oneBlock(ctx context.Context, c testCase) error {
	shape := c.shape
	shape.Blocks = uint32(min(256, (512<<20)/shape.ShardBytes()))
	p, err := b.newPair(ctx, pools, shape, shape)
	if err != nil {
		return err
	}
	defer p.close()
	content, _ := chain(int(shape.Blocks), 0)
	if err := p.prefill.Write(ctx, blockRange(0, int(shape.Blocks)), content); err != nil {
		return err
	}
	var store, load, handoff []time.Duration
	verified := true
	for i := range singles {
		at := i % int(shape.Blocks)
		block, what := blockRange(at, 1), content[at:at+1]
		hashes, parents := chain(1, uint64(i)+1)
		s, err := p.prefill.Store(ctx, batches(block, hashes, parents)...)
		if err != nil {
			return err
		}
		if s.Stored != 1 {
			return fmt.Errorf("store: %s", s.Reason)
		}
		store = append(store, s.Took)

		took, ok, err := single(ctx, p.prefill, block, hashes, what, nil)
		if err != nil {
			return err
		}
		load, verified = append(load, took), verified && ok

		ticket, err := p.prefill.Offer(ctx, process.OfferArgs{RequestID: "bench", Hashes: hashes, Tokens: 512, LifetimeMs: 60_000})
		if err != nil {
			return err
		}
		took, ok, err = single(ctx, p.decode, block, hashes, what, ticket)
		if err != nil {
			return err
		}
		handoff, verified = append(handoff, took), verified && ok
	}
	note := fmt.Sprintf("the target; p50 of %d", singles)
	b.latency("one_block_store_"+c.name, store, targetStore, note, verified)
	b.latency("one_block_load_"+c.name, load, targetLoad, note, verified)
	b.latency("one_block_handoff_tcp_"+c.name, handoff, targetHandoff, note, verified)
	return nil
}

// single loads or accepts one block over something else, and checks it.
func single(ctx context.Context, w *process.Worker, block []uint32, hashes, content []kvferry.Hash, ticket []byte) (time.Duration, bool, error) {
	if err := w.Scribble(ctx, block); err != nil {
		return 0, false, err
	}
	r, err := w.Load(ctx, standin.LoadRequest{RequestID: "bench", Blocks: block, Hashes: hashes, Ticket: ticket, DeadlineMs: 10_000})
	if err != nil {
		return 0, false, err
	}
	wrong, err := w.Check(ctx, block, content)
	return r.Took, wrong == 0 && r.Report.Loaded == 1, err
}

// match asks for 8,192 blocks that are all there, among many more.
func (b *bench) match(ctx context.Context) error {
	const n, prompts = 8192, 12
	shape := standin.Shape{Blocks: n, Planes: 1, PlaneBytes: 4 << 10}
	small := shape
	small.Blocks = 1
	p, err := b.newPair(ctx, pools, shape, small)
	if err != nil {
		return err
	}
	defer p.close()
	var hashes, parents []kvferry.Hash
	for k := range prompts {
		hashes, parents = chain(n, uint64(k)+1)
		r, err := p.prefill.Store(ctx, batches(blockRange(0, n), hashes, parents)...)
		if err != nil {
			return err
		}
		if r.Stored != n {
			return fmt.Errorf("store: %d of %d blocks: %s", r.Stored, n, r.Reason)
		}
	}
	r, err := p.prefill.Match(ctx, process.MatchArgs{RequestID: "bench", Hashes: hashes, LeaseMs: 10_000, Times: 300})
	if err != nil {
		return err
	}
	note := fmt.Sprintf("the target; p50 of 300, all hits, %d blocks in the ledger", n*prompts)
	b.latency("match_8192_go", r.Took, targetMatch, note, r.Blocks == n)
	return nil
}
