package tiers

import (
	"time"

	"github.com/kvferry/kvferry"
)

// MatchResult says how much of a chain is resident.
type MatchResult struct {
	Blocks int // longest prefix
	Leased bool
}

// Match counts how many of these blocks, from the first on, are resident, and leases the last of them for the key until the deadline: its ancestors cannot leave before it.
// Repeating it for a key replaces the lease. hashes is packed.
func (l *Ledger) Match(now time.Time, owner Owner, key string, space SpaceRef, hashes []byte, until time.Time) MatchResult {
	l.mu.Lock()
	defer l.mu.Unlock()
	res := l.prefixLocked(now, owner, key, space, hashes, until)
	n := len(hashes) / kvferry.HashSize
	l.counts.Asked += uint64(n)
	l.counts.DRAM += uint64(res.Blocks)
	l.counts.Missed += uint64(n - res.Blocks)
	return res
}

// Prefix is Match for a look-up that is counted elsewhere.
func (l *Ledger) Prefix(now time.Time, owner Owner, key string, space SpaceRef, hashes []byte, until time.Time) MatchResult {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.prefixLocked(now, owner, key, space, hashes, until)
}

// AtPeer counts blocks that a Match has missed and that another node has.
func (l *Ledger) AtPeer(blocks int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counts.Peer += uint64(blocks)
	l.counts.Missed -= uint64(blocks)
}

func (l *Ledger) prefixLocked(now time.Time, owner Owner, key string, space SpaceRef, hashes []byte, until time.Time) MatchResult {
	n := len(hashes) / kvferry.HashSize
	const step = 256 // a miss ends the search: do not look the whole of a long prompt up before
	var ids [step]recordID
	stamp := now.UnixNano()
	hits := 0
	var deepest recordID
search:
	for base := 0; base < n; base += step {
		k := min(step, n-base)
		l.index.findBatch(space, hashes[base*kvferry.HashSize:], ids[:k])
		for _, id := range ids[:k] {
			if id == 0 {
				break search
			}
			r := l.recs.at(id)
			if !l.complete(r) {
				break search
			}
			r.stamp = max(r.stamp, stamp)
			deepest = id
			hits++
		}
	}
	res := MatchResult{Blocks: hits}
	if hits == 0 || key == "" {
		if id, ok := l.holds.byKey[holdKey{owner, key}]; ok {
			l.removeHoldLocked(l.holds.byID[id])
		}
		return res
	}
	res.Leased = l.leaseLocked(owner, key, deepest, until) == nil
	return res
}

// Missed accounts a lookup in a space that the ledger does not know: all of it is missed.
func (l *Ledger) Missed(blocks int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counts.Asked += uint64(blocks)
	l.counts.Missed += uint64(blocks)
}

// Await tells, for a shard of each block, whether it is resident or being filled, and gives a channel that is closed when the next fill of any block ends.
func (l *Ledger) Await(space SpaceRef, shard uint16, hashes []byte) (states []SlotState, changed <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	states = make([]SlotState, len(hashes)/kvferry.HashSize)
	for i := range states {
		if id := l.index.find(space, (*kvferry.Hash)(hashes[i*kvferry.HashSize:])); id != 0 {
			if s := l.shardSlotLocked(id, shard); s != 0 {
				states[i] = l.slot(s).state
			}
		}
	}
	if l.changed == nil {
		l.changed = make(chan struct{})
	}
	return states, l.changed
}

// Parents is the packed list of what comes before each of these blocks in its chain; zero where nothing does or it is not known.
func (l *Ledger) Parents(space SpaceRef, hashes []byte) []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]byte, len(hashes))
	for i := 0; i < len(hashes); i += kvferry.HashSize {
		if id := l.index.find(space, (*kvferry.Hash)(hashes[i:])); id != 0 {
			if p := l.recs.at(id).parent; p != 0 {
				copy(out[i:], l.recs.at(p).hash[:])
			}
		}
	}
	return out
}
