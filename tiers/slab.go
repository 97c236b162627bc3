package tiers

import (
	"fmt"
	"math"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers/pool"
)

// SlotRef names a slot of the tier; 0 is none.
type SlotRef uint32

const slotBits = 14

func makeSlotRef(slab, slot int) SlotRef {
	if slot >= pool.SlotsPerSlabMax-1 {
		panic("tiers: slot number out of range")
	}
	return SlotRef(slab<<slotBits|slot) + 1
}

func (s SlotRef) split() (slab, slot int) {
	return int((s - 1) >> slotBits), int((s - 1) & (1<<slotBits - 1))
}

// slotInfo is the ledger's side of a slot. 32 bytes.
type slotInfo struct {
	generation kvferry.Generation // that it has, or will have when it is committed
	crc        uint32
	block      recordID
	next       SlotRef // of the same block
	pins       uint32
	shard      uint16
	state      SlotState
}

type slab struct {
	slotBytes uint64
	slots     []slotInfo // nil: the slab is free
	used      int        // slots that are not free
	touched   int64      // last time that one of its slots was committed or read
}

// class is all slabs of one slot length: their free slots, and the blocks in them that may leave.
type class struct {
	slotBytes uint64
	free      []SlotRef
	leaves    leafHeap
}

func (l *Ledger) slot(s SlotRef) *slotInfo {
	slab, slot := s.split()
	return &l.slabs[slab].slots[slot]
}

func (l *Ledger) class(slotBytes uint64) *class {
	c := l.classes[slotBytes]
	if c == nil {
		c = &class{slotBytes: slotBytes, leaves: leafHeap{l: l}}
		l.classes[slotBytes] = c
	}
	return c
}

// slotEventLocked moves a slot along its state machine and keeps what is counted by state.
func (l *Ledger) slotEventLocked(m *slotInfo, e slotEvent) {
	next, ok := m.state.next(e)
	if !ok {
		panic(fmt.Sprintf("tiers: %v of a slot that is %v", e, m.state))
	}
	if m.state == SlotFilling {
		l.filling--
	}
	if next == SlotFilling {
		l.filling++
	}
	m.state = next
}

func (l *Ledger) addSlabLocked(i int, slotBytes uint64, n int) {
	l.slabs[i] = slab{slotBytes: slotBytes, slots: make([]slotInfo, n)}
	l.freeSlabs--
	l.class(slotBytes)
}

func (l *Ledger) freeSlabLocked(i int) {
	c := l.class(l.slabs[i].slotBytes)
	kept := c.free[:0]
	for _, s := range c.free {
		if k, _ := s.split(); k != i {
			kept = append(kept, s)
		}
	}
	c.free = kept
	l.slots.FreeSlab(i)
	l.slabs[i] = slab{}
	l.freeSlabs++
}

// rebuildFree lists the free slots of a class after adoption.
func (c *class) rebuildFree(l *Ledger) {
	c.free = c.free[:0]
	for i := range l.slabs {
		if l.slabs[i].slotBytes != c.slotBytes {
			continue
		}
		for k := range l.slabs[i].slots {
			if l.slabs[i].slots[k].state == SlotFree {
				c.free = append(c.free, makeSlotRef(i, k))
			}
		}
	}
}

// takeSlotLocked hands a free slot to a block.
func (l *Ledger) takeSlotLocked(s SlotRef, id recordID, shard uint16) {
	i, _ := s.split()
	m, r := l.slot(s), l.recs.at(id)
	m.block, m.shard, m.next, m.crc = id, shard, r.slots, 0
	r.slots = s
	r.filling++
	l.slabs[i].used++
	l.usedBytes += l.slabs[i].slotBytes
	l.spaces[r.space].slots++
	l.leafRemoveLocked(id)
}

// releaseSlotLocked takes a slot that is leaving and quiet from its block and makes it free.
func (l *Ledger) releaseSlotLocked(s SlotRef) {
	i, k := s.split()
	m := l.slot(s)
	r := l.recs.at(m.block)
	for p := &r.slots; ; p = &l.slot(*p).next {
		if *p == s {
			*p = m.next
			break
		}
	}
	l.slotEventLocked(m, slotQuiet)
	*m = slotInfo{generation: m.generation}
	l.slots.Clear(i, k)
	l.slabs[i].used--
	l.usedBytes -= l.slabs[i].slotBytes
	l.spaces[r.space].slots--
	c := l.class(l.slabs[i].slotBytes)
	c.free = append(c.free, s)
}

// shardSlotLocked is the slot that a shard of a block has, in whatever state.
func (l *Ledger) shardSlotLocked(id recordID, shard uint16) SlotRef {
	for s := l.recs.at(id).slots; s != 0; s = l.slot(s).next {
		if m := l.slot(s); m.shard == shard && m.state != SlotLeaving {
			return s
		}
	}
	return 0
}

