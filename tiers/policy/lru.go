package policy

import (
	"container/heap"
	"time"
)

// LRU lets the block leave that was used longest ago. What is to be kept Long counts as used an hour later than it was, Short as an hour earlier, None as never.
type LRU struct{}

// Name is Policy.
func (LRU) Name() string { return "lru" }

// Hit is Policy: the ledger keeps the stamps.
func (LRU) Hit(int64, Table, []ID, []byte) {}

// New is Policy.
func (LRU) New(_ int64, m, _ *Meta, a Arrival) { m.Uses = withRetention(m.Uses, a.Retention) }

// Gone is Policy.
func (LRU) Gone(int64, *Meta, uint64) {}

// Before is Policy.
func (LRU) Before(_ int64, t Table, a, b ID) bool { return lruStamp(t, a) < lruStamp(t, b) }

// lruStamp is a block's place in the order.
func lruStamp(t Table, id ID) int64 {
	const shift = int64(time.Hour)
	at := t.Stamp(id)
	if at == 0 {
		return 0
	}
	switch retentionOf(t.Meta(id)) {
	case None:
		return 1
	case Short:
		return max(at-shift, 2)
	case Long:
		return at + shift
	}
	return max(at, 2)
}

// NewSet is Policy.
func (LRU) NewSet(t Table, tier int) Set { return &lruSet{t: t, tier: tier} }

// lruSet is a heap by last use. A use changes the stamp in the table only; the heap is put right when a block comes up for leaving.
type lruSet struct {
	t       Table
	tier    int
	entries []lruEntry
}

type lruEntry struct {
	stamp int64
	id    ID
}

func (s *lruSet) Len() int           { return len(s.entries) }
func (s *lruSet) Less(i, j int) bool { return s.entries[i].stamp < s.entries[j].stamp }
func (s *lruSet) Swap(i, j int) {
	s.entries[i], s.entries[j] = s.entries[j], s.entries[i]
	s.t.Meta(s.entries[i].id).Pos[s.tier] = int32(i)
	s.t.Meta(s.entries[j].id).Pos[s.tier] = int32(j)
}

// Push is heap.Interface.
func (s *lruSet) Push(x any) {
	e := x.(lruEntry)
	s.t.Meta(e.id).Pos[s.tier] = int32(len(s.entries))
	s.entries = append(s.entries, e)
}

// Pop is heap.Interface.
func (s *lruSet) Pop() any {
	n := len(s.entries) - 1
	e := s.entries[n]
	s.entries = s.entries[:n]
	s.t.Meta(e.id).Pos[s.tier] = -1
	return e
}

// Add is Set.
func (s *lruSet) Add(id ID) { heap.Push(s, lruEntry{lruStamp(s.t, id), id}) }

// Remove is Set.
func (s *lruSet) Remove(id ID) { heap.Remove(s, int(s.t.Meta(id).Pos[s.tier])) }

// Next is Set.
func (s *lruSet) Next(int64) (ID, bool) {
	for len(s.entries) > 0 {
		e := &s.entries[0]
		now := lruStamp(s.t, e.id)
		if e.stamp == now {
			return e.id, true
		}
		e.stamp = now
		heap.Fix(s, 0)
	}
	return 0, false
}
