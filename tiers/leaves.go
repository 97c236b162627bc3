package tiers

import "container/heap"

// leafHeap holds the blocks of a class that may leave: resident, without children, leases or pins. The one that was used longest ago is on top. A use
// only changes the stamp in the record; the heap is put right when a block comes up for leaving.
type leafHeap struct {
	l       *Ledger
	entries []leaf
}

type leaf struct {
	stamp int64
	id    recordID
}

func (h *leafHeap) Len() int           { return len(h.entries) }
func (h *leafHeap) Less(i, j int) bool { return h.entries[i].stamp < h.entries[j].stamp }
func (h *leafHeap) Swap(i, j int) {
	h.entries[i], h.entries[j] = h.entries[j], h.entries[i]
	h.l.recs.at(h.entries[i].id).heapPos = int32(i)
	h.l.recs.at(h.entries[j].id).heapPos = int32(j)
}

func (h *leafHeap) Push(x any) {
	e := x.(leaf)
	h.l.recs.at(e.id).heapPos = int32(len(h.entries))
	h.entries = append(h.entries, e)
}

func (h *leafHeap) Pop() any {
	n := len(h.entries) - 1
	e := h.entries[n]
	h.entries = h.entries[:n]
	h.l.recs.at(e.id).heapPos = -1
	return e
}

// peek is the block that leaves next.
func (h *leafHeap) peek() (recordID, bool) {
	for len(h.entries) > 0 {
		e := &h.entries[0]
		now := h.l.stampOf(e.id)
		if e.stamp == now {
			return e.id, true
		}
		e.stamp = now
		heap.Fix(h, 0)
	}
	return 0, false
}

func (h *leafHeap) pop() (recordID, bool) {
	id, ok := h.peek()
	if ok {
		heap.Pop(h)
	}
	return id, ok
}

// stampOf orders leaving: a block that lacks a shard serves nobody and goes first.
func (l *Ledger) stampOf(id recordID) int64 {
	r := l.recs.at(id)
	if !l.complete(r) {
		return 0
	}
	return r.stamp
}

// leafChangedLocked puts a block into its class's heap or takes it out, after something that decides whether it may leave has changed.
func (l *Ledger) leafChangedLocked(id recordID) {
	r := l.recs.at(id)
	may := r.slots != 0 && r.children == 0 && r.leases == 0 && r.filling == 0
	for s := r.slots; may && s != 0; s = l.slot(s).next {
		may = l.slot(s).pins == 0 && l.slot(s).state == SlotResident
	}
	if !may {
		l.leafRemoveLocked(id)
		return
	}
	if r.heapPos < 0 {
		heap.Push(&l.class(l.spaces[r.space].slotBytes).leaves, leaf{l.stampOf(id), id})
	}
}

func (l *Ledger) leafRemoveLocked(id recordID) {
	if r := l.recs.at(id); r.heapPos >= 0 {
		heap.Remove(&l.class(l.spaces[r.space].slotBytes).leaves, int(r.heapPos))
	}
}
