package tiers_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/policy"
	"github.com/kvferry/kvferry/tiers/tierstest"
)

var (
	seed  = flag.Uint64("seed", 1, "first seed of the metamorphic test")
	seeds = flag.Int("seeds", 60, "how many seeds it runs")
)

// world drives a ledger with random operations and keeps a plain map of what must be there.
type world struct {
	t      *testing.T
	r      *rand.Rand
	l      *tiers.Ledger
	slots  *tierstest.Slots
	fold   folded
	moves  []tiers.Move
	now    time.Time
	spaces []tiers.SpaceRef
	shards []uint16
	open   []openFill
	pinned []openPin
	read   [][]tiers.Reading
	cursor tiers.Cursor
	slot   [3]tiers.SlotRef           // where reading back goes on, by store
	crc    map[string]map[uint32]bool // space, shard, hash → what was stored under it; a copy on a drive may be older than that in the pool
}

type openFill struct {
	space int
	shard uint16
	fills []tiers.Fill
}

type openPin struct {
	id     tiers.HoldID
	places []tiers.Place
	until  time.Time
}

func newWorld(t *testing.T, seed uint64) *world {
	w := &world{t: t, r: rand.New(rand.NewPCG(seed, 0)), slots: tierstest.NewSlots(6, 1<<20), now: time.Unix(1e9, 0), crc: map[string]map[uint32]bool{}}
	w.fold.set = map[string]bool{}
	cfg := tiers.Config{Pool: w.slots, Limits: tiers.DefaultLimits}
	for range w.r.IntN(3) {
		cfg.Drives = append(cfg.Drives, tierstest.NewSlots(1+w.r.IntN(12), 1<<20))
	}
	cfg.Limits.Changes = 1000
	var err error
	if cfg.Policy, err = policy.New([]string{"lru", "s3fifo", "reuse"}[w.r.IntN(3)], 100); err != nil {
		t.Fatal(err)
	}
	w.l = tiers.New(cfg)
	for i, s := range []tiers.SpaceShape{{Shards: 1, ShardBytes: 64 << 10}, {Shards: 2, ShardBytes: 64 << 10}, {Shards: 1, ShardBytes: 200_000}} {
		s.ID = kvferry.SpaceID{byte(i + 1)}
		ref, err := w.l.Space(s)
		if err != nil {
			t.Fatal(err)
		}
		w.spaces, w.shards = append(w.spaces, ref), append(w.shards, s.Shards)
	}
	return w
}

func (w *world) key(space int, shard uint16, h kvferry.Hash) string {
	return fmt.Sprint(space, shard, h)
}

func (w *world) chain() []tiers.Block {
	return tierstest.Chain(uint64(w.r.IntN(12)), 1+w.r.IntN(12))
}

func (w *world) step() {
	w.now = w.now.Add(time.Duration(w.r.IntN(2000)) * time.Millisecond)
	space := w.r.IntN(len(w.spaces))
	shard := uint16(w.r.IntN(int(w.shards[space])))
	owner := tiers.Owner(1 + w.r.IntN(3))
	switch w.r.IntN(16) {
	case 0, 1, 2:
		w.begin(space, shard)
	case 3, 4:
		w.end()
	case 5:
		blocks := w.chain()
		w.l.Match(w.now, owner, fmt.Sprint("r", w.r.IntN(4)), w.spaces[space], tierstest.Pack(blocks), w.now.Add(5*time.Second))
	case 6:
		w.pin(space, shard, owner)
	case 7:
		w.unpin()
	case 8:
		switch w.r.IntN(4) {
		case 0:
			w.l.ReleaseOwner(owner)
		case 1:
			w.l.ReleaseKey(owner, "r0")
		case 2:
			drop := w.l.Drop
			if w.r.IntN(2) == 0 {
				drop = w.l.DropFromPool
			}
			drop(w.spaces[space], []kvferry.Hash{w.chain()[0].Hash})
		case 3:
			b := w.chain()
			_ = w.l.Lease(owner, "tail", w.spaces[space], b[len(b)-1].Hash, w.now.Add(3*time.Second))
		}
	case 9:
		w.l.Expire(w.now)
	case 10:
		d := tiers.Down{Idle: time.Duration(w.r.IntN(20)) * time.Second, Move: w.r.IntN(2) == 0, High: 0.5 + w.r.Float64()/2, Low: w.r.Float64() / 2}
		w.plan(w.l.PlanDown(w.now, d, 1+w.r.IntN(30)))
	case 11:
		begin := w.l.BeginPromote
		if w.r.IntN(2) == 0 {
			begin = w.l.BeginPrefetch
		}
		w.plan(begin(w.now, w.spaces[space], shard, tierstest.Pack(w.chain())))
	case 12:
		for range w.r.IntN(8) {
			w.endMove()
		}
	case 13:
		if n := len(w.l.Stats().Drives); n > 0 {
			switch w.r.IntN(6) {
			case 0, 1, 2:
				w.l.SetOpen(tiers.StoreID(1+w.r.IntN(n)), w.r.IntN(4) > 0)
			case 3:
				w.l.SetWriteBudget(w.now, uint64(w.r.IntN(2))*uint64(w.r.IntN(1<<26)))
			}
		}
	case 14:
		w.byHand()
	case 15:
		w.readBack()
	}
}

