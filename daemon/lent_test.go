package daemon

import (
	"testing"
	"time"

	"github.com/kvferry/kvferry"
	pb "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/standin"
)

// lender is an engine that keeps its blocks for what it offers.
type lender struct {
	worker, sched *standin.Session
	memory        *standin.Memory
	table         *standin.Table
}

func (n *node) lender(instance string) *lender {
	n.t.Helper()
	table, err := standin.NewTable(256)
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { _ = table.Close() })
	l := &lender{table: table}
	l.worker, l.memory = n.attach(worker, func(c *standin.Config) { c.Instance = instance })
	l.sched, _ = n.attach(scheduler, func(c *standin.Config) { c.Instance, c.Table = instance, table })
	return l
}

// compute puts a prompt into blocks, from the given one on, and stores nothing.
func (l *lender) compute(from int, hashes []kvferry.Hash) {
	for i, h := range hashes {
		l.table.Bump(uint32(from + i))
		l.memory.Write(uint32(from+i), h)
	}
}

func (l *lender) offer(t *testing.T, from int, hashes []kvferry.Hash) (ticket []byte, id [16]byte) {
	t.Helper()
	ticket, err := l.sched.Offer(standin.OfferRequest{RequestID: "r", Hashes: hashes, Blocks: numbers(from, len(hashes)), Tokens: uint32(len(hashes)) * 16, LifetimeMs: 60_000})
	if err != nil {
		t.Fatal(err)
	}
	if id, err = standin.OfferID(ticket); err != nil {
		t.Fatal(err)
	}
	return ticket, id
}

// accept loads with a ticket into blocks that it lends, and checks what came.
func accept(t *testing.T, s *standin.Session, m *standin.Memory, from int, hashes []kvferry.Hash, ticket []byte, deadlineMs uint32) *standin.LoadReport {
	t.Helper()
	blocks := numbers(from, len(hashes))
	for _, b := range blocks {
		m.Scribble(b)
	}
	r, err := s.Load(ctx10(t), standin.LoadRequest{RequestID: "d", Blocks: blocks, Hashes: hashes, Ticket: ticket, Direct: true, DeadlineMs: deadlineMs})
	if err != nil {
		t.Fatal(err)
	}
	for i, b := range blocks {
		if r.Status[i] == pb.BlockStatus_BLOCK_STATUS_READY && m.Wrong(b, hashes[i]) > 0 {
			t.Fatalf("block %d has wrong bytes", i)
		}
	}
	return r
}

func (l *lender) served(t *testing.T, id [16]byte, want string) {
	t.Helper()
	if got, err := l.worker.Served(ctx10(t), id); err != nil || got != want {
		t.Fatalf("served: %q %v, want %q", got, err, want)
	}
}

// patient lets look-ups wait for other nodes as long as a busy machine takes.
func patient(c *Config) { c.Handoff.LookupTimeout = Duration(5 * time.Second) }

func supervised(c *Config) { c.Supervised = true }

// On one node the decode worker copies out of the prefill worker's memory: nothing was stored.
func TestLentOnOneNode(t *testing.T) {
	n := newNode(t)
	p := n.lender("prefill")
	d, dm := n.attach(worker, func(c *standin.Config) { c.Instance = "decode" })
	hashes, _ := prompt(48, 3)
	p.compute(10, hashes)
	ticket, id := p.offer(t, 10, hashes)
	if r := accept(t, d, dm, 0, hashes, ticket, 5000); r.Loaded != 48 || r.Lent != 48 {
		t.Fatalf("handed over %+v", r)
	}
	p.served(t, id, "done")
	if d.Mapped() != 1 {
		t.Fatalf("%d mappings of lent memory", d.Mapped())
	}

	// A block that was allocated again in the meantime is refused, and the others are right.
	ticket, id = p.offer(t, 10, hashes)
	p.table.Bump(12)
	p.memory.Scribble(12)
	r := accept(t, d, dm, 0, hashes, ticket, 5000)
	if r.Loaded != 47 || r.Status[2] == pb.BlockStatus_BLOCK_STATUS_READY {
		t.Fatalf("one block was used again: %+v", r)
	}
	p.served(t, id, "done")

	// What is in the pool is taken from there then.
	p.compute(12, hashes[2:3])
	ticket, _ = p.offer(t, 10, hashes)
	store(t, p.worker, p.memory, 200, hashes[2:3], hashes[1:2])
	p.table.Bump(12)
	if r := accept(t, d, dm, 0, hashes, ticket, 5000); r.Loaded != 48 || r.Lent != 47 {
		t.Fatalf("one block is in the pool: %+v", r)
	}
	_ = p.worker.Close()
	eventually(t, "lent memory is unmapped when its lender is gone", func() bool { return d.Mapped() == 0 })
	n.nothingMoves()
}

