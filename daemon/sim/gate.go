// Package sim runs one node's real parts (pool, ledger, mover, sessions, offers) under a seeded scheduler and a simulated clock, and checks the invariants of design.md section 9
// after every step. Everything is real but three things: copies wait in the middle until the simulation lets them go on, processes are goroutines that die when it says so, and time
// is that of testing/synctest.
//
//	go test ./daemon/sim -args -seed N -seeds M
package sim

import (
	"context"
	"math/rand/v2"
	"sync"

	"github.com/kvferry/kvferry/transport"
)

// gate holds copies back in their middle: half of the bytes are moved before, half after, so that whatever happens in between tears them.
type gate struct {
	mu      sync.Mutex
	waiting []*held
	open    bool
}

type held struct {
	release chan error
}

// release lets one copy go on, or fail.
func (g *gate) release(r *rand.Rand, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.waiting) == 0 {
		return
	}
	i := r.IntN(len(g.waiting))
	g.waiting[i].release <- err
	g.waiting = append(g.waiting[:i], g.waiting[i+1:]...)
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

func (g *gate) wait(ctx context.Context, deaf bool) error {
	g.mu.Lock()
	if g.open {
		g.mu.Unlock()
		return nil
	}
	h := &held{release: make(chan error, 1)}
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
		for i := range g.waiting {
			if g.waiting[i] == h {
				g.waiting = append(g.waiting[:i], g.waiting[i+1:]...)
				break
			}
		}
		return ctx.Err()
	}
}

// copier is a real local copier with the gate in its middle. A deaf one does not hear that it should stop, as a copy that is in the hands of hardware.
type copier struct {
	transport.Copier
	gate *gate
	deaf bool
}

func (c *copier) Copy(ctx context.Context, batch []transport.Copy) error {
	half := len(batch) / 2
	err := c.Copier.Copy(ctx, batch[:half])
	if err == nil {
		err = c.gate.wait(ctx, c.deaf)
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
