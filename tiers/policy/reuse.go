package policy

import "math"

// Reuse lets the block leave that promises the fewest hits for the room it takes. What a block promises it learns from what it sees: how soon, and how likely, blocks of a class are used again
// at each age (lives.go). Since it looks at blocks that have left as well (ghosts.go), it knows also of uses that come later than this node keeps anything. It asks itself what plain LRU would have
// hit with the same room, begins with LRU's order, and leaves it while its own proves better (guard.go).
//
// Its clock counts blocks that were used or came, so that it does not run while the node is idle. A block's class says which turn of its conversation it was used in, how long that request was,
// and how much of it was new. It takes no time and no randomness from outside: the same calls give the same answers.
type Reuse struct {
	lives    lives
	guard    guard
	ghosts   ghosts
	mean     float64 // blocks of a request
	expected expected
	rng      uint64
}

// NewReuse makes one for a node of so many blocks.
func NewReuse(blocks int) *Reuse {
	blocks = max(blocks, 1)
	r := &Reuse{mean: 8, rng: 0x9e3779b97f4a7c15}
	r.lives.init()
	r.guard.follows = true
	r.ghosts.init(blocks)
	return r
}

// Name is Policy.
func (r *Reuse) Name() string { return "reuse" }

// Meta.Class of this policy: kind in bits 0-1, turn in 2-4, length in 5-7. Meta.Uses: the turn in which the block came in bits 0-2, its uses in 3-5, retention in 6-7.
const (
	kindGrown  = iota // of a request most of which was here before, or of a first turn
	kindLarge         // of a later turn that brought much that is new
	kindTail          // shorter than a block: the next turn has another in its place
	kindShared        // more requests used it than its conversation has turns; turn then counts its uses, by powers of two
)

const (
	levels  = 8 // of turn, length and uses
	classes = 256
)

func classOf(kind, turn, length int) uint8 { return uint8(kind | turn<<2 | length<<5) }
func kindOf(class uint8) int               { return int(class & 3) }
func turnOf(class uint8) int               { return int(class >> 2 & 7) }
func lengthOf(class uint8) int             { return int(class >> 5) }

func packUses(came, uses int, r Retention) uint8 { return uint8(came | uses<<3 | int(r)<<6) }
func cameOf(uses uint8) int                      { return int(uses & 7) }
func usesOf(uses uint8) int                      { return int(uses >> 3 & 7) }

// lengthLevel is how long a request of n blocks is, by powers of two around the mean.
func (r *Reuse) lengthLevel(n int) int {
	return int(min(max(math.Log2(float64(n)/r.mean)+levels/2+0.5, 0), levels-1))
}

// Hit is Policy.
func (r *Reuse) Hit(_ int64, t Table, found []ID, missed []byte) {
	asked := len(found) + len(missed)/hashBytes
	r.mean += (float64(asked) - r.mean) / 256
	r.guard.begin(&r.lives, r.mean)
	r.lives.advance(len(found), r.guard.resident)
	turn, left := r.turn(t, found, missed)
	kind := kindGrown
	if turn > 0 && (asked-len(found)-left)*4 > asked {
		kind = kindLarge
	}
	class := classOf(kind, turn, r.lengthLevel(asked))
	if len(missed) > 0 {
		r.expected.put(hashAt(missed, 0), class)
	}
	if len(found) > 0 {
		r.found(t, found, class)
	}
}

// aheadMax bounds the blocks that have left that are looked up to find where a prompt's conversation ended.
const aheadMax = 1024

// turn finds the turn of a request: one more than that in which the last of its blocks that is known came, here or as one that has left. Where that block begins many conversations, this is a new one.
// left is how many of the blocks that were missed are known.
func (r *Reuse) turn(t Table, found []ID, missed []byte) (turn, left int) {
	class, uses, known := uint8(0), uint8(0), false
	for n := min(len(missed)/hashBytes, aheadMax); left < n; left++ {
		g := r.ghosts.find(hashAt(missed, left))
		if g == nil || kindOf(g.class) == kindTail {
			break
		}
		class, uses, known = g.class, g.uses, true
	}
	if n := len(found); n > 0 && left == 0 {
		m := t.Meta(found[n-1])
		class, uses, known = m.Class, m.Uses, true
	}
	if known && kindOf(class) != kindShared {
		turn = min(cameOf(uses)+1, levels-1)
	}
	return turn, left
}

