package tiers

import (
	"bytes"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers/policy"
)

// Selection names blocks that somebody asks for by hand.
type Selection struct {
	Space  *kvferry.SpaceID // nil: of all spaces
	Prefix []byte           // of the hash
}

// Cursor is where a walk over all blocks goes on: 0 at its beginning, and where it has come to its end. Blocks that come or go meanwhile are seen or not.
type Cursor uint32

// changedMax bounds the blocks that one part of a walk removes or plans, and with them the time that it holds the mutex: some milliseconds.
const changedMax = 1024

func (l *Ledger) selectedLocked(id recordID, sel *Selection) bool {
	r := l.recs.at(id)
	return r.slots != 0 && bytes.HasPrefix(r.hash[:], sel.Prefix) && (sel.Space == nil || l.spaces[r.space].shape.ID == *sel.Space)
}

// walkLocked calls f with chosen blocks, from one on, until a chunk of records was looked at or f answers false. It answers where to go on: with the block that f was false for, which is looked at again.
func (l *Ledger) walkLocked(from Cursor, sel *Selection, f func(id recordID) bool) Cursor {
	for id := max(recordID(from), 1); id < l.recs.next; id++ {
		if l.selectedLocked(id, sel) && !f(id) {
			return Cursor(id)
		}
		if (id+1)%recordsPerChunk == 0 {
			return Cursor(id + 1)
		}
	}
	return 0
}

// Evict removes chosen blocks from a tier, or from all of them (policy.NumTiers), by force: also leased ones, and with their children left behind unmatchable. It does a part of them, tells how many blocks
// lost something, and where to go on. Slots that are being filled are not touched.
func (l *Ledger) Evict(now time.Time, sel Selection, tier int, from Cursor) (blocks int, next Cursor) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.now = now.UnixNano()
	next = l.walkLocked(from, &sel, func(id recordID) bool {
		if blocks == changedMax {
			return false
		}
		if l.dropSlotsLocked(id, tier, Dropped) {
			blocks++
			l.counts.Dropped++
		}
		return true
	})
	return blocks, next
}

// DownPart is a part of what PlanDemote plans.
type DownPart struct {
	Moves
	Present int  // blocks that are on a drive already, or on their way to one
	NoDrive int  // blocks for which no drive has room
	Busy    bool // as much is being moved as may be: try again, from Next on, when something of it has ended
	Next    Cursor
}

// PlanDemote plans the copies of chosen blocks to the drives, however lately they were used and whatever the write budget is, and of their ancestors before them: at most so many bytes in a part, or one shard. With 0, or where all drives are
// closed, it plans nothing, and counts what it would plan as without a drive.
//
// A chain that is longer than that takes several parts, which begin with the same block. The caller bounds how often: on a drive that is too small for the chain its beginning may have left again.
func (l *Ledger) PlanDemote(now time.Time, sel Selection, from Cursor, bytes uint64) DownPart {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.now = now.UnixNano()
	p := &plan{l: l, now: now, byHand: true}
	none, may := bytes == 0 || !l.driveOpenLocked(), min(changedMax, l.mayMoveLocked())
	var out DownPart
	out.Next = l.walkLocked(from, &sel, func(id recordID) bool {
		r := l.recs.at(id)
		if !l.isIn(r, policy.DRAM) {
			return true
		}
		if l.isIn(r, policy.NVMe) || r.filling[policy.NVMe] > 0 {
			out.Present++
			return true
		}
		if none {
			out.NoDrive++
			return true
		}
		n, slotBytes := len(p.out.List), l.spaces[r.space].slotBytes
		if p.limit = min(n+int(bytes/slotBytes), may); n > 0 && p.limit <= n {
			return false
		}
		if p.limit = max(p.limit, 1); may < 1 {
			out.Busy = true
			return false
		}
		ok := p.chain(id, false) == done
		bytes -= min(bytes, uint64(len(p.out.List)-n)*slotBytes)
		switch {
		case ok:
			return r.filling[policy.NVMe] > 0 // else only the first of its ancestors had room in this part
		case p.held, len(p.out.List) > 0:
			out.Busy = p.held
			return false // there may be room when that is done
		}
		out.NoDrive++
		return true
	})
	out.Moves = p.out
	return out
}

// Release has chosen blocks leave DRAM that are on a drive that may be read, and that nothing needs in DRAM: children first. It does a part of them, and tells how many left and where to go on.
func (l *Ledger) Release(now time.Time, sel Selection, from Cursor) (left int, next Cursor) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.now = now.UnixNano()
	next = l.walkLocked(from, &sel, func(id recordID) bool {
		for id != 0 && l.selectedLocked(id, &sel) {
			if left == changedMax {
				return false
			}
			r := l.recs.at(id)
			parent := r.parent
			if l.Meta(id).Pos[policy.DRAM] < 0 || !l.isIn(r, policy.NVMe) || !l.isOpenLocked(id) {
				break
			}
			l.leaveLocked(id, policy.DRAM)
			left++
			id = parent // which may have waited for this one
		}
		return true
	})
	return left, next
}

// Up are blocks of one space, a shard of each of which is on a drive and not in DRAM.
type Up struct {
	Space  SpaceShape
	Shard  uint16
	Hashes []byte // packed
}

// PlanUp finds chosen blocks that are to be had from a drive only, about so many bytes of them, by space and shard, in the order in which a chain is asked for. It tells where to go on.
func (l *Ledger) PlanUp(sel Selection, from Cursor, bytes uint64) (ups []Up, next Cursor) {
	l.mu.Lock()
	defer l.mu.Unlock()
	type group struct {
		space SpaceRef
		shard uint16
	}
	at, shards, planned := map[group]int{}, 0, uint64(0)
	next = l.walkLocked(from, &sel, func(id recordID) bool {
		r := l.recs.at(id)
		if r.in[policy.NVMe] == 0 || l.isIn(r, policy.DRAM) || !l.isOpenLocked(id) {
			return true
		}
		if shards >= changedMax || planned >= bytes {
			return false
		}
		for shard := range l.spaces[r.space].shape.Shards {
			if s := l.shardSlotLocked(id, shard, policy.NVMe); s == 0 || l.slot(s).state != SlotResident || l.shardSlotLocked(id, shard, policy.DRAM) != 0 {
				continue
			}
			g := group{r.space, shard}
			i, ok := at[g]
			if !ok {
				i = len(ups)
				at[g] = i
				ups = append(ups, Up{Space: l.spaces[r.space].shape, Shard: shard})
			}
			ups[i].Hashes = append(ups[i].Hashes, r.hash[:]...)
			shards++
			planned += l.spaces[r.space].shape.ShardBytes
		}
		return true
	})
	return ups, next
}
