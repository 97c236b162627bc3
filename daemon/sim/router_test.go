package sim

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/handoff"
	"github.com/kvferry/kvferry/daemon/session"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/tierstest"
	"github.com/kvferry/kvferry/transport"
)

// router carries tickets from prefill to decode engines: late, twice, to another one, or never.
type router struct {
	tickets []*ticket
	claims  []foreignClaim
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

// prefill computes a prompt: the scheduler offers it, and the ranks store their shards, before or after.
func (w *world) prefill(n *node) {
	s := w.pick(n, session.Scheduler)
	if s == nil {
		return
	}
	blocks, offerFirst := n.prompt(), w.r.IntN(2) == 0
	if offerFirst {
		w.offer(s, blocks)
	}
	for _, p := range n.workers(s.engine) {
		if w.r.IntN(8) > 0 { // else this rank's never come
			p.store(blocks)
		}
	}
	if !offerFirst {
		w.offer(s, blocks)
	}
}

// offer registers an offer and gives its ticket to the router.
func (w *world) offer(s *proc, blocks []tiers.Block) {
	o := session.Offer{Space: s.space, RequestID: "r", Hashes: tierstest.Pack(blocks), Tokens: 100, Lifetime: time.Duration(2+w.r.IntN(9)) * time.Second}
	for i := range o.ID {
		o.ID[i], o.Secret[i] = byte(w.r.Uint32()), byte(w.r.Uint32())
	}
	t := &ticket{ranks: s.ranks, blocks: blocks, scheduler: s}
	t.Ticket = handoff.Ticket{Addresses: []string{s.node.name}, OfferID: o.ID, Secret: o.Secret, Epoch: s.node.daemon.epoch, Space: s.space}
	if w.r.IntN(2) == 0 { // an address for each rank says the same
		t.Addresses = append(t.Addresses, s.node.name)
	}
	w.book.offer(t.Ticket, s.ranks, o.Hashes)
	w.router.tickets = append(w.router.tickets, t)
	if len(w.router.tickets) > ticketsKept {
		w.router.tickets = w.router.tickets[1:]
	}
	s.tell(func(s *session.Session) { s.Offer(o) })
}

func (b *book) offer(t handoff.Ticket, ranks uint32, hashes []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.offers[t.OfferID] = &bookOffer{Ticket: t, label: fmt.Sprintf("%x", t.OfferID[:4]), ranks: ranks, hashes: hashes, ended: map[uint32]bool{}}
}

// deliver has an engine of this node accept a ticket: most often one of the other node, and of its own tp.
func (w *world) deliver(n *node) {
	p := w.pick(n, session.Worker)
	if p == nil {
		return
	}
	odd := w.r.IntN(8) == 0
	var fit []*ticket
	for _, t := range w.router.tickets {
		if odd || (t.ranks == p.ranks && t.scheduler.node != n) {
			fit = append(fit, t)
		}
	}
	if len(fit) == 0 {
		return
	}
	t := fit[max(w.r.IntN(len(fit)), w.r.IntN(len(fit)))] // most are not very old
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
	if d := t.scheduler.node.daemon; d != nil && d.epoch != t.Epoch {
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
	if err != nil {
		return
	}
	if wrong {
		w.fatalf("a wrong secret was taken")
	}
	w.router.claims = append(w.router.claims, foreignClaim{n, d.epoch, a, t.blocks, t.ranks, q.Rank})
}

// readClaim reads what such a claim covers, as the data server does, and sometimes ends it.
func (w *world) readClaim() {
	if len(w.router.claims) == 0 {
		return
	}
	i := w.r.IntN(len(w.router.claims))
	c := w.router.claims[i]
	forget := func() { w.router.claims = append(w.router.claims[:i], w.router.claims[i+1:]...) }
	d := c.node.daemon
	if d == nil || d.epoch != c.epoch {
		forget()
		return
	}
	g, err := d.registry.Acquire(c.epoch, c.answer.Key)
	if err != nil {
		if !errors.Is(err, transport.ErrRefused) {
			w.fatalf("acquire: %v", err)
		}
		forget() // not renewed in time
		return
	}
	w.book.renewed(c.answer.Key)
	for k, st := range c.answer.Status {
		if st != handoff.Stored {
			continue
		}
		parts, err := g.Append(nil, c.answer.Offsets[k], c.answer.ShardBytes)
		if err != nil {
			continue // a later claim of the same id has taken its place
		}
		b := slices.Concat(parts...)
		if crcOf(b) == c.answer.CRC32C[k] {
			if string(b) != string(content(c.hashes[k].Hash, c.ranks, c.rank)) {
				w.fatalf("a claim was served wrong bytes")
			}
			w.saw("claimed blocks", 1)
		}
	}
	g.Release()
	if w.r.IntN(2) == 0 {
		d.registry.EndClaim(c.answer.Key, "")
		w.book.ended(c.answer.Key, "")
		forget()
	}
}
