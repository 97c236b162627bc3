package policy

const (
	// samples is how many blocks are looked at to find one that leaves. More does not find better ones.
	samples = 64
	// looksAll is how many times as many are all looked at: small caches have no luck to spare, and their blocks are in the processor's.
	looksAll = 4
	// longTurns is for how long a Long block may go without a use before it is as good as any other, in touches for each block that the node keeps.
	longTurns = 8
)

// The lists of a sampleSet. The first three leave one after the other.
const (
	listIncomplete = iota
	listNone
	listShort
	listNormal
	listLong
	numLists
)

// Pos is a list and a place in it.
const placeBits = 28

func makePos(list, place int) int32 { return int32(list<<placeBits | place) }

func splitPos(pos int32) (list, place int) {
	return int(pos >> placeBits), int(pos & (1<<placeBits - 1))
}

// retentionOf is kept in the upper bits of Uses, by all policies.
func retentionOf(m *Meta) Retention { return Retention(m.Uses >> 6) }

func withRetention(uses uint8, r Retention) uint8 { return uses&0x3f | uint8(r)<<6 }

// sampleSet finds what leaves among some that it takes by chance. So a block's worth may change with time, and costs nothing until it is looked at.
type sampleSet struct {
	r     *Reuse
	t     Table
	tier  int
	lists [numLists][]ID
	count int
	next  choice // the same until it is removed or something is used: who asks and then has it leave means one block
	at    uint32 // touches at which it was made
}

// NewSet is Policy.
func (r *Reuse) NewSet(t Table, tier int) Set {
	r.guard.drives = r.guard.drives || tier == NVMe
	return &sampleSet{r: r, t: t, tier: tier}
}

// Len is Set.
func (s *sampleSet) Len() int { return s.count }

// listOf is the list that a block belongs to.
func listOf(t Table, id ID) int {
	if t.Stamp(id) == 0 {
		return listIncomplete
	}
	switch retentionOf(t.Meta(id)) {
	case None:
		return listNone
	case Short:
		return listShort
	case Long:
		return listLong
	}
	return listNormal
}

// Before is Policy.
func (r *Reuse) Before(_ int64, t Table, a, b ID) bool {
	if x, y := listOf(t, a), listOf(t, b); x != y {
		return x < y
	}
	return r.worth(t.Meta(a)) < r.worth(t.Meta(b))
}

// Add is Set.
func (s *sampleSet) Add(id ID) {
	m := s.t.Meta(id)
	list := listOf(s.t, id)
	if list <= listShort {
		s.next.any = false
	}
	m.Pos[s.tier] = makePos(list, len(s.lists[list]))
	s.lists[list] = append(s.lists[list], id)
	s.count++
}

// Remove is Set.
func (s *sampleSet) Remove(id ID) {
	if id == s.next.id {
		s.next.any = false
	}
	m := s.t.Meta(id)
	list, place := splitPos(m.Pos[s.tier])
	ids := s.lists[list]
	last := ids[len(ids)-1]
	ids[place] = last
	s.t.Meta(last).Pos[s.tier] = makePos(list, place)
	s.lists[list] = ids[:len(ids)-1]
	m.Pos[s.tier] = -1
	s.count--
}

// choice is the least of the blocks that were looked at.
type choice struct {
	id    ID
	worth float32
	any   bool
}

// Next is Set.
func (s *sampleSet) Next(int64) (ID, bool) {
	if !s.next.any || s.at != s.r.lives.touches {
		s.next, s.at = s.choose(), s.r.lives.touches
	}
	return s.next.id, s.next.any
}

func (s *sampleSet) choose() choice {
	for list := listIncomplete; list <= listShort; list++ {
		if n := len(s.lists[list]); n > 0 {
			var c choice
			s.look(&c, s.lists[list], samples, 0)
			return c
		}
	}
	normal, long := s.lists[listNormal], s.lists[listLong]
	var c choice
	switch {
	case len(long) == 0:
		s.look(&c, normal, samples, 0)
	case len(normal) == 0:
		s.look(&c, long, samples, 0)
	default:
		s.look(&c, normal, samples*3/4, 0)
		s.look(&c, long, samples/4, longTurns*uint32(s.r.guard.resident))
	}
	return c
}

// worth orders what leaves. What leaves DRAM for a drive is not lost, so it goes in LRU's order: that keeps chains together. Else the leaves of many chains would go down, each with copies of
// all of its ancestors, and the drives would hold everything that DRAM has.
func (s *sampleSet) worth(m *Meta) float32 {
	if s.tier == DRAM && s.r.guard.drives {
		return -float32(s.r.lives.touches - m.Used)
	}
	return s.r.worth(m)
}

// look considers n blocks of a list that were used last at least so long ago; all of the list where it has no more than looksAll times as many.
func (s *sampleSet) look(c *choice, ids []ID, n int, ago uint32) {
	all := len(ids) <= looksAll*n
	if all {
		n = len(ids)
	}
	now := s.r.lives.touches
	for i := range n {
		id := ids[i]
		if !all {
			id = ids[s.r.random()%uint64(len(ids))]
		}
		m := s.t.Meta(id)
		if now-m.Used < ago {
			continue
		}
		w := s.worth(m)
		if !c.any || w < c.worth {
			*c = choice{id, w, true}
		}
	}
}
