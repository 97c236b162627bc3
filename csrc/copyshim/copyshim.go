// Package copyshim copies lists of segments of mapped memory in C, with a CRC32C made on the way and, for large ones, stores that bypass the cache.
//
// It deals in addresses: the memory must be mapped outside of Go's heap (as every region is) and stay so until a call returns. It checks no bounds.
// Its functions may be called by any number of goroutines.
package copyshim

/*
#cgo CFLAGS: -O3 -std=gnu11 -Wall -Wextra
#include "kvcopy.h"
#include "shim.h"
*/
import "C"

import (
	"runtime"
	"unsafe"
)

// Segment is one range to be copied. Source and destination must not overlap.
type Segment struct{ Dst, Src, Length uintptr }

// Unit is a number of segments that share one CRC32C. The CRC is continued from its value before the call: 0 begins a new one.
type Unit struct {
	Segments uint32
	CRC32C   uint32
}

// The layouts are those of kvcopy_seg and copyshim_unit.
var (
	_ = [1]struct{}{}[unsafe.Sizeof(Unit{})-unsafe.Sizeof(C.copyshim_unit{})]
	_ = [1]struct{}{}[unsafe.Sizeof(Segment{})-unsafe.Sizeof(C.kvcopy_seg{})]
)

// Flags change how a copy is made.
type Flags uint32

// NonTemporal lets stores bypass the cache: for destinations that nobody reads soon.
const NonTemporal Flags = C.KVCOPY_NT

// Address is where b lies.
func Address(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// Copy copies all units, whose segments follow each other in segments, in one crossing, and fences: what is read or written after it is so in every
// other thread's eyes too. It panics where there are fewer segments than the units say.
func Copy(segments []Segment, units []Unit, flags Flags) {
	var n int
	for _, u := range units {
		n += int(u.Segments)
	}
	_ = segments[:n]
	if n == 0 {
		return
	}
	C.copyshim_copy((*C.uintptr_t)(unsafe.Pointer(unsafe.SliceData(segments))), (*C.copyshim_unit)(unsafe.Pointer(unsafe.SliceData(units))),
		C.size_t(len(units)), C.uint(flags))
	runtime.KeepAlive(segments)
}

// Plain copies segments without a checksum.
func Plain(segments []Segment, flags Flags) {
	if len(segments) == 0 {
		return
	}
	C.copyshim_plain((*C.uintptr_t)(unsafe.Pointer(unsafe.SliceData(segments))), C.size_t(len(segments)), C.uint(flags))
	runtime.KeepAlive(segments)
}

// Checksum continues crc over b.
func Checksum(crc uint32, b []byte) uint32 {
	return uint32(C.kvcopy_crc32c(C.uint32_t(crc), unsafe.Pointer(unsafe.SliceData(b)), C.size_t(len(b))))
}

// ISA names the instructions in use: "avx512-vpclmul", "sse-pclmul" or "portable".
func ISA() string { return C.GoString(C.kvcopy_isa()) }
