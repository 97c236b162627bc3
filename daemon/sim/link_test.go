package sim

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/handoff"
	"github.com/kvferry/kvferry/transport"
)

// peerLink is handoff.PeerLink over the simulated network: it reads as transport/tcp's server answers.
type peerLink struct {
	d     *daemon // that reads
	to    *node
	epoch kvferry.Epoch
	ctx   context.Context // ends with Close
	close context.CancelCauseFunc
}

func (d *daemon) newLink(address string, epoch kvferry.Epoch) handoff.PeerLink {
	l := &peerLink{d: d, to: d.node.w.nodeAt(address), epoch: epoch}
	l.ctx, l.close = context.WithCancelCause(context.Background())
	return l
}

// Close is handoff.PeerLink.
func (l *peerLink) Close() error {
	l.close(fmt.Errorf("%w: link is closed", transport.ErrLink))
	return nil
}

// Copier is handoff.PeerLink.
func (l *peerLink) Copier(key [16]byte, src kvferry.Region, dst transport.Memory) transport.Copier {
	return &peerCopier{link: l, key: key, src: src, dst: dst}
}

// peerCopier reads under a claim.
type peerCopier struct {
	link *peerLink
	key  [16]byte
	src  kvferry.Region
	dst  transport.Memory

	mu     sync.Mutex
	closed bool
}

// Close is transport.Copier.
func (c *peerCopier) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	return nil
}

// Copy is transport.Copier: it returns when nothing of it writes any more.
func (c *peerCopier) Copy(ctx context.Context, batch []transport.Copy) error {
	c.mu.Lock()
	err := context.Cause(ctx)
	if c.closed {
		err = fmt.Errorf("%w: copier is closed", transport.ErrLink)
	}
	c.mu.Unlock()
	if err != nil {
		fail(batch, err)
		return err
	}
	switch m := c.link.d.node.w.mutation; {
	case m == notQuiet && c.target() == nil, m == writesOn && c.target() != nil:
		return c.copyLoud(ctx, batch)
	}
	return c.copy(ctx, batch)
}

// target is the worker memory that is written; nil: the pool.
func (c *peerCopier) target() *target {
	d := c.link.d
	if c.dst.ID == d.memory.ID {
		return nil
	}
	d.node.mu.Lock()
	defer d.node.mu.Unlock()
	return d.targets[c.dst.ID]
}

func fail(batch []transport.Copy, err error) {
	for i := range batch {
		batch[i].Err = err
	}
}

func (c *peerCopier) copy(ctx context.Context, batch []transport.Copy) error {
	d := c.link.d
	if t := c.target(); t != nil {
		t.count(batch, 1)
		defer t.count(batch, -1)
	} else {
		d.slots.begin(batch)
		defer d.slots.end(batch)
	}
	d.node.w.net.count(1)
	defer d.node.w.net.count(-1)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(c.link.ctx, func() { cancel(context.Cause(c.link.ctx)) })
	defer stop()
	r := d.node.w.roll("copy " + d.node.w.book.name(c.key))
	for i := range batch {
		if err := c.one(ctx, r, &batch[i]); err != nil {
			fail(batch[i:], err)
			return err
		}
	}
	return nil
}

