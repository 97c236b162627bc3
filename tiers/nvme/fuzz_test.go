package nvme_test

import (
	"context"
	"testing"

	"github.com/kvferry/kvferry/tiers/nvme"
	"github.com/kvferry/kvferry/tiers/nvme/nvmetest"
)

// FuzzScan lays arbitrary bytes over a drive: it opens or is refused, and what it then believes reads as what was written, or not at all.
func FuzzScan(f *testing.F) {
	ctx := context.Background()
	base := nvmetest.New(6 << 20)
	cfg := nvme.Config{Bytes: 6 << 20, SlabBytes: 2 << 20}
	d, _, err := nvme.OpenDevice(cfg, base)
	if err != nil {
		f.Fatal(err)
	}
	d.FormatSlab(0, 4096)
	want := map[spot]nvmetest.Block{}
	for slot := range 4 {
		b := nvmetest.NewBlock(uint64(slot), 1, 4096)
		if b.Header, err = nvmetest.Write(ctx, d, 0, slot, b); err != nil {
			f.Fatal(err)
		}
		want[spot{0, slot}] = b
	}
	if err := d.Close(); err != nil {
		f.Fatal(err)
	}
	for _, seed := range []struct {
		at  uint32
		len int
	}{{0, 64}, {4096, 64}, {8192, 64}, {2 << 20, 64}, {2<<20 + 4096, 256}, {2<<20 + 4096, 1024}, {4 << 20, 64}} {
		b := make([]byte, seed.len)
		base.Peek(b, int64(seed.at))
		f.Add(seed.at, b)
	}
	f.Add(uint32(0), make([]byte, 64))
	f.Fuzz(func(t *testing.T, at uint32, content []byte) {
		dev := base.Restart(0)
		if int64(at)+int64(len(content)) > dev.Size() || len(content) == 0 {
			return
		}
		dev.Poke(content, int64(at))
		d, keep, err := nvme.OpenDevice(cfg, dev)
		if err != nil {
			return
		}
		for _, r := range keep {
			if bytes, slots := d.SlabInUse(r.Slab); r.Slot >= slots || r.Header.Length == 0 || r.Header.Length > bytes {
				t.Fatalf("%+v in a slab of %d slots of %d", r, slots, bytes)
			}
			b, ok := want[spot{r.Slab, r.Slot}]
			if !ok || b.Header != r.Header {
				t.Fatalf("%+v is believed", r) // the drive's id is in each header: nobody makes one without knowing it
			}
			if got, err := nvmetest.Read(ctx, d, r.Slab, r.Slot, r.Header); err == nil && string(got) != string(b.Payload) {
				t.Fatalf("%+v: wrong bytes", r)
			}
		}
		for slab := range d.Slabs() {
			if bytes, _ := d.SlabInUse(slab); bytes == 0 {
				d.FormatSlab(slab, 8192)
				if _, err := nvmetest.Write(ctx, d, slab, 1, nvmetest.NewBlock(77, 7, 8000)); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
	})
}
