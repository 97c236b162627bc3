package tiers

import (
	"fmt"

	"github.com/kvferry/kvferry/tiers/policy"
	"github.com/kvferry/kvferry/tiers/pool"
)

// StoreID names one memory of the node: 0 is the pool, the drives come after it in the order of Config.Drives.
type StoreID uint16

// poolStore is the only store of the DRAM tier.
const poolStore StoreID = 0

// store is the pool, or a drive.
type store struct {
	tier      int
	slots     Slots
	first     int // number of its first slab among all
	slabs     int
	classes   map[uint64]*class
	freeSlabs int
	cutUpTo   int // none of the slabs before it is free
	usedBytes uint64
	blocks    int  // that have a slot here
	closed    bool // nothing is written to it, and what only it has is not found
}

// class is all slabs of a store of one slot length: their free slots, and the blocks in them that may leave.
type class struct {
	store     *store
	slotBytes uint64
	slots     int
	free      []SlotRef
	leaves    policy.Set
	noSlab    int64 // when it last looked for a slab of another class in vain, unix ns
	relieving bool  // more was to leave than one PlanDown does
	leaving   int   // slots from which blocks are being moved, to be free when that has succeeded
	held      int   // moves of blocks that could leave when they were planned
}

func (l *Ledger) addStoreLocked(tier int, slots Slots) {
	st := &store{tier: tier, slots: slots, first: len(l.slabs), slabs: slots.Slabs(), freeSlabs: slots.Slabs(), classes: map[uint64]*class{}}
	id := StoreID(len(l.stores))
	l.stores = append(l.stores, st)
	for range st.slabs {
		l.slabs = append(l.slabs, slab{store: id})
	}
}

// AddDrive adds a drive that has come later, empty until it is adopted. It is closed: nothing is moved there before whoever moves knows of it, and says SetOpen.
func (l *Ledger) AddDrive(slots Slots) (StoreID, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.slabs)+slots.Slabs() > pool.SlabsMax {
		return 0, fmt.Errorf("%w: %d slabs", ErrLimit, pool.SlabsMax)
	}
	l.addStoreLocked(policy.NVMe, slots)
	id := StoreID(len(l.stores) - 1)
	l.stores[id].closed = true
	return id, nil
}

func (l *Ledger) class(st *store, slotBytes uint64) *class {
	c := st.classes[slotBytes]
	if c == nil {
		c = &class{store: st, slotBytes: slotBytes, leaves: l.policy.NewSet(l, st.tier)}
		st.classes[slotBytes] = c
	}
	return c
}

// storeOf is where a slot lies.
func (l *Ledger) storeOf(s SlotRef) *store {
	i, _ := s.split()
	return l.stores[l.slabs[i].store]
}

// storeInLocked is the store in which a block has slots of a tier; false when it has none there. Shards of a block share a drive.
func (l *Ledger) storeInLocked(id recordID, tier int) (StoreID, bool) {
	for s := l.recs.at(id).slots; s != 0; s = l.slot(s).next {
		i, _ := s.split()
		if k := l.slabs[i].store; l.stores[k].tier == tier {
			return k, true
		}
	}
	return 0, false
}

// local is a slot's slab as its store counts them, and its number in it.
func (l *Ledger) local(s SlotRef) (st *store, slab, slot int) {
	i, k := s.split()
	st = l.stores[l.slabs[i].store]
	return st, i - st.first, k
}

// DrivesFit tells whether shards of a space fit into the slabs of some drive; true where there is none.
func (l *Ledger) DrivesFit(ref SpaceRef) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, st := range l.stores[1:] {
		if st.slots.SlotsPerSlab(l.spaces[ref].slotBytes) > 0 {
			return true
		}
	}
	return len(l.stores) == 1
}

// SetOpen closes a drive that is in trouble, or opens it again: while it is closed nothing is moved there, and blocks that only it has are not found. What it has stays in the book.
func (l *Ledger) SetOpen(id StoreID, open bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stores[id].closed = !open
}

// Meta is policy.Table.
func (l *Ledger) Meta(id policy.ID) *policy.Meta { return &l.recs.aside(id).meta }

// Stamp is policy.Table.
func (l *Ledger) Stamp(id policy.ID) int64 {
	r := l.recs.at(id)
	if !l.isComplete(r) {
		return 0
	}
	return r.stamp
}
