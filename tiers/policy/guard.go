package policy

const (
	// loan is what LRU's hits count against this policy's own: it may do worse by so much while it learns.
	loan = 0.994
	// loanDrives is the same where blocks go down to drives: some lie in both tiers then, for LRU as for others, and the guard knows of one cache of all blocks only.
	loanDrives = 0.96
	// What it has gained counts up to this part of the blocks, so that a change of load cannot use up the gain of a day.
	creditMax = 0.5
	// It starts with as much, of the blocks that the node has room for once they are there,
	startCredit = 0.03
	// and comes back from LRU's order with so much, twice as much after each try that has failed.
	returnCredit = 0.01
	failedMax    = 6
)

// guard asks what LRU would have hit in the same room, and gives its order the lead when it has done better.
//
// No second cache is needed for that: LRU has the blocks that were used last, as many as fit, and each block's last use is known, also of those that have left.
type guard struct {
	resident int
	most     int    // that were resident at once
	since    uint32 // LRU has what was used since then
	drives   bool
	credit   float64
	lru      bool
	failed   int // tries that have ended in LRU's order, since one that did not
	both     int // blocks of this look-up that LRU would have had as well
	hits     int // that LRU would have had in all
}

// came counts a block that has come: the more there are, the more may be lent.
func (g *guard) came() {
	if g.resident++; g.resident > g.most {
		g.most = g.resident
		g.credit += startCredit
	}
}

// look finds out since when LRU has everything, before a look-up is accounted.
func (g *guard) look(l *lives) {
	room, now := g.resident, l.cohort(l.touches)
	for age := range uint32(cohorts) {
		n := int(l.open[(now-age)%cohorts])
		if n > room {
			began, span := (now-age)<<l.shift, uint32(1)<<l.shift
			if age == 0 {
				span = l.touches - began + 1
			}
			g.since = began + span - uint32(uint64(room)*uint64(span)/uint64(n))
			return
		}
		room -= n
	}
	g.since = (now - cohorts + 1) << l.shift
}

// found notes blocks that were found, used last at a time.
func (g *guard) found(used uint32, n int) {
	if int32(used-g.since) >= 0 {
		g.both += n
	}
}

// settle accounts a look-up that has found n blocks.
func (g *guard) settle(n int) {
	g.hits += g.both
	g.pay(float64(n) - g.loan()*float64(g.both))
	g.both = 0
}

func (g *guard) loan() float64 {
	if g.drives {
		return loanDrives
	}
	return loan
}

// missed accounts a block that had left.
func (g *guard) missed(used uint32) {
	if int32(used-g.since) >= 0 {
		g.hits++
		g.pay(-g.loan())
	}
}

func (g *guard) pay(credit float64) {
	full := creditMax * float64(g.resident)
	g.credit = min(g.credit+credit, full)
	switch {
	case g.lru && g.credit > returnCredit*float64(g.resident)*float64(int(1)<<g.failed):
		g.lru = false
	case !g.lru && g.credit < 0:
		g.lru = true
		g.failed = min(g.failed+1, failedMax)
	case !g.lru && g.credit >= full/2:
		g.failed = 0
	}
}
