package tiers

import (
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers/policy"
	"github.com/kvferry/kvferry/tiers/pool"
)

// Move is one shard that is to be copied between the pool and a drive: its place in one is pinned, a slot of the other is being filled.
type Move struct {
	Fill   Fill
	From   Place
	Header pool.Header // of the slot that is filled; its checksum is the source's. A drive writes it itself, after the payload
	Drive  StoreID
	DriveSlab,
	DriveSlot int // as the drive counts them
	leaf bool // it could have left when this was planned
	// Leaves: the block leaves DRAM when it is on the drive, if nobody wants it by then.
	Leaves bool
}

// Moves are those that were planned together. Each of them is given to EndMove once, when nothing of it touches memory any more.
type Moves struct {
	List []Move
	// Elsewhere, of a promotion, are the indexes of blocks that somebody else is bringing already.
	Elsewhere []int
	// At are, of a promotion, the indexes of List's blocks among those that were asked for.
	At []int
	// More, of a PlanDown: more is to leave DRAM than one call does. The next goes on.
	More bool
	// NoRoom, of a promotion, counts blocks that are on a drive and have no room in DRAM.
	NoRoom int
}

// BeginPromote takes a DRAM slot for every block whose shard is on a drive and not in DRAM, and pins it there. hashes is packed.
func (l *Ledger) BeginPromote(now time.Time, space SpaceRef, shard uint16, hashes []byte) Moves {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.beginPromoteLocked(now, space, shard, hashes, len(hashes)/kvferry.HashSize)
}

// BeginPrefetch is BeginPromote for blocks that nobody waits for yet: of a long prompt the first ones come, and with what else is being moved no more than may be.
func (l *Ledger) BeginPrefetch(now time.Time, space SpaceRef, shard uint16, hashes []byte) Moves {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.poolClassLocked(now.UnixNano(), l.spaces[space].slotBytes)
	slots := c.slots + c.store.freeSlabs*c.store.slots.SlotsPerSlab(c.slotBytes)
	return l.beginPromoteLocked(now, space, shard, hashes, slots/movingShare-l.moving)
}

// beginPromoteLocked begins at most limit moves.
func (l *Ledger) beginPromoteLocked(now time.Time, space SpaceRef, shard uint16, hashes []byte, limit int) Moves {
	var out Moves
	e := &l.spaces[space]
	c := l.poolClassLocked(now.UnixNano(), e.slotBytes)
	var ids []recordID
	for i := range len(hashes) / kvferry.HashSize { // all are pinned before any room is made: none of them may be what leaves
		if len(ids) >= limit {
			break
		}
		id := l.index.find(space, (*kvferry.Hash)(hashes[i*kvferry.HashSize:]))
		if id == 0 {
			continue
		}
		if d := l.shardSlotLocked(id, shard, policy.DRAM); d != 0 {
			if l.slot(d).state == SlotFilling {
				out.Elsewhere = append(out.Elsewhere, i)
			}
			continue
		}
		s := l.shardSlotLocked(id, shard, policy.NVMe)
		if s == 0 || l.slot(s).state != SlotResident || l.storeOf(s).closed || l.slot(s).pins == pinsMax {
			continue
		}
		l.pinMoveLocked(s)
		l.recs.at(id).stamp = max(l.recs.at(id).stamp, now.UnixNano()) // who asks for it to come will want it: else it is idle still, and goes again at once
		ids, out.At = append(ids, id), append(out.At, i)
		out.List = append(out.List, Move{From: l.placeLocked(s, e.shape.ShardBytes)})
	}
	n := 0
	for k, id := range ids {
		m := out.List[k]
		if l.shardSlotLocked(id, shard, policy.DRAM) != 0 { // named twice: it has a slot by now
			l.unpinMoveLocked(m.From.Slot)
			out.Elsewhere = append(out.Elsewhere, out.At[k])
			continue
		}
		s, ok := l.allocateLocked(now.UnixNano(), c)
		if !ok {
			l.unpinMoveLocked(m.From.Slot)
			out.NoRoom++
			continue
		}
		l.driveOf(&m, m.From.Slot)
		m.Fill = Fill{Block: l.blockLocked(id), Place: l.beginLocked(s, id, shard, e.shape.ShardBytes)}
		m.Header = l.headerLocked(now, l.slot(s))
		m.Header.CRC32C = m.From.CRC32C
		if f, ok := l.stores[poolStore].slots.(interface {
			MarkFromDrive(slab, slot int, nowMs uint64)
		}); ok {
			_, slab, slot := l.local(s)
			f.MarkFromDrive(slab, slot, uint64(now.UnixMilli()))
		}
		out.List[n], out.At[n] = m, out.At[k]
		n++
	}
	out.List, out.At = out.List[:n], out.At[:n]
	return out
}

func (l *Ledger) blockLocked(id recordID) Block {
	r := l.recs.at(id)
	b := Block{Hash: r.hash}
	if r.parent != 0 {
		b.Parent = l.recs.at(r.parent).hash
	}
	return b
}

func (l *Ledger) driveOf(m *Move, s SlotRef) {
	i, _ := s.split()
	m.Drive = l.slabs[i].store
	_, m.DriveSlab, m.DriveSlot = l.local(s)
}

func (l *Ledger) pinMoveLocked(s SlotRef) {
	m := l.slot(s)
	m.pins++
	l.moving++
	l.leafChangedLocked(m.block)
}

func (l *Ledger) unpinMoveLocked(s SlotRef) {
	l.moving--
	l.unpinSlotLocked(s)
}

// EndMove publishes what was copied, or gives its slot back where it was not. Nothing touches its memory any more.
func (l *Ledger) EndMove(now time.Time, m *Move, copied bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.now = now.UnixNano()
	down := l.storeOf(m.Fill.Place.Slot).tier == policy.NVMe
	src := l.slot(m.From.Slot)
	id := src.block
	if m.leaf {
		l.classOfLocked(id, policy.DRAM).held--
	}
	if m.Leaves {
		l.classOfLocked(id, policy.DRAM).leaving--
	}
	// What was removed by force while it was copied does not come back by that.
	if !copied || src.state != SlotResident {
		l.unpinMoveLocked(m.From.Slot)
		l.abortLocked(now, m.Fill.Place.Slot)
		l.wakeLocked()
		return
	}
	stamp := time.Unix(0, l.recs.at(id).stamp)
	l.commitLocked(now, m.Fill, m.From.CRC32C, stamp)
	l.unpinMoveLocked(m.From.Slot)
	if down {
		l.counts.Demoted++
		if m.Leaves && l.Meta(id).Pos[policy.DRAM] >= 0 && l.isIn(l.recs.at(id), policy.NVMe) && l.isOpenLocked(id) {
			l.leaveLocked(id, policy.DRAM)
		}
	} else {
		l.counts.Promoted++
	}
	l.wakeLocked()
}
