package tiers_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers"
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
	switch w.r.IntN(14) {
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
			w.l.Drop(w.spaces[space], []kvferry.Hash{w.chain()[0].Hash})
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
		w.plan(w.l.BeginPromote(w.now, w.spaces[space], shard, tierstest.Pack(w.chain())))
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
