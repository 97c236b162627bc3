package nvme_test

import (
	"encoding/binary"
	"hash/crc32"
	"maps"
	"testing"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers/nvme"
	"github.com/kvferry/kvferry/tiers/nvme/nvmetest"
)

// TestSettledUnknown opens a drive whose state block does not say what of the log is settled, after lives short enough to leave rounds in it that are long in
// place: a daemon of before has written the block, or both copies of it are lost. What was cleared or written last is what holds.
func TestSettledUnknown(t *testing.T) {
	castagnoli := crc32.MakeTable(crc32.Castagnoli)
	for name, forget := range map[string]func(b []byte){
		"written by a daemon of before": func(b []byte) {
			clear(b[48:56])
			binary.LittleEndian.PutUint32(b[60:], crc32.Checksum(b[:60], castagnoli))
		},
		"lost": func(b []byte) { clear(b) },
	} {
		t.Run(name, func(t *testing.T) {
			if found, want := settledUnknown(t, forget); !maps.Equal(found, want) {
				t.Errorf("adopted %v, want %v", found, want)
			}
		})
	}
}

// settledUnknown answers what is adopted in the end, and what was there.
func settledUnknown(t *testing.T, forget func(b []byte)) (found, want map[int]kvferry.Generation) {
	dev := nvmetest.New(int64(modelConfig.Bytes))
	want = map[int]kvferry.Generation{} // of slab 0, by slot
	next := uint64(0)
	life := func(work func(d *nvme.Drive)) map[int]kvferry.Generation {
		d, keep, err := nvme.OpenMutated(modelConfig, dev, nvme.SmallLog)
		if err != nil {
			t.Fatal(err)
		}
		found := map[int]kvferry.Generation{}
		for _, r := range keep {
			found[r.Slot] = r.Header.Generation
		}
		work(d)
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
		dev = dev.Restart(1)
		return found
	}
	write := func(d *nvme.Drive, slots ...int) {
		for _, slot := range slots {
			next++
			h, err := nvmetest.Write(t.Context(), d, 0, slot, nvmetest.NewBlock(next, next, 4096))
			if err != nil {
				t.Fatal(err)
			}
			want[slot] = h.Generation
		}
	}
	remove := func(d *nvme.Drive, slots ...int) {
		for _, slot := range slots {
			d.Clear(0, slot)
			delete(want, slot)
		}
		if err := d.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	all := []int{0, 1, 2, 3, 4, 5, 6, 7}
	life(func(d *nvme.Drive) { d.FormatSlab(0, 4096); write(d, all...) })
	for range 6 {
		life(func(d *nvme.Drive) { remove(d, all...); write(d, all...) })
	}
	for n := range 4 { // each logs one block
		life(func(d *nvme.Drive) { remove(d, 6, 7) })
		life(func(d *nvme.Drive) { write(d, 20+n) })
	}
	for _, at := range []int64{4096, 8192} {
		b := make([]byte, 64)
		dev.Peek(b, at)
		forget(b)
		dev.Poke(b, at)
	}
	return life(func(*nvme.Drive) {}), want
}
