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

// Take has the ring use what a holder has registered. Nothing is under way. Operations on other memory, and those that cross a border of pieces, work as before, and all do when it fails.
func (r *Ring) Take(h *Holder) error {
	if err := C.uringshim_take(r.ring, h.holder); err < 0 {
		return fmt.Errorf("take over registered memory: %w", syscall.Errno(-err))
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

// Holder keeps memory registered, for any number of rings to take over: so its pages are pinned once. It has one user at a time; the memory is there until Pin has returned for the last time.
type Holder struct{ holder *C.uringshim_holder }

// Hold makes a holder of which nothing is registered yet, once it is certain that rings could take it over: the error is an errno, EINVAL before Linux 6.12.
func Hold(memory []byte) (*Holder, error) {
	h := &Holder{}
	p := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(memory))))
	if err := C.uringshim_hold(C.uint64_t(p), C.uint64_t(len(memory)), &h.holder); err < 0 {
		return nil, fmt.Errorf("register memory: %w", syscall.Errno(-err))
	}
	r, err := New(1, -1)
	if err == nil {
		err = r.Take(h)
		r.Close()
	}
	if err != nil {
		h.Close()
		return nil, err
	}
	return h, nil
}

// Pin registers the next piece, which maps what of it is not mapped, and tells whether there are more.
func (h *Holder) Pin() (more bool, err error) {
	n := C.uringshim_pin(h.holder)
	if n < 0 {
		return false, fmt.Errorf("register memory: %w", syscall.Errno(-n))
	}
	return n == 1, nil
}

// Close gives the holder back. What rings have taken over they keep until they are closed.
func (h *Holder) Close() {
	C.uringshim_let_go(h.holder)
	h.holder = nil
}
