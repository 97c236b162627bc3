package policy

import "math/bits"

// Ghosts are kept for so many times the node's blocks, within these bounds; 12 bytes each.
const (
	ghostsPerBlock = 4
	ghostsMin      = 1 << 18
	ghostsMax      = 1 << 22
	ghostWays      = 8
)

// ghost is a block that has left: when it was used last and what it was.
type ghost struct {
	tag   uint32
	since uint32
	class uint8
	uses  uint8
	live  bool
}

// ghosts is a table of rows of eight. A new one takes the place of its row's oldest.
type ghosts struct {
	table []ghost
	mask  uint64
}

func (g *ghosts) init(blocks int) {
	n := min(max(ghostsPerBlock*blocks, ghostsMin), ghostsMax)
	n = 1 << bits.Len(uint(n-1))
	g.table = make([]ghost, n)
	g.mask = uint64(n/ghostWays - 1)
}

func (g *ghosts) row(hash uint64) []ghost {
	i := (hash * 0x9e3779b97f4a7c15 >> 24 & g.mask) * ghostWays
	return g.table[i : i+ghostWays]
}

// find is a block that has left; nil: it is not known.
func (g *ghosts) find(hash uint64) *ghost {
	row := g.row(hash)
	for i := range row {
		if row[i].live && row[i].tag == uint32(hash>>32) {
			return &row[i]
		}
	}
	return nil
}

// take finds a block that has left, and forgets it: it is here again.
func (g *ghosts) take(hash uint64) (ghost, bool) {
	e := g.find(hash)
	if e == nil {
		return ghost{}, false
	}
	e.live = false
	return *e, true
}

// put adds one, and answers the one that it takes the place of.
func (g *ghosts) put(hash uint64, e ghost, now uint32) (old ghost, was bool) {
	e.tag, e.live = uint32(hash>>32), true
	row := g.row(hash)
	oldest := 0
	for i := range row {
		if !row[i].live {
			row[i] = e
			return ghost{}, false
		}
		if now-row[i].since > now-row[oldest].since {
			oldest = i
		}
	}
	old = row[oldest]
	row[oldest] = e
	return old, true
}
