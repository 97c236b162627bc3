package tiers_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/tierstest"
)

// Where everything in the pool is leased, a store of blocks of another length is refused, and soon: it does not go over all leases for each of its blocks. When the leases are gone, there is room.
func TestStoreBesideLeases(t *testing.T) {
	const leases = 64
	l := tiers.New(tiers.Config{Pool: tierstest.NewSlots(leases*4, 1<<20), Limits: tiers.DefaultLimits})
	var refs [2]tiers.SpaceRef
	for i := range refs {
		var err error
		if refs[i], err = l.Space(tiers.SpaceShape{ID: kvferry.SpaceID{byte(i)}, Shards: 1, ShardBytes: 4 << 10 << i}); err != nil {
			t.Fatal(err)
		}
	}
	now := time.Unix(1e9, 0)
	for i := range uint64(leases) {
		chain := tierstest.Chain(i, 1024)
		fills := l.BeginFill(now, refs[0], 0, chain)
		l.Commit(now, fills, make([]uint32, len(fills)))
		var hashes []byte
		for _, b := range chain {
			hashes = append(hashes, b.Hash[:]...)
		}
		if m := l.Match(now, 1, fmt.Sprint(i), refs[0], hashes, now.Add(time.Hour)); !m.Leased {
			t.Fatalf("%+v", m)
		}
	}
	other := tierstest.Chain(1000, 64)
	start := time.Now()
	for _, f := range l.BeginFill(now, refs[1], 0, other) {
		if f.Status != tiers.FillBusy {
			t.Fatalf("status %d: everything is leased", f.Status)
		}
	}
	if took := time.Since(start); took > 1500*time.Millisecond {
		t.Errorf("a store was refused after %v", took)
	}
	l.ReleaseOwner(1)
	for _, f := range l.BeginFill(now.Add(time.Second), refs[1], 0, other) {
		if f.Status != tiers.FillNew {
			t.Fatalf("status %d: nothing is leased any more", f.Status)
		}
	}
}
