package main

import (
	"context"
	"fmt"

	"github.com/kvferry/kvferry"
	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/standin"
	"github.com/kvferry/kvferry/standin/process"
)

// storeBlocksMax is what one Store may carry.
const storeBlocksMax = 64

// request is a prompt's life: match and load what is there, compute and store the rest on node a, offer it, accept it on node b, compare every byte.
// Blocks first.. of both workers' memory are its own.
func (s *stage) request(ctx context.Context, w *process.Worker, p *prompt, first uint32) error {
	blocks := make([]uint32, len(p.hashes))
	for i := range blocks {
		blocks[i] = first + uint32(i)
	}
	hits, err := s.restore(ctx, w, p, blocks)
	if err != nil {
		return err
	}
	if err := s.compute(ctx, w, p, blocks, hits); err != nil {
		return err
	}
	if err := s.handOver(ctx, w, p, blocks); err != nil {
		return err
	}
	s.tally.add(func(t *tally) { // at the end: what a killed worker did does not count
		t.asked += len(p.hashes)
		t.hit += hits
	})
	return w.ReleaseLease(ctx, p.id)
}

// restore loads the prefix that is resident, and tells how long it is.
func (s *stage) restore(ctx context.Context, w *process.Worker, p *prompt, blocks []uint32) (hits int, err error) {
	m, err := w.Match(ctx, process.MatchArgs{RequestID: p.id, Hashes: p.hashes, LeaseMs: 30_000})
	if err != nil {
		return 0, err
	}
	n := int(m.Blocks)
	if n > 0 {
		if err := w.Scribble(ctx, blocks[:n]); err != nil {
			return 0, err
		}
		end := s.tally.loaded.begin()
		r, err := w.Load(ctx, standin.LoadRequest{RequestID: p.id, Blocks: blocks[:n], Hashes: p.hashes[:n], DeadlineMs: 30_000})
		end(r.Report.Loaded, r.Took)
		if err != nil {
			return 0, err
		}
		for hits < n && r.Report.Status[hits] == kvferryv1.BlockStatus_BLOCK_STATUS_READY {
			hits++
		}
		if err := s.check(ctx, w, blocks[:hits], p.hashes[:hits]); err != nil {
			return 0, err
		}
	}
	return hits, nil
}

// compute prefills what was not there and stores it.
func (s *stage) compute(ctx context.Context, w *process.Worker, p *prompt, blocks []uint32, hits int) error {
	if hits == len(blocks) {
		return nil
	}
	end := s.tally.computed.begin()
	err := w.Write(ctx, blocks[hits:], p.hashes[hits:])
	end(len(blocks)-hits, 0)
	if err != nil {
		return err
	}
	var batches []standin.StoreRequest
	for at := hits; at < len(blocks); at += storeBlocksMax {
		to := min(at+storeBlocksMax, len(blocks))
		batches = append(batches, standin.StoreRequest{RequestID: p.id, Blocks: blocks[at:to], Hashes: p.hashes[at:to], Parents: p.parents[at:to], DeadlineMs: 30_000})
	}
	end = s.tally.stored.begin()
	r, err := w.Store(ctx, batches...)
	end(r.Stored, r.Took)
	s.tally.add(func(t *tally) { t.refused += r.Failed })
	return err
}

// handOver offers the prompt on node a and accepts it on node b. What does not come is computed there, as an engine does.
func (s *stage) handOver(ctx context.Context, w *process.Worker, p *prompt, blocks []uint32) error {
	ticket, err := w.Offer(ctx, standin.OfferRequest{RequestID: p.id, Hashes: p.hashes, Tokens: p.tokens, LifetimeMs: 60_000})
	if err != nil {
		return err
	}
	here, err := s.decode.Match(ctx, process.MatchArgs{RequestID: p.id, Hashes: p.hashes, LeaseMs: 30_000})
	if err != nil {
		return err
	}
	if err := s.decode.Scribble(ctx, blocks); err != nil {
		return err
	}
	end := s.tally.handed.begin()
	r, err := s.decode.Load(ctx, standin.LoadRequest{RequestID: p.id, Blocks: blocks, Hashes: p.hashes, Ticket: ticket, DeadlineMs: 30_000})
	end(max(0, r.Report.Loaded-int(here.Blocks)), r.Took)
	if err != nil {
		return err
	}
	var came, missed []uint32
	var cameHashes, missedHashes []kvferry.Hash
	for i, status := range r.Report.Status {
		if status == kvferryv1.BlockStatus_BLOCK_STATUS_READY {
			came, cameHashes = append(came, blocks[i]), append(cameHashes, p.hashes[i])
		} else {
			missed, missedHashes = append(missed, blocks[i]), append(missedHashes, p.hashes[i])
		}
	}
	s.tally.add(func(t *tally) {
		t.here += int(here.Blocks)
		t.recomputed += len(missed)
	})
	if len(missed) > 0 {
		if err := s.decode.Write(ctx, missed, missedHashes); err != nil {
			return err
		}
	}
	if err := s.check(ctx, s.decode, came, cameHashes); err != nil {
		return err
	}
	return s.decode.ReleaseLease(ctx, p.id)
}

// check compares every byte of blocks with what their hashes stand for.
func (s *stage) check(ctx context.Context, w *process.Worker, blocks []uint32, hashes []kvferry.Hash) error {
	if len(blocks) == 0 {
		return nil
	}
	end := s.tally.checked.begin()
	wrong, err := w.Check(ctx, blocks, hashes)
	if err != nil {
		end(0, 0)
		return fmt.Errorf("compare: %w", err)
	}
	end(len(blocks), 0)
	s.tally.add(func(t *tally) { t.wrong += wrong })
	return nil
}
