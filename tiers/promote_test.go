package tiers_test

import (
	"testing"

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
