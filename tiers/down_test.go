package tiers_test

import (
	"testing"
	"time"

	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/policy"
	"github.com/kvferry/kvferry/tiers/tierstest"
)

// Long chains are idle in DRAM, and what lies on a full drive was used later: looking at them takes a plan no longer than its bound, whatever they descend from. With a look at all ancestors of each it took a second.
func TestIdleLongChains(t *testing.T) {
	s := newShelf(t, 520, 1)
	chain := tierstest.Chain(1, 8192)
	for len(chain) > 0 {
		s.store(chain[:64])
		chain = chain[64:]
	}
	s.now = s.now.Add(time.Hour)
	later := tierstest.Chain(2, 16)
	s.store(later)
	if copied, _, _ := s.demote(tiers.Selection{Prefix: later[15].Hash[:]}, 1<<30); copied != 16 {
		t.Fatalf("%d copied", copied)
	}
	best := time.Hour
	for range 5 {
		start := time.Now()
		if m := s.l.PlanDown(s.now, tiers.Down{Idle: time.Minute, High: 1, Low: 1}, 1024); len(m.List) > 0 {
			t.Fatalf("%d moves are planned to where all is worth more", len(m.List))
		}
		best = min(best, time.Since(start))
	}
	if best > 50*time.Millisecond {
		t.Errorf("a plan held the ledger for %v", best)
	}
}

// However much is to leave DRAM at once, one call does a part and says that there is more.
func TestRelieveInParts(t *testing.T) {
	s := newShelf(t, 1024, 1024)
	for i := range uint64(256) {
		s.store(tierstest.Chain(i, 64))
	}
	s.demote(tiers.Selection{}, 1<<30)
	parts, before := 0, 16384
	for {
		m := s.l.PlanDown(s.now, tiers.Down{High: 0.5, Low: 0.25}, 1024)
		left := s.l.Stats().InTier[policy.DRAM]
		if before-left > 4096 {
			t.Errorf("%d blocks left in one call", before-left)
		}
		if parts, before = parts+1, left; !m.More || parts > 100 {
			break
		}
	}
	if before != 4096 || parts < 3 {
		t.Errorf("%d blocks are in DRAM after %d parts", before, parts)
	}
}

// Where all drives are closed, what is to go down by hand is counted, and its ancestors need not be looked at.
func TestDemoteToClosedDrives(t *testing.T) {
	s := newShelf(t, 520, 1)
	for chain := tierstest.Chain(1, 8192); len(chain) > 0; chain = chain[64:] {
		s.store(chain[:64])
	}
	s.l.SetOpen(1, false)
	best := time.Hour
	for range 3 {
		start := time.Now()
		if part := s.l.PlanDemote(s.now, tiers.Selection{}, 0, 1<<30); part.NoDrive != 8192 || len(part.List) != 0 || part.Next != 0 {
			t.Fatalf("%d, %d, %d", part.NoDrive, len(part.List), part.Next)
		}
		best = min(best, time.Since(start))
	}
	if best > 50*time.Millisecond {
		t.Errorf("a part held the ledger for %v", best)
	}
}
