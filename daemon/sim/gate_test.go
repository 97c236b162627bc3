package sim

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"testing/synctest"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/transport"
)

// gate holds local copies back in their middle: half of the bytes are moved before, half after, so that whatever happens in between tears them.
type gate struct {
	mu      sync.Mutex
	waiting []*heldCopy
	open    bool
}

type heldCopy struct {
	from    kvferry.Segment // names the copy: a block is stored by one operation at a time
	release chan error
}

// releaseCopy lets one copy go on, or fail.
func (n *node) releaseCopy(err error) {
	if n.daemon == nil {
		return
	}
	g := n.daemon.gate
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.waiting) == 0 {
		return
	}
	slices.SortFunc(g.waiting, func(x, y *heldCopy) int {
		return cmp.Or(cmp.Compare(x.from.Region, y.from.Region), cmp.Compare(x.from.Offset, y.from.Offset))
	})
	i := n.w.r.IntN(len(g.waiting))
	g.waiting[i].release <- err
	g.waiting = slices.Delete(g.waiting, i, i+1)
}

// drain lets all copies go on, one after the other, and those that come after them.
func (n *node) drain() {
	for n.daemon.gate.holds() {
		n.releaseCopy(nil)
		synctest.Wait()
	}
}

func (g *gate) holds() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.waiting) > 0
}

// openAll lets all copies go on, those to come too.
func (g *gate) openAll() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open = true
	for _, h := range g.waiting {
		h.release <- nil
	}
	g.waiting = nil
}

func (g *gate) wait(ctx context.Context, from kvferry.Segment, deaf bool) error {
	g.mu.Lock()
	if g.open {
		g.mu.Unlock()
		return nil
	}
	h := &heldCopy{from: from, release: make(chan error, 1)}
	g.waiting = append(g.waiting, h)
	g.mu.Unlock()
	done := ctx.Done()
	if deaf {
		done = nil
	}
	select {
	case err := <-h.release:
		return err
	case <-done:
		g.mu.Lock()
		defer g.mu.Unlock()
		if i := slices.Index(g.waiting, h); i >= 0 {
			g.waiting = slices.Delete(g.waiting, i, i+1)
		}
		return ctx.Err()
	}
}

// localCopier is a real local copier with the gate in its middle. A deaf one does not hear that it should stop, as a copy that is in the hands of hardware.
type localCopier struct {
	transport.Copier
	d    *daemon
	deaf bool
}

// newCopier is called while a process attaches, by the scheduler's goroutine.
func (d *daemon) newCopier(dst, src transport.Memory) transport.Copier {
	d.node.mu.Lock()
	d.targets[src.ID] = d.attaching
	d.node.mu.Unlock()
	return &localCopier{transport.NewLocal(dst, src, 1), d, d.node.w.r.IntN(2) == 0}
}

func (c *localCopier) Copy(ctx context.Context, batch []transport.Copy) error {
	c.d.slots.begin(batch)
	defer c.d.slots.end(batch)
	half := len(batch) / 2
	err := c.Copier.Copy(ctx, batch[:half])
	if err == nil {
		err = c.d.gate.wait(ctx, batch[0].Src[0], c.deaf)
	}
	if err == nil && !c.d.awake() {
		err = errDead
	}
	if err == nil {
		err = c.Copier.Copy(context.WithoutCancel(ctx), batch[half:])
	}
	if err != nil {
		for i := half; i < len(batch); i++ {
			batch[i].Err = err
		}
	}
	return err
}
