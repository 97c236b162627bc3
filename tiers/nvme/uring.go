package nvme

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"unsafe"

	"github.com/kvferry/kvferry/csrc/uringshim"
)

// uring is the engine on io_uring. Each batch has a ring for its time; rings are made when they are first needed, and at most batchesMax of them.
type uring struct {
	fd      int
	depth   int
	memory  *Memory               // that rings take over when it is registered; may be nil
	refused atomic.Pointer[error] // why the ring that tried last could not
	ready   chan *lane
	unmade  chan struct{} // a token for each that may still be made
}

// lane is a ring and what goes with it.
type lane struct {
	ring       *uringshim.Ring
	registered bool // has taken memory over
	ops        []uringshim.Op
	ended      []uringshim.End // and not told yet
}

// newUring makes the first ring and reads with it: that it may be made does not say that it may be used.
func newUring(data *os.File, cfg Config) (*uring, error) {
	u := &uring{fd: int(data.Fd()), depth: cfg.Depth, memory: cfg.Memory, ready: make(chan *lane, batchesMax), unmade: make(chan struct{}, batchesMax)}
	ring, err := uringshim.New(u.depth, u.fd)
	if err != nil {
		return nil, err
	}
	u.ready <- newLane(ring)
	probe := []IO{{Buf: alignedBuffer(Align)}}
	u.run(context.Background(), false, probe, func(int) {})
	if err := probe[0].Err; err != nil {
		u.close()
		return nil, fmt.Errorf("io_uring_enter: %w", err)
	}
	for range batchesMax - 1 {
		u.unmade <- struct{}{}
	}
	if u.memory != nil {
		u.memory.start()
	}
	return u, nil
}

// describe tells how rings reach the memory: those that begin a batch from now on.
func (u *uring) describe(info *Info) {
	info.Engine = EngineUring
	if u.memory == nil {
		return
	}
	err := u.memory.Err()
	if p := u.refused.Load(); err == nil && p != nil {
		err = *p
	}
	if info.Registered = err == nil; !info.Registered {
		info.Why = fmt.Sprintf("without registered memory: %v", err)
	}
}

// register has a ring of which nothing is under way take the registered memory over, as soon as that is there: 0.25 µs a piece of it.
func (u *uring) register(l *lane) {
	if l.registered || u.memory == nil || !u.memory.ready.Load() {
		return
	}
	if err := u.memory.lend(l.ring); err != nil {
		u.refused.Store(&err) // it goes on without, and tries again with its next batch
		return
	}
	l.registered = true
	u.refused.Store(nil)
}

func (u *uring) close() {
	for len(u.ready) > 0 {
		(<-u.ready).ring.Close()
	}
}

func newLane(ring *uringshim.Ring) *lane {
	return &lane{ring: ring, ops: make([]uringshim.Op, 0, ring.Depth())}
}

// take waits for a ring.
func (u *uring) take(ctx context.Context) (*lane, error) {
	select {
	case l := <-u.ready: // rather than making one
		return l, nil
	default:
	}
	select {
	case l := <-u.ready:
		return l, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-u.unmade:
	}
	ring, err := uringshim.New(u.depth, u.fd)
	if err != nil {
		u.unmade <- struct{}{}
		return nil, err
	}
	return newLane(ring), nil
}

func (u *uring) give(l *lane) {
	if l.ring.Broken() {
		l.ring.Close()
		u.unmade <- struct{}{}
		return
	}
	u.ready <- l
}

func (u *uring) run(ctx context.Context, write bool, batch []IO, done func(i int)) {
	l, err := u.take(ctx)
	if err != nil {
		for i := range batch {
			batch[i].Err = err
			done(i)
		}
		return
	}
	defer u.give(l)
	u.register(l)
	next, flying := 0, 0
	l.ended = l.ended[:0]
	for next < len(batch) || flying > 0 || len(l.ended) > 0 {
		l.ops = l.ops[:0]
		for ; ctx.Err() != nil && next < len(batch); next++ {
			batch[next].Err = context.Cause(ctx)
			done(next)
		}
		for ; next < len(batch) && flying+len(l.ops) < u.depth; next++ {
			io := &batch[next]
			l.ops = append(l.ops, uringshim.Op{Offset: uint64(io.Offset), Address: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(io.Buf)))),
				Length: uint32(len(io.Buf)), Tag: uint32(next)})
		}
		flying += len(l.ops)
		wait := 1
		if len(l.ended) > 0 {
			wait = 0 // others take the places of those that have ended, before done looks at what came: that takes time
		}
		var ends []uringshim.End
		if flying > 0 && (wait > 0 || len(l.ops) > 0) {
			ends = l.ring.Step(write, l.ops, wait)
		}
		flying -= len(ends)
		tell(batch, l.ended, done)
		l.ended = append(l.ended[:0], ends...)
		if write { // there is nothing to be looked at
			tell(batch, l.ended, done)
			l.ended = l.ended[:0]
		}
	}
	runtime.KeepAlive(batch)
}

func tell(batch []IO, ended []uringshim.End, done func(i int)) {
	for _, e := range ended {
		batch[e.Tag].Err = e.Err()
		done(int(e.Tag))
	}
}
