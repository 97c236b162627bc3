package transporttest

import (
	"bytes"
	"context"
	"errors"
	"hash/crc32"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/transport"
)

const (
	dstID kvferry.RegionID = 7
	srcID kvferry.RegionID = 11
	size                   = 24 << 20
)

// Open makes a Copier from src to dst. What it needs besides is cleaned up when t ends, and by then nothing writes into dst.
type Open func(t *testing.T, dst, src transport.Memory) transport.Copier

// Run is the conformance suite: what transport.Copier promises, for any Copier.
func Run(t *testing.T, open Open) {
	for _, c := range []struct {
		name string
		run  func(*bench)
	}{
		{"one large", oneLarge},
		{"many small", manySmall},
		{"cut differently", cutDifferently},
		{"zero length", zeroLength},
		{"empty batch", emptyBatch},
		{"out of range", outOfRange},
		{"lengths differ", lengthsDiffer},
		{"an error leaves the others", errorLeavesOthers},
		{"neighbours untouched", neighboursUntouched},
		{"cancelled before", cancelledBefore},
		{"cancelled meanwhile is quiet", cancelledMeanwhile},
		{"works after a cancel", worksAfterCancel},
		{"concurrent batches", concurrentBatches},
		{"close twice", closeTwice},
	} {
		t.Run(c.name, func(t *testing.T) {
			dst, src := NewMemory(t, dstID, size), NewMemory(t, srcID, size)
			copy(src.Bytes, content())
			c.run(&bench{T: t, dst: dst, src: src, Copier: open(t, dst, src)})
		})
	}
}

// content is what each case's source holds: made once, since making it takes longer than most cases.
var content = sync.OnceValue(func() []byte {
	b := make([]byte, size)
	Fill(b, 1)
	return b
})

// bench is one case's set-up.
type bench struct {
	*testing.T
	transport.Copier
	dst, src transport.Memory
}

func (b *bench) to(off, n uint64) kvferry.Segment {
	return kvferry.Segment{Region: dstID, Offset: off, Length: n}
}
func (b *bench) from(off, n uint64) kvferry.Segment {
	return kvferry.Segment{Region: srcID, Offset: off, Length: n}
}

func (b *bench) one(dst, src, n uint64) transport.Copy {
	return transport.Copy{Dst: []kvferry.Segment{b.to(dst, n)}, Src: []kvferry.Segment{b.from(src, n)}}
}

func gather(m transport.Memory, segments []kvferry.Segment) []byte {
	var out []byte
	for _, s := range segments {
		out = append(out, m.Bytes[s.Offset:s.Offset+s.Length]...)
	}
	return out
}

// good checks that c is in place, whole and with the right CRC.
func (b *bench) good(c transport.Copy) {
	b.Helper()
	if c.Err != nil {
		b.Fatalf("copy to %v: %v", c.Dst, c.Err)
	}
	want := gather(b.src, c.Src)
	if !bytes.Equal(gather(b.dst, c.Dst), want) {
		b.Fatalf("copy to %v: wrong bytes", c.Dst)
	}
	if sum := crc32.Checksum(want, crc32.MakeTable(crc32.Castagnoli)); sum != c.CRC32C {
		b.Fatalf("copy to %v: CRC32C %08x, want %08x", c.Dst, c.CRC32C, sum)
	}
}

func (b *bench) must(batch []transport.Copy) {
	b.Helper()
	if err := b.Copy(b.Context(), batch); err != nil {
		b.Fatal("copy:", err)
	}
	for _, c := range batch {
		b.good(c)
	}
}

func oneLarge(b *bench) { b.must([]transport.Copy{b.one(3, 5, size-64)}) }

func manySmall(b *bench) {
	const n, each = 3000, 1000
	batch := make([]transport.Copy, n)
	for i, at := range rand.New(rand.NewPCG(1, 2)).Perm(n) {
		batch[i] = b.one(uint64(i*each), uint64(at*each), each)
	}
	b.must(batch)
}

