package sim

import (
	"errors"
	"slices"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/handoff"
	"github.com/kvferry/kvferry/daemon/session"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/tierstest"
	"github.com/kvferry/kvferry/transport"
	"github.com/kvferry/kvferry/transport/tcp"
)

// router carries tickets from prefill to decode engines: late, twice, to another one, or never.
type router struct {
	tickets []*ticket
	claims  []foreignClaim
	lent    []lentOffer // some of the last
	prompts []*prompt
}

type ticket struct {
	handoff.Ticket
	ranks     uint32
	blocks    []tiers.Block
	scheduler *proc
	delivered int
}

// ticketsKept is how many the router has at a time.
const ticketsKept = 10

// deliver has an engine of this node accept a ticket: most often one of the other node, and of its own tp.
func (w *world) deliver(n *node) {
	p := w.pick(n, session.Worker)
	if p == nil {
		return
	}
	odd := w.r.IntN(5) == 0
	var fit []*ticket
	for _, t := range w.router.tickets {
		if odd || (t.ranks == p.ranks && t.scheduler.node != n) {
			fit = append(fit, t)
		}
	}
	if len(fit) == 0 {
		return
	}
	t := fit[max(w.r.IntN(len(fit)), w.r.IntN(len(fit)), w.r.IntN(len(fit)))] // most are not very old
	w.sawTicket(t)
	for _, p := range n.workers(p.engine) {
		if w.r.IntN(12) == 0 {
			continue // this rank's scheduler gave up
		}
		sent := t.Ticket
		switch odd := w.r.IntN(40); {
		case odd == 0:
			sent.Secret[0] ^= 1
		case odd == 1:
			sent.Addresses = []string{"elsewhere"}
		case odd == 2:
			sent.Epoch = kvferry.Epoch{} // of an offer that names its daemon's, unless the router chose it
		case odd < 20 && t.ranks != p.ranks: // a router that mixes things up
			sent.Space = p.space
		}
		p.load(t.blocks[:1+w.r.IntN(len(t.blocks))], &sent)
	}
}

func (w *world) sawTicket(t *ticket) {
	if t.delivered++; t.delivered > 1 {
		w.saw("tickets again", 1)
	}
	if d := t.scheduler.node.daemon; d != nil && d.epoch != t.Epoch && t.Epoch != (kvferry.Epoch{}) {
		w.saw("tickets of another epoch", 1)
	}
	if t.scheduler.dead {
		w.saw("offers of a dead scheduler", 1)
	}
}

// foreignClaim is one of a third node's daemon, which asks and reads without this network.
type foreignClaim struct {
	node   *node
	epoch  kvferry.Epoch
	answer handoff.ClaimAnswer
	hashes []tiers.Block
	ranks  uint32
	rank   uint32
	grant  tcp.Grant      // nil: nothing is being read
	held   map[int][]byte // what is
}

func (w *world) claim(n *node) {
	if len(w.router.tickets) == 0 || n.daemon == nil || n.isFrozen() {
		return
	}
	t := w.router.tickets[w.r.IntN(len(w.router.tickets))]
	q := handoff.ClaimRequest{Epoch: t.Epoch, OfferID: t.OfferID, Secret: t.Secret, Instance: "elsewhere", Rank: uint32(w.r.IntN(int(t.ranks))), TP: t.ranks, ClaimID: uint64(w.r.IntN(3)),
		Space: t.Space, Hashes: tierstest.Pack(t.blocks)}
	wrong := w.r.IntN(6) == 0
	if wrong {
		q.Secret[0] ^= 1
	}
	d := n.daemon
	a, err := d.claim(w.t.Context(), q, q)
	if err != nil || a.Key == [16]byte{} {
		return
	}
	if wrong {
		w.fatalf("a wrong secret was taken")
	}
	w.router.claims = append(w.router.claims, foreignClaim{node: n, epoch: d.epoch, answer: a, hashes: t.blocks, ranks: t.ranks, rank: q.Rank})
}

// readClaim reads what such a claim covers, as the data server does: at once, or with the claim held over some steps, in which it may end. What is held does not change.
func (w *world) readClaim() {
	if len(w.router.claims) == 0 {
		return
	}
	i := w.r.IntN(len(w.router.claims))
	c := &w.router.claims[i]
	d := c.node.daemon
	if d == nil || d.epoch != c.epoch {
		w.forgetClaim(i)
		return
	}
	if c.grant == nil {
		g, err := d.registry.Acquire(c.epoch, c.answer.Key)
		if err != nil {
			if !errors.Is(err, transport.ErrRefused) {
				w.fatalf("acquire: %v", err)
			}
			w.forgetClaim(i) // not renewed in time
			return
		}
		w.book.renewed(c.answer.Key)
		c.grant = g
		c.hold(g)
		if w.r.IntN(2) == 0 {
			if w.r.IntN(2) == 0 {
				w.book.end(d, c.answer.Key, "")
				w.saw("claims ended while they are read", 1)
			}
			return
		}
	}
	for k, b := range c.held {
		if string(b) != string(content(c.hashes[k].Hash, c.ranks, c.rank)) && !c.node.flipped.has(c.answer.Offsets[k]) {
			w.fatalf("%s: a claim was served wrong bytes", c.node.name)
		}
		w.saw("claimed blocks", 1)
	}
	c.grant.Release()
	c.grant, c.held = nil, nil
	if w.r.IntN(2) == 0 {
		w.book.end(d, c.answer.Key, "")
		w.forgetClaim(i)
	}
}

// hold finds the memory that stored blocks of the claim lie in.
func (c *foreignClaim) hold(g tcp.Grant) {
	c.held = map[int][]byte{}
	for k, st := range c.answer.Status {
		if st != handoff.Stored {
			continue
		}
		parts, err := g.Append(nil, c.answer.Offsets[k], c.answer.ShardBytes)
		if err != nil {
			continue // a later claim of the same id has taken its place
		}
		c.held[k] = parts[0]
	}
}

func (w *world) forgetClaim(i int) {
	c := w.router.claims[i]
	if c.grant != nil && c.node.daemon != nil && c.node.daemon.epoch == c.epoch {
		c.grant.Release()
	}
	w.router.claims = slices.Delete(w.router.claims, i, i+1)
}