// selection is a few blocks of one space or all.
func (w *world) selection() tiers.Selection {
	blocks := w.chain()
	sel := tiers.Selection{Prefix: blocks[len(blocks)-1].Hash[:[]int{0, 1, kvferry.HashSize}[w.r.IntN(3)]]}
	if w.r.IntN(2) == 0 {
		sel.Space = &kvferry.SpaceID{byte(1 + w.r.IntN(3))}
	}
	return sel
}

// byHand does what people ask for.
func (w *world) byHand() {
	sel := w.selection()
	switch w.r.IntN(9) {
	case 0:
		if len(sel.Prefix) > 0 { // few
			_, w.cursor = w.l.Evict(w.now, sel, w.r.IntN(policy.NumTiers+1), w.cursor)
		}
	case 1, 2:
		part := w.l.PlanDemote(w.now, sel, w.cursor, w.r.Uint64N(4<<20))
		w.plan(part.Moves)
		w.cursor = part.Next
	case 3, 4:
		_, w.cursor = w.l.Release(w.now, sel, w.cursor)
	case 5, 6:
		ups, next := w.l.PlanUp(sel, w.cursor, w.r.Uint64N(4<<20))
		for _, u := range ups {
			w.plan(w.l.BeginPromote(w.now, w.spaces[u.Space.ID[0]-1], u.Shard, u.Hashes))
		}
		w.cursor = next
	default:
		for _, e := range w.l.Explain(w.now, sel, 5) {
			if e.Block == nil && e.Removed == nil {
				w.t.Fatalf("nothing is known of %v", e.Hash)
			}
			if e.Block != nil && e.Block.Complete && e.Block.Reachable != (e.Missing.IsZero() || e.MissingClosed) && !e.MissingClosed {
				w.t.Fatalf("%v is reachable: %v, its missing ancestor is %v", e.Hash, e.Block.Reachable, e.Missing)
			}
		}
	}
}

// readBack pins slots to be read, or ends that, at any time and in any order.
func (w *world) readBack() {
	if w.r.IntN(2) == 0 && len(w.read) < 4 {
		k := w.r.IntN(w.l.Stores())
		list, next := w.l.BeginReading(tiers.StoreID(k), w.slot[k], 1+w.r.IntN(10), 1<<20)
		w.slot[k] = next
		w.read = append(w.read, list)
		return
	}
	w.endReading()
}

func (w *world) endReading() {
	if len(w.read) == 0 {
		return
	}
	i := w.r.IntN(len(w.read))
	list := w.read[i]
	w.read = append(w.read[:i], w.read[i+1:]...)
	want := 0
	for k := range list {
		if w.r.IntN(12) == 0 {
			list[k].Broken = true
			want++
		}
	}
	if got := w.l.EndReading(w.now, list); got > want {
		w.t.Fatalf("%d slots were broken, %d removed", want, got)
	}
}

// plan takes moves over, which end at any time and in any order.
func (w *world) plan(m tiers.Moves) {
	for _, move := range m.List {
		if move.From.CRC32C != move.Header.CRC32C {
			w.t.Fatalf("a move's header has another checksum than its source: %+v", move)
		}
	}
	w.moves = append(w.moves, m.List...)
}

func (w *world) endMove() {
	if len(w.moves) == 0 {
		return
	}
	i := w.r.IntN(len(w.moves))
	m := w.moves[i]
	w.moves = append(w.moves[:i], w.moves[i+1:]...)
	w.l.EndMove(w.now, &m, w.r.IntN(5) > 0)
}

func (w *world) begin(space int, shard uint16) {
	if len(w.open) > 6 {
		return
	}
	blocks := w.chain()
	if w.r.IntN(3) == 0 { // a parent that is not there, or comes later
		blocks = blocks[w.r.IntN(len(blocks)):]
	}
	if w.r.IntN(6) == 0 { // a client's nonsense: its own parent, or a cycle
		blocks[w.r.IntN(len(blocks))].Parent = blocks[w.r.IntN(len(blocks))].Hash
	}
	f := openFill{space: space, shard: shard}
	for _, fill := range w.l.BeginFill(w.now, w.spaces[space], shard, blocks) {
		if fill.Status == tiers.FillNew {
			f.fills = append(f.fills, fill)
		}
	}
	if len(f.fills) > 0 {
		w.open = append(w.open, f)
	}
}

