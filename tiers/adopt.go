package tiers

import (
	"slices"
	"time"

	"github.com/kvferry/kvferry/tiers/pool"
)

// driveTimeout is how long a device may still write into a pool slot that an earlier daemon was reading it into when it was killed.
const driveTimeout = 30 * time.Second

// setAside is a slot that nobody may use until then.
type setAside struct {
	slot  SlotRef
	until time.Time
}

// adoptPart is how many slots are taken over while the ledger is held: some milliseconds.
const adoptPart = 1 << 13

// Adopt takes over the slots of a store that an earlier daemon left. It is called once for each store, the pool first. Meanwhile others may use the ledger, and nothing is moved to the store.
func (l *Ledger) Adopt(now time.Time, id StoreID, found []pool.Resident) (kept int) {
	closed := l.beginAdopt(now, id)
	for part := range slices.Chunk(found, adoptPart) {
		kept += l.adoptSome(now, id, part)
	}
	for part := range slices.Chunk(found, adoptPart) {
		l.noteIncomplete(now, part)
	}
	l.endAdopt(id, closed)
	return kept
}

// noteIncomplete has blocks leave in time that lack a shard now that all have come.
func (l *Ledger) noteIncomplete(now time.Time, found []pool.Resident) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range found {
		h := &found[i].Header
		ref, ok := l.byID[h.Space]
		if !ok || h.Shards < 2 {
			continue
		}
		id := l.index.find(ref, &h.Hash)
		if id == 0 {
			continue
		}
		if r := l.recs.at(id); r.resident > 0 && !l.isComplete(r) {
			l.partial = append(l.partial, partialBlock{ref, h.Hash, now.Add(l.limits.IncompleteKept)})
		}
	}
}

func (l *Ledger) beginAdopt(now time.Time, id StoreID) (closed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.now = now.UnixNano()
	st := l.stores[id]
	for i := range st.slabs {
		if slotBytes, n := st.slots.SlabInUse(i); n > 0 {
			l.addSlabLocked(st.first+i, slotBytes, n)
		}
	}
	closed, st.closed = st.closed, true
	return closed
}

func (l *Ledger) adoptSome(now time.Time, id StoreID, found []pool.Resident) (kept int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	st := l.stores[id]
	for _, r := range found {
		switch {
		case r.Aside:
			// The time counts from the read, however often daemons were started since; clocks jump.
			if since := now.Sub(time.UnixMilli(int64(min(r.Header.StoredMs, uint64(now.UnixMilli()))))); since < driveTimeout {
				l.setAsideLocked(makeSlotRef(st.first+r.Slab, r.Slot), now.Add(driveTimeout-since))
			} else {
				st.slots.Clear(r.Slab, r.Slot)
			}
		case l.adoptLocked(now, st, r):
			kept++
		default:
			st.slots.Clear(r.Slab, r.Slot)
		}
	}
	return kept
}

func (l *Ledger) endAdopt(id StoreID, closed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	st := l.stores[id]
	st.closed = closed
	for i := st.first; i < st.first+st.slabs; i++ {
		if l.slabs[i].slots != nil && l.slabs[i].used == 0 {
			l.freeSlabLocked(i) // before the free slots are listed: it goes over the list
		}
	}
	for _, c := range st.classes {
		l.rebuildFreeLocked(c)
	}
}

func (l *Ledger) adoptLocked(now time.Time, st *store, r pool.Resident) bool {
	h := r.Header
	ref, err := l.spaceLocked(SpaceShape{ID: h.Space, Shards: h.Shards, ShardBytes: h.Length})
	slotBytes, _ := st.slots.SlabInUse(r.Slab)
	if err != nil || slotBytes != l.spaces[ref].slotBytes || h.Shard >= h.Shards {
		return false
	}
	b := Block{Hash: h.Hash, Parent: h.Parent}
	id := l.recordLocked(ref, b)
	s := makeSlotRef(st.first+r.Slab, r.Slot)
	k, has := l.storeInLocked(id, st.tier)
	if l.shardSlotLocked(id, h.Shard, st.tier) != 0 || (has && l.stores[k] != st) { // the first of two copies in a tier wins: their bytes are the same. Shards of a block share a drive
		l.dropIfEmptyLocked(id)
		return false
	}
	m := l.slot(s)
	l.slotEventLocked(m, slotFill)
	l.takeSlotLocked(s, id, h.Shard)
	m.generation, m.crc = h.Generation, h.CRC32C
	used := time.UnixMilli(int64(min(h.StoredMs, uint64(now.UnixMilli())))) // clocks jump, and headers may say anything
	l.residentLocked(now.UnixNano(), s, used.UnixNano(), b)
	return true
}

// rebuildFreeLocked lists the free slots of a class.
func (l *Ledger) rebuildFreeLocked(c *class) {
	c.free = c.free[:0]
	for i := c.store.first; i < c.store.first+c.store.slabs; i++ {
		if l.slabs[i].slots == nil || l.slabs[i].slotBytes != c.slotBytes {
			continue
		}
		for k := range l.slabs[i].slots {
			if l.slabs[i].slots[k].state == SlotFree {
				c.free = append(c.free, makeSlotRef(i, k))
			}
		}
	}
}

// setAsideLocked keeps a free slot out of use for as long as a device may write there.
func (l *Ledger) setAsideLocked(s SlotRef, until time.Time) {
	m := l.slot(s)
	l.slotEventLocked(m, slotFill)
	l.slotEventLocked(m, slotAbort)
	i, _ := s.split()
	l.slabs[i].used++
	l.storeOf(s).usedBytes += l.slabs[i].slotBytes
	l.apart = append(l.apart, setAside{s, until})
}

func (l *Ledger) expireAsideLocked(now time.Time) {
	l.apart = slices.DeleteFunc(l.apart, func(a setAside) bool {
		if a.until.After(now) {
			return false
		}
		i, _ := a.slot.split()
		st, slab, slot := l.local(a.slot)
		l.slotEventLocked(l.slot(a.slot), slotQuiet)
		st.slots.Clear(slab, slot)
		l.slabs[i].used--
		st.usedBytes -= l.slabs[i].slotBytes
		c := l.class(st, l.slabs[i].slotBytes)
		c.free = append(c.free, a.slot)
		return true
	})
}
