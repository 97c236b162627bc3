package tiers

import (
	"fmt"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers/policy"
)

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
	if c := l.counts; c.Asked != c.DRAM+c.NVMe+c.Peer+c.Missed {
		return fmt.Errorf("lookups: asked %d, dram %d + nvme %d + peer %d + missed %d", c.Asked, c.DRAM, c.NVMe, c.Peer, c.Missed)
	}
	return nil
}

func (l *Ledger) checkSlotsLocked() error {
	pins, excess := map[SlotRef]int{}, 0
	for _, h := range l.holds.byID {
		for _, s := range h.slots {
			pins[s]++
		}
	}
	apart := map[SlotRef]bool{}
	for _, a := range l.apart {
		apart[a.slot] = true
	}
	for _, st := range l.stores {
		if err := l.checkStoreLocked(st, pins, apart, &excess); err != nil {
			return err
		}
	}
	if excess != l.moving {
		return fmt.Errorf("%d pins of moves, counted %d", excess, l.moving)
	}
	return nil
}

func (l *Ledger) checkStoreLocked(st *store, pins map[SlotRef]int, apart map[SlotRef]bool, excess *int) error {
	free := map[SlotRef]bool{}
	for _, c := range st.classes {
		if c.leaving < 0 || c.leaving > c.slots || c.held < 0 || c.held > l.moving {
			return fmt.Errorf("%d of %d slots are leaving, %d moves of leaves", c.leaving, c.slots, c.held)
		}
		for _, s := range c.free {
			if free[s] {
				return fmt.Errorf("slot %d is free twice", s)
			}
			free[s] = true
		}
	}
	var used uint64
	slabsFree := 0
	headers, _ := st.slots.(interface {
		Generation(slab, slot int) kvferry.Generation
	})
	for i := st.first; i < st.first+st.slabs; i++ {
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
			if int(m.pins) < pins[s] {
				return fmt.Errorf("slot %d has %d pins, held %d times", s, m.pins, pins[s])
			}
			*excess += int(m.pins) - pins[s]
			if m.state == SlotFree {
				continue
			}
			n++
			if apart[s] {
				continue
			}
			if err := l.checkSlotLocked(headers, s, i-st.first, k); err != nil {
				return err
			}
		}
		if n != sl.used {
			return fmt.Errorf("slab %d has %d slots in use, counted %d", i, n, sl.used)
		}
		used += uint64(n) * sl.slotBytes
	}
	if used != st.usedBytes || slabsFree != st.freeSlabs {
		return fmt.Errorf("used %d bytes, counted %d; %d slabs free, counted %d", used, st.usedBytes, slabsFree, st.freeSlabs)
	}
	return nil
}

func (l *Ledger) checkSlotLocked(headers interface {
	Generation(slab, slot int) kvferry.Generation
}, s SlotRef, slab, slot int) error {
	m := l.slot(s)
	if headers != nil {
		g := headers.Generation(slab, slot)
		if m.state == SlotResident && g != m.generation || m.state == SlotFilling && (!g.Filling() || g+1 != m.generation) {
			return fmt.Errorf("slot %d is %v with generation %d, header says %d", s, m.state, m.generation, g)
		}
	}
	if m.state == SlotLeaving && m.pins == 0 {
		return fmt.Errorf("slot %d is leaving and nothing holds it", s)
	}
	if m.state != SlotLeaving && l.shardSlotLocked(m.block, uint16(m.shard), l.storeOf(s).tier) != s {
		return fmt.Errorf("slot %d is not its block's", s)
	}
	return nil
}

func (l *Ledger) checkRecordsLocked() error {
	children, leases := map[recordID]uint32{}, map[recordID]uint32{}
	var childrenIn [policy.NumTiers]map[recordID]uint32
	for t := range childrenIn {
		childrenIn[t] = map[recordID]uint32{}
	}
	for _, h := range l.holds.byID {
		if h.block != 0 {
			leases[h.block]++
		}
	}
	live, matchable, complete := 0, 0, [policy.NumTiers]int{}
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
		if err := l.checkRecordLocked(id); err != nil {
			return err
		}
		for t := range policy.NumTiers {
			if _, has := l.storeInLocked(id, t); has && r.parent != 0 {
				childrenIn[t][r.parent]++
			}
			if l.isIn(r, t) {
				complete[t]++
			}
		}
		if l.isComplete(r) {
			matchable++
		}
		if r.leases != leases[id] {
			return fmt.Errorf("block %v has %d leases, held %d times", r.hash, r.leases, leases[id])
		}
	}
	for id, n := range children {
		if l.recs.at(id).children != n {
			return fmt.Errorf("block %v has %d children, counted %d", l.recs.at(id).hash, n, l.recs.at(id).children)
		}
		for t := range policy.NumTiers {
			if got := l.recs.aside(id).children[t]; got != childrenIn[t][id] {
				return fmt.Errorf("block %v has %d children in %v, counted %d", l.recs.at(id).hash, childrenIn[t][id], tierOf(t), got)
			}
		}
	}
	if live != l.recs.live || matchable != l.matchable || complete != l.complete {
		return fmt.Errorf("%d blocks, counted %d; %d matchable, counted %d; by tier %v, counted %v", live, l.recs.live, matchable, l.matchable, complete, l.complete)
	}
	return nil
}

// checkRecordLocked proves a block's own counters.
func (l *Ledger) checkRecordLocked(id recordID) error {
	r := l.recs.at(id)
	var resident, filling [policy.NumTiers]uint8
	distinct := map[uint8]bool{}
	drives := map[StoreID]bool{}
	for s := r.slots; s != 0; s = l.slot(s).next {
		i, _ := s.split()
		t, m := l.storeOf(s).tier, l.slot(s)
		if t == policy.NVMe {
			drives[l.slabs[i].store] = true
		}
		switch m.state {
		case SlotResident:
			resident[t]++
			distinct[m.shard] = true
		case SlotFilling:
			filling[t]++
		}
	}
	if resident != r.in || filling != r.filling || len(distinct) != int(r.resident) {
		return fmt.Errorf("block %v has %v shards resident and %v filling, %d distinct, counted %v, %v and %d", r.hash, resident, filling, len(distinct), r.in, r.filling, r.resident)
	}
	if len(drives) > 1 {
		return fmt.Errorf("block %v is on %d drives", r.hash, len(drives))
	}
	for t := range policy.NumTiers {
		if may, in := l.mayLeaveLocked(id, t), l.Meta(id).Pos[t] >= 0; may != in {
			return fmt.Errorf("block %v may leave %v: %v, in the set: %v", r.hash, tierOf(t), may, in)
		}
	}
	return nil
}
