// Package transport copies lists of segments to lists of segments.
//
// A Copier is made once for a pair of regions, when a process attaches or a peer is first met, and from then on it only copies.
// The package owns no memory: whoever made the copier keeps both regions mapped, and the places in them pinned, until Copy has returned.
// It knows nothing of blocks, leases or slots; the data that it moves is checked by the caller with the CRC32C that it computes on the way.
//
// The copy between two mappings of this machine's memory is in local.go; links between nodes are in packages of their own.
package transport

import (
	"context"
	"errors"

	"github.com/kvferry/kvferry"
)

// Errors that a Copier reports, always wrapped with what was tried.
var (
	// ErrNotSupported is returned when this pair of regions can never be served by this transport. A retry is useless.
	ErrNotSupported = errors.New("transport: not supported")
	// ErrRange is returned when a segment lies outside of its region, or the two lists differ in length. Nothing was copied.
	ErrRange = errors.New("transport: segment out of range")
	// ErrLink is returned when the link failed: a connection was reset, refused or timed out. A retry may succeed.
	ErrLink = errors.New("transport: link failed")
	// ErrRefused is returned when the other side refused: key or range unknown to it. A retry with the same key is useless.
	ErrRefused = errors.New("transport: refused by peer")
)

// Copy is one unit of a batch: bytes that belong together and are checked together, such as a shard.
type Copy struct {
	Dst, Src []kvferry.Segment // the same total length; they may be cut differently
	CRC32C   uint32            // out: of the bytes in order (Castagnoli)
	Err      error             // out: nil when all bytes are in place
}

// Length is the number of bytes that c moves.
func (c *Copy) Length() uint64 {
	var n uint64
	for _, s := range c.Dst {
		n += s.Length
	}
	return n
}

// Copier copies from one region to another. It is safe for concurrent use.
//
// Copy returns when the batch is quiet: nothing will write into any Dst after it. The outcome of each copy is in its Err; the returned error is not nil when
// the batch as a whole could not be tried or was cut short, and then every copy that did not succeed has an Err.
// When ctx ends, Copy stops as soon as it can and still returns quiet.
type Copier interface {
	Copy(ctx context.Context, batch []Copy) error
	Close() error
}

// Memory is a mapped region.
type Memory struct {
	ID    kvferry.RegionID
	Bytes []byte
}

// Slice is the memory under s, or ErrRange.
func (m Memory) Slice(s kvferry.Segment) ([]byte, error) {
	if s.Region != m.ID || s.Offset > uint64(len(m.Bytes)) || s.Length > uint64(len(m.Bytes))-s.Offset {
		return nil, ErrRange
	}
	return m.Bytes[s.Offset : s.Offset+s.Length : s.Offset+s.Length], nil
}

// Region is m without its bytes.
func (m Memory) Region() kvferry.Region { return kvferry.Region{ID: m.ID, Bytes: uint64(len(m.Bytes))} }
