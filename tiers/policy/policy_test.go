package policy

import (
	"flag"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"unsafe"
)

var seeds = flag.Uint64("seeds", 3, "loads of each kind that are held against LRU")

var names = []string{"lru", "s3fifo", "reuse"}

func make1(t testing.TB, name string, blocks int) Policy {
	t.Helper()
	p, err := New(name, blocks)
	if err != nil {
		t.Fatal(err)
	}
	if p.Name() != name {
		t.Fatalf("%q calls itself %q", name, p.Name())
	}
	return p
}

func TestNew(t *testing.T) {
	if _, err := New("mru", 1); err == nil || !strings.Contains(err.Error(), "reuse, s3fifo or lru") {
		t.Errorf("New of an unknown policy: %v", err)
	}
	if _, err := New(Default, 0); err != nil {
		t.Error(err)
	}
	if n := unsafe.Sizeof(Meta{}); n != 16 {
		t.Errorf("Meta has %d bytes", n)
	}
}

// table is blocks without a ledger.
type table struct {
	metas  []Meta
	stamps []int64
}

func (t *table) Meta(id ID) *Meta  { return &t.metas[id] }
func (t *table) Stamp(id ID) int64 { return t.stamps[id] }

func newTable(n int) *table {
	t := &table{make([]Meta, n), make([]int64, n)}
	for i := range t.metas {
		t.metas[i] = NewMeta()
	}
	return t
}

// Sets against plain maps: what was added and not removed is there, Next is of these, Pos is -1 outside; incomplete ones leave first.
func TestSets(t *testing.T) {
	for _, name := range names {
		for seed := range uint64(8) {
			rng := rand.New(rand.NewPCG(seed, 5))
			const n = 300
			tab := newTable(n)
			p := make1(t, name, n/2)
			sets := [NumTiers]Set{p.NewSet(tab, DRAM), p.NewSet(tab, NVMe)}
			in := [NumTiers]map[ID]bool{{}, {}}
			for id := range ID(n) {
				tab.stamps[id] = int64(rng.IntN(5)) * 1e9
				p.New(1, &tab.metas[id], nil, Arrival{Hash: rng.Uint64(), Retention: Retention(rng.IntN(int(NumRetentions)))})
			}
			for step := range 4000 {
				tier, id := rng.IntN(NumTiers), ID(rng.IntN(n))
				s, m := sets[tier], in[tier]
				switch k := rng.IntN(8); {
				case k < 3 && !m[id]:
					s.Add(id)
					m[id] = true
				case k < 5 && m[id]:
					s.Remove(id)
					delete(m, id)
				case k == 5 && tab.stamps[id] > 0:
					tab.stamps[id] += 1e9
					p.Hit(int64(step), tab, []ID{id}, pack([]uint64{rng.Uint64()}))
				case k == 6:
					got, ok := s.Next(int64(step))
					if ok != (len(m) > 0) || ok && !m[got] {
						t.Fatalf("%s: Next is %d, %v of %d", name, got, ok, len(m))
					}
					if again, _ := s.Next(int64(step)); again != got { // a ledger asks whether it is worth it, and then has it leave
						t.Fatalf("%s: Next is %d and then %d", name, got, again)
					}
					incomplete := false
					for id := range m {
						incomplete = incomplete || tab.stamps[id] == 0
					}
					if ok && incomplete && tab.stamps[got] != 0 {
						t.Fatalf("%s: a complete block leaves before an incomplete one", name)
					}
				case k == 7: // gone, and another block in its place
					for i := range NumTiers {
						if in[i][id] {
							sets[i].Remove(id)
							delete(in[i], id)
						}
					}
					p.Gone(int64(step), &tab.metas[id], uint64(id)<<32)
					tab.metas[id] = NewMeta()
					p.New(int64(step), &tab.metas[id], &tab.metas[(id+1)%n], Arrival{Hash: rng.Uint64(), Partial: rng.IntN(2) == 0})
				}
				for i := range NumTiers {
					if sets[i].Len() != len(in[i]) {
						t.Fatalf("%s: Len is %d of %d", name, sets[i].Len(), len(in[i]))
					}
					if in[i][id] != (tab.metas[id].Pos[i] >= 0) {
						t.Fatalf("%s: Pos of %d is %v, in it: %v", name, id, tab.metas[id].Pos, in[i][id])
					}
				}
			}
			for i := range sets { // emptied by Next and Remove alone
				for left := len(in[i]); left > 0; left-- {
					id, ok := sets[i].Next(1e9)
					if !ok || !in[i][id] {
						t.Fatalf("%s: %d left and Next is %d, %v", name, left, id, ok)
					}
					sets[i].Remove(id)
					delete(in[i], id)
				}
				if _, ok := sets[i].Next(1e9); ok {
					t.Fatalf("%s: Next of an empty set", name)
				}
			}
		}
	}
}

