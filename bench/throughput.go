package main

import (
	"context"
	"fmt"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/standin"
	"github.com/kvferry/kvferry/standin/process"
)

// testCase is a layout of KV memory.
type testCase struct {
	name  string
	shape standin.Shape // of one block
}

var cases = []testCase{
	{"64k", standin.Shape{Planes: 1, PlaneBytes: 64 << 10}},
	{"256k", standin.Shape{Planes: 1, PlaneBytes: 256 << 10}},
	{"2m", standin.Shape{Planes: 1, PlaneBytes: 2 << 20}},
	{"32x64k", standin.Shape{Planes: 32, PlaneBytes: 64 << 10}},
}

const (
	window  = 96 << 20  // bytes that one round moves
	sources = 6         // windows that are stored from in turn: together more than the caches hold
	targets = 3         // windows that are loaded into in turn
	pools   = 832 << 20 // bytes of each pool: the oldest leave while new blocks come, as in use
)

// warmUp is how many rounds come before those that count: by then the pools are full and their pages are mapped everywhere.
const warmUp = 9

// measured is what the rounds have given.
type measured struct {
	store, load, direct, lent, handoff, fetch, near, pooled []time.Duration
	stores, loads, plain                                    variants
}

// rig is one case's set-up.
type rig struct {
	*pair
	c       testCase
	blocks  int            // of a window
	next    int            // source window
	content []kvferry.Hash // what the blocks of all source windows hold
	wrong   uint64
	short   int // blocks that did not make it
}

func (b *bench) throughput(ctx context.Context, c testCase, streams *streams) error {
	r := &rig{c: c, blocks: int(window / c.shape.ShardBytes())}
	prefill, decode := c.shape, c.shape
	prefill.Blocks, decode.Blocks = uint32((sources+targets)*r.blocks), uint32(targets*r.blocks)
	var err error
	if r.pair, err = b.newPair(ctx, pools, prefill, decode); err != nil {
		return err
	}
	defer r.close()
	if err := r.fill(ctx); err != nil {
		return err
	}
	m := measured{stores: variants{}, loads: variants{}, plain: variants{}}
	for round := range warmUp + b.rounds {
		if round == warmUp {
			m = measured{stores: variants{}, loads: variants{}, plain: variants{}}
		}
		if err := r.round(ctx, round, &m, streams); err != nil {
			return err
		}
	}
	ok := r.wrong == 0 && r.short == 0
	bytes := uint64(r.blocks) * c.shape.ShardBytes()
	best, limit := m.stores.fastest()
	b.speed("store_"+c.name, bytes, m.store, limit, "memcpy, "+best, ok)
	best, limit = m.loads.fastest()
	b.speed("load_"+c.name, bytes, m.load, limit, "memcpy, "+best, ok)
	b.speed("handoff_local_"+c.name, bytes, m.near, limit, "memcpy, "+best, ok)
	b.speed("handoff_pool_"+c.name, bytes, m.pooled, limit, "memcpy, "+best, ok)
	best, limit = m.plain.fastest()
	b.speed("handoff_direct_tcp_"+c.name, bytes, m.direct, limit, "TCP, "+b.between+", "+best, ok)
	b.speed("handoff_lent_tcp_"+c.name, bytes, m.lent, limit, "TCP, "+b.between+", "+best, ok)
	b.speed("handoff_tcp_"+c.name, bytes, m.handoff, limit, "TCP, "+b.between+", "+best, ok)
	b.speed("fetch_tcp_"+c.name, bytes, m.fetch, limit, "TCP, "+b.between+", "+best, ok)
	if !ok {
		return fmt.Errorf("%d wrong bytes, %d blocks did not make it", r.wrong, r.short)
	}
	return nil
}

// round stores a window of new blocks, loads them and hands them over, each followed by what the machine does at best.
func (r *rig) round(ctx context.Context, round int, m *measured, streams *streams) error {
	hashes, parents := chain(r.blocks, uint64(round)+1)
	at := r.take()
	reply, err := r.prefill.Store(ctx, batches(blockRange(at, r.blocks), hashes, parents)...)
	if err != nil {
		return err
	}
	if r.short += r.blocks - reply.Stored; reply.Failed > 0 {
		return fmt.Errorf("store: %s", reply.Reason)
	}
	m.store = append(m.store, reply.Took)
	if err := r.limits(ctx, m.stores, false, round); err != nil {
		return err
	}
	took, _, err := r.load(ctx, r.prefill, sources*r.blocks, round, at, hashes, nil, false)
	if err != nil {
		return err
	}
	m.load = append(m.load, took)
	if err := r.limits(ctx, m.loads, true, round); err != nil {
		return err
	}
	return r.handoffs(ctx, round, at, hashes, m, streams)
}

