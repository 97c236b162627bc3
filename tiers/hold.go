package tiers

import (
	"container/heap"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers/policy"
)

// Owner is who holds leases and pins: a session, or a claim. All that it holds goes at once with ReleaseOwner.
type Owner uint64

// HoldID names a lease or a pin; 0 is none.
type HoldID uint64

// hold is a lease (on a block: it stays in existence) or a pin (on slots: they stay where they are), with an owner and a deadline.
type hold struct {
	id    HoldID
	owner Owner
	key   string
	until time.Time
	block recordID  // lease
	slots []SlotRef // pin
	pos   int
}

type holdKey struct {
	owner Owner
	key   string
}

// holdTable is the one table of leases and pins, and its timer heap.
type holdTable struct {
	byID    map[HoldID]*hold
	byKey   map[holdKey]HoldID
	byOwner map[Owner]map[HoldID]struct{}
	timers  holdHeap
	last    HoldID
	leases  int
	pins    int // slots
}

func (t *holdTable) init() {
	t.byID, t.byKey, t.byOwner = map[HoldID]*hold{}, map[holdKey]HoldID{}, map[Owner]map[HoldID]struct{}{}
}

type holdHeap []*hold

func (h holdHeap) Len() int           { return len(h) }
func (h holdHeap) Less(i, j int) bool { return h[i].until.Before(h[j].until) }
func (h holdHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i]; h[i].pos, h[j].pos = i, j }
func (h *holdHeap) Push(x any)        { e := x.(*hold); e.pos = len(*h); *h = append(*h, e) }
func (h *holdHeap) Pop() any {
	n := len(*h) - 1
	e := (*h)[n]
	(*h)[n] = nil
	*h = (*h)[:n]
	return e
}

func (l *Ledger) addHoldLocked(h *hold) HoldID {
	t := &l.holds
	t.last++
	h.id = t.last
	t.byID[h.id] = h
	if h.key != "" {
		t.byKey[holdKey{h.owner, h.key}] = h.id
	}
	if t.byOwner[h.owner] == nil {
		t.byOwner[h.owner] = map[HoldID]struct{}{}
	}
	t.byOwner[h.owner][h.id] = struct{}{}
	heap.Push(&t.timers, h)
	return h.id
}

func (l *Ledger) removeHoldLocked(h *hold) {
	t := &l.holds
	delete(t.byID, h.id)
	if k := (holdKey{h.owner, h.key}); h.key != "" && t.byKey[k] == h.id {
		delete(t.byKey, k)
	}
	delete(t.byOwner[h.owner], h.id)
	if len(t.byOwner[h.owner]) == 0 {
		delete(t.byOwner, h.owner)
	}
	heap.Remove(&t.timers, h.pos)
	if h.block != 0 {
		t.leases--
		l.recs.at(h.block).leases--
		l.dropIfEmptyLocked(h.block)
	}
	for _, s := range h.slots {
		t.pins--
		l.unpinSlotLocked(s)
	}
}

// unpinSlotLocked ends one pin of a slot, which is free if it only waited for that.
func (l *Ledger) unpinSlotLocked(s SlotRef) {
	m := l.slot(s)
	m.pins--
	if id := m.block; m.state == SlotLeaving && m.pins == 0 {
		l.releaseSlotLocked(s)
		l.dropIfEmptyLocked(id)
	} else {
		l.leafChangedLocked(id)
	}
}

// leaseLocked leases a block for a key; an earlier lease of that key is replaced.
func (l *Ledger) leaseLocked(owner Owner, key string, block recordID, until time.Time) error {
	if old, ok := l.holds.byKey[holdKey{owner, key}]; ok {
		h := l.holds.byID[old]
		if h.block == block {
			h.until = until
			heap.Fix(&l.holds.timers, h.pos)
			return nil
		}
		l.removeHoldLocked(h)
	}
	if len(l.holds.byID) >= l.limits.Holds {
		return fmt.Errorf("%w: %d leases and pins", ErrLimit, l.limits.Holds)
	}
	l.recs.at(block).leases++
	l.holds.leases++
	l.leafChangedLocked(block)
	l.addHoldLocked(&hold{owner: owner, key: key, until: until, block: block})
	return nil
}

