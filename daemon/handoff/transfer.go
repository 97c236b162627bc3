package handoff

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/mover"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/transport"
)

// item is one block of a transfer.
type item struct {
	at     int         // index into the request
	fill   *tiers.Fill // the slot that it goes into; nil: worker memory
	crc    uint32      // that the peer told; of what is lent it tells it afterwards
	lent   bool
	offset uint64 // at the peer, of what is lent
	got    uint32 // checksum of what came
	status FetchStatus
}

// transferIn is one transfer from a peer: a part of a fetch.
type transferIn struct {
	r     *remote
	items []item
	batch []transport.Copy
	bytes uint64
	done  chan struct{}
	end   func()          // of the destination
	m     *mover.Transfer // nil: was not taken

	mu        sync.Mutex
	abandoned bool // nobody waits any more: what is not confirmed never will be
	quietly   bool // it is quiet
	err       error
}

func (t *transferIn) add(it item, dst []kvferry.Segment, src kvferry.Segment) {
	t.items = append(t.items, it)
	t.bytes += src.Length
	t.batch = append(t.batch, transport.Copy{Dst: dst, Src: []kvferry.Segment{src}})
}

// partsAhead is how many parts of a fetch may wait for the link or be copied, so that no fetch fills the link's queue.
const partsAhead = 2 * peerTransfers

// transfer submits the parts, some ahead, and waits, one after the other, until they are quiet or ctx has ended. It adds what is to be asked for again.
func (r *remote) transfer(ctx context.Context, a ClaimAnswer, parts []*transferIn, again []int) ([]int, error) {
	var first error
	renew := time.NewTicker(max(a.Lease/3, 100*time.Millisecond))
	defer renew.Stop()
	submitted := 0
	for i, t := range parts {
		for first == nil && submitted < len(parts) && submitted < i+partsAhead {
			err := parts[submitted].submit(ctx, a)
			if errors.Is(err, mover.ErrBusy) && submitted > i {
				break // parts of this fetch are under way: their end makes room
			}
			submitted++
			if err != nil && !errors.Is(err, mover.ErrBusy) {
				first = err
			}
		}
		if t.m == nil {
			t.drop(first)
			continue
		}
		err := t.wait(ctx, a, renew.C)
		if err == nil {
			err = t.confirm(ctx, a)
		}
		if err != nil {
			t.abandon()
			if first == nil {
				first = err
			}
		}
		var come []int
		for _, it := range t.collect() {
			switch {
			case it.status == 0 && it.lent && first == nil: // its generation did not hold: the pool may have it
				again = append(again, it.at)
				r.lent = false
				continue
			case it.status == Fetched || it.status == Delivered:
				come = append(come, it.at)
			}
			r.out[it.at] = it.status
		}
		if r.q.Arrived != nil {
			r.q.Arrived(come)
		}
	}
	slices.Sort(again) // a claim names them in the offer's order
	return again, first
}

// drop gives a part back that was not taken: because the link is busy, or because the fetch has failed before.
func (t *transferIn) drop(failed error) {
	t.giveBack(t.items)
	if failed == nil {
		for _, it := range t.items {
			t.r.out[it.at] = NoRoom
		}
	}
}

// submit queues the transfer. One that is not taken may be submitted again.
func (t *transferIn) submit(ctx context.Context, a ClaimAnswer) error {
	into := t.r.f.cfg.Pool
	t.end = func() {}
	if t.r.q.Into != nil {
		into = t.r.q.Into.Memory
		end, ok := t.r.q.Into.Begin()
		if !ok {
			return context.Canceled // the worker has taken its memory back
		}
		t.end = end
	}
	copier := t.r.p.copier(a, into)
	deadline, _ := ctx.Deadline()
	m := &mover.Transfer{Class: kvferry.ClassHandoff, Copier: copier, Batch: t.batch, Deadline: deadline}
	m.Quiet = func(mover.Outcome) { t.quiet(copier) }
	t.m = m
	err := t.r.p.link.Submit(m)
	if err != nil {
		t.m = nil
		_ = copier.Close()
		t.end()
	}
	return err
}

