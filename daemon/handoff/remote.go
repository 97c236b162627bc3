package handoff

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers"
)

// errLate ends a claim whose blocks did not come in time, which is no fault of the way to the peer.
var errLate = errors.New("handoff: too late")

// remote is a fetch from another node: it claims and reads in rounds, as the blocks come there.
type remote struct {
	f     *Fetcher
	p     *peer
	q     FetchRequest
	out   []FetchStatus
	begun time.Time
	lent  bool // memory that the peer's workers lend is still worth asking for
	key   [16]byte
	epoch kvferry.Epoch // of the peer
	asked time.Time
	calls int
}

// path is how the blocks go, for people on the node that offers.
func (r *remote) path() string {
	if r.q.Into != nil {
		return "direct, tcp"
	}
	return "pool, tcp: " + r.q.Pooled
}

// run returns when every block has a status, or something failed.
func (r *remote) run(ctx context.Context) error {
	todo := indexes(len(r.out))
	for len(todo) > 0 {
		c := r.f.claimRequest(ctx, r.q, pick(r.q.Hashes, todo))
		c.ReadsLent, c.Path = r.lent, r.path()
		if until, ok := ctx.Deadline(); ok {
			c.Wait = max(0, min(c.Wait, time.Until(until)-answerTime))
		}
		if err := r.pause(ctx); err != nil {
			return err
		}
		a, err := r.f.cfg.Control.Claim(ctx, r.p.address, c)
		if err != nil {
			return fmt.Errorf("claim at %s: %w", r.p.address, err)
		}
		r.key, r.epoch = a.Key, a.Epoch
		if a.Key == ([16]byte{}) {
			if !r.f.patient(ctx, a, r.begun) || late(ctx) {
				return fmt.Errorf("%w: %s has not heard of it", ErrUnknown, r.p.address)
			}
			continue
		}
		if a.DataAddress, err = r.f.resolve(ctx, a.DataAddress); err != nil {
			return err
		}
		if a.ShardBytes != r.q.Shape.ShardBytes {
			return fmt.Errorf("%w: shard of %d bytes, here %d", ErrMismatch, a.ShardBytes, r.q.Shape.ShardBytes)
		}
		if todo, err = r.read(ctx, a, todo); err != nil {
			return fmt.Errorf("read from %s: %w", r.p.address, err)
		}
		if len(todo) > 0 && late(ctx) {
			for _, i := range todo {
				r.out[i] = TooLate
			}
			return fmt.Errorf("%w: %d blocks are still pending at %s", errLate, len(todo), r.p.address)
		}
	}
	return nil
}

// pauseBetween keeps a peer that answers at once that all is pending, which none of ours does, from being asked without end.
const pauseBetween = 5 * time.Millisecond

func (r *remote) pause(ctx context.Context) error {
	r.calls++
	if wait := pauseBetween - time.Since(r.asked); r.calls > 8 && wait > 0 {
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	r.asked = time.Now()
	return nil
}

// read copies what a claim says can be read, and answers the indexes of what to ask for again. at are the indexes of the claimed blocks.
func (r *remote) read(ctx context.Context, a ClaimAnswer, at []int) (again []int, err error) {
	var blocks []tiers.Block
	var source []int // index into the claim, beside blocks
	for i, s := range a.Status {
		switch s {
		case Stored, InLent:
			b := tiers.Block{Hash: kvferry.Hash(r.q.Hashes[at[i]*kvferry.HashSize:])}
			if a.Parents != nil {
				b.Parent = kvferry.Hash(a.Parents[i*kvferry.HashSize:])
			}
			blocks, source = append(blocks, b), append(source, i)
		case Pending:
			again = append(again, at[i])
		default:
			r.out[at[i]] = NotThere
		}
	}
	if len(blocks) == 0 {
		return again, nil
	}
	var parts []*transferIn
	add := func(i int, dst []kvferry.Segment, fill *tiers.Fill) {
		if len(parts) == 0 || parts[len(parts)-1].bytes >= r.f.cfg.PartBytes {
			parts = append(parts, &transferIn{r: r, done: make(chan struct{})})
		}
		it := item{at: at[i], fill: fill, crc: a.CRC32C[i]}
		if a.Status[i] == InLent {
			it.lent, it.offset = true, a.Offsets[i]
		}
		parts[len(parts)-1].add(it, dst, kvferry.Segment{Region: r.p.region.ID, Offset: a.Offsets[i], Length: a.ShardBytes})
	}
	if r.q.Into != nil {
		for _, i := range source {
			add(i, r.q.Into.Segments(at[i]), nil)
		}
		return r.transfer(ctx, a, parts, again)
	}
	var running []int
	pool := r.f.cfg.Pool.ID
	for k, fill := range r.f.cfg.Ledger.BeginFill(time.Now(), r.q.Space, r.q.Shard, blocks) {
		i := source[k]
		switch fill.Status {
		case tiers.FillNew:
			add(i, []kvferry.Segment{{Region: pool, Offset: fill.Place.Offset, Length: fill.Place.Length}}, &fill)
		case tiers.FillBusy:
			r.out[at[i]] = NoRoom
		case tiers.FillPresent:
			r.out[at[i]] = Fetched
		default:
			running = append(running, at[i])
		}
	}
	again, err = r.transfer(ctx, a, parts, again)
	r.f.awaitOthers(ctx, r.q, running, r.out)
	return again, err
}

// end gives the claim back without making anybody wait for it.
func (r *remote) end(cause error) {
	reason, received := "", uint32(0)
	if cause != nil {
		reason = cause.Error()
		reason = reason[:min(len(reason), 256)]
	}
	for _, s := range r.out {
		if s == Fetched || s == Delivered {
			received++
		}
	}
	key, epoch := r.key, r.epoch
	r.f.background(func(ctx context.Context) {
		if err := r.f.cfg.Control.EndClaim(ctx, r.p.address, epoch, key, received, reason); err != nil {
			r.f.cfg.Log.Debug("end claim", "peer", r.p.address, "error", err) // it ends with its lease
		}
	})
}
