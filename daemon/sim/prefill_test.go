package sim

import (
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/handoff"
	"github.com/kvferry/kvferry/daemon/session"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/tierstest"
)

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
