package tiers

import (
	"fmt"
	"math"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers/policy"
	"github.com/kvferry/kvferry/tiers/pool"
)

// SlotRef names a slot of any store; 0 is none.
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

// slotInfo is the ledger's side of a slot. 24 bytes.
type slotInfo struct {
	generation kvferry.Generation // that it has, or will have when it is committed
	crc        uint32
	block      recordID
	next       SlotRef // of the same block
	pins       uint16
	shard      uint8
	state      SlotState
}

// pinsMax bounds the pins of one slot; above it a Pin finds nothing there.
const pinsMax = math.MaxUint16

type slab struct {
	slotBytes uint64
	slots     []slotInfo // nil: the slab is free
	used      int        // slots that are not free
	touched   int64      // last time that one of its slots was committed or read
	store     StoreID
}

func (l *Ledger) slot(s SlotRef) *slotInfo {
	slab, slot := s.split()
	return &l.slabs[slab].slots[slot]
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
	k := l.slabs[i].store
	l.slabs[i] = slab{slotBytes: slotBytes, slots: make([]slotInfo, n), store: k}
	l.stores[k].freeSlabs--
	l.class(l.stores[k], slotBytes).slots += n
}

func (l *Ledger) freeSlabLocked(i int) {
	st := l.stores[l.slabs[i].store]
	c := l.class(st, l.slabs[i].slotBytes)
	kept := c.free[:0]
	for _, s := range c.free {
		if k, _ := s.split(); k != i {
			kept = append(kept, s)
		}
	}
	c.free = kept
	c.slots -= len(l.slabs[i].slots)
	st.slots.FreeSlab(i - st.first)
	l.slabs[i] = slab{store: l.slabs[i].store}
	st.freeSlabs++
	st.cutUpTo = min(st.cutUpTo, i-st.first)
}

// takeSlotLocked hands a free slot to a block.
func (l *Ledger) takeSlotLocked(s SlotRef, id recordID, shard uint16) {
	i, _ := s.split()
	st := l.storeOf(s)
	_, had := l.storeInLocked(id, st.tier)
	m, r := l.slot(s), l.recs.at(id)
	m.block, m.shard, m.next, m.crc = id, uint8(shard), r.slots, 0
	r.slots = s
	r.filling[st.tier]++
	l.slabs[i].used++
	st.usedBytes += l.slabs[i].slotBytes
	l.spaces[r.space].slots[st.tier]++
	if !had {
		st.blocks++
		if r.parent != 0 {
			l.recs.aside(r.parent).children[st.tier]++
			l.leafChangedLocked(r.parent)
		}
	}
	l.leafChangedLocked(id)
}

// releaseSlotLocked takes a slot that nobody touches any more from its block and makes it free.
func (l *Ledger) releaseSlotLocked(s SlotRef) {
	i, _ := s.split()
	st, localSlab, localSlot := l.local(s)
	m := l.slot(s)
	id := m.block
	r := l.recs.at(id)
	for p := &r.slots; ; p = &l.slot(*p).next {
		if *p == s {
			*p = m.next
			break
		}
	}
	l.slotEventLocked(m, slotQuiet)
	*m = slotInfo{generation: m.generation}
	st.slots.Clear(localSlab, localSlot)
	l.slabs[i].used--
	st.usedBytes -= l.slabs[i].slotBytes
	l.spaces[r.space].slots[st.tier]--
	c := l.class(st, l.slabs[i].slotBytes)
	c.free = append(c.free, s)
	if _, has := l.storeInLocked(id, st.tier); !has {
		st.blocks--
		if r.parent != 0 {
			l.recs.aside(r.parent).children[st.tier]--
			l.leafChangedLocked(r.parent)
		}
	}
}

// shardSlotLocked is the slot that a shard of a block has in a tier, filling or resident.
func (l *Ledger) shardSlotLocked(id recordID, shard uint16, tier int) SlotRef {
	for s := l.recs.at(id).slots; s != 0; s = l.slot(s).next {
		if m := l.slot(s); m.shard == uint8(shard) && m.state != SlotLeaving && l.storeOf(s).tier == tier {
			return s
		}
	}
	return 0
}

// allocateLocked finds a free slot: one of the class, one of a free slab, that of the class's own next block to leave, or one of another class's coldest slab.
func (l *Ledger) allocateLocked(now int64, c *class) (SlotRef, bool) {
	for {
		if n := len(c.free); n > 0 {
			s := c.free[n-1]
			c.free = c.free[:n-1]
			return s, true
		}
		if i := l.freeSlabIndex(c.store); i >= 0 {
			l.formatLocked(i, c)
			continue
		}
		if l.evictLeafLocked(now, c) {
			continue
		}
		if !l.reclaimLocked(now, c) {
			return 0, false
		}
	}
}

