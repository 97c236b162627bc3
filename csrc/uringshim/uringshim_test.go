package uringshim

import (
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

func mapped(t testing.TB, size int) []byte {
	b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(b) })
	return b
}

func ring(t *testing.T, depth int, f *os.File) *Ring {
	r, err := New(depth, int(f.Fd()))
	if errors.Is(err, syscall.ENOSYS) || errors.Is(err, syscall.EPERM) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return r
}

// hold registers memory.
func hold(t *testing.T, memory []byte) *Holder {
	t.Helper()
	h, err := Hold(memory)
	if errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.ENOMEM) {
		t.Skipf("rings cannot share registered memory here (before Linux 6.12, or forbidden): %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	for more := true; more; {
		if more, err = h.Pin(); err != nil {
			t.Fatal(err)
		}
	}
	return h
}

func address(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// all runs operations to their end, as many at a time as there may be.
func all(t *testing.T, r *Ring, write bool, ops []Op) map[uint32]error {
	t.Helper()
	ended, flying := map[uint32]error{}, 0
	for len(ops) > 0 || flying > 0 {
		n := min(len(ops), r.Depth()-flying)
		flying += n
		ends := r.Step(write, ops[:n], 1)
		if len(ends) == 0 {
			t.Fatal("a step that was to wait has not")
		}
		ops = ops[n:]
		for _, e := range ends {
			if _, twice := ended[e.Tag]; twice {
				t.Fatalf("%d has ended twice", e.Tag)
			}
			ended[e.Tag] = e.Err()
			flying--
		}
	}
	return ended
}

func TestRing(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const blocks, size = 100, 4096
	from, to := mapped(t, blocks*size), mapped(t, blocks*size)
	random := rand.NewChaCha8([32]byte{2})
	_, _ = random.Read(from)
	for _, registered := range []bool{false, true} {
		r := ring(t, 7, f)
		if registered {
			if err := r.Take(hold(t, to)); err != nil {
				t.Fatal(err)
			}
		}
		clear(to)
		var writes, reads []Op
		for i := range blocks {
			writes = append(writes, Op{Offset: uint64(i) * size, Address: address(from[i*size:]), Length: size, Tag: uint32(i)})
			reads = append(reads, Op{Offset: uint64(i) * size, Address: address(to[i*size:]), Length: size, Tag: uint32(i)})
		}
		for _, ended := range []map[uint32]error{all(t, r, true, writes), all(t, r, false, reads)} {
			for tag, err := range ended {
				if err != nil {
					t.Errorf("%d: %v", tag, err)
				}
			}
			if len(ended) != blocks {
				t.Errorf("%d have ended", len(ended))
			}
		}
		if string(to) != string(from) {
			t.Error("wrong bytes")
		}
		// In part beyond the end; wholly beyond it; memory that is not there.
		ended := all(t, r, false, []Op{{Offset: (blocks - 1) * size, Address: address(to), Length: 2 * size, Tag: 1},
			{Offset: blocks * size, Address: address(to), Length: size, Tag: 2}, {Offset: 0, Address: 4096, Length: size, Tag: 3}})
		if ended[1] != io.ErrUnexpectedEOF || ended[2] != io.ErrUnexpectedEOF || !errors.Is(ended[3], syscall.EFAULT) {
			t.Errorf("%v", ended)
		}
		if r.Broken() {
			t.Error("broken")
		}
		if n := len(r.Step(false, nil, 1)); n != 0 {
			t.Errorf("%d ends of nothing", n)
		}
	}
	runtime.KeepAlive(f)
}

// TestTake puts other pages at the addresses of registered memory: a ring that has taken it over moves the bytes of the old ones, any other, and what crosses a border of pieces, those that are there now. Nothing else tells
// whether an operation uses it.
func TestTake(t *testing.T) {
	const piece, size, n = 15 << 20, 31 << 20, 4096
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := mapped(t, size)
	fill := func(c byte) {
		for _, at := range []int{0, piece - n, piece, 2*piece - n, 2 * piece, size - n} {
			b[at], b[at+n-1] = c, c
		}
	}
	fill('o')
	h := hold(t, b)
	with, without, late := ring(t, 4, f), ring(t, 4, f), ring(t, 4, f)
	if err := with.Take(h); err != nil {
		t.Fatal(err)
	}
	if err := with.Take(h); err == nil {
		t.Error("taken over twice")
	}
	if _, err := unix.MmapPtr(-1, 0, unsafe.Pointer(unsafe.SliceData(b)), size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		t.Fatal(err)
	}
	fill('n')
	try := func(what string, r *Ring, at, length int, want byte) {
		t.Helper()
		got := make([]byte, length)
		if err := all(t, r, true, []Op{{Address: address(b[at:]), Length: uint32(length)}})[0]; err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if _, err := f.ReadAt(got, 0); err != nil {
			t.Fatal(err)
		}
		if got[0] != want || got[length-1] != want {
			t.Errorf("%s: it was %q", what, got[0])
		}
	}
	try("first piece", with, 0, n, 'o')
	try("end of a piece", with, piece-n, n, 'o')
	try("second piece", with, piece, n, 'o')
	try("last piece", with, size-n, n, 'o')
	try("across a border", with, piece-n, 2*n, 'n')
	try("without", without, piece, n, 'n')
	if err := late.Take(h); err != nil {
		t.Fatal(err)
	}
	try("taken over late", late, piece, n, 'o')
	own, err := Hold(b[:n])
	if err != nil {
		t.Fatal(err)
	}
	if more, err := own.Pin(); more || err != nil {
		t.Fatal(more, err)
	}
	if err := without.Take(own); err != nil {
		t.Fatal(err)
	}
	fill('x')
	own.Close() // the ring keeps it
	try("other memory", without, piece, n, 'x')
	if _, err := unix.MmapPtr(-1, 0, unsafe.Pointer(unsafe.SliceData(b)), size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		t.Fatal(err)
	}
	fill('z')
	try("after the holder's end", without, 0, n, 'x')
	try("beyond what was held", without, n, n, 0)
}

// Memory that is not there is refused, when its piece comes.
func TestHoldNothing(t *testing.T) {
	if _, err := Hold(nil); !errors.Is(err, syscall.EINVAL) {
		t.Error(err)
	}
	b := mapped(t, 16<<20)
	hold(t, b)
	if err := unix.Mprotect(b[15<<20:], unix.PROT_NONE); err != nil {
		t.Fatal(err)
	}
	h, err := Hold(b)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if more, err := h.Pin(); !more || err != nil {
		t.Errorf("first piece: %v %v", more, err)
	}
	for range 2 {
		if _, err := h.Pin(); !errors.Is(err, syscall.EFAULT) {
			t.Errorf("second piece: %v", err)
		}
	}
}
