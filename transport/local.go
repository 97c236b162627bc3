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

// part is a piece of one copy.
type part struct {
	copy   int // in the batch
	dst    cursor
	src    cursor
	length uint64
	crc    uint32
	err    error
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
	parts, total := l.plan(batch)
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
			w.copy(ctx, l, batch, parts[first:min(end, len(parts))])
		}
	}
	var wg sync.WaitGroup
	for range min(l.threads, int(total/localShare), len(parts)) - 1 {
		wg.Go(work)
	}
	work()
	wg.Wait()
	return conclude(batch, parts)
}

// Close refuses further copies. Those that run are ended by their context.
func (l *local) Close() error {
	l.closed.Store(true)
	return nil
}

// plan checks the batch and cuts what is good to parts.
func (l *local) plan(batch []Copy) (parts []part, total uint64) {
	parts = make([]part, 0, len(batch))
	for i := range batch {
		c := &batch[i]
		length, err := l.check(c)
		c.CRC32C, c.Err = 0, err
		if err != nil {
			continue
		}
		total += length
		p := part{copy: i}
		for ; length > localPart; length -= localPart {
			p.length = localPart
			parts = append(parts, p)
			p.dst.skip(c.Dst, localPart)
			p.src.skip(c.Src, localPart)
		}
		p.length = length
		parts = append(parts, p)
	}
	return parts, total
}

func (l *local) check(c *Copy) (length uint64, err error) {
	to, err := sum(l.dst, c.Dst)
	if err != nil {
		return 0, fmt.Errorf("dst: %w", err)
	}
	from, err := sum(l.src, c.Src)
	if err != nil {
		return 0, fmt.Errorf("src: %w", err)
	}
	if to != from {
		return 0, fmt.Errorf("%d bytes to %d: %w", from, to, ErrRange)
	}
	return to, nil
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

// conclude puts the parts' outcomes and checksums together. The parts of a copy follow each other.
func conclude(batch []Copy, parts []part) (err error) {
	for i := range parts {
		p := &parts[i]
		c := &batch[p.copy]
		switch {
		case p.err != nil:
			c.Err, err = p.err, p.err
		case i > 0 && parts[i-1].copy == p.copy:
			c.CRC32C = copyshim.Combine(c.CRC32C, p.crc, p.length)
		default:
			c.CRC32C = p.crc
		}
	}
	return err
}

// worker is one thread's scratch: the descriptors of one crossing.
type worker struct {
	segments []copyshim.Segment
	units    []copyshim.Unit
}

var workers = sync.Pool{New: func() any { return new(worker) }}

// copy makes parts, in as few crossings as localCross allows.
func (w *worker) copy(ctx context.Context, l *local, batch []Copy, parts []part) {
	for len(parts) > 0 {
		n, bytes := 0, uint64(0)
		for n < len(parts) && (n == 0 || bytes+parts[n].length <= localCross) {
			bytes += parts[n].length
			n++
		}
		w.cross(ctx, l, batch, parts[:n])
		parts = parts[n:]
	}
}

func (w *worker) cross(ctx context.Context, l *local, batch []Copy, parts []part) {
	if ctx.Err() != nil {
		for i := range parts {
			parts[i].err = context.Cause(ctx)
		}
		return
	}
	w.segments, w.units = w.segments[:0], w.units[:0]
	to, from := copyshim.Address(l.dst.Bytes), copyshim.Address(l.src.Bytes)
	for i := range parts {
		p := &parts[i]
		c, before := &batch[p.copy], len(w.segments)
		d, s := p.dst, p.src
		for left := p.length; left > 0; {
			n := min(left, d.left(c.Dst), s.left(c.Src))
			w.segments = append(w.segments, copyshim.Segment{
				Dst:    to + uintptr(c.Dst[d.index].Offset+d.offset),
				Src:    from + uintptr(c.Src[s.index].Offset+s.offset),
				Length: uintptr(n),
			})
			d.skip(c.Dst, n)
			s.skip(c.Src, n)
			left -= n
		}
		w.units = append(w.units, copyshim.Unit{Segments: uint32(len(w.segments) - before)})
	}
	copyshim.Copy(w.segments, w.units, copyshim.NonTemporal)
	for i := range parts {
		parts[i].crc = w.units[i].CRC32C
	}
}

// cursor is a place in a list of segments.
type cursor struct {
	index  int
	offset uint64
}

// left is how far the segment goes on from here. Empty segments are passed over.
func (c *cursor) left(list []kvferry.Segment) uint64 {
	for c.offset == list[c.index].Length {
		c.index, c.offset = c.index+1, 0
	}
	return list[c.index].Length - c.offset
}

// skip goes n bytes on, which must be there.
func (c *cursor) skip(list []kvferry.Segment, n uint64) {
	for n > 0 {
		step := min(n, c.left(list))
		c.offset += step
		n -= step
	}
}