// Between nodes the blocks come straight into the decode worker's memory: out of the pool, and out of the prefill worker's memory where they were not stored.
func TestDirect(t *testing.T) {
	a, b := newNode(t), newNode(t, supervised)
	p := a.lender("prefill")
	d, dm := b.attach(worker, func(c *standin.Config) { c.Instance = "decode" })
	if !d.Welcome.Direct {
		t.Fatal("a daemon under a watchdog does not offer direct delivery")
	}
	hashes, parents := prompt(48, 3)
	p.compute(10, hashes)
	store(t, p.worker, p.memory, 10, hashes[:20], parents[:20])
	ticket, id := p.offer(t, 10, hashes)
	if r := accept(t, d, dm, 0, hashes, ticket, 5000); r.Loaded != 48 || r.Delivered != 48 {
		t.Fatalf("handed over %+v", r)
	}
	p.served(t, id, "done")
	if v := a.counters.Value("claim_blocks", "lent"); v != 28 {
		t.Errorf("%d blocks came out of lent memory", v)
	}
	if st := b.ledger.Stats(); st.Blocks != 0 {
		t.Errorf("direct delivery left %d blocks in the pool", st.Blocks)
	}

	ticket, _ = p.offer(t, 10, hashes)
	p.table.Bump(40)
	r := accept(t, d, dm, 0, hashes, ticket, 5000)
	if r.Loaded != 47 || r.Status[30] == pb.BlockStatus_BLOCK_STATUS_READY {
		t.Fatalf("one block was used again: %+v", r)
	}

	// A worker that lends nothing gets all by way of its pool, and what is lent there is confirmed too.
	staged, sm := b.attach(worker, func(c *standin.Config) { c.Instance, c.Pooled = "staged", true })
	ticket, _ = p.offer(t, 10, hashes[:30])
	if r := load(t, staged, sm, 0, hashes[:30], ticket); r.Loaded != 30 || r.Delivered != 0 {
		t.Fatalf("by way of the pool: %+v", r)
	}
	for _, n := range []*node{a, b} {
		n.nothingMoves()
	}
}

// A daemon that nobody would kill writes into no worker's memory.
func TestNotDirectWithoutAWatchdog(t *testing.T) {
	a, b := newNode(t), newNode(t)
	p := a.lender("prefill")
	d, dm := b.attach(worker, func(c *standin.Config) { c.Instance = "decode" })
	hashes, _ := prompt(8, 3)
	p.compute(10, hashes)
	ticket, _ := p.offer(t, 10, hashes)
	if r := accept(t, d, dm, 0, hashes, ticket, 5000); r.Loaded != 8 || r.Delivered != 0 {
		t.Fatalf("handed over %+v", r)
	}
	r, err := a.admin().Offers(ctx10(t), &pb.OffersRequest{})
	if err != nil || len(r.Offers) != 1 || r.Offers[0].Path != "pool, tcp: no watchdog ends the claimer's daemon when it freezes" {
		t.Errorf("offers: %v %v", r, err)
	}
}

