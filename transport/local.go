package transport

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/kvferry/kvferry/csrc/copyshim"
)

const (
	localPart  = 1 << 20 // copies are cut to parts of this size, which any thread may make
	localCross = 2 << 20 // that one crossing into C copies at most, between two looks at the context: some 200 µs
	localShare = 1 << 20 // bytes that make one more thread worth while
)

// local copies between two mappings of this machine's memory.
type local struct {
	dst, src Memory
	threads  int
	closed   atomic.Bool
}

// NewLocal copies from src to dst on this machine, on up to so many threads where the batch is large. The memory must be mapped, not of Go's heap.
func NewLocal(dst, src Memory, threads int) Copier {
	return &local{dst: dst, src: src, threads: max(1, threads)}
}

// Copy is Copier.Copy. It looks at ctx between crossings.
func (l *local) Copy(ctx context.Context, batch []Copy) error {
	err := context.Cause(ctx)
	if l.closed.Load() {
		err = fmt.Errorf("local copy: %w: closed", ErrLink)
	}
	if err != nil {
		for i := range batch {
			batch[i].Err = err
		}
		return err
	}
	parts, total := Cut(batch, l.dst.Region(), l.src.Region(), localPart)
	var next atomic.Int64
	work := func() {
		w := workers.Get().(*worker)
		defer workers.Put(w)
		for {
			// Neighbours are taken together, so that one crossing carries many small copies.
			run := localCross * uint64(len(parts)) / (total + 1)
			end := int(next.Add(int64(max(1, run))))
			first := end - int(max(1, run))
			if first >= len(parts) {
				return
			}
			w.copy(ctx, l, parts[first:min(end, len(parts))])
		}
	}
	var wg sync.WaitGroup
	for range min(l.threads, int(total/localShare), len(parts)) - 1 {
		wg.Go(work)
	}
	work()
	wg.Wait()
	return Join(parts)
}

// Close refuses further copies. Those that run are ended by their context.
func (l *local) Close() error {
	l.closed.Store(true)
	return nil
}

// worker is one thread's scratch: the descriptors of one crossing.
type worker struct {
	segments []copyshim.Segment
	units    []copyshim.Unit
}

var workers = sync.Pool{New: func() any { return new(worker) }}

// copy makes parts, in as few crossings as localCross allows.
func (w *worker) copy(ctx context.Context, l *local, parts []Part) {
	for len(parts) > 0 {
		n, bytes := 0, uint64(0)
		for n < len(parts) && (n == 0 || bytes+parts[n].Length <= localCross) {
			bytes += parts[n].Length
			n++
		}
		w.cross(ctx, l, parts[:n])
		parts = parts[n:]
	}
}

func (w *worker) cross(ctx context.Context, l *local, parts []Part) {
	if ctx.Err() != nil {
		for i := range parts {
			parts[i].Err = context.Cause(ctx)
		}
		return
	}
	w.segments, w.units = w.segments[:0], w.units[:0]
	to, from := copyshim.Address(l.dst.Bytes), copyshim.Address(l.src.Bytes)
	for i := range parts {
		p := &parts[i]
		c, before := p.Copy, len(w.segments)
		d, s := p.Dst, p.Src
		for left := p.Length; left > 0; {
			n := min(left, d.Left(c.Dst), s.Left(c.Src))
			w.segments = append(w.segments, copyshim.Segment{
				Dst:    to + uintptr(c.Dst[d.Index].Offset+d.Offset),
				Src:    from + uintptr(c.Src[s.Index].Offset+s.Offset),
				Length: uintptr(n),
			})
			d.Skip(c.Dst, n)
			s.Skip(c.Src, n)
			left -= n
		}
		w.units = append(w.units, copyshim.Unit{Segments: uint32(len(w.segments) - before)})
	}
	copyshim.Copy(w.segments, w.units, copyshim.NonTemporal)
	for i := range parts {
		parts[i].CRC32C = w.units[i].CRC32C
	}
}
