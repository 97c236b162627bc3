package tiers_test

import (
	"testing"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/policy"
	"github.com/kvferry/kvferry/tiers/tierstest"
)

// A request may name a block twice: one copy of it comes up.
func TestPromoteTwice(t *testing.T) {
	s := newShelf(t, 2, 2)
	chain := tierstest.Chain(1, 4)
	s.store(chain)
	s.demote(tiers.Selection{}, 1<<20)
	s.l.Release(s.now, tiers.Selection{}, 0)
	var hashes []byte
	for _, i := range []int{0, 1, 1, 2, 3, 0} {
		hashes = append(hashes, chain[i].Hash[:]...)
	}
	m := s.l.BeginPromote(s.now, s.ref, 0, hashes)
	if len(m.List) != 4 || len(m.At) != 4 || len(m.Elsewhere) != 2 {
		t.Errorf("%d moves at %v, elsewhere %v", len(m.List), m.At, m.Elsewhere)
	}
	for i := range m.List {
		s.l.EndMove(s.now, &m.List[i], true)
	}
	if err := s.l.Check(); err != nil {
		t.Error(err)
	}
	if st := s.l.Stats(); st.InTier != [policy.NumTiers]int{4, 4} {
		t.Errorf("%+v", st)
	}
}

// One shard of a block is in DRAM, and what the drive has of it is removed: what is left serves nobody, and leaves in time.
func TestLeftShardLeaves(t *testing.T) {
	l := tiers.New(tiers.Config{Pool: tierstest.NewSlots(2, 1<<20), Drives: []tiers.Slots{tierstest.NewSlots(2, 1<<20)}, Limits: tiers.DefaultLimits})
	shape := tiers.SpaceShape{ID: kvferry.SpaceID{1}, Shards: 2, ShardBytes: 64 << 10}
	ref, err := l.Space(shape)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Unix(1e9, 0)
	block := tierstest.Chain(1, 1)
	for shard := range shape.Shards {
		l.Commit(now, l.BeginFill(now, ref, shard, block), make([]uint32, 1))
	}
	now = now.Add(time.Hour)
	l.Expire(now) // it was incomplete once, for a moment
	part := l.PlanDemote(now, tiers.Selection{}, 0, 1<<20)
	for i := range part.List {
		l.EndMove(now, &part.List[i], true)
	}
	l.Release(now, tiers.Selection{}, 0)
	m := l.BeginPromote(now, ref, 1, block[0].Hash[:])
	if len(m.List) != 1 {
		t.Fatalf("%+v", m)
	}
	l.EndMove(now, &m.List[0], true)
	if !l.DropFrom(shape.ID, block[0].Hash, policy.NVMe) {
		t.Fatal("nothing was on the drive")
	}
	l.Expire(now.Add(2 * time.Minute))
	if st := l.Stats(); st.UsedBytes != 0 || st.Counts.Incomplete != 1 {
		t.Errorf("%d bytes are used for a shard of what is nowhere whole: %+v", st.UsedBytes, st.Counts)
	}
	if err := l.Check(); err != nil {
		t.Error(err)
	}
}