// one reads a shard: in pieces, while the peer holds the claim.
func (c *peerCopier) one(ctx context.Context, r *rand.Rand, one *transport.Copy) error {
	l, w := c.link, c.link.d.node.w
	if err := l.travel(ctx, w.net.delay(r), l.d.node, l.to); err != nil {
		return err
	}
	to := l.to.now()
	if to == nil {
		return fmt.Errorf("%w: connection refused", transport.ErrLink)
	}
	grant, err := to.registry.Acquire(l.epoch, c.key)
	if err != nil {
		w.saw("reads refused", 1)
		return fmt.Errorf("%w: %v", transport.ErrRefused, err)
	}
	defer grant.Release()
	claim := w.book.renewed(c.key)
	if claim == nil {
		return fmt.Errorf("%w: a claim that is not in the book", transport.ErrRefused)
	}
	from, err := grant.Append(nil, one.Src[0].Offset, one.Src[0].Length)
	if err != nil {
		return fmt.Errorf("%w: %v", transport.ErrRefused, err)
	}
	into := make([][]byte, len(one.Dst))
	for i, s := range one.Dst {
		if into[i], err = c.dst.Slice(s); err != nil {
			return err
		}
	}
	want := claim.lies[one.Src[0].Offset] // nil: lent, and the engine may use it again at any moment
	if want == nil {
		w.net.countLent(1)
		defer w.net.countLent(-1)
	}
	may := func() bool { return true }
	if t := c.target(); t != nil {
		may = func() bool { return t.check(one.Dst[0]) }
		w.saw("writes into worker memory", 1)
	}
	if err := c.pieces(ctx, r, to, into, from, want, one.Src[0].Offset, may); err != nil {
		return err
	}
	one.CRC32C, one.Err = w.mutation.checksum(slices.Concat(into...), want), nil
	w.saw("blocks over the network", 1)
	if want == nil {
		w.saw("lent blocks over the network", 1)
	}
	if c.dst.ID != l.d.memory.ID {
		w.saw("blocks into worker memory", 1)
	}
	return nil
}

// pieces brings the bytes over, as they are when their turn comes.
func (c *peerCopier) pieces(ctx context.Context, r *rand.Rand, to *daemon, into, from [][]byte, want []byte, offset uint64, may func() bool) error {
	l, w := c.link, c.link.d.node.w
	pace := time.Duration(w.net.now().pace)
	if w.mutation == writesOn {
		pace *= 20 // so that there is something to write on
	}
	for at, f, t := 0, 0, 0; len(from) > 0; {
		piece := min(len(from[0])-f, len(into[0])-t, 1+r.IntN(shardBytes/2))
		if err := c.trouble(ctx, r); err != nil {
			return err
		}
		if err := l.travel(ctx, w.net.delay(r)*pace/8, l.to, l.d.node); err != nil {
			if errors.Is(err, errDead) {
				w.saw("crashes of who reads", 1)
			}
			return err
		}
		if to.ctx.Err() != nil {
			w.saw("crashes of who is read", 1)
			return fmt.Errorf("%w: connection reset", transport.ErrLink)
		}
		came := from[0][f : f+piece]
		if want != nil && string(came) != string(want[at:at+piece]) && !l.to.flipped.has(offset) {
			w.breaks("%s: a slot was used again while it was read under a claim", l.to.name)
		}
		if !may() {
			return fmt.Errorf("%w: the process that is written to is gone", transport.ErrLink)
		}
		copy(into[0][t:], came)
		if chance(r, w.net.now().flips) {
			into[0][t+r.IntN(piece)] ^= 1 << r.IntN(8)
			w.saw("flips", 1)
		}
		at, f, t = at+piece, f+piece, t+piece
		if f == len(from[0]) {
			from, f = from[1:], 0
		}
		if t == len(into[0]) {
			into, t = into[1:], 0
		}
	}
	return nil
}

// trouble is what goes wrong in the middle of a copy.
func (c *peerCopier) trouble(ctx context.Context, r *rand.Rand) error {
	w := c.link.d.node.w
	switch b := w.net.now(); {
	case chance(r, b.breaks):
		w.saw("links broken", 1)
		return fmt.Errorf("%w: connection reset", transport.ErrLink)
	case chance(r, b.hangs):
		w.saw("links hung", 1)
		return c.link.d.pause(ctx, time.Hour)
	}
	return nil
}

func (n *network) now() weather {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.weather
}

// stall is how long a reader waits for a peer from which nothing comes.
const stall = time.Second

// travel lets time pass until something has got from one node to the other, which takes as long as it is cut off or either daemon frozen, and fails when that is too long.
func (l *peerLink) travel(ctx context.Context, t time.Duration, from, to *node) error {
	end := time.Now().Add(stall)
	for {
		if err := l.d.pause(ctx, t); err != nil {
			return err
		}
		if l.d.node.w.net.passes(from, to) && !l.to.isFrozen() {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("%w: nothing came for %v", transport.ErrLink, stall)
		}
		t = 20 * time.Millisecond
	}
}