// The prompt of an open-ended offer is taken while it is computed.
func TestOpenEnded(t *testing.T) {
	for name, elsewhere := range map[string]bool{"one node": false, "two nodes": true} {
		t.Run(name, func(t *testing.T) {
			a := newNode(t, supervised)
			b := a
			if elsewhere {
				b = newNode(t, supervised)
			}
			p := a.lender("prefill")
			d, dm := b.attach(worker, func(c *standin.Config) { c.Instance = "decode" })
			hashes, parents := prompt(30, 3)
			offer := func() ([]byte, [16]byte) {
				ticket, err := p.sched.Offer(standin.OfferRequest{RequestID: "r", Hashes: hashes, Tokens: 480, OpenEnded: true})
				if err != nil {
					t.Fatal(err)
				}
				id, _ := standin.OfferID(ticket)
				return ticket, id
			}
			ticket, id := offer()
			done := make(chan *standin.LoadReport)
			go func() { done <- accept(t, d, dm, 0, hashes, ticket, 9000) }()
			p.compute(10, hashes)
			store(t, p.worker, p.memory, 10, hashes[:10], parents[:10])
			eventually(t, "the first chunk is taken", func() bool { return a.counters.Value("claim_blocks", "stored") >= 10 })
			store(t, p.worker, p.memory, 20, hashes[10:20], parents[10:20])
			if err := p.sched.Complete(id, numbers(10, 30)); err != nil {
				t.Fatal(err)
			}
			if r := <-done; r.Loaded != 30 {
				t.Fatalf("handed over %+v", r)
			}
			p.served(t, id, "done")

			// Aborted: what is not there will not come, and nobody waits for it.
			ticket, id = offer()
			before := a.counters.Value("claim_blocks", "stored")
			go func() { done <- accept(t, d, dm, 0, hashes, ticket, 9000) }()
			eventually(t, "it is claimed", func() bool { return a.counters.Value("claim_blocks", "stored") >= before+20 })
			begun := time.Now()
			if err := p.sched.EndOffer(id, "aborted"); err != nil {
				t.Fatal(err)
			}
			if r := <-done; r.Loaded < 20 || time.Since(begun) > 2*time.Second {
				t.Fatalf("aborted: %+v after %v", r, time.Since(begun))
			}
			a.nothingMoves()
			b.nothingMoves()
		})
	}
}

