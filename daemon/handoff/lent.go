package handoff

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/csrc/copyshim"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/transport"
)

// Lent is memory that a worker of this node lends for reading, with the block generation table of its engine. It stays mapped until Release.
type Lent struct {
	Handle     uint64 // names this memory and this table, in this epoch
	Memory     transport.Memory
	Planes     []kvferry.Plane
	Blocks     uint32
	Table      []byte // uint64 a block, written by the engine's scheduler
	ShardBytes uint64
	Release    func()
}

// Lend takes hold of what a rank of an instance lends, with the table of the scheduler session that offers. It fails where either is not there, and where the worker has come after the blocks were
// offered, or in the place of another one in this scheduler's time: then its memory is another.
type Lend func(scheduler tiers.Owner, instance string, rank, region uint32, offered time.Time) (*Lent, error)

// holds tells whether a block still is what it was when the offer was made. Called after a read, it tells that of all of the read.
func (l *Lent) holds(block uint32, generation uint64) bool {
	if block >= l.Blocks || 8*(uint64(block)+1) > uint64(len(l.Table)) {
		return false
	}
	atomic.AddUint32(new(uint32), 1) // a full fence: what was read before stays before
	return atomic.LoadUint64((*uint64)(unsafe.Pointer(&l.Table[8*uint64(block)]))) == generation
}

// lentBase is where lent blocks begin in the data protocol: block b of a claim lies at lentBase + b*ShardBytes, its planes in order.
const lentBase = 1 << 63

func (l *Lent) offset(block uint32) uint64 { return lentBase + uint64(block)*l.ShardBytes }

// block is the one that an offset of the data protocol lies in, and how far.
func (l *Lent) block(off uint64) (block uint32, in uint64) {
	off -= lentBase
	return uint32(min(off/l.ShardBytes, uint64(l.Blocks))), off % l.ShardBytes
}

// append adds the memory of a range of a block.
func (l *Lent) append(parts [][]byte, block uint32, in, length uint64) ([][]byte, error) {
	if length > l.ShardBytes-in {
		return nil, fmt.Errorf("read %d bytes of a lent block at %d: %w", length, in, transport.ErrRange)
	}
	for _, p := range l.Planes {
		if in >= p.Bytes {
			in -= p.Bytes
			continue
		}
		n := min(p.Bytes-in, length)
		at := p.Base + uint64(block)*p.Stride + in
		parts = append(parts, l.Memory.Bytes[at:at+n:at+n])
		if length -= n; length == 0 {
			break
		}
		in = 0
	}
	return parts, nil
}

// checksum is that of a block as it is now.
func (l *Lent) checksum(block uint32) (crc uint32) {
	for _, p := range l.Planes {
		at := p.Base + uint64(block)*p.Stride
		crc = copyshim.Checksum(crc, l.Memory.Bytes[at:at+p.Bytes])
	}
	return crc
}

// samePlanes tells whether a worker can copy from lent memory plane by plane.
func samePlanes(a, b []kvferry.Plane) bool {
	return slices.EqualFunc(a, b, func(x, y kvferry.Plane) bool { return x.Bytes == y.Bytes })
}

// confirmBytesMax bounds what one Confirm reads, beside one block.
const confirmBytesMax = 64 << 20

// Confirm tells, of lent blocks of a claim that were read, whether their generations held all the time, and the checksum of what they hold.
func (r *Registry) Confirm(ctx context.Context, key [16]byte, offsets []uint64) (held []bool, crcs []uint32, err error) {
	g, err := r.acquire(key)
	if err != nil {
		return nil, nil, err
	}
	defer g.Release()
	held, crcs = make([]bool, len(offsets)), make([]uint32, len(offsets))
	var total uint64
	for i, off := range offsets {
		if ctx.Err() != nil {
			return nil, nil, context.Cause(ctx)
		}
		block, generation, ok := g.lent(off)
		if !ok {
			return nil, nil, fmt.Errorf("%w: confirm.offsets: %d is not lent to this claim", ErrMismatch, off)
		}
		if total += g.c.lent.ShardBytes; i > 0 && total > confirmBytesMax+g.c.lent.ShardBytes {
			return nil, nil, fmt.Errorf("%w: confirm.offsets: %d blocks are more than 64 MiB", ErrMismatch, len(offsets))
		}
		crcs[i] = g.c.lent.checksum(block)
		held[i] = g.c.lent.holds(block, generation) // after the checksum, which is of one moment for both
	}
	return held, crcs, nil
}
