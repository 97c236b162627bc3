package process

import (
	"context"
	"errors"
	"sync"
)

// gate holds a worker's copies up, so that something can happen to their blocks in the meantime.
type gate struct {
	mu      sync.Mutex
	closed  chan struct{} // closed by open; nil: open
	arrived chan struct{} // has a value when a copy waits
}

func (g *gate) pass() {
	g.mu.Lock()
	closed, arrived := g.closed, g.arrived
	g.mu.Unlock()
	if closed == nil {
		return
	}
	select {
	case arrived <- struct{}{}:
	default:
	}
	<-closed
}

func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed == nil {
		g.closed, g.arrived = make(chan struct{}), make(chan struct{}, 1)
	}
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed != nil {
		close(g.closed)
		g.closed = nil
	}
}

// Hold lets no copy of blocks begin until Go.
func (s *Service) Hold(struct{}, *struct{}) error {
	s.gate.close()
	return nil
}

// Held waits until a copy would begin.
func (s *Service) Held(struct{}, *struct{}) error {
	s.gate.mu.Lock()
	arrived := s.gate.arrived
	s.gate.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	select {
	case <-arrived:
		return nil
	case <-ctx.Done():
		return errors.New("nothing is copied")
	}
}

// Go ends Hold.
func (s *Service) Go(struct{}, *struct{}) error {
	s.gate.open()
	return nil
}

// Hold lets no copy of blocks begin in the worker until Go.
func (w *Worker) Hold(ctx context.Context) error { return w.do(ctx, "Hold") }

// Held waits until a copy would begin.
func (w *Worker) Held(ctx context.Context) error { return w.do(ctx, "Held") }

// Go ends Hold.
func (w *Worker) Go(ctx context.Context) error { return w.do(ctx, "Go") }

func (w *Worker) do(ctx context.Context, method string) error {
	_, err := call[struct{}, struct{}](ctx, w, method, struct{}{})
	return err
}
