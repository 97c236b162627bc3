package tiers

import (
	"bytes"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers/policy"
)

// StoreStats is the state of the pool or of a drive. UsedBytes + FreeBytes = CapacityBytes, always.
type StoreStats struct {
	Tier                                kvferry.Tier
	Closed                              bool
	CapacityBytes, UsedBytes, FreeBytes uint64 // slabs; slots that are not free; the rest
	Blocks                              int    // that have a slot there
}

// Stats is the state of the tiers at one moment.
type Stats struct {
	StoreStats // of the pool
	Drives     []StoreStats
	Blocks     int                  // that Match can find
	InTier     [policy.NumTiers]int // of these, the ones that a tier has
	Records    int                  // blocks known, also incomplete ones and absent parents
	Leases     int
	Pins       int // slots, counted once for each hold
	Moving     int // slots from which a move reads
	Filling    int // slots
	Spaces     int
	Counts     Counts
	Change     uint64 // sequence number of the last change
	Policy     string
}

// Stats takes them.
func (l *Ledger) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := Stats{
		Blocks: l.matchable, InTier: l.complete, Records: l.recs.live, Leases: l.holds.leases, Pins: l.holds.pins, Moving: l.moving, Filling: l.filling, Spaces: len(l.byID), Counts: l.counts,
		Change: l.changes.last, Policy: l.policy.Name(),
	}
	for _, st := range l.stores {
		capacity := uint64(st.slabs) * st.slots.SlabBytes()
		s := StoreStats{Tier: tierOf(st.tier), Closed: st.closed, CapacityBytes: capacity, UsedBytes: st.usedBytes, FreeBytes: capacity - st.usedBytes, Blocks: st.blocks}
		if st.tier == policy.DRAM {
			out.StoreStats = s
		} else {
			out.Drives = append(out.Drives, s)
		}
	}
	return out
}

// SpaceStats is what a space has.
type SpaceStats struct {
	Shape  SpaceShape
	Blocks int                     // with all of their shards
	InTier [policy.NumTiers]int    // of these, the ones that a tier has
	Bytes  [policy.NumTiers]uint64 // of slots
}

// Spaces lists the spaces that are known.
func (l *Ledger) Spaces() []SpaceStats {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []SpaceStats
	for _, ref := range l.byID {
		e := &l.spaces[ref]
		if e.users == 0 && e.blocks == 0 {
			continue
		}
		s := SpaceStats{Shape: e.shape, Blocks: e.complete, InTier: e.inTier}
		for t, n := range e.slots {
			s.Bytes[t] = uint64(n) * e.slotBytes
		}
		out = append(out, s)
	}
	return out
}

// OwnerStats is how many leases and pinned slots an owner has.
func (l *Ledger) OwnerStats(o Owner) (leases, pins int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id := range l.holds.byOwner[o] {
		if h := l.holds.byID[id]; h.block != 0 {
			leases++
		} else {
			pins += len(h.slots)
		}
	}
	return leases, pins
}

// BlockView is a block as people see it.
type BlockView struct {
	Space         kvferry.SpaceID
	Hash, Parent  kvferry.Hash
	Complete      bool
	Reachable     bool                 // complete, and all of its ancestors
	Resident      int                  // shards, in whatever tiers
	InTier        [policy.NumTiers]int // shards
	Drive         StoreID              // 0: it is on none
	Children      int
	Leases, Pins  int
	Bytes         uint64
	Idle          time.Duration
	FillingShards int
}

// Blocks lists up to limit blocks whose hash starts with prefix, of one space or of all, and how many there are.
func (l *Ledger) Blocks(now time.Time, space *kvferry.SpaceID, prefix []byte, limit int) (out []BlockView, total int) {
	for next := recordID(1); next != 0; {
		next = l.blocksPart(now, next, space, prefix, limit, &out, &total)
	}
	return out, total
}

// blocksPart looks at one chunk of records, so that a listing of millions of blocks never holds the mutex for long. It answers where to go on.
func (l *Ledger) blocksPart(now time.Time, id recordID, space *kvferry.SpaceID, prefix []byte, limit int, out *[]BlockView, total *int) recordID {
	l.mu.Lock()
	defer l.mu.Unlock()
	reachable := map[recordID]bool{}
	for ; id < l.recs.next; id++ {
		r := l.recs.at(id)
		if r.slots != 0 && bytes.HasPrefix(r.hash[:], prefix) && (space == nil || l.spaces[r.space].shape.ID == *space) {
			*total++
			if len(*out) < limit {
				*out = append(*out, l.viewLocked(now, id, reachable))
			}
		}
		if (id+1)%recordsPerChunk == 0 {
			return id + 1
		}
	}
	return 0
}

func (l *Ledger) viewLocked(now time.Time, id recordID, reachable map[recordID]bool) BlockView {
	r := l.recs.at(id)
	e := &l.spaces[r.space]
	v := BlockView{
		Space: e.shape.ID, Hash: r.hash, Complete: l.isComplete(r), Resident: int(r.resident), Children: int(r.children), Leases: int(r.leases),
		Idle: now.Sub(time.Unix(0, r.stamp)),
	}
	for t := range policy.NumTiers {
		v.InTier[t] = int(r.in[t])
		v.FillingShards += int(r.filling[t])
	}
	v.Drive, _ = l.storeInLocked(id, policy.NVMe)
	for s := r.slots; s != 0; s = l.slot(s).next {
		v.Pins += int(l.slot(s).pins)
		v.Bytes += e.slotBytes
	}
	if r.parent != 0 {
		v.Parent = l.recs.at(r.parent).hash
	}
	v.Reachable = l.reachableLocked(id, reachable)
	return v
}

// reachableLocked tells whether a block and all of its ancestors are complete. known keeps what was found out, so that a listing walks no chain twice.
func (l *Ledger) reachableLocked(id recordID, known map[recordID]bool) bool {
	var walked []recordID
	yes := true
	for ; id != 0; id = l.recs.at(id).parent {
		if k, ok := known[id]; ok {
			yes = k
			break
		}
		walked = append(walked, id)
		if !l.isComplete(l.recs.at(id)) {
			yes = false
			break
		}
	}
	for _, w := range walked {
		known[w] = yes
	}
	return yes
}
