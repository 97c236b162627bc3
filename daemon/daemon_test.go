package daemon

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvferry/kvferry"
	pb "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/standin"
)

const (
	worker    = pb.Role_ROLE_WORKER
	scheduler = pb.Role_ROLE_SCHEDULER
)

func TestStoreMatchLoad(t *testing.T) {
	n := newNode(t)
	s, m := n.attach(worker)
	sched, _ := n.attach(scheduler)
	hashes, parents := prompt(40, 1)
	if end := store(t, s, m, 0, hashes, parents); end.Outcome != pb.Outcome_OUTCOME_COMMITTED || end.BlocksStored != 40 {
		t.Fatalf("store ended %v", end)
	}
	if end := store(t, s, m, 0, hashes, parents); end.BlocksStored != 0 || end.BlocksPresent != 40 {
		t.Fatalf("second store ended %v", end)
	}
	more, _ := prompt(50, 1)
	r, err := sched.Match(ctx10(t), "r", more, 5000)
	if err != nil || r.Blocks != 40 || r.LeaseMs != 5000 {
		t.Fatalf("match: %v %v", r, err)
	}
	if got := load(t, s, m, 100, hashes, nil); got.Loaded != 40 {
		t.Fatalf("loaded %+v", got)
	}
	_ = s.Close()
	_ = sched.Close()
	n.nothingHeld()
}

func TestStagingStore(t *testing.T) {
	n := newNode(t)
	s, m := n.attach(worker, func(c *standin.Config) { c.Kind = pb.RegionKind_REGION_KIND_STAGING })
	hashes, parents := prompt(10, 1)
	store(t, s, m, 0, hashes, parents)
	if got := load(t, s, m, 100, hashes, nil); got.Loaded != 10 {
		t.Fatalf("loaded %+v", got)
	}
}

