package tiers

import (
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers/policy"
)

// Reading is a resident slot that is pinned to be read back.
type Reading struct {
	Place       Place
	Slab, Slot  int // as its store counts them
	Space       kvferry.SpaceID
	Hash        kvferry.Hash
	Broken      bool // set by the caller: its bytes are not what was stored
	slotOfStore SlotRef
}

// BeginReading pins resident slots of a store, from one on, up to limit of them and about so many bytes, and tells where to go on; 0: that was the last. Each of them is given to EndReading once. A closed drive has
// none.
func (l *Ledger) BeginReading(id StoreID, from SlotRef, limit int, bytes uint64) (list []Reading, next SlotRef) {
	l.mu.Lock()
	defer l.mu.Unlock()
	st := l.stores[id]
	if st.closed {
		return nil, 0
	}
	i, k := st.first, 0
	if from != 0 {
		i, k = from.split()
	}
	var sum uint64
	for looked := 0; i < st.first+st.slabs; i, k = i+1, 0 {
		s := &l.slabs[i]
		for ; k < len(s.slots); k++ {
			ref := makeSlotRef(i, k)
			if looked >= handSlots || len(list) >= limit || sum >= bytes {
				return list, ref
			}
			looked++
			if m := &s.slots[k]; m.state == SlotResident && m.pins < pinsMax {
				r := l.recs.at(m.block)
				shape := &l.spaces[r.space].shape
				l.pinMoveLocked(ref)
				list = append(list, Reading{Place: l.placeLocked(ref, shape.ShardBytes), Slab: i - st.first, Slot: k, Space: shape.ID, Hash: r.hash, slotOfStore: ref})
				sum += shape.ShardBytes
			}
		}
	}
	return list, 0
}

// EndReading unpins what was read. What a block with a broken slot has in that tier is removed, with its children left behind: where the other tier has it, it is found there. It answers how many slots were
// broken that nobody had removed before.
func (l *Ledger) EndReading(now time.Time, list []Reading) (broken int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.now = now.UnixNano()
	for i := range list {
		s := list[i].slotOfStore
		m := l.slot(s)
		if list[i].Broken && m.state == SlotResident {
			broken++
			l.counts.Dropped++
			l.dropSlotsLocked(m.block, l.storeOf(s).tier, Broken)
		}
		l.unpinMoveLocked(s)
	}
	return broken
}

// SlotsIn is how many slots of a store are resident, or being filled.
func (l *Ledger) SlotsIn(id StoreID) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	st, n := l.stores[id], 0
	for i := range st.slabs {
		n += l.slabs[st.first+i].used
	}
	return n
}

// Stores is how many there are: the pool, and the drives.
func (l *Ledger) Stores() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.stores)
}

// TierOfStore is the tier that a store is in, as policy.DRAM or policy.NVMe.
func TierOfStore(id StoreID) int {
	if id == poolStore {
		return policy.DRAM
	}
	return policy.NVMe
}
