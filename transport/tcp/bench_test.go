package tcp

import (
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/transport"
	"github.com/kvferry/kvferry/transport/transporttest"
)

const (
	benchBytes = 768 << 20 // larger than the caches, as in use
	benchBatch = 64 << 20
)

// BenchmarkRatio runs Copy and plain streams in turn, so that both see the same machine, and reports the ratio of the medians.
func BenchmarkRatio(b *testing.B) {
	dst, src := transporttest.NewMemory(b, 1, benchBytes), transporttest.NewMemory(b, 2, benchBytes)
	transporttest.Fill(src.Bytes, 1)
	transporttest.Fill(dst.Bytes, 2)
	plain := map[int]func(at int){}
	for _, streams := range []int{1, 2, 3, 4} {
		plain[streams] = plainStreams(b, streams, dst.Bytes, src.Bytes)
	}
	for _, each := range []uint64{64 << 10, 256 << 10, 2 << 20} {
		for _, lanes := range []int{1, 2, 3, 4} {
			b.Run(fmt.Sprintf("each=%dKiB/lanes=%d", each>>10, lanes), func(b *testing.B) {
				address, _ := serve(b, &Server{Grants: &grants{memory: src.Bytes}})
				link := NewLink(address, testEpoch, Options{Lanes: lanes})
				defer link.Close()
				c := link.Copier(testKey, src.Region(), dst)
				var ours []time.Duration
				theirs := map[int][]time.Duration{}
				at := 0
				timed := func(run func()) time.Duration {
					start := time.Now()
					run()
					at = (at + benchBatch) % benchBytes
					return time.Since(start)
				}
				for b.Loop() {
					batch := newBatch(uint64(at), each)
					ours = append(ours, timed(func() {
						if err := c.Copy(b.Context(), batch); err != nil || batch[0].Err != nil {
							b.Fatal(err, batch[0].Err)
						}
					}))
					for streams, run := range plain {
						theirs[streams] = append(theirs[streams], timed(func() { run(at) }))
					}
				}
				best := time.Hour
				for _, t := range theirs {
					best = min(best, median(t))
				}
				gb := func(d time.Duration) float64 { return benchBatch / d.Seconds() / 1e9 }
				b.ReportMetric(gb(median(ours)), "GB/s")
				b.ReportMetric(gb(best), "plain-GB/s")
				b.ReportMetric(best.Seconds()/median(ours).Seconds(), "ratio")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

func newBatch(at, each uint64) []transport.Copy {
	batch := make([]transport.Copy, benchBatch/each)
	for i := range batch {
		off := at + uint64(i)*each
		batch[i] = transport.Copy{
			Dst: []kvferry.Segment{{Region: 1, Offset: off, Length: each}},
			Src: []kvferry.Segment{{Region: 2, Offset: off, Length: each}},
		}
	}
	return batch
}

// plainStreams is what sockets do alone.
func plainStreams(b *testing.B, streams int, dst, src []byte) func(at int) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	type pair struct{ in, out net.Conn }
	pairs := make([]pair, streams)
	for i := range pairs {
		if pairs[i].out, err = net.Dial("tcp", l.Addr().String()); err != nil {
			b.Fatal(err)
		}
		if pairs[i].in, err = l.Accept(); err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _, _ = pairs[i].out.Close(), pairs[i].in.Close() })
	}
	share := benchBatch / streams
	return func(at int) {
		var wg sync.WaitGroup
		for i, p := range pairs {
			s, d := src[at+i*share:][:share], dst[at+i*share:][:share]
			wg.Go(func() { _, _ = p.out.Write(s) })
			wg.Go(func() { _, _ = io.ReadFull(p.in, d) })
		}
		wg.Wait()
	}
}

func BenchmarkOneBlock(b *testing.B) {
	dst, src := transporttest.NewMemory(b, 1, benchBytes), transporttest.NewMemory(b, 2, benchBytes)
	for _, each := range []uint64{64 << 10, 2 << 20} {
		b.Run(fmt.Sprintf("%dKiB", each>>10), func(b *testing.B) {
			address, _ := serve(b, &Server{Grants: &grants{memory: src.Bytes}})
			link := NewLink(address, testEpoch, Options{})
			defer link.Close()
			at := uint64(0)
			b.SetBytes(int64(each))
			for b.Loop() {
				c := link.Copier(testKey, src.Region(), dst)
				batch := []transport.Copy{{
					Dst: []kvferry.Segment{{Region: 1, Offset: at, Length: each}},
					Src: []kvferry.Segment{{Region: 2, Offset: at, Length: each}},
				}}
				at = (at + each) % benchBytes
				if err := c.Copy(b.Context(), batch); err != nil || batch[0].Err != nil {
					b.Fatal(err, batch[0].Err)
				}
			}
		})
	}
}