func TestHandoffOverTCP(t *testing.T) {
	a, b := newNode(t), newNode(t)
	s, m := a.attach(worker)
	sched, _ := a.attach(scheduler)
	hashes, parents := prompt(48, 3)
	ticket, err := sched.Offer(standin.OfferRequest{RequestID: "r", Hashes: hashes, Tokens: 48 * 16, LifetimeMs: 60_000}) // before the stores, as a scheduler does
	if err != nil {
		t.Fatal(err)
	}
	store(t, s, m, 0, hashes, parents)
	d, dm := b.attach(worker, func(c *standin.Config) { c.Instance = "decode" })
	if got := load(t, d, dm, 0, hashes, ticket); got.Loaded != 48 {
		t.Fatalf("handed over %+v", got)
	}
	eventually(t, "the offer is done", func() bool { return a.registry.OpenOffers() == 0 && a.ledger.Stats().Pins == 0 })
	if got := load(t, d, dm, 100, hashes, nil); got.Loaded != 48 { // it is in b's pool now
		t.Fatalf("loaded %+v", got)
	}
	for _, n := range []*node{a, b} {
		if err := n.ledger.Check(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestHandoffOnOneNode(t *testing.T) {
	a := newNode(t)
	s, m := a.attach(worker)
	sched, _ := a.attach(scheduler)
	d, dm := a.attach(worker, func(c *standin.Config) { c.Instance = "decode" })
	hashes, parents := prompt(48, 3)
	ticket, err := sched.Offer(standin.OfferRequest{RequestID: "r", Hashes: hashes, Tokens: 48 * 16, LifetimeMs: 60_000})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan *standin.LoadReport)
	go func() { done <- load(t, d, dm, 0, hashes, ticket) }() // asks before the stores are there
	store(t, s, m, 0, hashes, parents)
	if got := <-done; got.Loaded != 48 {
		t.Fatalf("handed over %+v", got)
	}
}

// A ticket is good for one instance, with its secret, in its epoch and lifetime.
func TestTickets(t *testing.T) {
	a, b := newNode(t), newNode(t)
	s, m := a.attach(worker)
	sched, _ := a.attach(scheduler)
	hashes, parents := prompt(8, 3)
	store(t, s, m, 0, hashes, parents)
	offer := func(lifetimeMs uint32) *pb.Ticket {
		raw, err := sched.Offer(standin.OfferRequest{RequestID: "r", Hashes: hashes, Tokens: 128, LifetimeMs: lifetimeMs})
		if err != nil {
			t.Fatal(err)
		}
		var ticket pb.Ticket
		if err := proto.Unmarshal(raw, &ticket); err != nil {
			t.Fatal(err)
		}
		return &ticket
	}
	attempt := func(instance string, ticket *pb.Ticket) int {
		d, dm := b.attach(worker, func(c *standin.Config) { c.Instance = instance })
		defer d.Close()
		raw, _ := proto.Marshal(ticket)
		got := load(t, d, dm, 0, hashes, raw).Loaded
		space := d.Space
		ref, _, _ := b.ledger.FindSpace(kvferry.SpaceID(space))
		b.ledger.Drop(ref, hashes) // so that the next attempt has to ask again
		return got
	}

	wrong := offer(60_000)
	wrong.Secret = make([]byte, 16)
	if n := attempt("d1", wrong); n != 0 {
		t.Errorf("wrong secret: %d blocks", n)
	}
	old := offer(60_000)
	old.Epoch = make([]byte, 16)
	if n := attempt("d1", old); n != 0 {
		t.Errorf("wrong epoch: %d blocks", n)
	}
	short := offer(1)
	eventually(t, "the offer expires", func() bool { return a.counters.Value("offers", "expired") > 0 })
	if n := attempt("d1", short); n != 0 {
		t.Errorf("expired: %d blocks", n)
	}
	unknown := offer(60_000)
	unknown.OfferId = []byte("0123456789abcdef")
	if n := attempt("d1", unknown); n != 0 {
		t.Errorf("unknown offer: %d blocks", n)
	}
	// A claim that another instance still has: hold one by hand.
	taken := offer(60_000)
	cl := a.claim(taken, "d2", hashes)
	if n := attempt("d1", taken); n != 0 {
		t.Errorf("claimed by another instance: %d blocks", n)
	}
	a.registry.EndClaim(cl, "")
	fine := offer(60_000)
	if n := attempt("d1", fine); n != 8 {
		t.Errorf("good ticket: %d blocks", n)
	}
	eventually(t, "both offers are done", func() bool { return a.counters.Value("offers", "done") == 2 })
	if n := attempt("d1", fine); n != 0 {
		t.Errorf("used ticket: %d blocks", n)
	}
	eventually(t, "nothing stays pinned", func() bool { return a.ledger.Stats().Pins == 0 })
}

func TestRevoke(t *testing.T) {
	n := newNode(t)
	s, m := n.attach(worker)
	for round := range 50 {
		hashes, parents := prompt(32, uint64(1000*round))
		for i, h := range hashes {
			m.Write(uint32(i), h)
		}
		o, err := s.Store(standin.StoreRequest{RequestID: "r", Blocks: numbers(0, 32), Hashes: hashes, Parents: parents})
		if err != nil {
			t.Fatal(err)
		}
		won := o.Revoke()
		if won {
			for i := range hashes {
				m.Scribble(uint32(i)) // at once, as an engine does after preemption
			}
		}
		end, err := o.Wait(ctx10(t))
		if err != nil {
			t.Fatal(err)
		}
		if won != (end.Outcome == pb.Outcome_OUTCOME_REVOKED) {
			t.Fatalf("revoke won: %v, outcome %v", won, end.Outcome)
		}
		got := load(t, s, m, 100, hashes, nil) // compares the bytes of all that is there
		if won && got.Loaded != 0 || !won && got.Loaded != 32 {
			t.Fatalf("revoke won: %v, loaded %d", won, got.Loaded)
		}
	}
}

// Bytes that change in the pool are never served, and leave.
func TestFlippedPayload(t *testing.T) {
	n := newNode(t)
	s, m := n.attach(worker)
	hashes, parents := prompt(16, 1)
	store(t, s, m, 0, hashes, parents)
	n.pool.Bytes()[n.placeOf(s, hashes[5])+100] ^= 1
	got := load(t, s, m, 100, hashes, nil)
	if got.Loaded != 15 || got.Wrong != 1 || got.Status[5] == pb.BlockStatus_BLOCK_STATUS_READY {
		t.Fatalf("loaded %+v", got)
	}
	eventually(t, "the block is dropped", func() bool { return n.counters.Value("broken_blocks", "pool") == 1 })
	sched, _ := n.attach(scheduler)
	if r, err := sched.Match(ctx10(t), "r", hashes, 0); err != nil || r.Blocks != 5 {
		t.Fatalf("match: %v %v", r, err)
	}
}

// A flipped byte is not handed to a peer either.
func TestFlippedPayloadOverTCP(t *testing.T) {
	a, b := newNode(t), newNode(t)
	s, m := a.attach(worker)
	sched, _ := a.attach(scheduler)
	hashes, parents := prompt(16, 1)
	store(t, s, m, 0, hashes, parents)
	a.pool.Bytes()[a.placeOf(s, hashes[5])+100] ^= 1
	ticket, err := sched.Offer(standin.OfferRequest{RequestID: "r", Hashes: hashes, Tokens: 256, LifetimeMs: 0})
	if err != nil {
		t.Fatal(err)
	}
	d, dm := b.attach(worker, func(c *standin.Config) { c.Instance = "decode" })
	if got := load(t, d, dm, 0, hashes, ticket); got.Loaded != 15 || got.Status[5] != pb.BlockStatus_BLOCK_STATUS_FAILED {
		t.Fatalf("handed over %+v", got)
	}
	if n := b.counters.Value("broken_blocks", "peer"); n != 1 {
		t.Errorf("counted %d", n)
	}
}

func TestPoolFullOfLeases(t *testing.T) {
	n := newNode(t) // 32 MiB in slots of 64 KiB
	s, m := n.attach(worker)
	sched, _ := n.attach(scheduler)
	for i := range 8 {
		hashes, parents := prompt(64, uint64(i)*1000)
		store(t, s, m, 0, hashes, parents)
		if _, err := sched.Match(ctx10(t), string(rune('a'+i)), hashes, 60_000); err != nil {
			t.Fatal(err)
		}
	}
	hashes, parents := prompt(64, 99_000)
	if end := store(t, s, m, 0, hashes, parents); end.Outcome != pb.Outcome_OUTCOME_BUSY && end.BlocksStored == 64 {
		t.Fatalf("store into a pool full of leases ended %v", end)
	}
	admin := n.admin()
	if st, err := admin.Status(ctx10(t), &pb.StatusRequest{}); err != nil || st.Health != pb.Health_HEALTH_DEGRADED || len(st.Problems) == 0 || st.Problems[0].Component != "pool" {
		t.Errorf("status of a full pool: %v %v", st.GetProblems(), err)
	}
	_ = sched.Close() // the leases go with it
	eventually(t, "there is room again", func() bool { return store(t, s, m, 0, hashes, parents).BlocksPresent == 64 })
}

func TestAdoptedPool(t *testing.T) {
	n := newNode(t)
	s, m := n.attach(worker)
	hashes, parents := prompt(40, 1)
	store(t, s, m, 0, hashes, parents)
	n.restart()
	if _, err := s.Match(ctx10(t), "r", hashes, 0); err == nil {
		t.Fatal("a session outlived its daemon")
	}
	s, m = n.attach(worker)
	if n.adopted != 40 {
		t.Fatalf("adopted %d blocks", n.adopted)
	}
	if got := load(t, s, m, 0, hashes, nil); got.Loaded != 40 {
		t.Fatalf("loaded %+v after the restart", got)
	}
}

func TestSecondDaemonIsRefused(t *testing.T) {
	n := newNode(t)
	c := n.cfg
	if _, err := Start(c, n.log); err == nil || !strings.Contains(err.Error(), "sockets.dir") {
		t.Errorf("same sockets: %v", err)
	}
	c.Sockets.Dir = t.TempDir()
	if _, err := Start(c, n.log); err == nil || !strings.Contains(err.Error(), "in use by another daemon") {
		t.Errorf("same pool: %v", err)
	}
}

func TestDrain(t *testing.T) {
	n := newNode(t)
	s, m := n.attach(worker)
	hashes, parents := prompt(8, 1)
	store(t, s, m, 0, hashes, parents)
	n.Drain(ctx10(t))
	more, moreParents := prompt(16, 1)
	if end := store(t, s, m, 0, more, moreParents); end.Outcome != pb.Outcome_OUTCOME_BUSY {
		t.Errorf("store while draining ended %v", end)
	}
	if got := load(t, s, m, 100, hashes, nil); got.Loaded != 8 {
		t.Errorf("load while draining: %+v", got)
	}
	if _, err := standin.Attach(ctx10(t), standin.Config{SocketsDir: n.cfg.Sockets.Dir, Role: scheduler, Instance: "x", Space: testSpace()}); err == nil {
		t.Error("attached to a draining daemon")
	}
}

// A Load that nobody releases ends at its deadline and holds nothing after it.
func TestLoadDeadline(t *testing.T) {
	n := newNode(t)
	raw := n.rawSession(helloOf(worker))
	hashes, parents := prompt(8, 1)
	space := raw.welcome.SpaceId
	raw.word(0, 1)
	raw.send(&pb.SessionRequest{Message: &pb.SessionRequest_Store{Store: &pb.Store{
		Operation: 1, SpaceId: space, Region: 1, BlockIds: numbers(0, 8), Hashes: packed(hashes), Parents: packed(parents),
	}}})
	if end := raw.receive().GetOperationEnd(); end.GetBlocksStored() != 8 {
		t.Fatalf("store ended %v", end)
	}
	raw.word(0, 2)
	raw.send(&pb.SessionRequest{Message: &pb.SessionRequest_Load{Load: &pb.Load{Operation: 2, Word: 0, SpaceId: space, Hashes: packed(hashes), DeadlineMs: 50}}})
	if r := raw.receive().GetLoadResult(); r == nil || len(r.Status) != 8 {
		t.Fatalf("load answered %v", r)
	}
	if n.ledger.Stats().Pins != 8 {
		t.Errorf("%d pins", n.ledger.Stats().Pins)
	}
	if end := raw.receive().GetOperationEnd(); end.GetOutcome() != pb.Outcome_OUTCOME_EXPIRED {
		t.Errorf("ended %v", end)
	}
	if p := n.ledger.Stats().Pins; p != 0 {
		t.Errorf("%d pins after the deadline", p)
	}
}

func TestSessionsOfDeadProcessesGo(t *testing.T) {
	n := newNode(t)
	sched, _ := n.attach(scheduler)
	s, m := n.attach(worker)
	hashes, parents := prompt(8, 1)
	store(t, s, m, 0, hashes, parents)
	if _, err := sched.Match(ctx10(t), "r", hashes, 60_000); err != nil {
		t.Fatal(err)
	}
	if _, err := sched.Offer(standin.OfferRequest{RequestID: "r", Hashes: hashes, Tokens: 128, LifetimeMs: 60_000}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "lease and offer", func() bool { return n.ledger.Stats().Leases == 2 })
	_ = sched.Close()
	_ = s.Close()
	n.nothingHeld()
	if n.registry.OpenOffers() != 0 {
		t.Error("an offer outlived its session")
	}
	if _, err := sched.Match(ctx10(t), "r", hashes, 0); err == nil || errors.Is(err, os.ErrNotExist) {
		t.Errorf("match in a closed session: %v", err)
	}
	if time.Since(n.started) > time.Minute {
		t.Error("took too long")
	}
}

// A handoff of which the beginning is here already keeps the chain whole: parents are those of the prefill side.
func TestHandoffOfTheRestKeepsTheChain(t *testing.T) {
	a, b := newNode(t), newNode(t)
	s, m := a.attach(worker)
	sched, _ := a.attach(scheduler)
	hashes, parents := prompt(12, 3)
	store(t, s, m, 0, hashes, parents)
	d, dm := b.attach(worker, func(c *standin.Config) { c.Instance = "decode" })
	store(t, d, dm, 0, hashes[:5], parents[:5])
	ticket, err := sched.Offer(standin.OfferRequest{RequestID: "r", Hashes: hashes, Tokens: 12 * 16, LifetimeMs: 60_000})
	if err != nil {
		t.Fatal(err)
	}
	if got := load(t, d, dm, 100, hashes, ticket); got.Loaded != 12 {
		t.Fatalf("handed over %+v", got)
	}
	views, _ := b.ledger.Blocks(time.Now(), nil, nil, 100)
	byHash := map[kvferry.Hash]kvferry.Hash{}
	for _, v := range views {
		byHash[v.Hash] = v.Parent
	}
	for i, h := range hashes {
		if byHash[h] != parents[i] {
			t.Errorf("block %d has parent %v, want %v", i, byHash[h], parents[i])
		}
	}
}

// A ticket cannot make the daemon dial whatever stands in it.
func TestPeerAllow(t *testing.T) {
	a := newNode(t)
	b := newNode(t, func(c *Config) { c.Peer.Allow = []string{"192.0.2.0/24"} })
	s, m := a.attach(worker)
	sched, _ := a.attach(scheduler)
	hashes, parents := prompt(4, 3)
	store(t, s, m, 0, hashes, parents)
	ticket, err := sched.Offer(standin.OfferRequest{RequestID: "r", Hashes: hashes, Tokens: 64, LifetimeMs: 0})
	if err != nil {
		t.Fatal(err)
	}
	d, dm := b.attach(worker, func(c *standin.Config) { c.Instance = "decode" })
	if got := load(t, d, dm, 0, hashes, ticket); got.Loaded != 0 || b.counters.Value("peers", "refused") != 1 {
		t.Fatalf("handed over %+v from an address that is not allowed", got)
	}
	if len(b.fetcher.Peers()) != 0 {
		t.Error("it is remembered as a peer")
	}
}

// An engine that changes its weights in place again and again keeps its cache.
func TestManySpacesInASession(t *testing.T) {
	n := newNode(t)
	raw := n.rawSession(helloOf(worker))
	for i := range 100 {
		space := helloOf(worker).Space
		space.WeightsGeneration = fmt.Sprint(i)
		raw.send(&pb.SessionRequest{Message: &pb.SessionRequest_UseSpace{UseSpace: &pb.UseSpace{Sequence: uint32(i), Space: space}}})
		ready := raw.receive().GetSpaceReady()
		if ready == nil {
			t.Fatalf("space %d is refused", i)
		}
		hashes, parents := prompt(1, 1)
		raw.word(0, uint64(i+1))
		raw.send(&pb.SessionRequest{Message: &pb.SessionRequest_Store{Store: &pb.Store{
			Operation: uint64(i + 1), SpaceId: ready.SpaceId, Region: 1, BlockIds: numbers(0, 1), Hashes: packed(hashes), Parents: packed(parents),
		}}})
		if end := raw.receive().GetOperationEnd(); end.GetBlocksStored() != 1 {
			t.Fatalf("store in space %d ended %v", i, end)
		}
	}
	_ = raw.stream.CloseSend()
	n.nothingHeld()
}

// An offer ends also when the decode side has all of it already.
func TestOfferOfWhatIsThere(t *testing.T) {
	a, b := newNode(t), newNode(t)
	s, m := a.attach(worker)
	sched, _ := a.attach(scheduler)
	hashes, parents := prompt(12, 3)
	store(t, s, m, 0, hashes, parents)
	for name, n := range map[string]*node{"another node": b, "this node": a} {
		d, dm := n.attach(worker, func(c *standin.Config) { c.Instance = "decode" })
		store(t, d, dm, 0, hashes, parents)
		ticket, err := sched.Offer(standin.OfferRequest{RequestID: "r", Hashes: hashes, Tokens: 12 * 16, LifetimeMs: 60_000})
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, "the offer is there", func() bool { return a.registry.OpenOffers() == 1 })
		if got := load(t, d, dm, 100, hashes, ticket); got.Loaded != 12 {
			t.Fatalf("%s: loaded %+v", name, got)
		}
		eventually(t, name+": the offer ends", func() bool { return a.registry.OpenOffers() == 0 })
	}
}

// What is here already is answered before the rest is fetched, and a large fetch in parts.
func TestAcceptAnswersInParts(t *testing.T) {
	big := func(c *Config) { c.Pool.Size = 2<<20 + 6*(8<<20) }
	a, b := newNode(t, big), newNode(t, big)
	shape := standin.Shape{Blocks: 64, Planes: 1, PlaneBytes: 1 << 20}
	with := func(instance string, mem **standin.Memory) func(*standin.Config) {
		return func(c *standin.Config) {
			m, err := standin.NewMemory(shape)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = m.Close() })
			c.Instance, c.Memory, *mem = instance, m, m
		}
	}
	var am, bm *standin.Memory
	s, _ := a.attach(worker, with("prefill", &am))
	sched, _ := a.attach(scheduler)
	d, _ := b.attach(worker, with("decode", &bm))
	hashes, parents := prompt(30, 3)
	store(t, s, am, 0, hashes, parents)
	store(t, d, bm, 0, hashes[10:14], parents[10:14])
	ticket, err := sched.Offer(standin.OfferRequest{RequestID: "r", Hashes: hashes, Tokens: 480, LifetimeMs: 0})
	if err != nil {
		t.Fatal(err)
	}
	if got := load(t, d, bm, 32, hashes, ticket); got.Loaded != 30 {
		t.Fatalf("handed over %+v", got)
	}
	_ = d.Close()
	b.nothingHeld()
}

