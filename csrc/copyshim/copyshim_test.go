package copyshim

import (
	"hash/crc32"
	"math/rand/v2"
	"testing"

	"golang.org/x/sys/unix"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func mapped(t testing.TB, size int) []byte {
	b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(b) })
	return b
}

func TestCopy(t *testing.T) {
	src, dst := mapped(t, 1<<20), mapped(t, 1<<20)
	random := rand.New(rand.NewPCG(1, 2))
	for i := range src {
		src[i] = byte(random.Uint32())
	}
	for round := range 200 {
		var segments []Segment
		var units []Unit
		var want [][]byte
		at := 0
		for u := 0; u < 5; u++ {
			unit := Unit{}
			var bytes []byte
			for s := random.IntN(4); s > 0; s-- {
				n := random.IntN(20000)
				from := random.IntN(len(src) - n)
				segments = append(segments, Segment{Address(dst[at:]), Address(src[from:]), uintptr(n)})
				bytes = append(bytes, src[from:from+n]...)
				at += n
				unit.Segments++
			}
			units, want = append(units, unit), append(want, bytes)
		}
		Copy(segments, units, NonTemporal*Flags(round%2))
		at = 0
		for i, w := range want {
			if string(dst[at:at+len(w)]) != string(w) || units[i].CRC32C != crc32.Checksum(w, castagnoli) {
				t.Fatalf("round %d unit %d of %d bytes is wrong", round, i, len(w))
			}
			at += len(w)
		}
	}
}

func TestCopyPanicsOnMissingSegments(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	Copy(nil, []Unit{{Segments: 1}}, 0)
}

func TestChecksumContinues(t *testing.T) {
	b := mapped(t, 70000)
	for i := range b {
		b[i] = byte(i * 7)
	}
	if got := Checksum(Checksum(0, b[:12345]), b[12345:]); got != crc32.Checksum(b, castagnoli) {
		t.Errorf("%08x", got)
	}
	if ISA() == "" {
		t.Error("no instruction set named")
	}
}

func BenchmarkChecksum(b *testing.B) {
	for _, size := range []int{16 << 10, 64 << 10, 256 << 10} {
		m := mapped(b, size)
		b.Run("go", func(b *testing.B) {
			b.SetBytes(int64(size))
			for b.Loop() {
				crc32.Update(1, castagnoli, m)
			}
		})
		b.Run("shim", func(b *testing.B) {
			b.SetBytes(int64(size))
			for b.Loop() {
				Checksum(1, m)
			}
		})
	}
}

func TestCombine(t *testing.T) {
	b := mapped(t, 3<<20)
	for i := range b {
		b[i] = byte(i * i >> 3)
	}
	whole := crc32.Checksum(b, castagnoli)
	for _, cut := range []int{0, 1, 7, 4096, 1 << 20, 2<<20 + 13, len(b)} {
		first, second := crc32.Checksum(b[:cut], castagnoli), crc32.Checksum(b[cut:], castagnoli)
		if got := Combine(first, second, uint64(len(b)-cut)); got != whole {
			t.Errorf("cut at %d: %08x, want %08x", cut, got, whole)
		}
	}
}

func BenchmarkCombine(b *testing.B) {
	for b.Loop() {
		Combine(0x12345678, 0x9abcdef0, 1<<20)
	}
}
