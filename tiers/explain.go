package tiers

import (
	"bytes"
	"slices"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers/policy"
)

// Explanation is what is known of why a block is found or not.
type Explanation struct {
	Space kvferry.SpaceID
	Hash  kvferry.Hash
	Block *BlockView // nil: nothing of it is here
	// Closed: it is complete only with what lies on a drive that may not be read now.
	Closed bool
	// Missing is the first of its ancestors, from the beginning of its chain, that a look-up does not find; zero: none. It ends there.
	Missing kvferry.Hash
	// MissingClosed: that one is complete only with what lies on a drive that may not be read now.
	MissingClosed bool
	// Removed is the last removal that is remembered: of it, or of Missing.
	Removed, MissingRemoved *Change
}

// Explain tells of up to limit blocks whose hash begins with a prefix: of those that are here, then of those that were removed lately.
func (l *Ledger) Explain(now time.Time, sel Selection, limit int) []Explanation {
	views := l.named(now, sel, limit)
	var out []Explanation
	here := map[spaceHash]bool{}
	for i := range views {
		v := &views[i]
		here[spaceHash{v.Space, v.Hash}] = true
		e := Explanation{Space: v.Space, Hash: v.Hash, Block: v, Missing: l.firstMissing(v.Space, v.Hash), Closed: l.isClosed(v.Space, v.Hash)}
		if !v.Complete {
			e.Removed = l.lastRemoval(Selection{&v.Space, v.Hash[:]})
		}
		if !e.Missing.IsZero() {
			e.MissingClosed = l.isClosed(v.Space, e.Missing)
			e.MissingRemoved = l.lastRemoval(Selection{&v.Space, e.Missing[:]})
		}
		out = append(out, e)
	}
	for _, c := range l.removals(sel, limit) {
		if len(out) >= limit {
			break
		}
		if !here[spaceHash{c.Space, c.Hash}] {
			out = append(out, Explanation{Space: c.Space, Hash: c.Hash, Removed: &c})
		}
	}
	return out
}

// named is what is here of chosen blocks. A whole hash is looked up, where Blocks would go over all of them.
func (l *Ledger) named(now time.Time, sel Selection, limit int) (out []BlockView) {
	if len(sel.Prefix) != kvferry.HashSize {
		out, _ = l.Blocks(now, sel.Space, sel.Prefix, limit)
		return out
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for space, ref := range l.byID {
		if len(out) == limit {
			break
		}
		if id := l.index.find(ref, (*kvferry.Hash)(sel.Prefix)); id != 0 && l.recs.at(id).slots != 0 && (sel.Space == nil || *sel.Space == space) {
			out = append(out, l.viewLocked(now, id, map[recordID]bool{}))
		}
	}
	slices.SortFunc(out, func(a, b BlockView) int { return bytes.Compare(a.Space[:], b.Space[:]) })
	return out
}

type spaceHash struct {
	space kvferry.SpaceID
	hash  kvferry.Hash
}

// walkMax bounds the ancestors, and the changes, that are looked at with the mutex held at a time.
const walkMax = 8192

// firstMissing goes up a block's chain and answers the first of it, from its beginning, that a look-up does not find.
func (l *Ledger) firstMissing(space kvferry.SpaceID, h kvferry.Hash) (missing kvferry.Hash) {
	for depth := 0; depth < chainMax; depth += walkMax {
		var more bool
		if h, more = l.ancestorsPart(space, h, &missing); !more {
			break
		}
	}
	return missing
}

// ancestorsPart goes up from a block and notes each ancestor that is not whole, or not to be read. It answers where it has come to.
func (l *Ledger) ancestorsPart(space kvferry.SpaceID, h kvferry.Hash, missing *kvferry.Hash) (kvferry.Hash, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	ref, ok := l.byID[space]
	if !ok {
		return h, false
	}
	id := l.index.find(ref, &h)
	for range walkMax {
		if id == 0 || l.recs.at(id).parent == 0 {
			return h, false
		}
		id = l.recs.at(id).parent
		r := l.recs.at(id)
		h = r.hash
		if !l.isComplete(r) || l.closedLocked(id) {
			*missing = h
		}
	}
	return h, true
}

// isClosed tells whether a complete block needs a drive that may not be read.
func (l *Ledger) isClosed(space kvferry.SpaceID, h kvferry.Hash) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	ref, ok := l.byID[space]
	if !ok {
		return false
	}
	id := l.index.find(ref, &h)
	return id != 0 && l.closedLocked(id)
}

func (l *Ledger) closedLocked(id recordID) bool {
	r := l.recs.at(id)
	return l.isComplete(r) && !l.isIn(r, policy.DRAM) && !l.isOpenLocked(id)
}

func (l *Ledger) lastRemoval(sel Selection) *Change {
	if c := l.removals(sel, 1); len(c) > 0 {
		return &c[0]
	}
	return nil
}

// removals are the last removals of up to limit chosen blocks that the change ring remembers, one of each block, the latest first.
func (l *Ledger) removals(sel Selection, limit int) (out []Change) {
	seen := map[spaceHash]bool{}
	for before := uint64(1 << 63); before > 0 && len(out) < limit; {
		before = l.removalsPart(before, &sel, limit, seen, &out)
	}
	return out
}

// removalsPart looks at changes before a sequence number, and answers before which to go on; 0: there are none.
func (l *Ledger) removalsPart(before uint64, sel *Selection, limit int, seen map[spaceHash]bool, out *[]Change) uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := &l.changes
	before = min(before, c.last+1)
	n := uint64(len(c.ring))
	for range walkMax {
		if before--; before == 0 || c.last-before >= n || len(*out) >= limit {
			return 0
		}
		e := &c.ring[before%n]
		if e.Kind != Removed || !bytes.HasPrefix(e.Hash[:], sel.Prefix) || (sel.Space != nil && e.Space != *sel.Space) {
			continue
		}
		if k := (spaceHash{e.Space, e.Hash}); !seen[k] {
			seen[k] = true
			*out = append(*out, *e)
		}
	}
	return before
}