// Lease leases a block whether it is here yet or not: an offer's last block keeps the whole chain from leaving, also while it is still being stored.
func (l *Ledger) Lease(owner Owner, key string, space SpaceRef, h kvferry.Hash, until time.Time) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	id := l.index.find(space, &h)
	if id == 0 {
		id = l.addRecordLocked(space, h)
	}
	err := l.leaseLocked(owner, key, id, until)
	if err != nil {
		l.dropIfEmptyLocked(id)
	}
	return err
}

// PinResult is where the blocks of a Pin lie. A Place with Slot 0 is a miss.
type PinResult struct {
	Hold   HoldID
	Places []Place
	Hits   int
}

// Pin finds a shard of each of these blocks and keeps the slots from being used again until Unpin or the deadline. A zero deadline is none:
// such a pin is for a transfer of the daemon's own, which gives it back when it is quiet.
func (l *Ledger) Pin(now time.Time, owner Owner, space SpaceRef, shard uint16, hashes []byte, until time.Time) (PinResult, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.holds.byID) >= l.limits.Holds {
		return PinResult{}, fmt.Errorf("%w: %d leases and pins", ErrLimit, l.limits.Holds)
	}
	n := len(hashes) / kvferry.HashSize
	ids := make([]recordID, n)
	l.index.findBatch(space, 0, hashes, ids)
	res := PinResult{Places: make([]Place, n)}
	h := &hold{owner: owner, until: until}
	if until.IsZero() {
		h.until = now.Add(100 * 365 * 24 * time.Hour)
	}
	stamp := now.UnixNano()
	for i, id := range ids {
		if id == 0 {
			continue
		}
		s := l.shardSlotLocked(id, shard, policy.DRAM)
		if s == 0 || l.slot(s).state != SlotResident || l.slot(s).pins == pinsMax {
			continue
		}
		l.pinLocked(h, s)
		slab, _ := s.split()
		l.slabs[slab].touched = max(l.slabs[slab].touched, stamp)
		l.recs.at(id).stamp = max(l.recs.at(id).stamp, stamp)
		res.Places[i] = l.placeLocked(s, l.spaces[space].shape.ShardBytes)
		res.Hits++
	}
	if res.Hits > 0 {
		res.Hold = l.addHoldLocked(h)
	}
	return res, nil
}

func (l *Ledger) pinLocked(h *hold, s SlotRef) {
	m := l.slot(s)
	m.pins++
	l.holds.pins++
	h.slots = append(h.slots, s)
	l.leafChangedLocked(m.block)
}

// Unpin gives a hold back. It answers false when it is gone already: expired, or its owner is.
func (l *Ledger) Unpin(id HoldID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.holds.byID[id]
	if h == nil {
		return false
	}
	l.removeHoldLocked(h)
	return true
}

// ReleaseKey gives back what Match leased for a key.
func (l *Ledger) ReleaseKey(owner Owner, key string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if id, ok := l.holds.byKey[holdKey{owner, key}]; ok {
		l.removeHoldLocked(l.holds.byID[id])
	}
}

// ReleaseOwner gives back everything that an owner holds, and answers how much that was.
func (l *Ledger) ReleaseOwner(owner Owner) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, id := range slices.Sorted(maps.Keys(l.holds.byOwner[owner])) { // in their order: which slots are used next does not hang on chance
		l.removeHoldLocked(l.holds.byID[id])
		n++
	}
	return n
}

// Expire ends the holds whose deadline has come and forgets blocks that lacked a shard for too long.
func (l *Ledger) Expire(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.now = now.UnixNano()
	for len(l.holds.timers) > 0 && !l.holds.timers[0].until.After(now) {
		l.removeHoldLocked(l.holds.timers[0])
	}
	l.expirePartialLocked(now)
	l.expireAsideLocked(now)
}

func (l *Ledger) expirePartialLocked(now time.Time) {
	n := 0
	for n < len(l.partial) && !l.partial[n].until.After(now) {
		p := l.partial[n]
		n++
		id := l.index.find(p.space, &p.hash)
		if id == 0 {
			continue
		}
		if r := l.recs.at(id); r.resident == 0 || r.filling != [policy.NumTiers]uint8{} || l.isComplete(r) {
			continue // gone, complete by now, or somebody is at it and will be queued again by its Commit
		}
		if l.dropSlotsLocked(id, policy.NumTiers, Incomplete) {
			l.counts.Incomplete++
		}
	}
	l.partial = append(l.partial[:0], l.partial[n:]...)
}
