// Package uringshim reads and writes one file through io_uring, in batches: one call begins operations and collects what has ended.
//
// It deals in addresses: the memory must not move and stay so until the operation has ended. A Ring has one user at a time.
package uringshim

/*
#cgo CFLAGS: -O2 -std=gnu11 -Wall -Wextra
#cgo LDFLAGS: -l:liburing.a
#include "ring.h"
*/
import "C"

import (
	"fmt"
	"io"
	"syscall"
	"unsafe"
)

// Op is one read or write. Tag comes back with its end.
type Op struct {
	Offset, Address uint64
	Length, Tag     uint32
}

// End is how an operation ended.
type End struct {
	Tag    uint32
	result int32
}

// The layouts are those of uringshim_op and uringshim_end.
var (
	_ = [1]struct{}{}[unsafe.Sizeof(Op{})-unsafe.Sizeof(C.uringshim_op{})]
	_ = [1]struct{}{}[unsafe.Sizeof(End{})-unsafe.Sizeof(C.uringshim_end{})]
)

// Err is nil when all was moved, io.ErrUnexpectedEOF when the file ended before, or an errno.
func (e End) Err() error {
	switch {
	case e.result == 0:
		return nil
	case e.result > 0:
		return io.ErrUnexpectedEOF
	}
	return syscall.Errno(-e.result)
}

// Ring is one io_uring on one file.
type Ring struct {
	ring  *C.uringshim_ring
	depth int
	ends  []End
}

// New makes a ring for depth operations at a time on fd, which stays the caller's. The error is an errno: ENOSYS or EPERM where io_uring is not to be had.
func New(depth, fd int) (*Ring, error) {
	r := &Ring{depth: depth, ends: make([]End, depth)}
	if err := C.uringshim_new(C.uint(depth), C.int(fd), &r.ring); err < 0 {
		return nil, fmt.Errorf("io_uring_setup: %w", syscall.Errno(-err))
	}
	return r, nil
}

// Register has the kernel keep the pages of memory at hand. Operations on other memory work as before, and all do when it fails.
func (r *Ring) Register(memory []byte) error {
	p := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(memory))))
	if err := C.uringshim_register(r.ring, C.uint64_t(p), C.uint64_t(len(memory))); err < 0 {
		return fmt.Errorf("register %d bytes: %w", len(memory), syscall.Errno(-err))
	}
	return nil
}

// Depth is how many operations may be under way.
func (r *Ring) Depth() int { return r.depth }

// Step begins operations, no more than depth under way at a time, waits until at least wait of those under way have ended, and answers those that have.
// The answer is valid until the next call.
func (r *Ring) Step(write bool, ops []Op, wait int) []End {
	var w C.int
	if write {
		w = 1
	}
	n := C.uringshim_step(r.ring, w, (*C.uringshim_op)(unsafe.Pointer(unsafe.SliceData(ops))), C.uint(len(ops)), C.uint(wait),
		(*C.uringshim_end)(unsafe.Pointer(unsafe.SliceData(r.ends))))
	return r.ends[:n]
}

// Broken tells that the kernel takes nothing from this ring any more: it is to be closed, when it is quiet.
func (r *Ring) Broken() bool { return C.uringshim_broken(r.ring) != 0 }

// Close gives the ring back. Nothing is under way.
func (r *Ring) Close() {
	C.uringshim_free(r.ring)
	r.ring = nil
}