// Blocks of one age leave by retention: None, Short, Normal, Long.
func TestRetentionOrder(t *testing.T) {
	for _, name := range names {
		tab := newTable(40)
		p := make1(t, name, 100)
		s := p.NewSet(tab, DRAM)
		for id := range ID(40) {
			tab.stamps[id] = 1e18
			p.New(1e18, &tab.metas[id], nil, Arrival{Hash: uint64(id) << 40, Retention: []Retention{Long, Normal, Short, None}[id%4]})
			s.Add(id)
		}
		for i := range 40 {
			id, _ := s.Next(1e18)
			if want := []Retention{None, Short, Normal, Long}[i/10]; retentionOf(&tab.metas[id]) != want {
				t.Errorf("%s: block %d to leave is %v, must be %v", name, i, retentionOf(&tab.metas[id]), want)
			}
			s.Remove(id)
		}
	}
}

// Long blocks that nobody uses leave in the end, though others are there.
func TestLongLeaves(t *testing.T) {
	for _, name := range names {
		p := make1(t, name, 100)
		n := newNode(p, 100)
		at := int64(1e9)
		for i := range uint64(45) {
			at += 1e9
			n.retention = Long
			n.run(request{at: at, chain: []uint64{mix(7, i)}})
		}
		n.retention = Normal
		for i := range uint64(8000) {
			at += 2e9
			n.run(request{at: at, chain: []uint64{mix(8, i)}})
		}
		left := 0
		for i := range uint64(45) {
			if _, ok := n.byHash[mix(7, i)]; ok {
				left++
			}
		}
		if left > 5 {
			t.Errorf("%s: %d of 45 Long blocks are still there", name, left)
		}
	}
}

// The same calls give the same answers.
func TestDeterministic(t *testing.T) {
	r := phases(3, 1500)
	for _, name := range names {
		a, b := newNode(make1(t, name, 2000), 2000), newNode(make1(t, name, 2000), 2000)
		for i := range r {
			a.run(r[i])
			b.run(r[i])
			if a.hits != b.hits || a.resident != b.resident {
				t.Fatalf("%s: request %d: %d hits and %d", name, i, a.hits, b.hits)
			}
		}
	}
}

// What a policy keeps does not grow with what it has seen.
func TestBounded(t *testing.T) {
	p := NewReuse(1000)
	tab := newTable(4000)
	rng := rand.New(rand.NewPCG(1, 6))
	id := ID(0)
	for range 600_000 {
		id = (id + 1) % 4000
		if tab.metas[id].Used != 0 {
			p.Gone(0, &tab.metas[id], mix(1, uint64(id)))
			tab.metas[id] = NewMeta()
		}
		p.New(0, &tab.metas[id], &tab.metas[rng.IntN(4000)], Arrival{Hash: rng.Uint64(), Partial: rng.IntN(9) == 0})
		if rng.IntN(3) == 0 {
			p.Hit(0, tab, []ID{id}, pack(make([]uint64, rng.IntN(40))))
		}
	}
	if len(p.ghosts.table) != ghostsMin {
		t.Errorf("%d ghosts", len(p.ghosts.table))
	}
	open, alive := 0, 0
	for _, n := range p.lives.open {
		open += int(n)
	}
	for _, g := range p.ghosts.table {
		if g.live {
			alive++
		}
	}
	if open < 0 || open > alive+4000 {
		t.Errorf("%d open lives of %d ghosts and 4000 blocks", open, alive)
	}
	for class, c := range p.lives.cells {
		for age := range cohorts {
			if c != nil && c.open[age] < 0 {
				t.Fatalf("class %d: %d open lives", class, c.open[age])
			}
		}
		for b, x := range p.lives.scores[class] {
			if math.IsNaN(float64(x)) || x < 0 {
				t.Fatalf("class %d: score at %d is %v", class, b, x)
			}
		}
	}
}

// Never clearly worse than LRU, on loads of every kind. Of loads that are over before there was much to learn, and of which one request can be a hundredth of all that LRU hits, a single one may have a bit less.
func TestAgainstLRU(t *testing.T) {
	for _, s := range synthetic {
		for requests, least := range map[int]float64{1500: 0.97, 5000: 0.99} {
			for _, percent := range []int{2, 5, 20} {
				sum := 0.0
				for seed := range *seeds {
					r := s.make(seed, requests)
					c := unique(r) * percent / 100
					lru, ours := hitRatio(LRU{}, c, r), hitRatio(NewReuse(c), c, r)
					if sum += ours / lru; ours < least*lru {
						t.Errorf("%s, %d requests, seed %d, %d blocks: %.4f, LRU %.4f", s.name, requests, seed, c, ours, lru)
					}
				}
				if mean := sum / float64(*seeds); mean < 0.99 {
					t.Errorf("%s, %d requests, %d %%: %.4f of LRU", s.name, requests, percent, mean)
				}
			}
		}
	}
}