func (w *world) end() {
	if len(w.open) == 0 {
		return
	}
	i := w.r.IntN(len(w.open))
	f := w.open[i]
	w.open = append(w.open[:i], w.open[i+1:]...)
	if w.r.IntN(4) == 0 {
		w.l.Abort(w.now, f.fills)
		return
	}
	crcs := make([]uint32, len(f.fills))
	for k, fill := range f.fills {
		crcs[k] = w.r.Uint32()
		key := w.key(f.space, f.shard, fill.Block.Hash)
		if w.crc[key] == nil {
			w.crc[key] = map[uint32]bool{}
		}
		w.crc[key][crcs[k]] = true
	}
	w.l.Commit(w.now, f.fills, crcs)
}

func (w *world) pin(space int, shard uint16, owner tiers.Owner) {
	blocks := w.chain()
	until := w.now.Add(4 * time.Second)
	res, err := w.l.Pin(w.now, owner, w.spaces[space], shard, tierstest.Pack(blocks), until)
	if err != nil {
		w.t.Fatal(err)
	}
	for i, p := range res.Places {
		if p.Slot == 0 {
			continue
		}
		if want := w.crc[w.key(space, shard, blocks[i].Hash)]; !want[p.CRC32C] {
			w.t.Fatalf("space %d shard %d block %v: found checksum %x, stored %v", space, shard, blocks[i].Hash, p.CRC32C, want)
		}
	}
	if res.Hold != 0 {
		w.pinned = append(w.pinned, openPin{res.Hold, res.Places, until})
	}
}

func (w *world) unpin() {
	if len(w.pinned) == 0 {
		return
	}
	p := w.pinned[0]
	w.pinned = w.pinned[1:]
	for _, place := range p.places {
		if place.Slot == 0 {
			continue
		}
		slab, slot := int(place.Offset>>20), int(place.HeaderOffset&(1<<20-1))
		var g kvferry.Generation
		if _, n := w.slots.SlabInUse(slab); slot < n { // else it expired, and its slab went to another slot length
			g = w.slots.Generation(slab, slot)
		}
		if w.l.Unpin(p.id) && g != place.Generation { // it was still held: nobody may have used the slot again
			w.t.Fatalf("pinned slot has generation %d, was %d", g, place.Generation)
		}
		return
	}
}

// TestMetamorphic drives the ledger with seeded random operations and lets it prove itself after each.
func TestMetamorphic(t *testing.T) {
	var all tiers.Counts
	for s := *seed; s < *seed+uint64(*seeds); s++ {
		w := newWorld(t, s)
		for i := range 400 {
			w.step()
			if err := w.l.Check(); err != nil {
				t.Fatalf("seed %d step %d: %v (replay with -seed %d -seeds 1)", s, i, err, s)
			}
			if err := w.fold.follow(w.l); err != nil {
				t.Fatalf("seed %d step %d: %v (replay with -seed %d -seeds 1)", s, i, err, s)
			}
			if err := w.fold.compare(w.l); err != nil {
				t.Fatalf("seed %d step %d: %v (replay with -seed %d -seeds 1)", s, i, err, s)
			}
		}
		for _, f := range w.open {
			w.l.Abort(w.now, f.fills)
		}
		for len(w.moves) > 0 {
			w.endMove()
		}
		for len(w.read) > 0 {
			w.endReading()
		}
		for o := range tiers.Owner(5) {
			w.l.ReleaseOwner(o)
		}
		if st := w.l.Stats(); st.Leases != 0 || st.Pins != 0 || st.Moving != 0 || st.Filling != 0 || st.UsedBytes+st.FreeBytes != st.CapacityBytes {
			t.Fatalf("seed %d: after all have gone: %+v", s, st)
		}
		if err := w.l.Check(); err != nil {
			t.Fatalf("seed %d at the end: %v", s, err)
		}
		c := w.l.Stats().Counts
		all.DRAM, all.Stored, all.Evicted, all.Reclaimed = all.DRAM+c.DRAM, all.Stored+c.Stored, all.Evicted+c.Evicted, all.Reclaimed+c.Reclaimed
		all.NVMe, all.Demoted, all.Promoted, all.Released = all.NVMe+c.NVMe, all.Demoted+c.Demoted, all.Promoted+c.Promoted, all.Released+c.Released
		all.NotAdmitted, all.DriveEvicted = all.NotAdmitted+c.NotAdmitted, all.DriveEvicted+c.DriveEvicted
		all.Dropped, all.Incomplete, all.Aborted = all.Dropped+c.Dropped, all.Incomplete+c.Incomplete, all.Aborted+c.Aborted
	}
	if all.DRAM == 0 || all.Stored == 0 || all.Evicted == 0 || all.Reclaimed == 0 || all.Dropped == 0 || all.Incomplete == 0 || all.Aborted == 0 ||
		all.NVMe == 0 || all.Demoted == 0 || all.Promoted == 0 || all.Released == 0 || all.NotAdmitted == 0 || all.DriveEvicted == 0 {
		t.Fatalf("the operations did not reach everything: %+v", all)
	}
	t.Logf("%+v", all)
}
