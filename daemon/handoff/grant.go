package handoff

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/transport"
	"github.com/kvferry/kvferry/transport/tcp"
)

// Acquire is tcp.Grants: a request of the data protocol reads under this claim.
func (r *Registry) Acquire(epoch kvferry.Epoch, key [16]byte) (tcp.Grant, error) {
	if epoch != r.cfg.Epoch {
		return nil, fmt.Errorf("acquire: %w: epoch %v", transport.ErrRefused, epoch)
	}
	g, err := r.acquire(key)
	if err != nil {
		return nil, err
	}
	return g, nil
}

func (r *Registry) acquire(key [16]byte) (*grant, error) {
	r.mu.Lock()
	defer r.unlock()
	c := r.claims[key]
	if c == nil {
		return nil, fmt.Errorf("acquire: %w: no such claim", transport.ErrRefused)
	}
	c.users++
	c.renewLocked(time.Now().Add(r.cfg.Limits.ClaimLease))
	return &grant{r: r, c: c}, nil
}

// renewLocked lets the claim live until then, if it would not live longer anyway.
func (c *claim) renewLocked(until time.Time) {
	if until.After(c.last) {
		until = c.last
	}
	if until.After(c.until) {
		c.until = until
	}
}

// grant is one request's hold on a claim.
type grant struct {
	r *Registry
	c *claim
}

// Append is tcp.Grant: a range inside one of the claim's slots or lent blocks.
func (g *grant) Append(parts [][]byte, off, length uint64) ([][]byte, error) {
	g.r.mu.Lock()
	defer g.r.unlock()
	if off >= lentBase && g.c.lent != nil {
		block, in := g.c.lent.block(off)
		if _, ok := g.c.lentBlocks[block]; ok {
			return g.c.lent.append(parts, block, in, length)
		}
	}
	i, _ := slices.BinarySearchFunc(g.c.blocks, off, func(b span, off uint64) int { return cmp.Compare(b.offset, off) })
	for _, k := range []int{i, i - 1} { // the block that starts there, or the one before it
		if k < 0 || k >= len(g.c.blocks) {
			continue
		}
		if b := g.c.blocks[k]; off >= b.offset && off-b.offset <= b.length && length <= b.length-(off-b.offset) {
			return append(parts, g.r.cfg.Pool.Bytes[off:off+length:off+length]), nil
		}
	}
	return parts, fmt.Errorf("read %d bytes at %d: %w: not in the claim", length, off, transport.ErrRange)
}

// lent is the block at an offset, if the claim may read it.
func (g *grant) lent(off uint64) (block uint32, generation uint64, ok bool) {
	g.r.mu.Lock()
	defer g.r.unlock()
	if g.c.lent == nil || off < lentBase {
		return 0, 0, false
	}
	block, in := g.c.lent.block(off)
	generation, ok = g.c.lentBlocks[block]
	return block, generation, ok && in == 0
}

// Release is tcp.Grant.
func (g *grant) Release() {
	g.r.mu.Lock()
	defer g.r.unlock()
	g.c.users--
	g.r.freeLocked(g.c)
}

// freeLocked gives back what an ended claim holds, when no answer reads it any more.
func (r *Registry) freeLocked(c *claim) {
	if !c.ended || c.users > 0 {
		return
	}
	r.cfg.Ledger.ReleaseOwner(c.owner)
	if c.lent != nil {
		r.released = append(r.released, c.lent)
		c.lent = nil
	}
}
