package tiers_test

import (
	"testing"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/policy"
	"github.com/kvferry/kvferry/tiers/tierstest"
)

// shelf is a ledger with one space.
type shelf struct {
	t   *testing.T
	l   *tiers.Ledger
	ref tiers.SpaceRef
	now time.Time
}

func newShelf(t *testing.T, poolSlabs int, driveSlabs ...int) *shelf {
	t.Helper()
	cfg := tiers.Config{Pool: tierstest.NewSlots(poolSlabs, 1<<20), Limits: tiers.DefaultLimits}
	for _, n := range driveSlabs {
		cfg.Drives = append(cfg.Drives, tierstest.NewSlots(n, 1<<20))
	}
	s := &shelf{t: t, now: time.Unix(1e9, 0), l: tiers.New(cfg)}
	var err error
	if s.ref, err = s.l.Space(tiers.SpaceShape{ID: kvferry.SpaceID{1}, Shards: 1, ShardBytes: 64 << 10}); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *shelf) store(blocks []tiers.Block) {
	s.t.Helper()
	fills := s.l.BeginFill(s.now, s.ref, 0, blocks)
	s.l.Commit(s.now, fills, make([]uint32, len(fills)))
}

// demote plans and copies until all is done, and answers how much was.
func (s *shelf) demote(sel tiers.Selection, bytes uint64) (copied, present, noDrive int) {
	s.t.Helper()
	parts := 0
	for from := tiers.Cursor(0); ; {
		part := s.l.PlanDemote(s.now, sel, from, bytes)
		for i := range part.List {
			s.l.EndMove(s.now, &part.List[i], true)
		}
		copied, present, noDrive = copied+len(part.List), present+part.Present, noDrive+part.NoDrive
		if from = part.Next; from == 0 {
			break
		}
		if parts++; parts > 1000 {
			s.t.Fatal("it does not end")
		}
	}
	if err := s.l.Check(); err != nil {
		s.t.Fatal(err)
	}
	return copied, present, noDrive
}

func TestDemoteByHand(t *testing.T) {
	s := newShelf(t, 8, 8)
	long, other := tierstest.Chain(1, 40), tierstest.Chain(2, 10)
	s.store(long)
	s.store(other)
	last := tiers.Selection{Prefix: long[39].Hash[:]}
	if copied, _, _ := s.demote(last, 7*64<<10); copied != 40 {
		t.Errorf("the last block of a chain of 40 took %d copies: all of its ancestors have to go before it", copied)
	}
	s.l.Release(s.now, last, 0)
	if st := s.l.Stats(); st.InTier[policy.DRAM] != 49 {
		t.Errorf("%d blocks are in DRAM: the one that was named leaves, its ancestors do not", st.InTier[policy.DRAM])
	}
	if copied, present, _ := s.demote(tiers.Selection{}, 7*64<<10); copied != 10 || present != 39 {
		t.Errorf("%d copies, %d were there", copied, present)
	}
	left, from := 0, tiers.Cursor(0)
	for {
		n, next := s.l.Release(s.now, tiers.Selection{}, from)
		left += n
		if from = next; from == 0 {
			break
		}
	}
	if st := s.l.Stats(); st.InTier[policy.DRAM] != 0 || st.InTier[policy.NVMe] != 50 {
		t.Errorf("after the release of %d: %v", left, st.InTier)
	}
}

// What is larger than the drives, or too much at a time, ends and says so.
func TestDemoteMoreThanThereIs(t *testing.T) {
	s := newShelf(t, 16, 2)
	s.store(tierstest.Chain(1, 100))
	copies, noDrive := 0, 0
	for from, parts := tiers.Cursor(0), 0; ; parts++ {
		part := s.l.PlanDemote(s.now, tiers.Selection{}, from, 1<<30) // none of them ends: nothing of it may leave to make room
		copies, noDrive = copies+len(part.List), noDrive+part.NoDrive
		if from = part.Next; from == 0 {
			break
		}
		if parts > 100 {
			t.Fatal("it does not end")
		}
	}
	if copies != 32 || noDrive != 100-32 {
		t.Errorf("%d copies into 32 slots, %d without room", copies, noDrive)
	}
	s = newShelf(t, 7, 16)
	s.store(tierstest.Chain(1, 100))
	part := s.l.PlanDemote(s.now, tiers.Selection{}, 0, 1<<30)
	if n := len(part.List); n == 0 || n > 28 || part.Next == 0 {
		t.Errorf("%d of 112 slots are moved at a time, next %d", n, part.Next)
	}
	if again := s.l.PlanDemote(s.now, tiers.Selection{}, part.Next, 1<<30); len(again.List) != 0 || !again.Busy || again.Next != part.Next {
		t.Errorf("%d more while those are under way: %+v", len(again.List), again)
	}
}

