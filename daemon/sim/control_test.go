package sim

import (
	"context"
	"errors"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/handoff"
	"github.com/kvferry/kvferry/transport"
)

// control is handoff.Control over the simulated network.
type control struct{ d *daemon }

// Claim is handoff.Control.
func (c *control) Claim(ctx context.Context, address string, q handoff.ClaimRequest) (handoff.ClaimAnswer, error) {
	ctx, cancel := context.WithTimeout(ctx, q.Wait+time.Second)
	defer cancel()
	return call(ctx, c.d, address, "claim "+c.d.node.w.book.nameOf(q).String(), func(ctx context.Context, to *daemon) (handoff.ClaimAnswer, error) {
		ctx, cancel := context.WithTimeout(ctx, q.Wait+time.Second)
		defer cancel()
		return to.claim(ctx, q, q)
	})
}

// claim has the registry answer a claim, and checks the answer. meant is the claim as its caller knows it.
func (d *daemon) claim(ctx context.Context, q, meant handoff.ClaimRequest) (handoff.ClaimAnswer, error) {
	w := d.node.w
	a, err := d.registry.Claim(ctx, q)
	switch {
	case err == nil && a.Key == [16]byte{}: // not heard of yet
		w.saw("claims before the offer", 1)
	case err == nil && d.ctx.Err() == nil:
		again, err := w.book.claimed(d, meant, a)
		if err != nil {
			w.breaks("%s: %v", d.node.name, err)
		}
		if again {
			w.saw("claims twice", 1)
		}
	case errors.Is(err, handoff.ErrTaken):
		w.saw("refused: another instance", 1)
	case errors.Is(err, handoff.ErrSecret):
		w.saw("refused: secret", 1)
	case errors.Is(err, handoff.ErrUnknown) && q.Epoch != d.epoch:
		w.saw("refused: epoch", 1)
	case errors.Is(err, handoff.ErrMismatch):
		w.saw("refused: tp", 1) // nothing else of what the simulation asks for does not fit
	}
	return a, err
}

// Confirm is handoff.Control.
func (c *control) Confirm(ctx context.Context, address string, epoch kvferry.Epoch, key [16]byte, offsets []uint64) ([]bool, []uint32, error) {
	type proof struct {
		held []bool
		crcs []uint32
	}
	ctx, cancel := context.WithTimeout(ctx, confirmTimeout)
	defer cancel()
	p, err := call(ctx, c.d, address, "confirm "+c.d.node.w.book.name(key), func(_ context.Context, to *daemon) (p proof, err error) {
		if to.epoch != epoch {
			return p, handoff.ErrUnknown
		}
		w := to.node.w
		p.held, p.crcs, err = to.registry.Confirm(ctx, key, offsets)
		if !errors.Is(err, transport.ErrRefused) { // it has taken hold of the claim, whatever came of it
			w.book.renewed(key)
		}
		if err != nil {
			return p, err
		}
		for i, held := range p.held {
			if !held {
				w.saw("stale reads refused", 1)
			} else if !w.book.lent(key, offsets[i], p.crcs[i]) {
				w.breaks("%s: a block is said to be what it was lent as, and is not", to.node.name)
			}
		}
		return p, nil
	})
	return p.held, p.crcs, err
}

// confirmTimeout is rpc's.
const confirmTimeout = 5 * time.Second

// Fetch is handoff.Control.
func (c *control) Fetch(ctx context.Context, address string, q handoff.FindRequest) (handoff.FindAnswer, error) {
	return call(ctx, c.d, address, "fetch "+q.Instance, func(_ context.Context, to *daemon) (handoff.FindAnswer, error) {
		a, err := to.registry.Fetch(q)
		if err == nil && a.Blocks > 0 {
			to.node.w.book.found(address, q, a)
		}
		return a, err
	})
}

// Renew is handoff.Control.
func (c *control) Renew(ctx context.Context, address string, epoch kvferry.Epoch, keys [][16]byte) error {
	_, err := call(ctx, c.d, address, "renew "+c.d.node.w.book.name(keys[0]), func(_ context.Context, to *daemon) (struct{}, error) {
		if to.epoch != epoch {
			return struct{}{}, handoff.ErrUnknown
		}
		if len(to.registry.Renew(keys)) == 0 {
			to.node.w.book.renewed(keys[0])
			to.node.w.saw("claims renewed", 1)
		}
		return struct{}{}, nil
	})
	return err
}

// EndClaim is handoff.Control.
func (c *control) EndClaim(ctx context.Context, address string, epoch kvferry.Epoch, key [16]byte, _ uint32, reason string) error {
	_, err := call(ctx, c.d, address, "end "+c.d.node.w.book.name(key), func(_ context.Context, to *daemon) (struct{}, error) {
		if to.epoch != epoch {
			return struct{}{}, handoff.ErrUnknown
		}
		to.node.w.book.end(to, key, reason)
		return struct{}{}, nil
	})
	return err
}
