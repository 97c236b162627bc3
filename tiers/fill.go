package tiers

import (
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers/policy"
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
func (l *Ledger) BeginFill(now time.Time, space SpaceRef, shard uint16, blocks []Block) []Fill {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.now = now.UnixNano()
	out := make([]Fill, len(blocks))
	e := &l.spaces[space]
	c := l.poolClassLocked(now.UnixNano(), e.slotBytes)
	for i, b := range blocks {
		out[i].Block = b
		if id := l.index.find(space, &b.Hash); id != 0 {
			if s := l.shardSlotLocked(id, shard, policy.DRAM); s != 0 {
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
		s, ok := l.allocateLocked(now.UnixNano(), c)
		if !ok {
			out[i].Status = FillBusy
			continue
		}
		out[i].Place = l.beginLocked(s, l.recordLocked(space, b), shard, e.shape.ShardBytes)
	}
	return out
}

// poolClassLocked is the pool's class for slots of this length, with room for at least one more where it may have it.
func (l *Ledger) poolClassLocked(now int64, slotBytes uint64) *class {
	st := l.stores[poolStore]
	c := l.class(st, slotBytes)
	if len(c.free) == 0 && st.freeSlabs == 0 && len(st.classes) > 1 {
		l.reclaimLocked(now, c) // once a batch: classes share the pool by how cold their blocks are
	}
	return c
}

// beginLocked starts to fill a slot that was free.
func (l *Ledger) beginLocked(s SlotRef, id recordID, shard uint16, length uint64) Place {
	m := l.slot(s)
	l.slotEventLocked(m, slotFill)
	l.takeSlotLocked(s, id, shard)
	st, slab, slot := l.local(s)
	m.generation = st.slots.Fill(slab, slot)
	return l.placeLocked(s, length)
}

func (l *Ledger) placeLocked(s SlotRef, length uint64) Place {
	st, slab, slot := l.local(s)
	m := l.slot(s)
	return Place{
		Slot: s, Offset: st.slots.SlotOffset(slab, slot), HeaderOffset: st.slots.HeaderOffset(slab, slot),
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
	l.now = now.UnixNano()
	for i, f := range fills {
		l.commitLocked(now, f, crcs[i], now)
		l.counts.Stored++
	}
	l.wakeLocked()
}

// commitLocked publishes a slot. used is when the block was used last.
func (l *Ledger) commitLocked(now time.Time, f Fill, crc uint32, used time.Time) {
	s := f.Place.Slot
	st, slab, slot := l.local(s)
	m := l.slot(s)
	m.crc = crc
	h := l.headerLocked(now, m)
	h.Parent = f.Block.Parent
	st.slots.Publish(slab, slot, h)
	l.residentLocked(now.UnixNano(), s, used.UnixNano(), f.Block)
	r := l.recs.at(m.block)
	if st.tier == policy.DRAM && !l.isComplete(r) {
		l.partial = append(l.partial, partialBlock{r.space, r.hash, now.Add(l.limits.IncompleteKept)})
	}
}

// headerLocked is what a slot says of its content.
func (l *Ledger) headerLocked(now time.Time, m *slotInfo) pool.Header {
	r := l.recs.at(m.block)
	shape := &l.spaces[r.space].shape
	h := pool.Header{
		Generation: m.generation, Hash: r.hash, Space: shape.ID, Length: shape.ShardBytes, CRC32C: m.crc, Shard: uint16(m.shard), Shards: shape.Shards, StoredMs: uint64(now.UnixMilli()),
	}
	if r.parent != 0 {
		h.Parent = l.recs.at(r.parent).hash
	}
	return h
}

// Abort gives slots back that were not filled. Nothing writes into them any more.
func (l *Ledger) Abort(now time.Time, fills []Fill) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, f := range fills {
		l.abortLocked(now, f.Place.Slot)
	}
	l.wakeLocked()
}

func (l *Ledger) abortLocked(now time.Time, s SlotRef) {
	m := l.slot(s)
	id := m.block
	l.recs.at(id).filling[l.storeOf(s).tier]--
	l.slotEventLocked(m, slotAbort)
	l.releaseSlotLocked(s)
	l.counts.Aborted++
	if r := l.recs.at(id); r.resident > 0 && !l.isComplete(r) { // its timer may have come while this was being filled
		l.partial = append(l.partial, partialBlock{r.space, r.hash, now.Add(l.limits.IncompleteKept)})
	}
	l.dropIfEmptyLocked(id)
}

// Drop removes broken blocks by force, with their children left behind unmatchable. Nobody finds them from now on; slots that are pinned are free when the last pin goes.
// It answers how many blocks lost a slot.
func (l *Ledger) Drop(space SpaceRef, hashes []kvferry.Hash) int {
	return l.drop(space, hashes, policy.NumTiers)
}

// DropFromPool is Drop of what blocks have in the pool alone: a copy on a drive may still be right, and is checked when it is read.
func (l *Ledger) DropFromPool(space SpaceRef, hashes []kvferry.Hash) int {
	return l.drop(space, hashes, policy.DRAM)
}

func (l *Ledger) drop(space SpaceRef, hashes []kvferry.Hash, tier int) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for i := range hashes {
		if id := l.index.find(space, &hashes[i]); id != 0 && l.dropSlotsLocked(id, tier, Broken) {
			n++
			l.counts.Dropped++
		}
	}
	return n
}

// DropFrom removes by force what a block has in a tier.
func (l *Ledger) DropFrom(space kvferry.SpaceID, h kvferry.Hash, tier int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	ref, ok := l.byID[space]
	if !ok {
		return false
	}
	id := l.index.find(ref, &h)
	if id == 0 || !l.dropSlotsLocked(id, tier, Broken) {
		return false
	}
	l.counts.Dropped++
	return true
}

// dropSlotsLocked removes what a block has in a tier, or in all of them (policy.NumTiers).
func (l *Ledger) dropSlotsLocked(id recordID, tier int, why Reason) bool {
	var resident []SlotRef
	for s := l.recs.at(id).slots; s != 0; s = l.slot(s).next {
		if l.slot(s).state == SlotResident && (tier == policy.NumTiers || l.storeOf(s).tier == tier) {
			resident = append(resident, s)
		}
	}
	for _, s := range resident {
		l.evictSlotLocked(s, why)
	}
	l.lacksShardLocked(id)
	return len(resident) > 0
}
