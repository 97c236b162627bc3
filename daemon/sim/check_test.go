package sim

import (
	"time"

	"github.com/kvferry/kvferry/daemon/handoff"
	"github.com/kvferry/kvferry/daemon/session"
	"github.com/kvferry/kvferry/tiers/tierstest"
)

// check holds the invariants of one node, and has its processes read what they were told.
func (n *node) check() {
	d := n.daemon
	if d == nil {
		return
	}
	if err := d.ledger.Check(); err != nil {
		n.w.fatalf("ledger of %s: %v", n.name, err)
	}
	n.follow()
	if st := d.ledger.Stats(); st.UsedBytes+st.FreeBytes != st.CapacityBytes {
		n.w.fatalf("%s: used %d + free %d is not %d", n.name, st.UsedBytes, st.FreeBytes, st.CapacityBytes)
	}
	if n.isFrozen() || n.ticked.IsZero() {
		return
	}
	n.checkDropped()
	for _, p := range n.procs {
		p.receive()
		p.checkDeadlines()
	}
	n.checkClaims()
	n.checkOffers()
}

// checkClaims compares the registry with the book.
func (n *node) checkClaims() {
	d := n.daemon
	most := n.w.book.alive(d.epoch, n.ticked)
	for _, p := range n.procs { // its own engines claim without the network
		for _, o := range p.ops {
			if o.ticket != nil && d.fetcher.Here(*o.ticket, p.rank) {
				most++
			}
		}
	}
	if got := d.registry.ActiveClaims(); got > most {
		n.w.fatalf("%s has %d claims, of which %d were asked for and have not ended", n.name, got, most)
	}
}

// checkOffers: an offer ends with its scheduler unless it was claimed, and when every rank has what it wanted; and its lease with it.
func (n *node) checkOffers() {
	d := n.daemon
	registered, over := int(d.counters.Value("offers", "registered")), 0
	for _, c := range d.counters.All() {
		if c.Name == "offers" && c.Reason != "registered" && c.Reason != "refused" {
			over += int(c.Value)
		}
	}
	if over+d.registry.OpenOffers() != registered {
		n.w.fatalf("%s: of %d offers %d have ended and %d have not", n.name, registered, over, d.registry.OpenOffers())
	}
	ended := map[[16]byte]bool{}
	schedulers, leases := map[string]bool{}, map[string]int{}
	for _, p := range n.procs {
		schedulers[p.engine.name] = schedulers[p.engine.name] || p.s != nil && p.role == session.Scheduler
	}
	for _, v := range d.registry.List(time.Now()) {
		if v.State == handoff.Ended {
			ended[v.ID] = true
			continue
		}
		leases[v.Instance]++
		if v.State == handoff.Open && !schedulers[v.Instance] && v.Instance != "pool" {
			n.w.fatalf("%s: the offer of a scheduler that is gone is open", n.name)
		}
		if v.State == handoff.Claimed && n.w.book.done(v.ID, n.ticked) && !n.accepts(v.ID) {
			n.w.fatalf("%s: every rank has ended its claim of an offer, and it is not done", n.name)
		}
	}
	for _, p := range n.procs {
		if p.s == nil || n.isFrozen() {
			continue
		}
		for id := range p.kept {
			if ended[id] && !p.engine.dead { // else it died before it had said so
				n.w.fatalf("%s keeps blocks for an offer that has ended, and was not told", p.name)
			}
		}
		v, pins := p.s.View(), 0
		for _, o := range p.ops {
			pins += o.pooled()
		}
		if p.role == session.Worker && v.Pins > pins {
			n.w.fatalf("%s has %d pins, and was told of %d blocks in the pool", p.name, v.Pins, pins)
		}
		if most := leases[p.engine.name] + len(p.matched); p.role == session.Scheduler && v.Leases > most {
			n.w.fatalf("%s has %d leases, of %d offers and matches", p.name, v.Leases, most)
		}
	}
}

// accepts tells whether an engine of this node is taking the offer: no network sees its claims.
func (n *node) accepts(offer [16]byte) bool {
	for _, p := range n.procs {
		for _, o := range p.ops {
			if o.ticket != nil && o.ticket.OfferID == offer {
				return true
			}
		}
	}
	return false
}

// checkPool reads everything that can be found and compares it.
func (n *node) checkPool() {
	d := n.daemon
	if d == nil {
		return
	}
	until := time.Now().Add(time.Second) // and the blocks are as cold as before
	for name := range uint64(chains) {
		blocks := tierstest.Chain(name, 16)
		hashes := tierstest.Pack(blocks)
		for _, ranks := range []uint32{1, 2} {
			ref, _, ok := d.ledger.FindSpace(space(ranks).ID())
			if !ok {
				continue
			}
			for shard := range ranks {
				res, err := d.ledger.Pin(time.Unix(0, 0), 1<<50, ref, uint16(shard), hashes, until)
				if err != nil {
					n.w.fatalf("pin: %v", err)
				}
				for i, p := range res.Places {
					if p.Slot == 0 {
						continue
					}
					if got := d.memory.Bytes[p.Offset:][:p.Length]; string(got) != string(content(blocks[i].Hash, ranks, shard)) && !n.flipped.has(p.Offset) {
						n.w.fatalf("%s: block %v shard %d holds wrong bytes", n.name, blocks[i].Hash, shard)
					}
				}
				d.ledger.Unpin(res.Hold)
			}
		}
	}
}

// checkIdle: with every deadline over and every copy let go, nothing runs.
func (n *node) checkIdle() {
	for _, p := range n.procs {
		if len(p.ops) > 0 && !p.dead {
			n.w.fatalf("%s: operations %v never ended", p.name, sorted(p.ops))
		}
	}
	if n.daemon.slots.busy() {
		n.w.fatalf("%s: a copy never ended", n.name)
	}
}

// checkEmpty: after every session has ended, nothing is held.
func (n *node) checkEmpty() {
	d := n.daemon
	if err := d.ledger.Check(); err != nil {
		n.w.fatalf("ledger of %s at the end: %v", n.name, err)
	}
	if st := d.ledger.Stats(); st.Leases != 0 || st.Pins != 0 || st.Moving != 0 || st.Filling != 0 || len(d.sessions.All()) != 0 || d.registry.OpenOffers() != 0 || d.registry.ActiveClaims() != 0 {
		n.w.fatalf("%s: at the end something is held: %+v, %d sessions, %d offers, %d claims", n.name, st, len(d.sessions.All()), d.registry.OpenOffers(), d.registry.ActiveClaims())
	}
}
