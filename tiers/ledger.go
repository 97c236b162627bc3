package tiers

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers/pool"
)

// Errors of the ledger. None of them leaves a trace.
var (
	// ErrBusy is returned when there is no room that may be made: everything is leased, pinned or being filled. A retry may succeed.
	ErrBusy = errors.New("tiers: no room")
	// ErrSpace is returned when a space is used with another shard length or number of shards than before. A retry is useless.
	ErrSpace = errors.New("tiers: space does not fit")
	// ErrLimit is returned when a table is full. A retry may succeed later.
	ErrLimit = errors.New("tiers: limit reached")
)

// Slots is a tier's memory as the ledger sees it; *pool.Pool is one.
type Slots interface {
	Slabs() int
	SlabBytes() uint64
	SlotsPerSlab(slotBytes uint64) int
	SlabInUse(slab int) (slotBytes uint64, slots int)
	FormatSlab(slab int, slotBytes uint64) int
	FreeSlab(slab int)
	HeaderOffset(slab, slot int) uint64
	SlotOffset(slab, slot int) uint64
	Fill(slab, slot int) kvferry.Generation
	Publish(slab, slot int, h pool.Header)
	Clear(slab, slot int)
	Generation(slab, slot int) kvferry.Generation
}

// Limits bound what the ledger keeps.
type Limits struct {
	Spaces         int           // known spaces
	Holds          int           // leases and read pins together
	IncompleteKept time.Duration // how long a block that lacks a shard is kept
}

// DefaultLimits are the daemon's.
var DefaultLimits = Limits{Spaces: 4096, Holds: 1 << 18, IncompleteKept: time.Minute}

// SpaceRef is a space's number in this ledger.
type SpaceRef uint16

// SpaceShape is what the ledger must know of a space.
type SpaceShape struct {
	ID         kvferry.SpaceID
	Shards     uint16 // distinct shards that make a block
	ShardBytes uint64
}

// chainMax bounds the blocks of one chain: 1,048,576 blocks of 16 tokens are 16 million tokens.
const chainMax = 1 << 20

// Block names a block and its parent.
type Block struct {
	Hash   kvferry.Hash
	Parent kvferry.Hash // zero: first of its chain
}

// Place is where a shard lies, as long as the slot's generation is this one.
type Place struct {
	Slot         SlotRef
	Offset       uint64 // of the payload in the pool
	HeaderOffset uint64
	Length       uint64 // of the payload
	Generation   kvferry.Generation
	CRC32C       uint32
}

// Ledger is the one book of what lies where.
type Ledger struct {
	mu     sync.Mutex
	slots  Slots
	limits Limits

	recs    records
	index   *index
	spaces  []spaceEntry
	byID    map[kvferry.SpaceID]SpaceRef
	slabs   []slab
	classes map[uint64]*class
	holds   holdTable
	changed chan struct{} // closed at the next end of a fill; nil while nobody waits
	partial []partialBlock

	freeSlabs int
	matchable int // blocks with all of their shards
	filling   int // slots
	usedBytes uint64
	counts    Counts
}

type spaceEntry struct {
	shape     SpaceShape
	slotBytes uint64
	blocks    int // records
	complete  int // of these, with all of their shards
	users     int // sessions
	slots     int
}

// Counts are running totals since the ledger was made. Asked = DRAM + Peer + Missed, always.
type Counts struct {
	Asked, DRAM, Peer, Missed                     uint64 // blocks of lookups
	Stored, Present, Evicted, Dropped, Incomplete uint64 // blocks
	Aborted                                       uint64 // fills given up
	Reclaimed                                     uint64 // slabs that went to another slot length
}

// New makes an empty ledger over slots that are all free.
func New(slots Slots, limits Limits) *Ledger {
	l := &Ledger{
		slots: slots, limits: limits, byID: map[kvferry.SpaceID]SpaceRef{}, classes: map[uint64]*class{},
		slabs: make([]slab, slots.Slabs()), freeSlabs: slots.Slabs(),
	}
	l.index = newIndex(&l.recs)
	l.holds.init()
	return l
}

// Space registers a space, or checks that it is used as it was before, and counts the caller as a user of it until ReleaseSpace.
func (l *Ledger) Space(s SpaceShape) (SpaceRef, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	ref, err := l.spaceLocked(s)
	if err == nil {
		l.spaces[ref].users++
	}
	return ref, err
}

// ReleaseSpace ends one use of a space. Its blocks stay.
func (l *Ledger) ReleaseSpace(ref SpaceRef) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.spaces[ref].users--
}

