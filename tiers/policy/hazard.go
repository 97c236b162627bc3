package policy

import "math"

const (
	// firstHazard is the rate of use per cohort at age 0 before anything is known. From there on it falls as 1/age: then LRU's order is the best.
	firstHazard = 0.2
	// fall is how much faster than 1/age a hazard is taken to fall beyond the ages that were seen.
	fall = 0.95
	// What holds against what was seen, in blocks: of all classes for each age, of a turn or a length, of a class for each age.
	weightAge   = 24
	weightLevel = 120
	weightClass = 200
	fitRounds   = 4
)

// refresh computes the scores anew.
func (l *lives) refresh() {
	var grown, tails, shared []int
	for class, c := range l.cells {
		if c == nil {
			continue
		}
		l.expose(c)
		switch kindOf(uint8(class)) {
		case kindTail:
			tails = append(tails, class)
		case kindShared:
			shared = append(shared, class)
		default:
			grown = append(grown, class)
		}
	}
	for _, group := range [][]int{grown, tails, shared} {
		if len(group) > 0 {
			l.fitGroup(group, fitRounds)
		}
	}
}

// base is the hazard of a group of classes by age. Where nothing was seen it goes on from the age before.
func (l *lives) base(group []int) (h byAge) {
	prior := firstHazard
	for b := range bins {
		hits, risk := float64(weightAge), weightAge/prior
		for _, class := range group {
			if c := l.cells[class]; c != nil {
				hits += c.hits[b]
				risk += c.risk[b]
			}
		}
		h[b] = hits / risk
		prior = h[b] * fall * float64(binStart[b]+1) / float64(binStart[b+1]+1)
	}
	return h
}

// factors are what each level of kind, turn and length multiplies the base with.
type factors [3][levels]float64

func factorLevels(class int) [3]int {
	c := uint8(class)
	return [3]int{kindOf(c), turnOf(c), lengthOf(c)}
}

func (f *factors) of(class int) float64 {
	k := factorLevels(class)
	return f[0][k[0]] * f[1][k[1]] * f[2][k[2]]
}

// fitGroup finds hazards for classes that are taken to differ by factors, and from them the scores.
func (l *lives) fitGroup(group []int, rounds int) {
	base := l.base(group)
	var f factors
	for i := range f {
		for k := range f[i] {
			f[i][k] = 1
		}
	}
	for _, class := range group {
		if c := l.cells[class]; c != nil {
			c.at, c.exp = 0, 0
			for b := range bins {
				c.at += c.hits[b]
				c.exp += c.risk[b] * base[b]
			}
		}
	}
	for range rounds { // each factor in turn, so that what its level was expected to have is what it had
		for i := range f {
			var at, exp [levels]float64
			for _, class := range group {
				if c := l.cells[class]; c != nil {
					k := factorLevels(class)[i]
					at[k] += c.at
					exp[k] += c.exp * f.of(class) / f[i][k]
				}
			}
			for k := range f[i] {
				f[i][k] = (at[k] + weightLevel) / (exp[k] + weightLevel)
			}
		}
	}
	for _, class := range group {
		h, factor := base, f.of(class)
		for b := range bins {
			h[b] *= factor
			if c := l.cells[class]; c != nil {
				h[b] = (c.hits[b] + weightClass) / (c.risk[b] + weightClass/h[b])
			}
		}
		l.score(class, &h)
	}
}

// score finds, for each age, the time to keep a block from there on that gives the most hits for the room: hits by the end of it over the time until it is used or given up.
func (l *lives) score(class int, h *byAge) {
	var p, stay byAge // of blocks that reach an age: the part that is used there, and the mean time spent there
	for b := range bins {
		p[b] = 1 - math.Exp(-h[b]*float64(binStart[b+1]-binStart[b]))
		stay[b] = p[b] / h[b]
	}
	for b := range bins {
		best, alive, hits, room := 0.0, 1.0, 0.0, 0.0
		for e := b; e < bins; e++ {
			hits += alive * p[e]
			room += alive * stay[e]
			alive *= 1 - p[e]
			if hits > best*room {
				best = hits / room
			}
		}
		l.scores[class][b] = float32(best)
	}
	l.scores[class][bins] = l.scores[class][bins-1] / 2
}
