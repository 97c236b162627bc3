package transport

import (
	"fmt"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/csrc/copyshim"
)

// Part is a piece of one Copy, for copiers that spread a copy over threads or lanes. Whoever makes it sets CRC32C and Err.
type Part struct {
	Copy     *Copy
	Dst, Src Cursor // where it begins
	Length   uint64
	CRC32C   uint32
	Err      error
}

// Cut checks every copy of a batch and cuts those that are good into parts of at most size bytes. The outcome of a bad one is set: ErrRange. Parts of
// a copy follow each other; a copy of no bytes has one. dst and src bound the segments; their memory is not looked at.
func Cut(batch []Copy, dst, src kvferry.Region, size uint64) (parts []Part, total uint64) {
	parts = make([]Part, 0, len(batch))
	for i := range batch {
		c := &batch[i]
		length, err := check(c, dst, src)
		c.CRC32C, c.Err = 0, err
		if err != nil {
			continue
		}
		total += length
		p := Part{Copy: c}
		for ; length > size; length -= size {
			p.Length = size
			parts = append(parts, p)
			p.Dst.Skip(c.Dst, size)
			p.Src.Skip(c.Src, size)
		}
		p.Length = length
		parts = append(parts, p)
	}
	return parts, total
}

// Join puts the parts' outcomes and checksums together in their copies. It returns an error of a part if there is one.
func Join(parts []Part) (err error) {
	for i := range parts {
		p := &parts[i]
		switch {
		case p.Err != nil:
			p.Copy.Err, err = p.Err, p.Err
		case i > 0 && parts[i-1].Copy == p.Copy:
			p.Copy.CRC32C = copyshim.Combine(p.Copy.CRC32C, p.CRC32C, p.Length)
		default:
			p.Copy.CRC32C = p.CRC32C
		}
	}
	return err
}

func check(c *Copy, dst, src kvferry.Region) (length uint64, err error) {
	to, err := sum(dst, c.Dst)
	if err != nil {
		return 0, fmt.Errorf("dst: %w", err)
	}
	from, err := sum(src, c.Src)
	if err != nil {
		return 0, fmt.Errorf("src: %w", err)
	}
	if to != from {
		return 0, fmt.Errorf("%d bytes to %d: %w", from, to, ErrRange)
	}
	return to, nil
}

func sum(r kvferry.Region, segments []kvferry.Segment) (uint64, error) {
	var n uint64
	for _, s := range segments {
		if s.Region != r.ID || s.Offset > r.Bytes || s.Length > r.Bytes-s.Offset {
			return 0, fmt.Errorf("%d+%d: %w", s.Offset, s.Length, ErrRange)
		}
		n += s.Length
		if n < s.Length {
			return 0, fmt.Errorf("sum of lengths: %w", ErrRange)
		}
	}
	return n, nil
}

// Cursor is a place in a list of segments.
type Cursor struct {
	Index  int
	Offset uint64 // in the segment
}

// Left is how far the segment goes on from here. Empty segments are passed over; there must be another byte.
func (c *Cursor) Left(list []kvferry.Segment) uint64 {
	for c.Offset == list[c.Index].Length {
		c.Index, c.Offset = c.Index+1, 0
	}
	return list[c.Index].Length - c.Offset
}

// Skip goes n bytes on, which must be there.
func (c *Cursor) Skip(list []kvferry.Segment, n uint64) {
	for n > 0 {
		step := min(n, c.Left(list))
		c.Offset += step
		n -= step
	}
}
