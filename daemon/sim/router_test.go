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

// prefill computes a prompt: the scheduler offers it, and the ranks store their shards, before or after, or lend them where they are.
func (w *world) prefill(n *node) {
	s := w.pick(n, session.Scheduler)
	if s == nil {
		return
	}
	ranks := n.workers(s.engine)
	if w.r.IntN(4) == 0 {
		w.prefillOpen(s)
		return
	}
	blocks := n.prompt()
	if w.r.IntN(5) < 3 && len(ranks) > 0 {
		w.prefillLent(s, ranks, blocks)
		return
	}
	offer, offerFirst := w.newOffer(s, blocks), w.r.IntN(2) == 0
	if offerFirst {
		s.offer(offer)
	}
	for _, p := range ranks {
		if w.r.IntN(8) > 0 { // else this rank's never come
			ids := p.take(len(blocks))
			p.store(blocks[:len(ids)], ids)
		}
	}
	if !offerFirst {
		s.offer(offer)
	}
}

// prefillLent offers blocks where they lie, with the generations that they have then. Most are kept until they are served; some are stored too.
func (w *world) prefillLent(s *proc, ranks []*proc, blocks []tiers.Block) {
	ids := s.engine.take(ranks, len(blocks))
	if blocks = blocks[:len(ids)]; len(blocks) == 0 {
		return
	}
	o := w.newOffer(s, blocks)
	o.Blocks = w.lend(s, ranks, o.ID, blocks, ids)
	s.offer(o)
}

// lend computes blocks on all ranks and keeps them for an offer.
func (w *world) lend(s *proc, ranks []*proc, offer [16]byte, blocks []tiers.Block, ids []uint32) handoff.LentBlocks {
	keep := w.r.IntN(3) > 0
	for _, p := range ranks {
		p.compute(blocks, ids)
		if keep {
			p.keep(offer, ids)
		}
		if w.r.IntN(3) == 0 {
			p.store(blocks, ids)
		}
	}
	w.router.lent = append(w.router.lent, lentOffer{offer, ranks, ids})
	if len(w.router.lent) > 4 {
		w.router.lent = w.router.lent[1:]
	}
	return handoff.LentBlocks{Region: 1, IDs: ids, Generations: s.engine.generations(ids)}
}

// lentOffer is what an engine may use again although somebody may be reading it.
type lentOffer struct {
	id     [16]byte
	ranks  []*proc
	blocks []uint32
}

// reuse has an engine use blocks again that it has offered, kept or not.
func (w *world) reuse() {
	if len(w.router.lent) == 0 {
		return
	}
	i := w.r.IntN(len(w.router.lent))
	o := w.router.lent[i]
	w.router.lent = append(w.router.lent[:i], w.router.lent[i+1:]...)
	for _, p := range o.ranks {
		if _, kept := p.kept[o.id]; kept {
			p.unkeep(o.id)
		}
	}
	for _, b := range o.blocks {
		used := false
		for _, p := range o.ranks {
			used = used || p.dead || p.engine.dead || p.busy[b] > 0
		}
		if used {
			continue // by a store of it, or for something else
		}
		o.ranks[0].engine.bump([]uint32{b})
		for _, p := range o.ranks {
			p.write(b, make([]byte, shardBytes))
		}
	}
}

// newOffer makes an offer and gives its ticket to the router.
func (w *world) newOffer(s *proc, blocks []tiers.Block) session.Offer {
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
	return o
}

func (s *proc) offer(o session.Offer) { s.tell(func(s *session.Session) { s.Offer(o) }) }

// prompt is one that is computed in chunks, while the router has sent it to the decode engine already.
type prompt struct {
	scheduler *proc
	s         *session.Session // of the time when it began
	offer     session.Offer
	blocks    []tiers.Block
	offered   bool
	done      int // blocks
}

// prefillOpen begins one.
func (w *world) prefillOpen(s *proc) {
	blocks := s.node.prompt()
	o := w.newOffer(s, blocks)
	o.OpenEnded = true
	t := w.router.tickets[len(w.router.tickets)-1]
	t.Epoch = kvferry.Epoch{} // the router does not know it
	w.book.routed(o.ID)
	w.router.prompts = append(w.router.prompts, &prompt{scheduler: s, s: s.s, offer: o, blocks: blocks})
}

// chunk goes on with a prompt: registers it, computes and stores some blocks, completes or aborts it.
func (w *world) chunk() {
	if len(w.router.prompts) == 0 {
		return
	}
	i := w.r.IntN(len(w.router.prompts))
	p := w.router.prompts[i]
	forget := func() { w.router.prompts = append(w.router.prompts[:i], w.router.prompts[i+1:]...) }
	s := p.scheduler
	if s.dead || s.s != p.s {
		forget() // its session is gone, and with it the offer
		return
	}
	if !p.offered {
		p.offered = true
		s.offer(p.offer)
		return
	}
	ranks := s.node.workers(s.engine)
	switch id := p.offer.ID; {
	case w.r.IntN(20) == 0:
		s.tell(func(s *session.Session) { s.EndOffer(id, "aborted") })
		w.saw("prompts aborted", 1)
		forget()
	case p.done == len(p.blocks) || len(ranks) == 0:
		var lent handoff.LentBlocks
		if w.r.IntN(2) == 0 && len(ranks) > 0 {
			if ids := s.engine.take(ranks, len(p.blocks)); len(ids) == len(p.blocks) {
				lent = w.lend(s, ranks, id, p.blocks, ids)
			}
		}
		s.tell(func(s *session.Session) { s.CompleteOffer(id, lent) })
		w.saw("prompts completed", 1)
		forget()
	default:
		n := min(len(p.blocks)-p.done, 1+w.r.IntN(6))
		for _, r := range ranks {
			ids := r.take(n)
			r.store(p.blocks[p.done:][:len(ids)], ids)
		}
		p.done += n
	}
}

// routed: the router has named an offer.
func (b *book) routed(offer [16]byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.offers[offer].router = true
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
