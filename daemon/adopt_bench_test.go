package daemon

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/pool"
)

// BenchmarkAdopt measures what a daemon's start takes over a pool that an earlier one left full of blocks of 64 KiB, scanned and in the ledger, while its pages are being mapped: s/16GiB is to be below 1.
func BenchmarkAdopt(b *testing.B) {
	const size = 2 << 30
	dir, err := os.MkdirTemp("/dev/shm", "kvferry-bench-")
	if err != nil {
		b.Fatal(err)
	}
	defer os.RemoveAll(dir)
	cfg := pool.Config{Path: filepath.Join(dir, "pool"), Bytes: size, SlabBytes: 64 << 20, BootID: "bench"}
	p, _, err := pool.Open(cfg)
	if err != nil {
		b.Fatal(err)
	}
	blocks := 0
	var parent kvferry.Hash
	for i := range p.Slabs() {
		for k := range p.FormatSlab(i, 64<<10) {
			h := pool.Header{Generation: p.Fill(i, k), Space: kvferry.SpaceID{1}, Parent: parent, Length: 64 << 10, Shards: 1}
			binary.LittleEndian.PutUint64(h.Hash[:], uint64(blocks+1)*0x9e3779b97f4a7c15)
			if parent = h.Hash; blocks%512 == 511 {
				parent = kvferry.Hash{}
			}
			p.Publish(i, k, h)
			blocks++
		}
	}
	if err := p.Close(); err != nil {
		b.Fatal(err)
	}
	var took time.Duration
	for b.Loop() {
		start := time.Now()
		p, found, err := pool.Open(cfg)
		if err != nil {
			b.Fatal(err)
		}
		l := tiers.New(tiers.Config{Pool: p, Limits: tiers.DefaultLimits})
		if n := l.Adopt(time.Now(), 0, found); n != blocks {
			b.Fatalf("%d of %d blocks adopted", n, blocks)
		}
		took += time.Since(start)
		_ = p.Close()
	}
	b.ReportMetric(took.Seconds()/float64(b.N)*(16<<30)/size, "s/16GiB")
}
