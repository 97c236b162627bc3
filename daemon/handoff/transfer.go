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

// transferIn is one transfer from a peer's pool into this one: a part of a fetch.
type transferIn struct {
	f     *Fetcher
	fills []tiers.Fill
	crcs  []uint32 // that the peer told
	at    []int    // index into the request
	batch []transport.Copy
	bytes uint64
	done  chan struct{}
	m     *mover.Transfer // nil: was not taken

	mu     sync.Mutex
	status []FetchStatus // beside fills; set when done
	err    error
}

func (t *transferIn) add(pool kvferry.RegionID, fill tiers.Fill, src kvferry.Segment, crc uint32, at int) {
	t.fills = append(t.fills, fill)
	t.crcs = append(t.crcs, crc)
	t.at = append(t.at, at)
	t.bytes += src.Length
	t.batch = append(t.batch, transport.Copy{
		Dst: []kvferry.Segment{{Region: pool, Offset: fill.Place.Offset, Length: fill.Place.Length}}, Src: []kvferry.Segment{src},
	})
}

// transfer submits the parts and waits, one after the other, until they are quiet or ctx has ended.
func (f *Fetcher) transfer(ctx context.Context, p *peer, q FetchRequest, a ClaimAnswer, parts []*transferIn, out []FetchStatus) error {
	var first error
	for _, t := range parts {
		if err := t.submit(ctx, p, a, out); err != nil && first == nil {
			first = err
		}
	}
	renew := time.NewTicker(max(a.Lease/3, 100*time.Millisecond))
	defer renew.Stop()
	for i, t := range parts {
		if t.m == nil {
			continue
		}
		if err := t.wait(ctx, p, a, renew.C, out); err != nil && first == nil {
			first = err
		}
		if q.Arrived != nil && i < len(parts)-1 {
			q.Arrived(slices.DeleteFunc(slices.Clone(t.at), func(i int) bool { return out[i] != Fetched }))
		}
	}
	return first
}

// submit queues the transfer. What is not taken is given back at once.
func (t *transferIn) submit(ctx context.Context, p *peer, a ClaimAnswer, out []FetchStatus) error {
	copier := p.copier(a, t.f.cfg.Pool)
	deadline, _ := ctx.Deadline()
	m := &mover.Transfer{Class: kvferry.ClassHandoff, Copier: copier, Batch: t.batch, Deadline: deadline}
	m.Quiet = func(mover.Outcome) { t.quiet(copier) }
	err := p.link.Submit(m)
	if err == nil {
		t.m = m
		return nil
	}
	_ = copier.Close()
	t.f.cfg.Ledger.Abort(time.Now(), t.fills)
	if errors.Is(err, mover.ErrBusy) {
		for _, i := range t.at {
			out[i] = NoRoom
		}
		return nil
	}
	return err
}

// wait returns when the transfer is quiet, or ctx has ended: then its slots are given back when it is.
func (t *transferIn) wait(ctx context.Context, p *peer, a ClaimAnswer, renew <-chan time.Time, out []FetchStatus) error {
	for waiting := true; waiting; {
		select {
		case <-t.done:
			waiting = false
		case <-renew:
			// What is read renews the claim by itself; this is for transfers that wait in the queue.
			t.f.background(func(ctx context.Context) {
				if err := t.f.cfg.Control.Renew(ctx, p.address, a.Epoch, [][16]byte{a.Key}); err != nil {
					t.f.cfg.Log.Debug("renew claim", "peer", p.address, "error", err) // then the reads will tell
				}
			})
		case <-ctx.Done():
			t.m.End(mover.Expired)
			return context.Cause(ctx)
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for k, i := range t.at {
		out[i] = t.status[k]
	}
	return t.err
}

// quiet publishes what came whole and right, and gives the rest back. Also when the outcome was decided against the transfer: a block that is right is right.
func (t *transferIn) quiet(copier transport.Copier) {
	_ = copier.Close()
	status := make([]FetchStatus, len(t.fills))
	var good, bad []tiers.Fill
	var crcs []uint32
	var first error
	wrong := 0
	for k := range t.batch {
		c := &t.batch[k]
		switch {
		case c.Err != nil:
			status[k] = Failed
			if first == nil {
				first = c.Err
			}
		case c.CRC32C != t.crcs[k]:
			status[k] = Failed
			wrong++
		default:
			status[k] = Fetched
			good, crcs = append(good, t.fills[k]), append(crcs, c.CRC32C)
			continue
		}
		bad = append(bad, t.fills[k])
	}
	if wrong > 0 {
		t.f.cfg.Counters.Add("broken_blocks", "peer", wrong)
		t.f.cfg.Log.Error("blocks from a peer had the wrong checksum, and were thrown away", "blocks", wrong)
	}
	t.f.cfg.Ledger.Commit(time.Now(), good, crcs)
	t.f.cfg.Ledger.Abort(time.Now(), bad)
	t.mu.Lock()
	t.status, t.err = status, first
	t.mu.Unlock()
	close(t.done)
}