// A Release of several Loads does not say which of them had the wrong block: it is found in any.
func TestFlippedPayloadOfASecondLoad(t *testing.T) {
	n := newNode(t)
	raw := n.rawSession(helloOf(worker))
	hashes, parents := prompt(8, 1)
	space := raw.welcome.SpaceId
	raw.word(0, 1)
	raw.send(&pb.SessionRequest{Message: &pb.SessionRequest_Store{Store: &pb.Store{
		Operation: 1, SpaceId: space, Region: 1, BlockIds: numbers(0, 8), Hashes: packed(hashes), Parents: packed(parents),
	}}})
	raw.receive()
	var broken uint64
	for i, part := range [][]kvferry.Hash{hashes[:4], hashes[4:]} {
		op := uint64(i + 2)
		raw.word(i, op)
		raw.send(&pb.SessionRequest{Message: &pb.SessionRequest_Load{Load: &pb.Load{Operation: op, Word: uint32(i), SpaceId: space, Hashes: packed(part)}}})
		broken = raw.receive().GetLoadResult().GetOffsets()[0]
	}
	n.pool.Bytes()[broken] ^= 1
	raw.send(&pb.SessionRequest{Message: &pb.SessionRequest_Release{Release: &pb.Release{Operations: []uint64{2, 3}, WrongBlocks: 1}}})
	eventually(t, "the block is dropped", func() bool { return n.counters.Value("broken_blocks", "pool") == 1 })
}