// reclaimLocked gives a class the coldest slab of another one of its store, if that was used last before anything that would leave of its own.
func (l *Ledger) reclaimLocked(now int64, c *class) bool {
	i := l.coldestSlabLocked(now, c)
	if i < 0 {
		return false
	}
	l.emptySlabLocked(i)
	l.formatLocked(i, c)
	return true
}

func (l *Ledger) freeSlabIndex(st *store) int {
	if st.freeSlabs == 0 {
		return -1
	}
	for i := st.first + st.cutUpTo; i < st.first+st.slabs; i++ {
		if l.slabs[i].slots == nil {
			st.cutUpTo = i - st.first
			return i
		}
	}
	return -1
}

func (l *Ledger) formatLocked(i int, c *class) {
	n := c.store.slots.FormatSlab(i-c.store.first, c.slotBytes)
	l.addSlabLocked(i, c.slotBytes, n)
	for k := n - 1; k >= 0; k-- {
		c.free = append(c.free, makeSlotRef(i, k))
	}
}

// reclaimWait is how long a class does without another look for a slab when all that could be reclaimed was leased: such a look goes over all that is.
const reclaimWait = int64(100 * time.Millisecond)

// coldestSlabLocked is a slab of another class of the store, all of which may leave, that was used last before this class's own next block to leave; -1 when there is none.
func (l *Ledger) coldestSlabLocked(now int64, c *class) int {
	if len(c.store.classes) == 1 || (now >= c.noSlab && now < c.noSlab+reclaimWait) {
		return -1
	}
	before := int64(math.MaxInt64)
	if id, ok := c.leaves.Next(now); ok {
		before = l.Stamp(id)
	}
	var leased map[int]bool
	best := -1
	for i := c.store.first; i < c.store.first+c.store.slabs; i++ {
		s := &l.slabs[i]
		if s.slots == nil || s.slotBytes == c.slotBytes || s.touched >= before || leased[i] || !l.slabMayLeaveLocked(s) {
			continue
		}
		if leased == nil { // only now: mostly there is nothing to choose from
			var ok bool
			if leased, ok = l.leasedSlabsLocked(); !ok {
				break
			}
		}
		if !leased[i] {
			best, before = i, s.touched
		}
	}
	if best < 0 && leased != nil {
		c.noSlab = now
	}
	return best
}

// leaseWalkMax bounds the blocks that one look for leased chains goes over: some tens of milliseconds.
const leaseWalkMax = 1 << 20

// leasedBlocksLocked are the blocks of leased chains: a lease is on the last block and keeps its ancestors. It answers false when there are too many to look at.
func (l *Ledger) leasedBlocksLocked() (map[recordID]bool, bool) {
	seen := map[recordID]bool{}
	for _, h := range l.holds.byID {
		for id := h.block; id != 0 && !seen[id]; id = l.recs.at(id).parent {
			seen[id] = true
			if len(seen) > leaseWalkMax {
				return nil, false
			}
		}
	}
	return seen, true
}

// leasedSlabsLocked are the slabs that hold blocks of leased chains.
func (l *Ledger) leasedSlabsLocked() (map[int]bool, bool) {
	blocks, ok := l.leasedBlocksLocked()
	slabs := map[int]bool{}
	for id := range blocks {
		for s := l.recs.at(id).slots; s != 0; s = l.slot(s).next {
			i, _ := s.split()
			slabs[i] = true
		}
	}
	return slabs, ok
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
			id := l.slabs[i].slots[k].block
			l.evictSlotLocked(makeSlotRef(i, k), Reclaimed)
			l.lacksShardLocked(id)
			l.counts.Evicted++
		}
	}
	l.freeSlabLocked(i)
}

// evictSlotLocked removes one resident slot. Where it is pinned it stays out of use, to be freed with the last pin.
func (l *Ledger) evictSlotLocked(s SlotRef, why Reason) {
	m := l.slot(s)
	id := m.block
	l.nonresidentLocked(s, why)
	l.slotEventLocked(m, slotEvict)
	l.leafChangedLocked(id)
	if m.pins > 0 {
		st, slab, slot := l.local(s)
		st.slots.Clear(slab, slot) // no later daemon adopts it
		return
	}
	l.releaseSlotLocked(s)
	l.dropIfEmptyLocked(id)
}

