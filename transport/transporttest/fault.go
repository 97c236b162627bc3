package transporttest

import (
	"context"
	"sync"

	"github.com/kvferry/kvferry/transport"
)

// Fault is a Copier that goes wrong where it is told to. It is safe for concurrent use; the copies are counted from 1 over all batches, in the order
// in which Copy meets them.
type Fault struct {
	transport.Copier                  // that does the work
	Dst              transport.Memory // of Copier; needed for Flip

	// FailNth has the nth copy end with Err instead of being tried.
	FailNth int
	Err     error
	// FlipNth has one bit of the nth copy's destination flipped after it was copied; the CRC32C that is reported is that of what was sent.
	FlipNth int
	// Hold, if not nil, has each batch wait for one value, or its close, before it is tried. A context that ends is waited for too.
	Hold <-chan struct{}
	// Held, if not nil, gets a value when a batch begins to wait.
	Held chan<- struct{}

	mu    sync.Mutex
	count int
}

var _ transport.Copier = (*Fault)(nil)

// Copy is Copier.Copy with the faults.
func (f *Fault) Copy(ctx context.Context, batch []transport.Copy) error {
	if err := f.wait(ctx); err != nil {
		for i := range batch {
			batch[i].Err = err
		}
		return err
	}
	f.mu.Lock()
	first := f.count + 1
	f.count += len(batch)
	f.mu.Unlock()
	fail, flip := f.FailNth-first, f.FlipNth-first
	if fail < 0 || fail >= len(batch) {
		err := f.Copier.Copy(ctx, batch)
		f.flip(batch, flip)
		return err
	}
	rest := append(append([]transport.Copy{}, batch[:fail]...), batch[fail+1:]...)
	err := f.Copier.Copy(ctx, rest)
	copy(batch, rest[:fail])
	copy(batch[fail+1:], rest[fail:])
	batch[fail].Err = f.Err
	f.flip(batch, flip)
	return err
}

func (f *Fault) wait(ctx context.Context) error {
	if f.Hold == nil {
		return nil
	}
	if f.Held != nil {
		f.Held <- struct{}{}
	}
	select {
	case <-f.Hold:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (f *Fault) flip(batch []transport.Copy, i int) {
	if i < 0 || i >= len(batch) || batch[i].Err != nil {
		return
	}
	for _, s := range batch[i].Dst {
		if b, err := f.Dst.Slice(s); err == nil && len(b) > 0 {
			b[len(b)/2] ^= 0x10
			return
		}
	}
}
