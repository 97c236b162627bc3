package pool

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// touchBytes is what is mapped in one call: while it lasts, whoever wants to change the process's address space (the Go heap when it grows) waits, so it is to be well below a millisecond.
const touchBytes = 2 << 20

// populate maps the pages of a part of the pool, so that no copy pays for it. They are allocated already.
func populate(part []byte) error {
	err := unix.Madvise(part, unix.MADV_POPULATE_WRITE)
	if err != nil && !errors.Is(err, unix.EINVAL) { // kernels before 5.14 do not know it
		return fmt.Errorf("touch pages: %w", err)
	}
	return nil
}

// touchAll maps all pages now, on all cores: a new pool has nothing to offer meanwhile, and making its pages has taken longer.
func touchAll(mem []byte) error {
	n := runtime.GOMAXPROCS(0)
	part := (len(mem)/n + touchBytes) &^ (touchBytes - 1)
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		lo, hi := min(i*part, len(mem)), min((i+1)*part, len(mem))
		if lo < hi {
			wg.Go(func() { errs[i] = populate(mem[lo:hi]) })
		}
	}
	wg.Wait()
	return errors.Join(errs...)
}

// touching maps the pages of an adopted pool part by part, while it is in use already: who comes before takes the page faults. One goroutine, that waits for nobody and holds nothing.
type touching struct {
	stop atomic.Bool
	done chan struct{}
	err  error // valid once done is closed
}

func startTouching(mem []byte, populate func([]byte) error) *touching {
	t := &touching{done: make(chan struct{})}
	go func() {
		defer close(t.done)
		for at := 0; at < len(mem) && t.err == nil && !t.stop.Load(); at += touchBytes {
			t.err = populate(mem[at:min(at+touchBytes, len(mem))])
		}
	}()
	return t
}

// end stops it after the part that it is at, and returns when it touches nothing any more.
func (t *touching) end() {
	t.stop.Store(true)
	<-t.done
}

// Mapped is closed when all pages are mapped, or mapping them has been given up: then MapError tells why. Until then first accesses to a page are slower, and nothing else.
func (p *Pool) Mapped() <-chan struct{} {
	if p.touching != nil {
		return p.touching.done
	}
	done := make(chan struct{})
	close(done)
	return done
}

// MapError is why not all pages were mapped beforehand, once Mapped is closed; nil where they are, and after Close.
func (p *Pool) MapError() error {
	if p.touching == nil {
		return nil
	}
	<-p.touching.done
	return p.touching.err
}
