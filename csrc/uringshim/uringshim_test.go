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
			if err := r.Register(to); err != nil {
				t.Skip(err)
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