// found gives blocks that were found the class of the request, but for those that many requests share.
func (r *Reuse) found(t Table, found []ID, class uint8) {
	now, turn := r.lives.touches, turnOf(class)
	run, same := life{}, 0 // neighbours mostly have the same life: they are accounted at once
	own, shared := 0, [levels]int{}
	chance := r.random()
	for _, id := range found {
		m := t.Meta(id)
		if m.Class != run.class || m.Used != run.since {
			r.used(run, same)
			run, same = life{m.Class, m.Used}, 0
		}
		same++
		m.Used = now
		uses := usesOf(m.Uses)
		if kindOf(m.Class) == kindShared {
			if uses < levels-1 && chance&(1<<uses-1) == 0 {
				uses++
			}
		} else if uses = min(uses+1, levels-1); uses > turn-cameOf(m.Uses) && uses < levels-1 {
			uses = 2
			m.Class = classOf(kindShared, 0, 0)
		} else {
			m.Class = class
			own++
		}
		m.Uses = m.Uses&^(7<<3) | uint8(uses<<3)
		if kindOf(m.Class) == kindShared {
			m.Class = classOf(kindShared, uses, 0)
			shared[uses]++
		}
	}
	r.used(run, same)
	r.lives.begin(class, own)
	for uses, n := range shared {
		r.lives.begin(classOf(kindShared, uses, 0), n)
	}
}

// used ends the lives of blocks that were found.
func (r *Reuse) used(l life, n int) {
	if n > 0 {
		r.guard.ended(&r.lives, l, n, true)
		r.lives.end(l, n, true)
	}
}

// New is Policy.
func (r *Reuse) New(_ int64, m, parent *Meta, a Arrival) {
	r.guard.resident++
	r.lives.advance(1, r.guard.resident)
	turn, length, kind := 0, 0, kindGrown
	if parent != nil {
		m.Depth = uint16(min(int(parent.Depth)+1, math.MaxUint16))
	}
	if class, ok := r.expected.find(a.Hash); ok { // the first that its request missed
		turn, length, kind = turnOf(class), lengthOf(class), kindOf(class)
	} else if parent != nil && kindOf(parent.Class) != kindShared {
		turn, length = turnOf(parent.Class), lengthOf(parent.Class)
		if kindOf(parent.Class) == kindLarge {
			kind = kindLarge
		}
	}
	length = max(length, r.lengthLevel(int(m.Depth)+1))
	came := turn
	if g, ok := r.ghosts.take(a.Hash); ok {
		r.guard.ended(&r.lives, life{g.class, g.since}, 1, false)
		r.lives.end(life{g.class, g.since}, 1, true)
		if k := kindOf(g.class); k != kindTail && k != kindShared {
			came = cameOf(g.uses)
		}
	}
	if a.Partial {
		kind = kindTail
	}
	m.Class = classOf(kind, turn, length)
	m.Uses = packUses(came, 0, a.Retention)
	m.Used = r.lives.touches
	r.lives.begin(m.Class, 1)
}

// Gone is Policy.
func (r *Reuse) Gone(_ int64, m *Meta, hash uint64) {
	r.guard.resident--
	if old, ok := r.ghosts.put(hash, ghost{since: m.Used, class: m.Class, uses: m.Uses}, r.lives.touches); ok {
		r.lives.end(life{old.class, old.since}, 1, false)
	}
}

// random is a xorshift: the same in every run.
func (r *Reuse) random() uint64 {
	r.rng ^= r.rng << 13
	r.rng ^= r.rng >> 7
	r.rng ^= r.rng << 17
	return r.rng
}

// worth is what a block promises: expected hits per touch of the clock. Only its order means something.
func (r *Reuse) worth(m *Meta) float32 {
	age := r.lives.touches - m.Used
	if r.guard.follows || !r.lives.known(age) {
		return -float32(age)
	}
	return r.lives.worth(m.Class, age)
}
