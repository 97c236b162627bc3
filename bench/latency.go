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

const (
	singles       = 400       // single blocks that are measured
	singlesWarm   = 420       // that come before: by then every slot of 2 MiB was used, and its pages are mapped everywhere
	singlesMemory = 768 << 20 // of each worker
)

// oneBlock stores, loads and hands over one block at a time.
func (b *bench) oneBlock(ctx context.Context, c testCase) error {
	shape := c.shape
	shape.Blocks = uint32(singlesMemory / shape.ShardBytes())
	p, err := b.newPair(ctx, pools, shape, shape)
	if err != nil {
		return err
	}
	defer p.close()
	// Sources are written once, targets are scribbled over; each block is touched again only when it is cold.
	half := int(shape.Blocks) / 2
	content, _ := chain(half, 0)
	if err := p.prefill.Write(ctx, blockRange(0, half), content); err != nil {
		return err
	}
	for _, w := range []*process.Worker{p.prefill, p.decode, p.near} {
		if err := w.Scribble(ctx, blockRange(half, half)); err != nil {
			return err
		}
	}
	var store, load, direct, handoff, near []time.Duration
	verified := true
	for i := range singlesWarm + singles {
		if i == singlesWarm {
			store, load, direct, handoff, near = nil, nil, nil, nil, nil
		}
		at := i * (half/2 - 1) % half // far from the last one
		block, target, what := blockRange(at, 1), blockRange(half+at, 1), content[at:at+1]
		hashes, parents := chain(1, uint64(i)+1)
		s, err := p.prefill.Store(ctx, batches(block, hashes, parents)...)
		if err != nil {
			return err
		}
		if s.Stored != 1 {
			return fmt.Errorf("store: %s", s.Reason)
		}
		store = append(store, s.Took)

		took, ok, err := single(ctx, p.prefill, target, hashes, what, nil, false)
		if err != nil {
			return err
		}
		load, verified = append(load, took), verified && ok

		for _, h := range []struct {
			to           *process.Worker
			lend, direct bool
			took         *[]time.Duration
		}{{p.decode, false, true, &direct}, {p.decode, false, false, &handoff}, {p.near, true, false, &near}} {
			offer := standin.OfferRequest{RequestID: "bench", Hashes: hashes, Tokens: 512, LifetimeMs: 60_000}
			if h.lend {
				offer.Blocks = block
			}
			ticket, err := p.prefill.Offer(ctx, offer)
			if err != nil {
				return err
			}
			if took, ok, err = single(ctx, h.to, target, hashes, what, ticket, h.direct); err != nil {
				return err
			}
			*h.took, verified = append(*h.took, took), verified && ok
		}
	}
	note := fmt.Sprintf("the target; p50 of %d", singles)
	b.latency("one_block_store_"+c.name, store, targetStore, note, verified)
	b.latency("one_block_load_"+c.name, load, targetLoad, note, verified)
	b.latency("one_block_handoff_local_"+c.name, near, targetNear, note, verified)
	b.latency("one_block_handoff_direct_tcp_"+c.name, direct, targetHandoff, note, verified)
	b.latency("one_block_handoff_tcp_"+c.name, handoff, targetHandoff, note, verified)
	return nil
}

// single loads or accepts one block over something else, checks it, and scribbles over it for the next time.
func single(ctx context.Context, w *process.Worker, block []uint32, hashes, content []kvferry.Hash, ticket []byte, direct bool) (time.Duration, bool, error) {
	r, err := w.Load(ctx, standin.LoadRequest{RequestID: "bench", Blocks: block, Hashes: hashes, Ticket: ticket, Direct: direct, DeadlineMs: 10_000})
	if err != nil {
		return 0, false, err
	}
	wrong, err := w.Check(ctx, block, content)
	if err != nil {
		return 0, false, err
	}
	return r.Took, wrong == 0 && r.Report.Loaded == 1, w.Scribble(ctx, block)
}