// allocateLocked finds a free slot: one of the class, one of a free slab, that of the class's own coldest leaf, or one of another class's coldest slab.
func (l *Ledger) allocateLocked(c *class) (SlotRef, bool) {
	for {
		if n := len(c.free); n > 0 {
			s := c.free[n-1]
			c.free = c.free[:n-1]
			return s, true
		}
		if i := l.freeSlabIndex(); i >= 0 {
			l.formatLocked(i, c)
			continue
		}
		if l.evictLeafLocked(c) {
			continue
		}
		if !l.reclaimLocked(c) {
			return 0, false
		}
	}
}

// reclaimLocked gives a class the coldest slab of another one, if that was used last before anything that would leave of its own.
func (l *Ledger) reclaimLocked(c *class) bool {
	i := l.coldestSlabLocked(c)
	if i < 0 {
		return false
	}
	l.emptySlabLocked(i)
	l.formatLocked(i, c)
	return true
}

func (l *Ledger) freeSlabIndex() int {
	if l.freeSlabs == 0 {
		return -1
	}
	for i := range l.slabs {
		if l.slabs[i].slots == nil {
			return i
		}
	}
	return -1
}

func (l *Ledger) formatLocked(i int, c *class) {
	n := l.slots.FormatSlab(i, c.slotBytes)
	l.addSlabLocked(i, c.slotBytes, n)
	for k := n - 1; k >= 0; k-- {
		c.free = append(c.free, makeSlotRef(i, k))
	}
}

// coldestSlabLocked is a slab of another class, all of which may leave, that was used last before this class's own next block to leave; -1 when there is none.
func (l *Ledger) coldestSlabLocked(c *class) int {
	if len(l.classes) == 1 {
		return -1
	}
	before := int64(math.MaxInt64)
	if id, ok := c.leaves.peek(); ok {
		before = l.stampOf(id)
	}
	leased, ok := l.leasedSlabsLocked()
	if !ok {
		return -1
	}
	best := -1
	for i := range l.slabs {
		s := &l.slabs[i]
		if s.slotBytes != c.slotBytes && s.touched < before && !leased[i] && l.slabMayLeaveLocked(s) {
			best, before = i, s.touched
		}
	}
	return best
}

// leaseWalkMax bounds the blocks that one look for leased chains goes over: some tens of milliseconds.
const leaseWalkMax = 1 << 20

// leasedSlabsLocked are the slabs that hold blocks of leased chains: a lease is on the last block and keeps its ancestors. It answers false when there are too many to look at.
func (l *Ledger) leasedSlabsLocked() (map[int]bool, bool) {
	slabs, seen := map[int]bool{}, map[recordID]bool{}
	for _, h := range l.holds.byID {
		for id := h.block; id != 0 && !seen[id]; id = l.recs.at(id).parent {
			seen[id] = true
			if len(seen) > leaseWalkMax {
				return nil, false
			}
			for s := l.recs.at(id).slots; s != 0; s = l.slot(s).next {
				i, _ := s.split()
				slabs[i] = true
			}
		}
	}
	return slabs, true
}

func (l *Ledger) slabMayLeaveLocked(s *slab) bool {
	for k := range s.slots {
		m := &s.slots[k]
		if m.state == SlotFree {
			continue
		}
		if m.state != SlotResident || m.pins > 0 || l.recs.at(m.block).leases > 0 {
			return false
		}
	}
	return true
}

// emptySlabLocked empties a slab. This is a forced removal: blocks may leave before their children, which cannot be matched from then on and leave as they get cold.
func (l *Ledger) emptySlabLocked(i int) {
	l.counts.Reclaimed++
	for k := range l.slabs[i].slots {
		if l.slabs[i].slots[k].state == SlotResident {
			l.evictSlotLocked(makeSlotRef(i, k))
			l.counts.Evicted++
		}
	}
	l.freeSlabLocked(i)
}

// evictSlotLocked removes one resident slot. Where it is pinned it stays out of use, to be freed with the last pin.
func (l *Ledger) evictSlotLocked(s SlotRef) {
	m := l.slot(s)
	id := m.block
	l.nonresidentLocked(id)
	l.slotEventLocked(m, slotEvict)
	if m.pins > 0 {
		slab, slot := s.split()
		l.slots.Clear(slab, slot) // no later daemon adopts it
		l.leafChangedLocked(id)
		return
	}
	l.releaseSlotLocked(s)
	l.dropIfEmptyLocked(id)
}

// nonresidentLocked counts one resident shard of a block less.
func (l *Ledger) nonresidentLocked(id recordID) {
	r := l.recs.at(id)
	if l.complete(r) {
		l.matchable--
		l.spaces[r.space].complete--
	}
	r.resident--
}

// evictLeafLocked removes the block of a class that is to leave next. It answers false when none may.
func (l *Ledger) evictLeafLocked(c *class) bool {
	id, ok := c.leaves.pop()
	if !ok {
		return false
	}
	l.counts.Evicted++
	l.removeBlockLocked(id)
	return true
}

// removeBlockLocked evicts all slots of a block, none of which is pinned or being filled.
func (l *Ledger) removeBlockLocked(id recordID) {
	for {
		s := l.recs.at(id).slots
		last := l.slot(s).next == 0
		l.evictSlotLocked(s)
		if last {
			return
		}
	}
}