// cutDifferently has lists of 1 to 1500 pieces on both sides, their cuts in different places.
func cutDifferently(b *bench) {
	random := rand.New(rand.NewPCG(3, 4))
	var batch []transport.Copy
	at := uint64(0)
	for _, pieces := range []int{1, 2, 7, 100, 1500} {
		const total = 3<<20 + 12345
		cut := func(n int, segment func(off, n uint64) kvferry.Segment) (list []kvferry.Segment) {
			for off := uint64(0); off < total; {
				take := min(total-off, uint64(random.IntN(2*total/n)+1))
				list = append(list, segment(at+off, take))
				off += take
			}
			random.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
			return list
		}
		batch = append(batch, transport.Copy{Dst: cut(pieces, b.to), Src: cut(max(1, 1500/pieces), b.from)})
		at += total
	}
	b.must(batch)
}

func zeroLength(b *bench) {
	batch := []transport.Copy{
		{},
		b.one(0, 0, 0),
		{Dst: []kvferry.Segment{b.to(9, 0), b.to(64, 10), b.to(size, 0), b.to(128, 6)}, Src: []kvferry.Segment{b.from(77, 16), b.from(0, 0)}},
		b.one(size, size, 0),
	}
	b.must(batch)
}

func emptyBatch(b *bench) { b.must(nil) }

func outOfRange(b *bench) {
	wrong := kvferry.Segment{Region: 99, Offset: 0, Length: 8}
	batch := []transport.Copy{
		b.one(size-7, 0, 8),
		b.one(0, size-7, 8),
		b.one(1<<63, 0, 8),
		b.one(0, ^uint64(0)-3, 8),
		{Dst: []kvferry.Segment{wrong}, Src: []kvferry.Segment{b.from(0, 8)}},
		{Dst: []kvferry.Segment{b.to(0, 8)}, Src: []kvferry.Segment{wrong}},
	}
	_ = b.Copy(b.Context(), batch)
	for i, c := range batch {
		if !errors.Is(c.Err, transport.ErrRange) {
			b.Errorf("copy %d: %v, want ErrRange", i, c.Err)
		}
	}
	if !allEqual(b.dst.Bytes, 0) {
		b.Error("something was written")
	}
}

func lengthsDiffer(b *bench) {
	batch := []transport.Copy{
		{Dst: []kvferry.Segment{b.to(0, 8)}, Src: []kvferry.Segment{b.from(0, 9)}},
		{Dst: []kvferry.Segment{b.to(0, 8)}},
		{Src: []kvferry.Segment{b.from(0, 8)}},
	}
	_ = b.Copy(b.Context(), batch)
	for i, c := range batch {
		if !errors.Is(c.Err, transport.ErrRange) {
			b.Errorf("copy %d: %v, want ErrRange", i, c.Err)
		}
	}
}

func errorLeavesOthers(b *bench) {
	batch := []transport.Copy{b.one(0, 100, 4096), b.one(size, 0, 1), b.one(8192, 300, 5000), b.one(16384, 0, 3<<20)}
	_ = b.Copy(b.Context(), batch)
	if !errors.Is(batch[1].Err, transport.ErrRange) {
		b.Errorf("bad copy: %v", batch[1].Err)
	}
	for _, i := range []int{0, 2, 3} {
		b.good(batch[i])
	}
}

func neighboursUntouched(b *bench) {
	const each, gap = 4097, 63
	var batch []transport.Copy
	for i := range uint64(200) {
		batch = append(batch, b.one(gap+i*(each+gap), 13+i*each, each))
	}
	b.must(batch)
	for i := range 200 {
		if !allEqual(b.dst.Bytes[i*(each+gap):][:gap], 0) {
			b.Fatalf("bytes before copy %d were written", i)
		}
	}
	if !allEqual(b.dst.Bytes[200*(each+gap):], 0) {
		b.Fatal("bytes after the last copy were written")
	}
}