// It leads where that is worth something, also where LRU hits nothing at all.
func TestLeads(t *testing.T) {
	for _, c := range []struct {
		name     string
		requests []request
		percent  int
		least    float64 // times LRU's hit ratio
		more     float64 // hit ratio beyond that
	}{
		{"quickChat", quickChat(3, 5000), 5, 1.05, 0},
		{"zipf", zipfPrompts(3, 5000), 5, 1.15, 0},
		{"ring", ring(3, 8000, 0), 50, 1, 0.3},
		{"ring with a hot prompt", ring(3, 8000, 100), 50, 1, 0.3},
	} {
		room := unique(c.requests) * c.percent / 100
		lru, ours := hitRatio(LRU{}, room, c.requests), hitRatio(NewReuse(room), room, c.requests)
		if t.Logf("%s: %.4f, LRU %.4f", c.name, ours, lru); ours < c.least*lru+c.more {
			t.Errorf("%s: %.4f, LRU %.4f", c.name, ours, lru)
		}
	}
}

// The shadow knows what this policy's own order would hit, while it leads and while it does not.
func TestShadow(t *testing.T) {
	for _, s := range synthetic {
		r := s.make(9, 5000)
		for _, percent := range []int{5, 20} {
			c := unique(r) * percent / 100
			leads := func(follows bool) (hits, shadow float64) {
				p := NewReuse(c)
				n := newNode(p, c)
				for _, q := range r {
					p.guard.credit, p.guard.follows = 0, follows
					if !follows {
						p.guard.credit = float64(c)
					}
					n.run(q)
				}
				return float64(n.hits), float64(p.guard.sum.own[0])
			}
			hits, beside := leads(false)
			_, alone := leads(true)
			t.Logf("%s, %d %%: %.0f hits; shadow %.0f, behind LRU's order %.0f", s.name, percent, hits, beside, alone)
			if math.Abs(beside-hits) > 0.04*hits {
				t.Errorf("%s, %d %%: %.0f hits, the shadow says %.0f", s.name, percent, hits, beside)
			}
			if least, most := 0.7*hits, 1.1*hits; alone < least || alone > most { // it learns of less there
				t.Errorf("%s, %d %%: %.0f hits, the shadow behind LRU's order says %.0f", s.name, percent, hits, alone)
			}
		}
	}
}

// The guard knows what LRU would have hit without having it.
func TestGuardKnowsLRU(t *testing.T) {
	for _, s := range synthetic {
		r := s.make(9, 5000)
		c := unique(r) / 20
		p := NewReuse(c)
		n, l := newNode(p, c), newNode(LRU{}, c)
		for _, q := range r {
			n.run(q)
			l.run(q)
		}
		if got, want := float64(p.guard.sum.lru[0]), float64(l.hits); math.Abs(got-want) > 0.02*want {
			t.Errorf("%s: guard says %.0f, LRU has %.0f", s.name, got, want)
		}
	}
}

// A policy that is always wrong costs next to nothing.
func TestGuardBites(t *testing.T) {
	r := chat(4, 6000)
	c := unique(r) / 10
	lru := hitRatio(LRU{}, c, r)
	p := NewReuse(c)
	p.lives.wrong = true
	if got := hitRatio(p, c, r); got < 0.97*lru {
		t.Errorf("with worths turned round %.4f, LRU %.4f", got, lru)
	}
	p = NewReuse(c)
	p.lives.wrong = true
	n := newNode(p, c)
	for _, q := range r {
		p.guard.credit, p.guard.follows = float64(c), false
		n.run(q)
	}
	if got := float64(n.hits) / float64(n.asked); got > 0.9*lru {
		t.Errorf("with worths turned round and no guard %.4f, LRU %.4f: the test shows nothing", got, lru)
	}
}

// It falls back also when it hits nothing any more: every prompt is asked for twice, five prompts apart.
func TestGuardBitesWithoutHits(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 9))
	var r []request
	for i := range 3000 {
		r = append(r, request{at: int64(2*i+1) * 1e8, chain: chainOf(rng, nil, 20)})
		if i >= 5 {
			r = append(r, request{at: int64(2*i+2) * 1e8, chain: r[max(2*i-15, i-5)].chain})
		}
	}
	const room = 2000
	p := NewReuse(room)
	p.lives.wrong, p.guard.follows = true, false
	if lru, ours := hitRatio(LRU{}, room, r), hitRatio(p, room, r); ours < 0.97*lru || lru < 0.4 {
		t.Errorf("with worths turned round %.4f, LRU %.4f", ours, lru)
	}
}

// Conversation trace: what design.md asks.
func TestConversation(t *testing.T) {
	if *traceFile == "" {
		t.Skip("no -requests")
	}
	r := readTrace(t, strings.Split(*traceFile, ",")[0])
	u := unique(r)
	for percent, least := range map[int]float64{2: 1.5, 5: 1.08, 10: 1.05, 20: 0.99} {
		c := u * percent / 100
		lru, ours := hitRatio(LRU{}, c, r), hitRatio(NewReuse(c), c, r)
		if t.Logf("%d %%: %.4f, LRU %.4f: x%.3f", percent, ours, lru, ours/lru); ours < least*lru {
			t.Errorf("%d %%: less than x%.2f", percent, least)
		}
	}
}