// What another node's decode worker has stored is found there by the next turn, and fetched where that beats computing.
func TestFetchFromAPeer(t *testing.T) {
	a, b := newNode(t, patient), newNode(t)
	s, m := b.attach(worker, func(c *standin.Config) { c.Instance = "decode" })
	w, wm := a.attach(worker)
	sched, _ := a.attach(scheduler)
	hashes, parents := prompt(40, 3)
	store(t, s, m, 0, hashes, parents)
	store(t, w, wm, 0, hashes[:10], parents[:10])
	match := func(request string, computeUs uint32, peers ...string) *pb.MatchResponse {
		r, err := a.engine().Match(ctx10(t), &pb.MatchRequest{SessionId: sched.Welcome.SessionId, RequestId: request, SpaceId: sched.Space[:], Hashes: packed(hashes), Peers: peers,
			ComputeUs: computeUs})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	if r := match("none", 0); r.Blocks != 10 || r.PeerBlocks != 0 || r.PeerReason != "" {
		t.Fatalf("nobody to ask: %v", r)
	}
	if r := match("slow", 1, b.peerAddress); r.Blocks != 10 || r.PeerReason != "compute is faster" || r.PeerUs == 0 {
		t.Fatalf("computing is faster: %v", r)
	}
	if r := match("fetched", 1_000_000, "127.0.0.1:1", b.peerAddress); r.Blocks != 40 || r.PeerBlocks != 30 || r.DramBlocks != 10 {
		t.Fatalf("fetching is faster: %v", r)
	}
	r, err := w.Load(ctx10(t), standin.LoadRequest{RequestID: "fetched", Blocks: numbers(100, 40), Hashes: hashes, DeadlineMs: 5000})
	if err != nil || r.Loaded != 40 {
		t.Fatalf("loaded %+v %v", r, err)
	}
	for i, h := range hashes {
		if wm.Wrong(uint32(100+i), h) > 0 {
			t.Fatalf("block %d has wrong bytes", i)
		}
	}
	if r := match("again", 0, b.peerAddress); r.Blocks != 40 || r.PeerBlocks != 0 {
		t.Fatalf("what was fetched is here: %v", r)
	}
	view, err := a.admin().Fetches(ctx10(t), &pb.FetchesRequest{})
	if err != nil || len(view.Decisions) != 2 || view.Decisions[1].Reason != "fetch is faster" || view.Decisions[1].Blocks != 30 || view.Decisions[0].Fetched {
		t.Errorf("decisions: %v %v", view, err)
	}
	b.registry.Expire(time.Now().Add(time.Hour))
	eventually(t, "the lease at the owner ends", func() bool { st := b.ledger.Stats(); return st.Leases == 0 && st.Pins == 0 })
}

// A forged Confirm tells nothing of memory that the claim may not read.
func TestConfirmOfOthers(t *testing.T) {
	a := newNode(t)
	p := a.lender("prefill")
	hashes, _ := prompt(4, 3)
	p.compute(10, hashes)
	_, _ = p.offer(t, 10, hashes)
	if _, _, err := a.registry.Confirm(t.Context(), [16]byte{1}, []uint64{1 << 63}); err == nil {
		t.Error("a claim that is not there was confirmed")
	}
}

// A worker that takes a dead one's place has other memory: the scheduler's generations tell nothing of it.
func TestLentByAnotherWorker(t *testing.T) {
	a, b := newNode(t, supervised), newNode(t, supervised)
	for name, n := range map[string]*node{"one node": a, "two nodes": b} {
		p := a.lender("prefill of " + name)
		d, dm := n.attach(worker, func(c *standin.Config) { c.Instance = "decode" })
		hashes, _ := prompt(8, 3)
		p.compute(10, hashes)
		ticket, _ := p.offer(t, 10, hashes)
		_ = p.worker.Close()
		a.attach(worker, func(c *standin.Config) { c.Instance = "prefill of " + name })
		if r := accept(t, d, dm, 0, hashes, ticket, 3000); r.Loaded != 0 {
			t.Errorf("%s: %+v", name, r)
		}
	}
}

// An engine that completes an offer which has ended, or whose offer is refused, has its blocks back all the same.
func TestServedWithoutAnOffer(t *testing.T) {
	n := newNode(t)
	p := n.lender("prefill")
	hashes, _ := prompt(4, 3)
	p.compute(10, hashes)
	ticket, err := p.sched.Offer(standin.OfferRequest{RequestID: "r", Hashes: hashes, Tokens: 64, OpenEnded: true})
	if err != nil {
		t.Fatal(err)
	}
	id, _ := standin.OfferID(ticket)
	if err := p.sched.EndOffer(id, "aborted"); err != nil {
		t.Fatal(err)
	}
	if err := p.sched.Complete(id, numbers(10, 4)); err != nil {
		t.Fatal(err)
	}
	p.served(t, id, "withdrawn")
	if err := p.sched.Complete([16]byte{7}, numbers(10, 4)); err != nil { // long ago
		t.Fatal(err)
	}
	p.served(t, [16]byte{7}, "not known")
	ticket, err = p.sched.Offer(standin.OfferRequest{RequestID: "r", Hashes: hashes, Blocks: numbers(10, 4)}) // of no tokens
	if err != nil {
		t.Fatal(err)
	}
	id, _ = standin.OfferID(ticket)
	p.served(t, id, "refused")
}