func cancelledBefore(b *bench) {
	ctx, cancel := context.WithCancel(b.Context())
	cancel()
	batch := []transport.Copy{b.one(0, 0, 1<<20), b.one(1<<20, 0, 64)}
	if err := b.Copy(ctx, batch); !errors.Is(err, context.Canceled) {
		b.Errorf("copy: %v, want Canceled", err)
	}
	for i, c := range batch {
		if !errors.Is(c.Err, context.Canceled) {
			b.Errorf("copy %d: %v, want Canceled", i, c.Err)
		}
	}
}

// cancelledMeanwhile cancels at a different moment in each round. Any outcome is right, but nothing may be written after Copy has returned.
func cancelledMeanwhile(b *bench) {
	const n, each = 48, size / 48
	dirty := func(v byte) {
		b.dst.Bytes[0] = v
		for n := 1; n < size; n *= 2 {
			copy(b.dst.Bytes[n:], b.dst.Bytes[:n])
		}
	}
	for round := range 12 {
		ctx, cancel := context.WithCancel(b.Context())
		batch := make([]transport.Copy, n)
		for i := range batch {
			batch[i] = b.one(uint64(i*each), uint64(i*each), each)
		}
		clear(b.dst.Bytes)
		timer := time.AfterFunc(time.Duration(round)*150*time.Microsecond, cancel)
		err := b.Copy(ctx, batch)
		timer.Stop()
		cancel()
		for i, c := range batch {
			if c.Err == nil {
				b.good(c)
			} else if err == nil || !errors.Is(c.Err, context.Canceled) {
				b.Fatalf("round %d: copy %d: %v; batch: %v", round, i, c.Err, err)
			}
		}
		dirty(0xa5)
	}
	// Whatever is late comes before the answers to what is asked now.
	b.must([]transport.Copy{b.one(0, 0, each), b.one(each, 0, each)})
	_ = b.Close()
	if !allEqual(b.dst.Bytes[2*each:], 0xa5) {
		b.Error("something was written after Copy had returned")
	}
}

func worksAfterCancel(b *bench) {
	ctx, cancel := context.WithCancel(b.Context())
	cancel()
	_ = b.Copy(ctx, []transport.Copy{b.one(0, 0, size)})
	b.must([]transport.Copy{b.one(0, 17, 5<<20)})
}

func concurrentBatches(b *bench) {
	const workers, rounds, each = 8, 6, size / 8
	var wg sync.WaitGroup
	for w := range uint64(workers) {
		wg.Go(func() {
			for r := range uint64(rounds) {
				n := 1 + (w*7919+r*104729)%(each/4)
				batch := []transport.Copy{b.one(w*each, r, n), b.one(w*each+each/2, w, n/2)}
				if err := b.Copy(b.Context(), batch); err != nil {
					b.Error(err)
				}
				for _, c := range batch {
					if c.Err != nil || !bytes.Equal(gather(b.dst, c.Dst), gather(b.src, c.Src)) {
						b.Errorf("worker %d round %d: wrong bytes or %v", w, r, c.Err)
					}
				}
			}
		})
	}
	wg.Wait()
}

func closeTwice(b *bench) {
	b.must([]transport.Copy{b.one(0, 0, 100)})
	for range 2 {
		if err := b.Close(); err != nil {
			b.Error("close:", err)
		}
	}
	batch := []transport.Copy{b.one(200, 0, 100)}
	if err := b.Copy(b.Context(), batch); err == nil || batch[0].Err == nil {
		b.Errorf("copy after close: %v, %v; want errors", err, batch[0].Err)
	}
}

func allEqual(b []byte, v byte) bool {
	return len(b) == 0 || (b[0] == v && bytes.Equal(b[1:], b[:len(b)-1]))
}
