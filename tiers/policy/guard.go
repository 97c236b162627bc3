package policy

import "math"

const (
	// loan is what LRU's hits count against this policy's own: it may do worse by so much while it leads.
	loan = 0.994
	// loanDrives is the same where blocks go down to drives: some lie in both tiers then, for LRU as for others, and the guard knows of one cache of all blocks only.
	loanDrives = 0.96
	// What it has gained counts up to this part of the blocks, so that a change of load cannot use up the gain of a day.
	creditMax = 0.5
	// It takes the lead when its credit, and what its order would have hit more than LRU's, are so much, of the blocks, and begins with no less,
	creditLead = 0.005
	// and when the latter is no chance: so many standard deviations, of blocks, and of requests, where no request counts for more than a mean one does.
	sureBlocks   = 2.5
	sureRequests = 3
	// Beyond these, so many mean requests: of the first few the deviation says nothing.
	sureMore = 2
	// Look-ups that hit nothing are accounted together with the next that does, while it follows, or when its own order would have hit so many mean requests: one alone says little.
	mostTogether = 4
	// After 1/(1-fade) look-ups that hit something what they told counts a third.
	fade = 0.999
)

// guard asks, look-up by look-up, what LRU would have hit in the same room and what this policy's own order would have hit (shadow.go), and gives the lead to its own when that has proved better, and
// as long as what was really hit does not fall behind LRU.
//
// No second cache is needed for LRU: it has the blocks that were used last, as many as fit, and each block's last use is known, also of those that have left.
type guard struct {
	resident int
	drives   bool
	since    [rooms]uint32 // in such a room LRU has what was used since then
	look     look
	credit   float64 // hits beyond LRU's, less the loan
	follows  bool    // LRU's order
	// What its own order would have hit more than LRU's, since it followed last.
	blocks, requests, whole evidence
	sum                     look // of all look-ups; tests look at it
}

// look is what a look-up has hit, and what would have been hit by LRU and by this policy's own order.
type look struct {
	hits     int
	lru, own [rooms]int
}

// evidence is a sum that grows old.
type evidence struct{ sum, squares float64 }

func (e *evidence) add(d float64) {
	e.sum = e.sum*fade + d
	e.squares = e.squares*fade + d*d
}

// beyond is by how much it is above so many standard deviations.
func (e *evidence) beyond(deviations float64) float64 { return e.sum - deviations*math.Sqrt(e.squares) }

// begin accounts the look-up before, of requests with so many blocks in the mean, and finds out since when LRU has everything.
func (g *guard) begin(l *lives, mean float64) {
	if g.look.hits > 0 || !g.follows && g.look != (look{}) || float64(g.look.own[0]+g.look.own[1]) >= mostTogether*mean {
		g.account(mean)
		g.look = look{}
	}
	for i := range g.since {
		g.since[i] = l.lastUsed(roomOf(i, g.resident))
	}
}

// ended notes lives that end with a use: of blocks that were found, or of some that had left.
func (g *guard) ended(l *lives, of life, n int, found bool) {
	if found {
		g.look.hits += n
	}
	for i, since := range g.since {
		if int32(of.since-since) >= 0 {
			g.look.lru[i] += n
		}
		if l.keeps(of, i) {
			g.look.own[i] += n
		}
	}
}

func (g *guard) account(mean float64) {
	g.sum.hits += g.look.hits
	ahead := 0
	for i := range rooms {
		g.sum.lru[i] += g.look.lru[i]
		g.sum.own[i] += g.look.own[i]
		ahead += g.look.own[i] - g.look.lru[i]
	}
	g.whole.add(float64(g.look.own[0] - g.look.lru[0]))
	g.blocks.add(float64(ahead))
	g.requests.add(max(min(float64(ahead), mean), -mean))
	g.credit = min(g.credit+float64(g.look.hits)-g.loan()*float64(g.look.lru[0]), creditMax*float64(g.resident))
	if g.follows {
		g.credit = max(g.credit, 0) // what a try has cost is no reason against another, once that has proved better
	}
	switch {
	case g.follows && g.credit+g.whole.sum >= creditLead*float64(g.resident) && g.whole.sum >= 0 &&
		g.blocks.beyond(sureBlocks) > 0 && g.requests.beyond(sureRequests) > sureMore*mean:
		g.follows = false
		g.credit = max(g.credit, creditLead*float64(g.resident))
	case !g.follows && g.credit < 0:
		g.follows = true
		g.blocks, g.requests, g.whole = evidence{}, evidence{}, evidence{}
	}
}

func (g *guard) loan() float64 {
	if g.drives {
		return loanDrives
	}
	return loan
}
