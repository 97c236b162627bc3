package tiers

import (
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers/pool"
)

// FillStatus is what BeginFill found for a block.
type FillStatus uint8

// The statuses.
const (
	FillNew     FillStatus = iota // a slot was taken: copy, then Commit or Abort
	FillPresent                   // the shard is resident already
	FillRunning                   // somebody else is filling it
	FillBusy                      // no room
)

// Fill is a slot being filled.
type Fill struct {
	Status FillStatus
	Block  Block
	Place  Place
}

type partialBlock struct {
	space SpaceRef
	hash  kvferry.Hash
	until time.Time
}

// BeginFill takes a slot for every block of which this shard is neither resident nor being filled. It evicts what it must and no more.
// The slots stay filling until Commit or Abort, however long that takes: whoever asked says when nothing writes there any more.
func (l *Ledger) BeginFill(space SpaceRef, shard uint16, blocks []Block) []Fill {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]Fill, len(blocks))
	e := &l.spaces[space]
	c := l.class(e.slotBytes)
	if len(c.free) == 0 && l.freeSlabs == 0 && len(l.classes) > 1 {
		l.reclaimLocked(c) // once a batch: classes share the pool by how cold their blocks are
	}
	for i, b := range blocks {
		out[i].Block = b
		if id := l.index.find(space, &b.Hash); id != 0 {
			if s := l.shardSlotLocked(id, shard); s != 0 {
				out[i].Place = l.placeLocked(s, e.shape.ShardBytes)
				out[i].Status = FillPresent
				if l.slot(s).state == SlotFilling {
					out[i].Status = FillRunning
				} else {
					l.counts.Present++
				}
				continue
			}
		}
		s, ok := l.allocateLocked(c)
		if !ok {
			out[i].Status = FillBusy
			continue
		}
		l.takeSlotLocked(s, l.recordLocked(space, b), shard)
		m := l.slot(s)
		l.slotEventLocked(m, slotFill)
		slab, slot := s.split()
		m.generation = l.slots.Fill(slab, slot)
		out[i].Place = l.placeLocked(s, e.shape.ShardBytes)
	}
	return out
}

func (l *Ledger) placeLocked(s SlotRef, length uint64) Place {
	slab, slot := s.split()
	m := l.slot(s)
	return Place{
		Slot: s, Offset: l.slots.SlotOffset(slab, slot), HeaderOffset: l.slots.HeaderOffset(slab, slot),
		Length: length, Generation: m.generation, CRC32C: m.crc,
	}
}

// wakeLocked tells those who wait in Await.
func (l *Ledger) wakeLocked() {
	if l.changed != nil {
		close(l.changed)
		l.changed = nil
	}
}

// Commit publishes slots that are complete: headers are written, and the blocks can be found. crcs run beside fills.
func (l *Ledger) Commit(now time.Time, fills []Fill, crcs []uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, f := range fills {
		s := f.Place.Slot
		slab, slot := s.split()
		m := l.slot(s)
		m.crc = crcs[i]
		r := l.recs.at(m.block)
		shape := &l.spaces[r.space].shape
		l.slots.Publish(slab, slot, pool.Header{
			Generation: m.generation, Hash: r.hash, Space: shape.ID, Parent: f.Block.Parent, Length: shape.ShardBytes,
			CRC32C: m.crc, Shard: m.shard, Shards: shape.Shards, StoredMs: uint64(now.UnixMilli()),
		})
		l.residentLocked(s, now.UnixNano())
		l.counts.Stored++
		if !l.complete(r) {
			l.partial = append(l.partial, partialBlock{r.space, r.hash, now.Add(l.limits.IncompleteKept)})
		}
	}
	l.wakeLocked()
}

// residentLocked makes a filling slot resident.
func (l *Ledger) residentLocked(s SlotRef, stamp int64) {
	i, _ := s.split()
	m := l.slot(s)
	r := l.recs.at(m.block)
	l.slotEventLocked(m, slotCommit)
	r.filling--
	r.resident++
	if l.complete(r) {
		l.matchable++
		l.spaces[r.space].complete++
	}
	r.stamp = max(r.stamp, stamp)
	l.slabs[i].touched = max(l.slabs[i].touched, stamp)
	l.leafChangedLocked(m.block)
}

// Abort gives slots back that were not filled. Nothing writes into them any more.
func (l *Ledger) Abort(now time.Time, fills []Fill) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, f := range fills {
		s := f.Place.Slot
		m := l.slot(s)
		id := m.block
		l.recs.at(id).filling--
		l.slotEventLocked(m, slotAbort)
		l.releaseSlotLocked(s)
		l.counts.Aborted++
		if r := l.recs.at(id); r.resident > 0 && !l.complete(r) { // its timer may have come while this was being filled
			l.partial = append(l.partial, partialBlock{r.space, r.hash, now.Add(l.limits.IncompleteKept)})
		}
		l.dropIfEmptyLocked(id)
	}
	l.wakeLocked()
}

// Drop removes blocks by force, with their children left behind unmatchable. Nobody finds them from now on; slots that are pinned are free when the last pin goes.
// It answers how many blocks lost a slot.
func (l *Ledger) Drop(space SpaceRef, hashes []kvferry.Hash) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for i := range hashes {
		if id := l.index.find(space, &hashes[i]); id != 0 && l.dropSlotsLocked(id) {
			n++
			l.counts.Dropped++
		}
	}
	return n
}

func (l *Ledger) dropSlotsLocked(id recordID) bool {
	var resident []SlotRef
	for s := l.recs.at(id).slots; s != 0; s = l.slot(s).next {
		if l.slot(s).state == SlotResident {
			resident = append(resident, s)
		}
	}
	for _, s := range resident {
		l.evictSlotLocked(s)
	}
	return len(resident) > 0
}
