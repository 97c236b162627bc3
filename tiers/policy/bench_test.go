package policy

import (
	"math/rand/v2"
	"testing"
)

func filled(p Policy, n int) (*table, Set) {
	tab := newTable(n)
	s := p.NewSet(tab, DRAM)
	rng := rand.New(rand.NewPCG(1, 1))
	for i := range n {
		tab.stamps[i] = int64(i + 1)
		var parent *Meta
		if i%32 > 0 {
			parent = &tab.metas[i-1]
		}
		p.New(int64(i), &tab.metas[i], parent, Arrival{Hash: rng.Uint64(), Partial: i%32 == 31})
		s.Add(ID(i))
	}
	return tab, s
}

// BenchmarkHit is a look-up of 8,192 blocks, all found.
func BenchmarkHit(b *testing.B) {
	for _, name := range names {
		b.Run(name, func(b *testing.B) {
			p := make1(b, name, 1<<20)
			tab, _ := filled(p, 1<<20)
			rng := rand.New(rand.NewPCG(1, 2))
			found := make([]ID, 8192)
			for b.Loop() {
				at := rng.IntN(1<<20 - 8192)
				for i := range found {
					found[i] = ID(at + i)
				}
				p.Hit(1, tab, found, nil)
			}
		})
	}
}

// BenchmarkNext is a block that leaves a set of a million, and another that comes.
func BenchmarkNext(b *testing.B) {
	for _, name := range names {
		b.Run(name, func(b *testing.B) {
			p := make1(b, name, 1<<20)
			tab, s := filled(p, 1<<20)
			at := int64(1 << 20)
			h := uint64(1)
			for b.Loop() {
				at++
				id, _ := s.Next(at)
				s.Remove(id)
				h = mix(h, 1)
				p.Gone(at, &tab.metas[id], h)
				tab.metas[id], tab.stamps[id] = NewMeta(), at
				p.New(at, &tab.metas[id], nil, Arrival{Hash: mix(h, 2)})
				s.Add(id)
			}
		})
	}
}

// BenchmarkRefresh is the longest that one call may take: all classes there are, at all ages.
func BenchmarkRefresh(b *testing.B) {
	p := NewReuse(1 << 20)
	filled(p, 1<<20)
	for class := range classes {
		p.lives.begin(uint8(class), 1)
		for at := range cohorts {
			p.lives.cells[class].open[at] = 1
		}
	}
	for b.Loop() {
		p.lives.refresh()
		p.lives.drop(1 << 12)
	}
}