// residentLocked makes a filling slot resident.
func (l *Ledger) residentLocked(now int64, s SlotRef, stamp int64, b Block) {
	i, _ := s.split()
	tier := l.storeOf(s).tier
	m := l.slot(s)
	r := l.recs.at(m.block)
	l.slotEventLocked(m, slotCommit)
	r.filling[tier]--
	r.in[tier]++
	if r.resident == 0 {
		l.arrivedLocked(now, m.block, b)
	}
	if !l.elsewhereLocked(m.block, s) {
		r.resident++
		if l.isComplete(r) {
			l.matchable++
			l.spaces[r.space].complete++
		}
	}
	if l.isIn(r, tier) {
		l.complete[tier]++
		l.spaces[r.space].inTier[tier]++
		l.emitLocked(m.block, tier, Stored, 0)
	}
	r.stamp = max(r.stamp, stamp)
	l.slabs[i].touched = max(l.slabs[i].touched, stamp)
	l.leafChangedLocked(m.block)
}

// nonresidentLocked counts one resident shard of a block less.
func (l *Ledger) nonresidentLocked(s SlotRef, why Reason) {
	tier := l.storeOf(s).tier
	id := l.slot(s).block
	r := l.recs.at(id)
	if l.isIn(r, tier) {
		l.complete[tier]--
		l.spaces[r.space].inTier[tier]--
		l.emitLocked(id, tier, Removed, why)
	}
	r.in[tier]--
	if l.elsewhereLocked(id, s) {
		return
	}
	if l.isComplete(r) {
		l.matchable--
		l.spaces[r.space].complete--
	}
	if r.resident--; r.resident == 0 {
		l.policy.Gone(r.stamp, l.Meta(id), hashLow(&r.hash))
	}
}

// elsewhereLocked tells whether the shard of a slot is resident in another one too.
func (l *Ledger) elsewhereLocked(id recordID, s SlotRef) bool {
	shard := l.slot(s).shard
	for o := l.recs.at(id).slots; o != 0; o = l.slot(o).next {
		if m := l.slot(o); o != s && m.shard == shard && m.state == SlotResident {
			return true
		}
	}
	return false
}

// arrivedLocked tells the policy of a block that was in no tier.
func (l *Ledger) arrivedLocked(now int64, id recordID, b Block) {
	r := l.recs.at(id)
	r.used = false
	var parent *policy.Meta
	if r.parent != 0 && l.recs.at(r.parent).resident > 0 {
		parent = l.Meta(r.parent)
	}
	l.policy.New(now, l.Meta(id), parent, policy.Arrival{Hash: hashLow(&r.hash), Partial: b.Partial, Retention: b.Retention})
}

// evictTries bounds the blocks that are passed over because others descend from them.
const evictTries = 16

// evictLeafLocked removes from a class the block that is to leave next. It answers false when none may. Blocks in DRAM from which others descend, on a drive, are to be moved and not to be lost: one of them goes
// only where nothing else may, and no chain that is leased needs it.
func (l *Ledger) evictLeafLocked(now int64, c *class) bool {
	var passed []recordID
	defer func() {
		for _, id := range passed {
			l.leafChangedLocked(id)
		}
	}()
	for range evictTries {
		id, ok := c.leaves.Next(now)
		if !ok {
			break
		}
		if !l.orphansLocked(id, c.store.tier) {
			l.leaveLocked(id, c.store.tier)
			return true
		}
		c.leaves.Remove(id)
		passed = append(passed, id)
	}
	if len(passed) == 0 {
		return false
	}
	leased, ok := l.leasedBlocksLocked()
	for i, id := range passed {
		if ok && !leased[id] {
			passed = append(passed[:i:i], passed[i+1:]...)
			l.leafChangedLocked(id)
			l.leaveLocked(id, c.store.tier)
			return true
		}
	}
	return false
}

// leaveLocked takes a block that may leave out of a tier.
func (l *Ledger) leaveLocked(id recordID, tier int) {
	why := Evicted
	switch {
	case l.orphansLocked(id, tier):
		why = Forced
		l.counts.Forced++
	case tier == policy.NVMe:
		l.counts.DriveEvicted++
	case l.isIn(l.recs.at(id), policy.NVMe):
		why = Demoted
		l.counts.Released++
	default:
		l.counts.Evicted++
	}
	l.removeBlockLocked(id, tier, why)
}

// removeBlockLocked evicts all slots that a block has in a tier, none of which is pinned or being filled.
func (l *Ledger) removeBlockLocked(id recordID, tier int, why Reason) {
	var slots []SlotRef
	for s := l.recs.at(id).slots; s != 0; s = l.slot(s).next {
		if l.storeOf(s).tier == tier {
			slots = append(slots, s)
		}
	}
	for _, s := range slots {
		l.evictSlotLocked(s, why)
	}
	l.lacksShardLocked(id)
}

// lacksShardLocked has a block leave in time of which something was removed, if it lacks a shard by that.
func (l *Ledger) lacksShardLocked(id recordID) {
	if r := l.recs.at(id); r.resident > 0 && !l.isComplete(r) { // one that is gone has none
		l.partial = append(l.partial, partialBlock{r.space, r.hash, time.Unix(0, l.now).Add(l.limits.IncompleteKept)})
	}
}
