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
	targetHandoff = time.Millisecond       // by TCP
	targetNear    = 500 * time.Microsecond // on one node
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
	var store, load, handoff, near []time.Duration
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

		for _, to := range []struct {
			worker *process.Worker
			took   *[]time.Duration
		}{{p.decode, &handoff}, {p.near, &near}} {
			ticket, err := p.prefill.Offer(ctx, process.OfferArgs{RequestID: "bench", Hashes: hashes, Tokens: 512, LifetimeMs: 60_000})
			if err != nil {
				return err
			}
			if took, ok, err = single(ctx, to.worker, block, hashes, what, ticket); err != nil {
				return err
			}
			*to.took, verified = append(*to.took, took), verified && ok
		}
	}
	note := fmt.Sprintf("the target; p50 of %d", singles)
	b.latency("one_block_store_"+c.name, store, targetStore, note, verified)
	b.latency("one_block_load_"+c.name, load, targetLoad, note, verified)
	b.latency("one_block_handoff_local_"+c.name, near, targetNear, note, verified)
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