// handoffs hands the window over in every way, each by an offer of its own. By way of node b's pool comes after the direct ones: from then on it has the blocks.
func (r *rig) handoffs(ctx context.Context, round, at int, hashes []kvferry.Hash, m *measured, streams *streams) error {
	unstored, _ := chain(r.blocks, uint64(round)+1<<20)
	for _, h := range []struct {
		to     *process.Worker
		hashes []kvferry.Hash
		lend   bool // the offer lends the prefill worker's blocks
		direct bool
		took   *[]time.Duration
		inPool *[]time.Duration
	}{
		{r.decode, hashes, false, true, &m.direct, nil},
		{r.decode, unstored, true, true, &m.lent, nil},
		{r.decode, hashes, false, false, &m.handoff, &m.fetch},
		{r.near, hashes, true, false, &m.near, nil},
		{r.near, hashes, false, false, &m.pooled, nil},
	} {
		offer := standin.OfferRequest{RequestID: "bench", Hashes: h.hashes, Tokens: uint32(r.blocks), LifetimeMs: 60_000}
		if h.lend {
			offer.Blocks = blockRange(at, r.blocks)
		}
		ticket, err := r.prefill.Offer(ctx, offer)
		if err != nil {
			return err
		}
		took, inPool, err := r.load(ctx, h.to, 0, round, at, h.hashes, ticket, h.direct)
		if err != nil {
			return err
		}
		*h.took = append(*h.took, took)
		if h.inPool != nil {
			*h.inPool = append(*h.inPool, inPool)
		}
	}
	return streams.measure(m.plain, round)
}

// fill writes the source windows once, and scribbles over those that are loaded into. What a round stores from then on is cold.
func (r *rig) fill(ctx context.Context) error {
	n := sources * r.blocks
	r.content, _ = chain(n, 0)
	if err := r.prefill.Write(ctx, blockRange(0, n), r.content); err != nil {
		return err
	}
	if err := r.prefill.Scribble(ctx, blockRange(n, targets*r.blocks)); err != nil {
		return err
	}
	for _, w := range []*process.Worker{r.decode, r.near} {
		if err := w.Scribble(ctx, blockRange(0, targets*r.blocks)); err != nil {
			return err
		}
	}
	return nil
}

// take is the first block of the next source window: everything that is timed reads another one than what was read last.
func (r *rig) take() int {
	at := r.next * r.blocks
	r.next = (r.next + 1) % sources
	return at
}

// load reads what was stored from source window at into the next target window of w, and checks it afterwards.
func (r *rig) load(ctx context.Context, w *process.Worker, first, round, at int, hashes []kvferry.Hash, ticket []byte, direct bool) (took, inPool time.Duration, err error) {
	target := blockRange(first+round%targets*r.blocks, r.blocks)
	reply, err := w.Load(ctx, standin.LoadRequest{RequestID: "bench", Blocks: target, Hashes: hashes, Ticket: ticket, Direct: direct, DeadlineMs: 30_000})
	if err != nil {
		return 0, 0, err
	}
	r.short += r.blocks - reply.Report.Loaded
	wrong, err := w.Check(ctx, target, r.content[at:at+r.blocks])
	r.wrong += wrong
	if err != nil {
		return 0, 0, err
	}
	return reply.Took, reply.Report.InPool, w.Scribble(ctx, target)
}

// limits measures all kinds of memcpy once, in another order each round.
func (r *rig) limits(ctx context.Context, to variants, load bool, round int) error {
	for i := range 4 {
		k := (i + round) % 4
		a := process.LimitArgs{Scratch: uint32(sources * r.blocks), Load: load, NonTemporal: k&1 == 1, Threads: 1 + k>>1}
		at := r.take()
		a.Slots = blockRange(at, r.blocks)
		a.Blocks = a.Slots
		name := "ordinary"
		if a.NonTemporal {
			name = "non-temporal"
		}
		if load {
			a.Blocks = blockRange((sources+(i+round)%targets)*r.blocks, r.blocks)
		}
		took, err := r.prefill.Limit(ctx, a)
		if err != nil {
			return err
		}
		name = fmt.Sprintf("%s, %d threads", name, a.Threads)
		to[name] = append(to[name], took)
	}
	return nil
}