// wait returns when the transfer is quiet, or ctx has ended.
func (t *transferIn) wait(ctx context.Context, a ClaimAnswer, renew <-chan time.Time) error {
	f := t.r.f
	for {
		select {
		case <-t.done:
			t.mu.Lock()
			defer t.mu.Unlock()
			return t.err
		case <-renew:
			// What is read renews the claim by itself; this is for transfers that wait in the queue.
			f.background(func(ctx context.Context) {
				if err := f.cfg.Control.Renew(ctx, t.r.p.address, a.Epoch, [][16]byte{a.Key}); err != nil {
					f.cfg.Log.Debug("renew claim", "peer", t.r.p.address, "error", err) // then the reads will tell
				}
			})
		case <-ctx.Done():
			t.m.End(mover.Expired)
			return context.Cause(ctx)
		}
	}
}

// quiet publishes what came whole and right, and gives the rest back. Also when the outcome was decided against the transfer: a block that is right is right.
func (t *transferIn) quiet(copier transport.Copier) {
	_ = copier.Close()
	var wrong int
	var settled []item
	t.mu.Lock()
	for k := range t.batch {
		c, it := &t.batch[k], &t.items[k]
		it.got = c.CRC32C
		switch {
		case c.Err != nil:
			it.status = Failed
			if t.err == nil {
				t.err = c.Err
			}
		case it.lent && !t.abandoned:
			continue
		case it.lent:
			it.status = TooLate
		case it.got != it.crc:
			it.status = Failed
			wrong++
		default:
			it.status = it.arrived()
		}
		settled = append(settled, *it)
	}
	t.quietly = true
	t.mu.Unlock()
	t.broken(wrong)
	t.publish(settled)
	t.end()
	close(t.done)
}

// confirm asks the peer about what was read out of lent memory.
func (t *transferIn) confirm(ctx context.Context, a ClaimAnswer) error {
	var offsets []uint64
	var which []int
	for k := range t.items {
		if t.items[k].lent && t.items[k].status == 0 {
			offsets, which = append(offsets, t.items[k].offset), append(which, k)
		}
	}
	if len(offsets) == 0 {
		return nil
	}
	held, crcs, err := t.r.f.cfg.Control.Confirm(ctx, t.r.p.address, a.Epoch, a.Key, offsets)
	if err != nil {
		return err
	}
	var settled []item
	wrong, changed := 0, 0
	for n, k := range which {
		it := &t.items[k]
		switch {
		case !held[n]:
			changed++
			t.giveBack([]item{*it}) // its status stays 0: it is asked for again
			continue
		case crcs[n] != it.got:
			it.status = Failed
			wrong++
		default:
			it.status = it.arrived()
		}
		settled = append(settled, *it)
	}
	t.r.f.cfg.Counters.Add("fetch_blocks", "generation_changed", changed)
	t.broken(wrong)
	t.publish(settled)
	return nil
}

// abandon gives up what was not confirmed.
func (t *transferIn) abandon() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.abandoned = true
	if !t.quietly {
		return // quiet gives it back
	}
	for k := range t.items {
		if it := &t.items[k]; it.status == 0 {
			it.status = Failed
			t.giveBack([]item{*it})
		}
	}
}

// collect is how the blocks are now.
func (t *transferIn) collect() []item {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.items)
}

func (it *item) arrived() FetchStatus {
	if it.fill == nil {
		return Delivered
	}
	return Fetched
}

func (t *transferIn) broken(wrong int) {
	if wrong > 0 {
		t.r.f.cfg.Counters.Add("broken_blocks", "peer", wrong)
		t.r.f.cfg.Log.Error("blocks from a peer had the wrong checksum, and were thrown away", "peer", t.r.p.address, "blocks", wrong)
	}
}

// publish commits the slots of what is right and gives the others back.
func (t *transferIn) publish(items []item) {
	var good []tiers.Fill
	var crcs []uint32
	var bad []item
	for _, it := range items {
		switch {
		case it.fill == nil:
		case it.status == Fetched:
			good, crcs = append(good, *it.fill), append(crcs, it.got)
		default:
			bad = append(bad, it)
		}
	}
	t.r.f.cfg.Ledger.Commit(time.Now(), good, crcs)
	t.giveBack(bad)
}

// giveBack frees the slots of blocks that did not come.
func (t *transferIn) giveBack(items []item) {
	var fills []tiers.Fill
	for _, it := range items {
		if it.fill != nil {
			fills = append(fills, *it.fill)
		}
	}
	t.r.f.cfg.Ledger.Abort(time.Now(), fills)
}