func (l *Ledger) spaceLocked(s SpaceShape) (SpaceRef, error) {
	slotBytes := pool.SlotBytes(s.ShardBytes)
	if s.ShardBytes == 0 || l.slots.SlotsPerSlab(slotBytes) < 1 {
		return 0, fmt.Errorf("%w: shard of %d bytes does not fit into a slab of %d", ErrSpace, s.ShardBytes, l.slots.SlabBytes())
	}
	if s.Shards == 0 || s.Shards > 255 {
		return 0, fmt.Errorf("%w: %d shards", ErrSpace, s.Shards)
	}
	if ref, ok := l.byID[s.ID]; ok {
		e := &l.spaces[ref]
		if e.blocks == 0 && e.users == 0 {
			e.shape, e.slotBytes = s, slotBytes
			return ref, nil
		}
		if e.shape != s {
			return 0, fmt.Errorf("%w: %d shards of %d bytes, was %d of %d", ErrSpace, s.Shards, s.ShardBytes, e.shape.Shards, e.shape.ShardBytes)
		}
		return ref, nil
	}
	entry := spaceEntry{shape: s, slotBytes: slotBytes}
	ref := SpaceRef(len(l.spaces))
	if len(l.spaces) < l.limits.Spaces {
		l.spaces = append(l.spaces, entry)
	} else {
		found := false
		for i := range l.spaces {
			if e := &l.spaces[i]; e.blocks == 0 && e.users == 0 {
				delete(l.byID, e.shape.ID)
				ref, found = SpaceRef(i), true
				l.spaces[i] = entry
				break
			}
		}
		if !found {
			return 0, fmt.Errorf("%w: %d spaces", ErrLimit, l.limits.Spaces)
		}
	}
	l.byID[s.ID] = ref
	return ref, nil
}

// FindSpace is the number of a space that is known.
func (l *Ledger) FindSpace(id kvferry.SpaceID) (SpaceRef, SpaceShape, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	ref, ok := l.byID[id]
	if !ok {
		return 0, SpaceShape{}, false
	}
	return ref, l.spaces[ref].shape, true
}

// Adopt takes over the slots that an earlier daemon left. It is called once, before anything else.
func (l *Ledger) Adopt(found []pool.Resident) (kept int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range l.slabs {
		if slotBytes, n := l.slots.SlabInUse(i); n > 0 {
			l.addSlabLocked(i, slotBytes, n)
		}
	}
	for _, r := range found {
		h := r.Header
		ref, err := l.spaceLocked(SpaceShape{ID: h.Space, Shards: h.Shards, ShardBytes: h.Length})
		slotBytes, _ := l.slots.SlabInUse(r.Slab)
		if err != nil || slotBytes != l.spaces[ref].slotBytes || h.Shard >= h.Shards {
			l.slots.Clear(r.Slab, r.Slot)
			continue
		}
		id := l.recordLocked(ref, Block{h.Hash, h.Parent})
		if l.shardSlotLocked(id, h.Shard) != 0 { // the first of two copies wins: their bytes are the same
			l.slots.Clear(r.Slab, r.Slot)
			l.dropIfEmptyLocked(id)
			continue
		}
		s := makeSlotRef(r.Slab, r.Slot)
		l.takeSlotLocked(s, id, h.Shard)
		m := l.slot(s)
		m.generation, m.crc = h.Generation, h.CRC32C
		l.slotEventLocked(m, slotFill)
		l.residentLocked(s, int64(h.StoredMs)*int64(time.Millisecond))
		kept++
	}
	for _, c := range l.classes {
		c.rebuildFree(l)
	}
	for i := range l.slabs {
		if l.slabs[i].slots != nil && l.slabs[i].used == 0 {
			l.freeSlabLocked(i)
		}
	}
	return kept
}

// recordLocked is the record of a block, made where there is none, with its parent's record.
func (l *Ledger) recordLocked(space SpaceRef, b Block) recordID {
	id := l.index.find(space, &b.Hash)
	if id == 0 {
		id = l.addRecordLocked(space, b.Hash)
	}
	if r := l.recs.at(id); r.parent == 0 && r.slots == 0 && !b.Parent.IsZero() && b.Parent != b.Hash { // new, or known only as a parent until now
		l.linkParentLocked(id, space, b.Parent)
	}
	return id
}

func (l *Ledger) addRecordLocked(space SpaceRef, h kvferry.Hash) recordID {
	id := l.recs.add()
	r := l.recs.at(id)
	r.hash, r.space = h, space
	l.index.insert(id)
	l.spaces[space].blocks++
	return id
}

func (l *Ledger) linkParentLocked(id recordID, space SpaceRef, parent kvferry.Hash) {
	p := l.index.find(space, &parent)
	if p == 0 {
		p = l.addRecordLocked(space, parent)
	}
	// Parents come from clients. A cycle would never have a leaf, and never leave: such a link is not made. A block that nobody names as a parent closes none.
	for a, depth := p, 0; a != 0 && (a == id || l.recs.at(id).children > 0); a, depth = l.recs.at(a).parent, depth+1 {
		if a == id || depth > chainMax {
			l.dropIfEmptyLocked(p)
			return
		}
	}
	l.recs.at(id).parent = p
	pr := l.recs.at(p)
	pr.children++
	l.leafChangedLocked(p)
}

// dropIfEmptyLocked forgets a block that has no slot, no lease and no child, and then its parent if that was all that kept it.
func (l *Ledger) dropIfEmptyLocked(id recordID) {
	for id != 0 {
		r := l.recs.at(id)
		if r.slots != 0 || r.children > 0 || r.leases > 0 {
			l.leafChangedLocked(id)
			return
		}
		parent := r.parent
		l.leafRemoveLocked(id)
		l.index.remove(id)
		l.spaces[r.space].blocks--
		l.recs.remove(id)
		if parent != 0 {
			l.recs.at(parent).children--
		}
		id = parent
	}
}

// complete tells whether every distinct shard is resident.
func (l *Ledger) complete(r *record) bool {
	return r.resident > 0 && uint16(r.resident) == l.spaces[r.space].shape.Shards
}
