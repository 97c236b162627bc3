package tiers

import (
	"fmt"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers/policy"
)

// ChangeKind is what happened to a block in a tier.
type ChangeKind uint8

// The kinds.
const (
	Stored  ChangeKind = iota + 1 // all of its shards are there now
	Removed                       // they no longer are
)

func (k ChangeKind) String() string {
	switch k {
	case Stored:
		return "stored"
	case Removed:
		return "removed"
	}
	return fmt.Sprintf("change(%d)", uint8(k))
}

// Reason is why a block was removed from a tier.
type Reason uint8

// The reasons.
const (
	Evicted    Reason = iota + 1 // to make room; it was the only copy
	Demoted                      // from DRAM; NVMe has it
	Dropped                      // by force: somebody asked for it
	Incomplete                   // it lacked a shard for too long
	Forced                       // to make room where nothing else could leave; its descendants cannot be matched
	Reclaimed                    // its slab went to another slot length
	Broken                       // by force: its bytes were not what was stored, or could not be read
)

func (r Reason) String() string {
	switch r {
	case 0:
		return ""
	case Evicted:
		return "evicted"
	case Demoted:
		return "demoted"
	case Dropped:
		return "dropped"
	case Incomplete:
		return "incomplete"
	case Forced:
		return "forced"
	case Reclaimed:
		return "reclaimed"
	case Broken:
		return "broken"
	}
	return fmt.Sprintf("reason(%d)", uint8(r))
}

// Change is one entry of the ledger's stream of changes, written when it happens. Folding them, in their order, gives which blocks lie in which tier.
type Change struct {
	Seq          uint64 // rises by 1
	At           int64  // unix ns, as exact as the ledger's last call with a time
	Kind         ChangeKind
	Reason       Reason // of Removed
	Tier         kvferry.Tier
	Space        kvferry.SpaceID
	Hash, Parent kvferry.Hash
}

// changeRing keeps the last changes.
type changeRing struct {
	ring []Change
	last uint64        // sequence number of the last one
	wake chan struct{} // closed at the next one; nil while nobody waits
}

func (c *changeRing) init(n int) { c.ring = make([]Change, max(n, 1)) }

func (l *Ledger) emitLocked(id recordID, tier int, kind ChangeKind, why Reason) {
	r := l.recs.at(id)
	c := &l.changes
	c.last++
	e := &c.ring[c.last%uint64(len(c.ring))]
	*e = Change{Seq: c.last, At: l.now, Kind: kind, Reason: why, Tier: tierOf(tier), Space: l.spaces[r.space].shape.ID, Hash: r.hash}
	if r.parent != 0 {
		e.Parent = l.recs.at(r.parent).hash
	}
	if c.wake != nil {
		close(c.wake)
		c.wake = nil
	}
}

func tierOf(tier int) kvferry.Tier {
	if tier == policy.NVMe {
		return kvferry.NVMe
	}
	return kvferry.DRAM
}

// Changes appends up to max changes after a sequence number to out. It answers false when that one is no longer kept: then only a Snapshot helps.
// With nothing to tell, the channel is closed at the next change.
func (l *Ledger) Changes(after uint64, limit int, out []Change) ([]Change, <-chan struct{}, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := &l.changes
	if after > c.last || c.last-after > uint64(len(c.ring)) {
		return out, nil, false
	}
	if after == c.last {
		if c.wake == nil {
			c.wake = make(chan struct{})
		}
		return out, c.wake, true
	}
	for seq := after + 1; seq <= c.last && limit > 0; seq, limit = seq+1, limit-1 {
		out = append(out, c.ring[seq%uint64(len(c.ring))])
	}
	return out, nil, true
}

// Snapshot tells all blocks and the tiers that they lie in, as Stored changes without a number. It is taken in parts, while the ledger goes on: whoever folds the changes after seq over it has the ledger's state,
// since each change says how its block is from then on.
func (l *Ledger) Snapshot(tell func([]Change)) (seq uint64) {
	l.mu.Lock()
	seq = l.changes.last
	l.mu.Unlock()
	for next := recordID(1); next != 0; {
		var part []Change
		part, next = l.snapshotPart(next)
		tell(part)
	}
	return seq
}

func (l *Ledger) snapshotPart(id recordID) (out []Change, next recordID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for ; id < l.recs.next; id++ {
		r := l.recs.at(id)
		for tier := range policy.NumTiers {
			if r.in[tier] == 0 || !l.isIn(r, tier) {
				continue
			}
			c := Change{Kind: Stored, Tier: tierOf(tier), Space: l.spaces[r.space].shape.ID, Hash: r.hash}
			if r.parent != 0 {
				c.Parent = l.recs.at(r.parent).hash
			}
			out = append(out, c)
		}
		if (id+1)%recordsPerChunk == 0 {
			return out, id + 1
		}
	}
	return out, 0
}