// A leased block does not leave by hand, unless it is by force.
func TestLeasedStays(t *testing.T) {
	s := newShelf(t, 4, 4)
	blocks := tierstest.Chain(1, 5)
	s.store(blocks)
	s.l.Match(s.now, 1, "r", s.ref, tierstest.Pack(blocks), s.now.Add(time.Minute))
	s.demote(tiers.Selection{}, 1<<30)
	if n, _ := s.l.Release(s.now, tiers.Selection{}, 0); n != 0 || s.l.Stats().InTier[policy.DRAM] != 5 {
		t.Errorf("%d left", n)
	}
	if n, next := s.l.Evict(s.now, tiers.Selection{Prefix: blocks[1].Hash[:]}, policy.NumTiers, 0); n != 1 || next != 0 {
		t.Errorf("%d evicted", n)
	}
	if r := s.l.Match(s.now, 1, "r", s.ref, tierstest.Pack(blocks), s.now.Add(time.Minute)); r.Blocks != 1 {
		t.Errorf("%d blocks are found of a chain whose second is gone", r.Blocks)
	}
}

func TestExplainByHand(t *testing.T) {
	s := newShelf(t, 4, 4)
	blocks := tierstest.Chain(1, 6)
	s.store(blocks)
	s.l.Evict(s.now.Add(time.Second), tiers.Selection{Prefix: blocks[2].Hash[:]}, policy.NumTiers, 0)
	e := s.l.Explain(s.now, tiers.Selection{Prefix: blocks[5].Hash[:]}, 10)
	if len(e) != 1 || e[0].Missing != blocks[2].Hash || e[0].MissingRemoved == nil || e[0].MissingRemoved.Reason != tiers.Dropped || e[0].MissingRemoved.At != s.now.Add(time.Second).UnixNano() {
		t.Errorf("the last: %+v", e)
	}
	e = s.l.Explain(s.now, tiers.Selection{Prefix: blocks[2].Hash[:]}, 10)
	if len(e) != 1 || e[0].Block != nil || e[0].Removed == nil || e[0].Removed.Reason != tiers.Dropped {
		t.Errorf("the one that is gone: %+v", e)
	}
	if e = s.l.Explain(s.now, tiers.Selection{Prefix: blocks[1].Hash[:]}, 10); len(e) != 1 || !e[0].Block.Reachable || !e[0].Missing.IsZero() || e[0].Removed != nil {
		t.Errorf("one before it: %+v", e)
	}
	s.demote(tiers.Selection{Prefix: blocks[0].Hash[:]}, 1<<30)
	s.l.Evict(s.now, tiers.Selection{Prefix: blocks[0].Hash[:]}, policy.DRAM, 0)
	s.l.SetOpen(1, false)
	if e = s.l.Explain(s.now, tiers.Selection{Prefix: blocks[1].Hash[:]}, 10); len(e) != 1 || e[0].Missing != blocks[0].Hash || !e[0].MissingClosed {
		t.Errorf("with its parent on a closed drive: %+v", e)
	}
}

func TestReadBack(t *testing.T) {
	s := newShelf(t, 4, 4)
	blocks := tierstest.Chain(1, 20)
	s.store(blocks)
	s.demote(tiers.Selection{}, 1<<30)
	for id, want := range []int{20, 20} {
		n := 0
		for from := tiers.SlotRef(0); ; {
			list, next := s.l.BeginReading(tiers.StoreID(id), from, 3, 1<<30)
			n += len(list)
			for i := range list {
				list[i].Broken = list[i].Hash == blocks[7].Hash
			}
			s.l.EndReading(s.now, list)
			if from = next; from == 0 {
				break
			}
		}
		if n != want {
			t.Errorf("store %d: %d slots read", id, n)
		}
		if id == 0 { // broken in DRAM: found on the drive
			if r := s.l.Match(s.now, 1, "", s.ref, tierstest.Pack(blocks), s.now); r.Blocks != 20 || r.NVMe != 1 {
				t.Errorf("%+v", r)
			}
		}
	}
	if r := s.l.Match(s.now, 1, "", s.ref, tierstest.Pack(blocks), s.now); r.Blocks != 7 {
		t.Errorf("%+v", r)
	}
	if err := s.l.Check(); err != nil || s.l.Stats().Moving != 0 {
		t.Error(err, s.l.Stats().Moving)
	}
}

