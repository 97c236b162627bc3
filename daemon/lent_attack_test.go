package daemon

import (
	"testing"

	pb "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/standin"
)

// Two engines that call themselves the same: whose memory holds what one of them offers is not known, so none of it is lent.
func TestTwoEnginesOfOneName(t *testing.T) {
	for name, elsewhere := range map[string]bool{"one node": false, "two nodes": true} {
		t.Run(name, func(t *testing.T) {
			a := newNode(t)
			b := a
			if elsewhere {
				b = newNode(t)
			}
			p := a.lender("prefill")
			_ = a.lender("prefill")
			d, dm := b.attach(worker, func(c *standin.Config) { c.Instance = "decode" })
			hashes, _ := prompt(8, 3)
			p.compute(10, hashes)
			ticket, _ := p.offer(t, 10, hashes)
			if r := accept(t, d, dm, 0, hashes, ticket, 3000); r.Loaded != 0 {
				t.Errorf("%d blocks came out of somebody's memory", r.Loaded)
			}
		})
	}
}

// A scheduler that only calls itself like an engine does not get that engine's memory lent.
func TestSchedulerOfAnotherStart(t *testing.T) {
	n := newNode(t)
	p := n.lender("prefill")
	_ = p.sched.Close()
	p.sched, _ = n.attach(scheduler, func(c *standin.Config) { c.Instance, c.Table, c.EngineStart = "prefill", p.table, "another" })
	d, dm := n.attach(worker, func(c *standin.Config) { c.Instance = "decode" })
	hashes, _ := prompt(8, 3)
	p.compute(10, hashes)
	ticket, _ := p.offer(t, 10, hashes)
	if r := accept(t, d, dm, 0, hashes, ticket, 3000); r.Loaded != 0 {
		t.Errorf("%d blocks came out of another engine's memory", r.Loaded)
	}
}

// Memory that whoever reads it could open for writing is not lent.
func TestWritableMemoryIsNotLent(t *testing.T) {
	n := newNode(t)
	p := n.lender("prefill")
	q, qm := n.attach(worker, func(c *standin.Config) {
		c.Instance = "open"
		if err := c.Memory.Chmod(0o666); err != nil {
			t.Fatal(err)
		}
	})
	sched, _ := n.attach(scheduler, func(c *standin.Config) { c.Instance, c.Table = "open", p.table })
	d, dm := n.attach(worker, func(c *standin.Config) { c.Instance = "decode" })
	hashes, _ := prompt(8, 3)
	l := &lender{worker: q, sched: sched, memory: qm, table: p.table}
	l.compute(10, hashes)
	ticket, _ := l.offer(t, 10, hashes)
	if r := accept(t, d, dm, 0, hashes, ticket, 3000); r.Loaded != 0 {
		t.Errorf("%d blocks were lent", r.Loaded)
	}
}

// A prompt of more parts than a link queues comes whole.
func TestManyParts(t *testing.T) {
	const blocks = 90
	pool := func(c *Config) { c.Pool.Size, c.Pool.Slab = 130<<20, 64<<20 }
	a, b := newNode(t, pool), newNode(t, supervised, pool)
	large := func(c *standin.Config) {
		m, err := standin.NewMemory(standin.Shape{Blocks: blocks, Planes: 1, PlaneBytes: 8 << 20})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = m.Close() })
		c.Memory, c.Space = m, testSpace()
		c.Space.Model = "large"
	}
	table, err := standin.NewTable(blocks)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = table.Close() })
	_, _ = a.attach(worker, large, func(c *standin.Config) { c.Instance = "prefill" })
	sched, _ := a.attach(scheduler, func(c *standin.Config) {
		c.Instance, c.Table, c.Space = "prefill", table, testSpace()
		c.Space.Model = "large"
	})
	d, _ := b.attach(worker, large, func(c *standin.Config) { c.Instance = "decode" })
	hashes, _ := prompt(blocks, 3) // the memory is zero on both sides: it is the number that counts here
	ticket, err := sched.Offer(standin.OfferRequest{RequestID: "r", Hashes: hashes, Blocks: numbers(0, blocks), Tokens: 16 * blocks, LifetimeMs: 60_000})
	if err != nil {
		t.Fatal(err)
	}
	r, err := d.Load(t.Context(), standin.LoadRequest{RequestID: "d", Blocks: numbers(0, blocks), Hashes: hashes, Ticket: ticket, Direct: true, DeadlineMs: 30_000})
	if err != nil || r.Delivered != blocks {
		t.Errorf("%d of %d blocks: %v", r.Delivered, blocks, err)
	}
}

// Look-ups of other nodes do not use up this node's offers.
func TestLookUpsAreBounded(t *testing.T) {
	a, b := newNode(t, patient), newNode(t)
	s, m := b.attach(worker, func(c *standin.Config) { c.Instance = "decode" })
	_, _ = a.attach(worker)
	sched, _ := a.attach(scheduler)
	hashes, parents := prompt(4, 3)
	store(t, s, m, 0, hashes, parents)
	for range 20 {
		_, err := a.engine().Match(ctx10(t), &pb.MatchRequest{SessionId: sched.Welcome.SessionId, RequestId: "same", SpaceId: sched.Space[:], Hashes: packed(hashes),
			Peers: []string{b.peerAddress}, ComputeUs: 1})
		if err != nil {
			t.Fatal(err)
		}
	}
	if n := b.registry.OpenOffers(); n != 1 {
		t.Errorf("20 look-ups of one request hold %d offers", n)
	}
}

// Blocks that one Accept has lent are not lent to another before it has ended.
func TestBlocksAreLentOnce(t *testing.T) {
	a, b := newNode(t), newNode(t, supervised)
	p := a.lender("prefill")
	d, dm := b.attach(worker, func(c *standin.Config) { c.Instance = "decode" })
	hashes, _ := prompt(8, 3)
	ticket, err := p.sched.Offer(standin.OfferRequest{RequestID: "r", Hashes: hashes, Tokens: 128, OpenEnded: true})
	if err != nil {
		t.Fatal(err)
	}
	id, _ := standin.OfferID(ticket)
	done := make(chan *standin.LoadReport)
	go func() { done <- accept(t, d, dm, 0, hashes, ticket, 9000) }()
	eventually(t, "the first waits", func() bool { return b.sessions.Busy() > 0 })
	other, _ := p.offer(t, 100, hashes[:1])
	if _, err := d.Load(ctx10(t), standin.LoadRequest{RequestID: "e", Blocks: numbers(3, 1), Hashes: hashes[:1], Ticket: other, Direct: true}); err == nil {
		t.Error("a block was lent twice at a time")
	}
	p.compute(10, hashes)
	if err := p.sched.Complete(id, numbers(10, 8)); err != nil {
		t.Fatal(err)
	}
	if r := <-done; r.Delivered != 8 {
		t.Fatalf("handed over %+v", r)
	}
}
