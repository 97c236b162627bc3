package transport_test

import (
	"fmt"
	"testing"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/transport"
	"github.com/kvferry/kvferry/transport/transporttest"
)

// BenchmarkLocal copies 64 MiB a time between regions that are larger than the caches.
func BenchmarkLocal(b *testing.B) {
	const size, batchBytes = 768 << 20, 64 << 20
	dst, src := transporttest.NewMemory(b, 1, size), transporttest.NewMemory(b, 2, size)
	transporttest.Fill(src.Bytes, 1)
	transporttest.Fill(dst.Bytes, 2)
	for _, each := range []uint64{64 << 10, 256 << 10, 2 << 20} {
		for _, threads := range []int{1, 2} {
			b.Run(fmt.Sprintf("each=%dKiB/threads=%d", each>>10, threads), func(b *testing.B) {
				c := transport.NewLocal(dst, src, threads)
				b.SetBytes(batchBytes)
				at := uint64(0)
				batch := make([]transport.Copy, batchBytes/each)
				for i := range batch {
					batch[i] = transport.Copy{Dst: make([]kvferry.Segment, 1), Src: make([]kvferry.Segment, 1)}
				}
				for b.Loop() {
					for i := range batch {
						off := at + uint64(i)*each
						batch[i].Dst[0] = kvferry.Segment{Region: 1, Offset: off, Length: each}
						batch[i].Src[0] = kvferry.Segment{Region: 2, Offset: off, Length: each}
					}
					at = (at + batchBytes) % size
					if err := c.Copy(b.Context(), batch); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
	b.Run("memmove", func(b *testing.B) {
		b.SetBytes(batchBytes)
		at := 0
		for b.Loop() {
			copy(dst.Bytes[at:at+batchBytes], src.Bytes[at:])
			at = (at + batchBytes) % size
		}
	})
}
