package tiers

import (
	"bytes"
	"fmt"
	"time"

	"github.com/kvferry/kvferry"
)

// Stats is the state of the tier at one moment. UsedBytes + FreeBytes = CapacityBytes, always.
type Stats struct {
	CapacityBytes, UsedBytes, FreeBytes uint64 // slabs; slots that are not free; the rest
	Blocks                              int    // that Match can find
	Records                             int    // blocks known, also incomplete ones and absent parents
	Leases                              int
	Pins                                int // slots, counted once for each hold
	Filling                             int // slots
	Spaces                              int
	Counts                              Counts
}

// Stats takes them.
func (l *Ledger) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	capacity := uint64(len(l.slabs)) * l.slots.SlabBytes()
	return Stats{
		CapacityBytes: capacity, UsedBytes: l.usedBytes, FreeBytes: capacity - l.usedBytes, Blocks: l.matchable, Records: l.recs.live,
		Leases: l.holds.leases, Pins: l.holds.pins, Filling: l.filling, Spaces: len(l.byID), Counts: l.counts,
	}
}

// SpaceStats is what a space has in the tier.
type SpaceStats struct {
	Shape  SpaceShape
	Blocks int // with all of their shards
	Bytes  uint64
}

// Spaces lists the spaces that are known.
func (l *Ledger) Spaces() []SpaceStats {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []SpaceStats
	for _, ref := range l.byID {
		e := &l.spaces[ref]
		if e.users > 0 || e.blocks > 0 {
			out = append(out, SpaceStats{e.shape, e.complete, uint64(e.slots) * e.slotBytes})
		}
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
	Reachable     bool // complete, and all of its ancestors
	Resident      int  // shards
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
		Space: e.shape.ID, Hash: r.hash, Complete: l.complete(r), Resident: int(r.resident), Children: int(r.children), Leases: int(r.leases),
		FillingShards: int(r.filling), Idle: now.Sub(time.Unix(0, r.stamp)),
	}
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
		if !l.complete(l.recs.at(id)) {
			yes = false
			break
		}
	}
	for _, w := range walked {
		known[w] = yes
	}
	return yes
}

// Check proves the book against itself and against the slots' headers, and names the first thing that does not add up. It is for tests and the simulation: it holds the mutex for as long as it takes.
func (l *Ledger) Check() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.checkSlotsLocked(); err != nil {
		return err
	}
	if err := l.checkRecordsLocked(); err != nil {
		return err
	}
	if c := l.counts; c.Asked != c.DRAM+c.Peer+c.Missed {
		return fmt.Errorf("lookups: asked %d, dram %d + peer %d + missed %d", c.Asked, c.DRAM, c.Peer, c.Missed)
	}
	return nil
}

func (l *Ledger) checkSlotsLocked() error {
	var used uint64
	free, pins := map[SlotRef]bool{}, map[SlotRef]int{}
	for _, c := range l.classes {
		for _, s := range c.free {
			if free[s] {
				return fmt.Errorf("slot %d is free twice", s)
			}
			free[s] = true
		}
	}
	for _, h := range l.holds.byID {
		for _, s := range h.slots {
			pins[s]++
		}
	}
	slabsFree := 0
	for i := range l.slabs {
		sl := &l.slabs[i]
		if sl.slots == nil {
			slabsFree++
		}
		n := 0
		for k := range sl.slots {
			s, m := makeSlotRef(i, k), &sl.slots[k]
			if (m.state == SlotFree) != free[s] {
				return fmt.Errorf("slot %d is %v and free=%v", s, m.state, free[s])
			}
			if int(m.pins) != pins[s] {
				return fmt.Errorf("slot %d has %d pins, held %d times", s, m.pins, pins[s])
			}
			if m.state == SlotFree {
				continue
			}
			n++
			g := l.slots.Generation(i, k)
			if m.state == SlotResident && g != m.generation || m.state == SlotFilling && (!g.Filling() || g+1 != m.generation) {
				return fmt.Errorf("slot %d is %v with generation %d, header says %d", s, m.state, m.generation, g)
			}
			if m.state == SlotLeaving && m.pins == 0 {
				return fmt.Errorf("slot %d is leaving and nothing holds it", s)
			}
			if m.state != SlotLeaving && l.shardSlotLocked(m.block, m.shard) != s {
				return fmt.Errorf("slot %d is not its block's", s)
			}
		}
		if n != sl.used {
			return fmt.Errorf("slab %d has %d slots in use, counted %d", i, n, sl.used)
		}
		used += uint64(n) * sl.slotBytes
	}
	if used != l.usedBytes || slabsFree != l.freeSlabs {
		return fmt.Errorf("used %d bytes, counted %d; %d slabs free, counted %d", used, l.usedBytes, slabsFree, l.freeSlabs)
	}
	return nil
}

func (l *Ledger) checkRecordsLocked() error {
	children, leases := map[recordID]uint32{}, map[recordID]uint32{}
	for _, h := range l.holds.byID {
		if h.block != 0 {
			leases[h.block]++
		}
	}
	live, matchable := 0, 0
	for id := recordID(1); id < l.recs.next; id++ {
		r := l.recs.at(id)
		if r.hash.IsZero() && r.slots == 0 { // a free record
			continue
		}
		live++
		if got := l.index.find(r.space, &r.hash); got != id {
			return fmt.Errorf("block %v is not found", r.hash)
		}
		if r.parent != 0 {
			children[r.parent]++
		}
		var resident, filling uint8
		held := false
		for s := r.slots; s != 0; s = l.slot(s).next {
			m := l.slot(s)
			held = held || m.pins > 0 || m.state == SlotLeaving
			switch m.state {
			case SlotResident:
				resident++
			case SlotFilling:
				filling++
			}
		}
		if resident != r.resident || filling != r.filling {
			return fmt.Errorf("block %v has %d shards resident and %d filling, counted %d and %d", r.hash, resident, filling, r.resident, r.filling)
		}
		if l.complete(r) {
			matchable++
		}
		may := r.slots != 0 && r.children == 0 && r.leases == 0 && filling == 0 && !held
		if may != (r.heapPos >= 0) {
			return fmt.Errorf("block %v may leave: %v, in the heap: %v", r.hash, may, r.heapPos >= 0)
		}
		if r.leases != leases[id] {
			return fmt.Errorf("block %v has %d leases, held %d times", r.hash, r.leases, leases[id])
		}
	}
	for id, n := range children {
		if l.recs.at(id).children != n {
			return fmt.Errorf("block %v has %d children, counted %d", l.recs.at(id).hash, n, l.recs.at(id).children)
		}
	}
	if live != l.recs.live || matchable != l.matchable {
		return fmt.Errorf("%d blocks, counted %d; %d matchable, counted %d", live, l.recs.live, matchable, l.matchable)
	}
	return nil
}
