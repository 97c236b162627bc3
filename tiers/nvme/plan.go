package nvme

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"
)

// pieceBytes is the longest I/O: longer payloads are several, so that a batch of few keeps the device as busy as one of many.
const pieceBytes = 1 << 20

// plan is a batch cut into I/Os as a Device takes them. What is not aligned, the last part of an odd length mostly, goes by way of memory that is.
type plan struct {
	ios    []IO
	owner  []int32  // the operation that an I/O belongs to
	target [][]byte // where the bytes of an I/O in borrowed memory belong; nil where it goes straight
	ops    []planned
}

type planned struct {
	first, end int32 // its I/Os
	left       atomic.Int32
}

func newPlan(ops int) *plan { return &plan{ops: make([]planned, ops)} }

// add plans operation op: b from or to the offset. The slot is long enough for the last I/O to be whole.
func (p *plan) add(op int, offset uint64, b []byte, write bool) {
	p.ops[op].first = int32(len(p.ios))
	straight := len(b) &^ (Align - 1)
	if uintptr(unsafe.Pointer(unsafe.SliceData(b)))%Align != 0 {
		straight = 0
	}
	for at := 0; at < len(b); {
		n, io := 0, IO{Offset: int64(offset) + int64(at)}
		if at < straight {
			n = min(straight-at, pieceBytes)
			io.Buf = b[at : at+n : at+n]
			p.target = append(p.target, nil)
		} else {
			n = min(len(b)-at, pieceBytes)
			io.Buf = alignedBuffer((n + Align - 1) &^ (Align - 1))
			part := b[at : at+n : at+n]
			if write {
				copy(io.Buf, part)
			}
			p.target = append(p.target, part)
		}
		p.ios, p.owner = append(p.ios, io), append(p.owner, int32(op))
		at += n
	}
	o := &p.ops[op]
	o.end = int32(len(p.ios))
	o.left.Store(o.end - o.first)
}

// ended counts an I/O, and answers its operation, and whether that has ended with it.
func (p *plan) ended(io int, write bool) (op int, all bool) {
	if t := p.target[io]; t != nil && !write && p.ios[io].Err == nil {
		copy(t, p.ios[io].Buf)
	}
	op = int(p.owner[io])
	return op, p.ops[op].left.Add(-1) == 0
}

// err is the first error of an operation that has ended.
func (p *plan) err(op int) error {
	for i := p.ops[op].first; i < p.ops[op].end; i++ {
		if p.ios[i].Err != nil {
			return p.ios[i].Err
		}
	}
	return nil
}

// alignedBuffer is memory that the device can reach past the page cache. Go does not move what is on its heap.
func alignedBuffer(n int) []byte {
	b := make([]byte, n+Align)
	skip := -int(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) & (Align - 1)
	return b[skip : skip+n : skip+n]
}

// deviceError is what an operation answers for what a device has: the end of ctx as it is, all else as ErrDevice.
func deviceError(ctx context.Context, what string, slab, slot int, err error) error {
	if ctx.Err() != nil && errors.Is(err, context.Cause(ctx)) {
		return err
	}
	return fmt.Errorf("%w: %s slab %d, slot %d: %w", ErrDevice, what, slab, slot, err)
}
