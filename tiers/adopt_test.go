package tiers_test

import (
	"testing"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/pool"
	"github.com/kvferry/kvferry/tiers/tierstest"
)

// A drive whose slabs were cut and are empty, as after an eviction of everything, is adopted in no time. It took longer by the square of them.
func TestAdoptEmptySlabs(t *testing.T) {
	const slabs = 4096
	drive := tierstest.NewSlots(slabs, 1<<20)
	for i := range slabs {
		drive.FormatSlab(i, 4<<10)
	}
	l := tiers.New(tiers.Config{Pool: tierstest.NewSlots(1, 1<<20), Limits: tiers.DefaultLimits})
	id, err := l.AddDrive(drive)
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	l.Adopt(time.Unix(1e9, 0), id, nil)
	if took := time.Since(start); took > 3*time.Second {
		t.Errorf("it took %v", took)
	}
	if err := l.Check(); err != nil {
		t.Error(err)
	}
	if n, _ := drive.SlabInUse(slabs - 1); n != 0 {
		t.Error("an empty slab was not given back")
	}
}

// Shards of a block that come one after the other are adopted whole; what lacks a shard in the end leaves in time, and nothing else.
func TestAdoptIncomplete(t *testing.T) {
	now := time.Unix(1e9, 0)
	slots := tierstest.NewSlots(1, 1<<20)
	slots.FormatSlab(0, 64<<10)
	var found []pool.Resident
	for i, b := range tierstest.Chain(1, 5) {
		for shard := range uint16(2) {
			if i == 4 && shard == 1 {
				continue
			}
			k := 2*i + int(shard)
			h := pool.Header{Hash: b.Hash, Parent: b.Parent, Space: kvferry.SpaceID{1}, Length: 64 << 10, Shard: shard, Shards: 2, Generation: slots.Fill(0, k)}
			slots.Publish(0, k, h)
			found = append(found, pool.Resident{Slab: 0, Slot: k, Header: h})
		}
	}
	l := tiers.New(tiers.Config{Pool: slots, Limits: tiers.DefaultLimits})
	if n := l.Adopt(now, 0, found); n != 9 {
		t.Fatalf("%d slots were adopted", n)
	}
	l.Expire(now.Add(2 * time.Minute))
	if st := l.Stats(); st.Blocks != 4 || st.Counts.Incomplete != 1 || st.UsedBytes != 8*64<<10 {
		t.Errorf("%+v", st)
	}
	if err := l.Check(); err != nil {
		t.Error(err)
	}
}
