package nvme

import (
	"context"
	"errors"
	"io"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// batchesMax is how many batches are at the device at once; others wait. It bounds rings, and threads.
const batchesMax = 4

// threads is the engine that works everywhere: one pread or pwrite on a thread of its own for each I/O in flight.
type threads struct {
	fd    int
	depth int
	gate  chan struct{}
}

func newThreads(data *os.File, depth int) *threads {
	return &threads{fd: int(data.Fd()), depth: depth, gate: make(chan struct{}, batchesMax)}
}

func (t *threads) describe(info *Info) { info.Engine = EngineThreads }

func (t *threads) close() {}

func (t *threads) run(ctx context.Context, write bool, batch []IO, done func(i int)) {
	select {
	case t.gate <- struct{}{}:
		defer func() { <-t.gate }()
	case <-ctx.Done():
	}
	var next atomic.Int64
	work := func() {
		for i := int(next.Add(1)) - 1; i < len(batch); i = int(next.Add(1)) - 1 {
			if ctx.Err() != nil {
				batch[i].Err = context.Cause(ctx)
			} else {
				batch[i].Err = whole(t.fd, write, batch[i].Buf, batch[i].Offset)
			}
			done(i)
		}
	}
	var wg sync.WaitGroup
	for range min(t.depth, len(batch)) - 1 {
		wg.Go(work)
	}
	work()
	wg.Wait()
}

// whole reads or writes all of b.
func whole(fd int, write bool, b []byte, off int64) error {
	for len(b) > 0 {
		var n int
		var err error
		if write {
			n, err = unix.Pwrite(fd, b, off)
		} else {
			n, err = unix.Pread(fd, b, off)
		}
		switch {
		case errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN):
			continue
		case err != nil:
			return err
		case n == 0:
			return io.ErrUnexpectedEOF
		}
		b, off = b[n:], off+int64(n)
	}
	return nil
}
