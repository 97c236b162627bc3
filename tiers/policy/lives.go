package policy

import (
	"math"
	"math/bits"
)

// The clock counts touches: blocks that were used or came. A cohort is the blocks whose last use fell into a time of 1<<shift touches, a 16th to a 32nd of the blocks that the node keeps; it doubles when
// the node keeps more. The last 1,024 cohorts are known one by one.
const (
	cohorts    = 1024
	shiftFirst = 4
	shiftLast  = 21 // 1,024 such cohorts are half of what 32 bits can count
	// cohortsKept is how many cohorts of touches make at least the blocks that are kept.
	cohortsKept = 32
	// Ages are counted in bins: one a cohort at first, then four to a power of two.
	binsPerOctave = 4
	bins          = 36
	// refreshHalf is after how many refreshes what was learned counts half.
	refreshHalf = 32
	// touchesMin is the shortest time between refreshes: one costs up to some milliseconds.
	touchesMin = 1024
)

var (
	binOf    [cohorts]uint8
	binStart [bins + 1]int // the last one is the end of the last bin
)

func init() {
	n := 0
	for age := range cohorts {
		if b := bits.Len(uint(age)); age < binsPerOctave || age&(1<<(b-3)-1) == 0 {
			binStart[n] = age
			n++
		}
		binOf[age] = uint8(n - 1)
	}
	binStart[n] = cohorts
}

type byAge [bins]float64

// life is the time between two uses of a block: of which class, and since when.
type life struct {
	class uint8
	since uint32
}

// cell is what is known of the lives of a class.
type cell struct {
	open    [cohorts]int32 // that have not ended, by the cohort they began in
	hits    byAge          // ended by a use
	lost    byAge          // ended out of sight
	at, exp float64        // of the fit: hits, and hits expected
	risk    byAge          // block-cohorts lived at an age
	// Of the shadow, by room: cohorts that were dropped, a bit each, and the lives of the others by age.
	dropped [cohorts]uint8
	kept    [rooms]byAge
}

// lives learns how blocks are used again. It estimates the rate of use at each age (a hazard): uses there over time spent there, where lives that have not ended yet count for the time they had
// (as Kaplan and Meier do): without them it would look as if everything that is kept were used soon. Classes are many and what is seen is little, so a class is held against what its turn, its length and
// its kind say each for itself, and those against the whole.
type lives struct {
	touches uint32 // wraps; ages are differences
	shift   uint
	left    int // touches until the next refresh
	decay   float64
	open    [cohorts]int32 // of all classes
	cells   [classes]*cell
	scores  [classes][bins + 1]float32 // by bin; the last one is of all that is older
	least   [rooms]float32             // worth of what the shadow keeps
	spans   []span
	wrong   bool // tests turn the order round
}

func (l *lives) init() {
	l.shift = shiftFirst
	l.decay = math.Exp2(-1.0 / refreshHalf)
	for class := range l.scores {
		l.fitGroup([]int{class}, 1)
	}
}

// cohort is the number of the cohort of a time.
func (l *lives) cohort(touches uint32) uint32 { return touches >> l.shift }

// advance moves the clock on by n touches, of a node that keeps so many blocks.
func (l *lives) advance(n, resident int) {
	for resident > cohortsKept<<l.shift && l.shift < shiftLast {
		l.widen()
	}
	from := l.cohort(l.touches)
	l.touches += uint32(n)
	for at := l.cohort(l.touches); from != at; {
		from = (from + 1) & (1<<(32-l.shift) - 1)
		l.open[from%cohorts] = 0
		for _, c := range l.cells {
			if c != nil {
				c.open[from%cohorts], c.dropped[from%cohorts] = 0, 0
			}
		}
	}
	if l.left -= n; l.left <= 0 {
		l.left = max(touchesMin, 4<<l.shift)
		l.refresh()
		l.drop(resident)
	}
}

// widen makes cohorts twice as long, and with them the bins of age.
func (l *lives) widen() {
	at := l.cohort(l.touches)
	double := func(open *[cohorts]int32) {
		var wide [cohorts]int32
		for age := range uint32(cohorts) {
			wide[(at-age)>>1%cohorts] += open[(at-age)%cohorts]
		}
		*open = wide
	}
	double(&l.open)
	for _, c := range l.cells {
		if c == nil {
			continue
		}
		double(&c.open)
		var wide [cohorts]uint8
		for age := range uint32(cohorts) {
			wide[(at-age)>>1%cohorts] |= c.dropped[(at-age)%cohorts]
		}
		c.dropped = wide
		for _, h := range []*byAge{&c.hits, &c.lost} {
			var wide byAge
			for b, n := range h {
				wide[binOf[binStart[b]/2]] += n
			}
			*h = wide
		}
	}
	l.shift++
}

// begin counts lives that begin now.
func (l *lives) begin(class uint8, n int) {
	if n == 0 {
		return
	}
	c := l.cells[class]
	if c == nil {
		c = &cell{}
		l.cells[class] = c
	}
	at := l.cohort(l.touches) % cohorts
	c.open[at] += int32(n)
	l.open[at] += int32(n)
}

// end counts lives that end now, by a use or out of sight.
func (l *lives) end(of life, n int, hit bool) {
	age := l.cohort(l.touches) - l.cohort(of.since)
	c := l.cells[of.class]
	if age >= cohorts || c == nil { // also where the clock has wrapped in between
		return
	}
	at := l.cohort(of.since) % cohorts
	c.open[at] -= int32(n)
	l.open[at] -= int32(n)
	if hit {
		c.hits[binOf[age]] += float64(n)
	} else {
		c.lost[binOf[age]] += float64(n)
	}
}

// known tells whether an age, in touches, is one that is learned of.
func (l *lives) known(age uint32) bool { return age < cohorts<<l.shift }

// worth is the score of a class at an age that is known.
func (l *lives) worth(class uint8, age uint32) float32 {
	b := int(binOf[age>>l.shift])
	from, to := uint32(binStart[b])<<l.shift, uint32(binStart[b+1])<<l.shift
	x, y := l.edge(class, b), l.edge(class, b+1)
	return x + (y-x)*float32(age-from)/float32(to-from)
}

// edge is the score where a bin begins.
func (l *lives) edge(class uint8, b int) float32 {
	if l.wrong {
		return -l.scores[class][b]
	}
	return l.scores[class][b]
}

// expose counts the time that lives of a class have spent at each age, and lets what is old count less.
func (l *lives) expose(c *cell) {
	alive, now := 0.0, l.cohort(l.touches)
	for b := bins - 1; b >= 0; b-- {
		var by [1 << rooms]int32 // of those that were dropped from the same rooms
		for age := binStart[b]; age < binStart[b+1]; age++ {
			at := (now - uint32(age)) % cohorts
			by[c.dropped[at]%(1<<rooms)] += c.open[at]
		}
		here := int32(0)
		for i := range c.kept {
			c.kept[i][b] = 0
		}
		for dropped, n := range by {
			here += n
			for i := range c.kept {
				if dropped>>i&1 == 0 {
					c.kept[i][b] += float64(n)
				}
			}
		}
		c.hits[b] *= l.decay
		c.lost[b] *= l.decay
		end := float64(here) + c.hits[b] + c.lost[b]
		c.risk[b] = float64(binStart[b+1]-binStart[b]) * (alive + end/2)
		alive += end
	}
}
