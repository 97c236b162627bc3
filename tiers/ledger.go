package tiers

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers/policy"
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

// Slots is a store's memory as the ledger sees it; *pool.Pool is one, *nvme.Drive another. Its calls are made under the ledger's mutex: those of a drive note what is to be written, and write nothing.
type Slots interface {
	Slabs() int
	SlabBytes() uint64
	SlotsPerSlab(slotBytes uint64) int
	SlabInUse(slab int) (slotBytes uint64, slots int)
	FormatSlab(slab int, slotBytes uint64) int
	FreeSlab(slab int)
	HeaderOffset(slab, slot int) uint64
	SlotOffset(slab, slot int) uint64
	// Fill answers the generation that the slot will have when it is published.
	Fill(slab, slot int) kvferry.Generation
	Publish(slab, slot int, h pool.Header)
	Clear(slab, slot int)
}

// Config is what a ledger works with; never modified after New.
type Config struct {
	Pool   Slots
	Drives []Slots
	Policy policy.Policy // nil: LRU
	Limits Limits
}

// Limits bound what the ledger keeps.
type Limits struct {
	Spaces         int           // known spaces
	Holds          int           // leases and read pins together
	IncompleteKept time.Duration // how long a block that lacks a shard is kept
	Changes        int           // that are kept for those who follow them
}

// DefaultLimits are the daemon's.
var DefaultLimits = Limits{Spaces: 4096, Holds: 1 << 18, IncompleteKept: time.Minute, Changes: 1 << 16}

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
	Hash      kvferry.Hash
	Parent    kvferry.Hash // zero: first of its chain
	Partial   bool         // the tail of a prompt, shorter than a block
	Retention policy.Retention
}

// Place is where a shard lies, as long as the slot's generation is this one.
type Place struct {
	Slot         SlotRef
	Offset       uint64 // of the payload in its store
	HeaderOffset uint64
	Length       uint64 // of the payload
	Generation   kvferry.Generation
	CRC32C       uint32
}

// Ledger is the one book of what lies where.
type Ledger struct {
	mu     sync.Mutex
	limits Limits
	policy policy.Policy

	recs      records
	index     *index
	spaces    []spaceEntry
	byID      map[kvferry.SpaceID]SpaceRef
	stores    []*store // the pool, then the drives
	slabs     []slab   // of all stores, one after the other
	holds     holdTable
	changed   chan struct{} // closed at the next end of a fill; nil while nobody waits
	partial   []partialBlock
	apart     []setAside
	changes   changeRing
	found     []recordID // scratch of look-ups
	hand      hand
	budget    budget
	lastDrive int // that a block went to

	now       int64 // of the last call that told it, unix ns
	matchable int   // blocks with all of their shards, in whatever tiers
	complete  [policy.NumTiers]int
	filling   int // slots
	moving    int // slots from which something is being moved
	counts    Counts
}

type spaceEntry struct {
	shape     SpaceShape
	slotBytes uint64
	blocks    int                  // records
	complete  int                  // of these, with all of their shards
	inTier    [policy.NumTiers]int // of these, with all of their shards in a tier
	users     int                  // sessions
	slots     [policy.NumTiers]int
}

// Counts are running totals since the ledger was made. Asked = DRAM + NVMe + Peer + Missed, always.
type Counts struct {
	Asked, DRAM, NVMe, Peer, Missed               uint64 // blocks of lookups
	Stored, Present, Evicted, Dropped, Incomplete uint64 // blocks
	Aborted                                       uint64 // fills given up
	Reclaimed                                     uint64 // slabs that went to another slot length
	Demoted, Promoted                             uint64 // shards that were copied to NVMe, and back to DRAM
	Released                                      uint64 // blocks that left DRAM and stay on NVMe
	NotAdmitted                                   uint64 // blocks that were not written to NVMe because the write budget was short
	NotWorth                                      uint64 // blocks that were not written to NVMe because all that is there is worth more
	Forced                                        uint64 // blocks that had to go although others descend from them
	DriveEvicted                                  uint64 // blocks that left NVMe to make room
}

// New makes an empty ledger over slots that are all free.
func New(cfg Config) *Ledger {
	l := &Ledger{limits: cfg.Limits, policy: cfg.Policy, byID: map[kvferry.SpaceID]SpaceRef{}}
	if l.policy == nil {
		l.policy = policy.LRU{}
	}
	l.addStoreLocked(policy.DRAM, cfg.Pool)
	for _, d := range cfg.Drives {
		l.addStoreLocked(policy.NVMe, d)
	}
	l.changes.init(cfg.Limits.Changes)
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
	memory := l.stores[0].slots
	if s.ShardBytes == 0 || memory.SlotsPerSlab(slotBytes) < 1 {
		return 0, fmt.Errorf("%w: shard of %d bytes does not fit into a slab of %d", ErrSpace, s.ShardBytes, memory.SlabBytes())
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
	l.recs.at(p).children++
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
		l.index.remove(id)
		l.spaces[r.space].blocks--
		l.recs.remove(id)
		if parent != 0 {
			l.recs.at(parent).children--
		}
		id = parent
	}
}

// isComplete tells whether every distinct shard is resident, in whatever tier.
func (l *Ledger) isComplete(r *record) bool {
	return r.resident > 0 && uint16(r.resident) == l.spaces[r.space].shape.Shards
}

// isIn tells whether a tier has every shard of a block.
func (l *Ledger) isIn(r *record, tier int) bool {
	return r.in[tier] > 0 && uint16(r.in[tier]) == l.spaces[r.space].shape.Shards
}