// What was brought up stays for a while: the next look for idle blocks does not let it leave again.
func TestPromotedIsNotIdle(t *testing.T) {
	s := newShelf(t, 4, 4)
	blocks := tierstest.Chain(1, 4)
	s.store(blocks)
	s.demote(tiers.Selection{}, 1<<30)
	s.l.Release(s.now, tiers.Selection{}, 0)
	s.now = s.now.Add(time.Hour)
	ups, _ := s.l.PlanUp(tiers.Selection{}, 0, 1<<30)
	if len(ups) != 1 || len(ups[0].Hashes) != 4*kvferry.HashSize {
		t.Fatalf("%+v", ups)
	}
	moves := s.l.BeginPromote(s.now, s.ref, 0, ups[0].Hashes)
	for i := range moves.List {
		s.l.EndMove(s.now, &moves.List[i], true)
	}
	down := tiers.Down{Idle: time.Minute, Move: true, High: 1, Low: 1}
	s.l.PlanDown(s.now.Add(time.Second), down, 100)
	if n := s.l.Stats().InTier[policy.DRAM]; n != 4 {
		t.Errorf("%d of 4 blocks that were brought up are left a second later", n)
	}
}

// A block that was not used for long stays in DRAM when its drive is in trouble, though another one is not.
func TestIdleWithItsDriveClosed(t *testing.T) {
	s := newShelf(t, 4, 4, 4)
	blocks := tierstest.Chain(1, 4)
	s.store(blocks)
	s.demote(tiers.Selection{}, 1<<30)
	s.l.SetOpen(1, false)
	on := s.l.Stats().Drives[0].Blocks
	if on == 0 || on == 4 {
		t.Fatalf("%d of 4 blocks are on the first of two drives", on)
	}
	s.l.PlanDown(s.now.Add(time.Hour), tiers.Down{Idle: time.Minute, Move: true, High: 1, Low: 1}, 100)
	if r := s.l.Match(s.now, 1, "", s.ref, tierstest.Pack(blocks), s.now); r.Blocks != 4 {
		t.Errorf("%d of 4 blocks are found: %+v", r.Blocks, s.l.Stats())
	}
}

// What is only hinted at takes a quarter of the pool at most, its first blocks first; what is asked for takes what it needs.
func TestPrefetchLeavesRoom(t *testing.T) {
	s := newShelf(t, 4, 16)
	chain := tierstest.Chain(1, 40)
	s.store(chain)
	if copied, _, _ := s.demote(tiers.Selection{}, 1<<30); copied != 40 {
		t.Fatalf("%d copied", copied)
	}
	s.l.Release(s.now, tiers.Selection{}, 0)
	if in := s.l.Stats().InTier; in[policy.DRAM] != 0 || in[policy.NVMe] != 40 {
		t.Fatalf("%v", in)
	}
	slots := 4 * tierstest.NewSlots(1, 1<<20).SlotsPerSlab(64<<10)
	hashes := tierstest.Pack(chain)
	hint := s.l.BeginPrefetch(s.now, s.ref, 0, hashes)
	if n := len(hint.List); n != slots/4 || hint.List[0].Fill.Block.Hash != chain[0].Hash || hint.At[n-1] != n-1 {
		t.Fatalf("%d of %d slots", len(hint.List), slots)
	}
	if again := s.l.BeginPrefetch(s.now, s.ref, 0, hashes); len(again.List) != 0 {
		t.Fatalf("%d more while those move", len(again.List))
	}
	asked := s.l.BeginPromote(s.now, s.ref, 0, hashes)
	if len(asked.List)+len(asked.Elsewhere) != 40 || len(asked.Elsewhere) != len(hint.List) {
		t.Fatalf("asked for: %d begin, %d are on their way", len(asked.List), len(asked.Elsewhere))
	}
	for _, m := range append(hint.List, asked.List...) {
		s.l.EndMove(s.now, &m, true)
	}
	if in := s.l.Stats().InTier; in[policy.DRAM] != 40 {
		t.Fatalf("%v", in)
	}
	if err := s.l.Check(); err != nil {
		t.Fatal(err)
	}
}
