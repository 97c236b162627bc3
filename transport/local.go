package transport

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/csrc/copyshim"
)

const (
	localPiece = 2 << 20 // that is copied between two looks at the context: about half a millisecond
	localShare = 4 << 20 // bytes that make a second thread worth while
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

// Copy is Copier.Copy. It looks at ctx between pieces.
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
	var total uint64
	for i := range batch {
		batch[i].CRC32C, batch[i].Err = 0, l.check(&batch[i])
		if batch[i].Err == nil {
			total += batch[i].Length()
		}
	}
	if len(batch) == 0 {
		return nil
	}
	// A thread takes runs of neighbours, so that one crossing carries many small copies.
	run := max(1, min(int64(len(batch)), localPiece*int64(len(batch))/int64(total+1)))
	var next atomic.Int64
	var cut atomic.Bool
	work := func() {
		w := workers.Get().(*worker)
		defer workers.Put(w)
		for {
			end := next.Add(run)
			first := end - run
			if first >= int64(len(batch)) {
				return
			}
			if !w.copy(ctx, l, batch[first:min(end, int64(len(batch)))]) {
				cut.Store(true)
			}
		}
	}
	var wg sync.WaitGroup
	for range min(l.threads, int(total/localShare), int((int64(len(batch))+run-1)/run)) - 1 {
		wg.Go(work)
	}
	work()
	wg.Wait()
	if cut.Load() {
		return context.Cause(ctx)
	}
	return nil
}

// Close refuses further copies. Those that run are ended by their context.
func (l *local) Close() error {
	l.closed.Store(true)
	return nil
}

func (l *local) check(c *Copy) error {
	to, err := sum(l.dst, c.Dst)
	if err != nil {
		return fmt.Errorf("dst: %w", err)
	}
	from, err := sum(l.src, c.Src)
	if err != nil {
		return fmt.Errorf("src: %w", err)
	}
	if to != from {
		return fmt.Errorf("%d bytes to %d: %w", from, to, ErrRange)
	}
	return nil
}

func sum(m Memory, segments []kvferry.Segment) (uint64, error) {
	var n uint64
	for _, s := range segments {
		if _, err := m.Slice(s); err != nil {
			return 0, fmt.Errorf("%d+%d: %w", s.Offset, s.Length, err)
		}
		n += s.Length
	}
	return n, nil
}

// worker is one thread's scratch: the descriptors of one crossing.
type worker struct {
	segments []copyshim.Segment
	units    []copyshim.Unit
	owners   []*Copy // of units; a copy that was cut by a piece's end is in several crossings, its CRC carried on
	bytes    uint64
}

var workers = sync.Pool{New: func() any { return new(worker) }}

// copy moves the good ones of batch. It answers false when ctx ended first.
func (w *worker) copy(ctx context.Context, l *local, batch []Copy) bool {
	to, from := copyshim.Address(l.dst.Bytes), copyshim.Address(l.src.Bytes)
	for i := range batch {
		c := &batch[i]
		if c.Err != nil {
			continue
		}
		w.begin(c)
		var d, s cursor
		for d.find(c.Dst) && s.find(c.Src) {
			n := min(d.left(c.Dst), s.left(c.Src), localPiece-w.bytes)
			w.add(copyshim.Segment{
				Dst:    to + uintptr(c.Dst[d.index].Offset+d.offset),
				Src:    from + uintptr(c.Src[s.index].Offset+s.offset),
				Length: uintptr(n),
			})
			d.offset += n
			s.offset += n
			if w.bytes == localPiece && !w.flush(ctx) {
				w.drop(context.Cause(ctx), batch[i:])
				return false
			}
			if len(w.owners) == 0 {
				w.begin(c)
			}
		}
	}
	if !w.flush(ctx) {
		w.drop(context.Cause(ctx), nil)
		return false
	}
	w.owners = w.owners[:0]
	return true
}

func (w *worker) begin(c *Copy) {
	w.units = append(w.units, copyshim.Unit{CRC32C: c.CRC32C})
	w.owners = append(w.owners, c)
}

func (w *worker) add(s copyshim.Segment) {
	w.segments = append(w.segments, s)
	w.units[len(w.units)-1].Segments++
	w.bytes += uint64(s.Length)
}

// flush makes the crossing, unless ctx has ended.
func (w *worker) flush(ctx context.Context) bool {
	if ctx.Err() != nil {
		return false
	}
	copyshim.Copy(w.segments, w.units, copyshim.NonTemporal)
	for i, c := range w.owners {
		c.CRC32C = w.units[i].CRC32C
	}
	clear(w.owners)
	w.segments, w.units, w.owners, w.bytes = w.segments[:0], w.units[:0], w.owners[:0], 0
	return true
}

// drop marks what was collected and not copied, and the rest of the run.
func (w *worker) drop(err error, rest []Copy) {
	for _, c := range w.owners {
		c.Err = err
	}
	for i := range rest {
		if rest[i].Err == nil {
			rest[i].Err = err
		}
	}
	clear(w.owners)
	w.segments, w.units, w.owners, w.bytes = w.segments[:0], w.units[:0], w.owners[:0], 0
}

// cursor is a place in a list of segments.
type cursor struct {
	index  int
	offset uint64
}

// find moves on to the next byte there is.
func (c *cursor) find(list []kvferry.Segment) bool {
	for c.index < len(list) && c.offset == list[c.index].Length {
		c.index, c.offset = c.index+1, 0
	}
	return c.index < len(list)
}

func (c *cursor) left(list []kvferry.Segment) uint64 { return list[c.index].Length - c.offset }
