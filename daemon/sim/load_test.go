package sim

import (
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/kvferry/kvferry/daemon/handoff"
	"github.com/kvferry/kvferry/daemon/session"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/tierstest"
)

func (w *world) load(n *node) {
	if p := w.pick(n, session.Worker); p != nil {
		p.load(p.wanted(), nil)
	}
}

// wanted is a prompt that is looked for: where there are disks, most often the one of a few of which most is on them.
func (p *proc) wanted() []tiers.Block {
	blocks := chain(p.w.r)
	d := p.node.daemon
	if d == nil || len(d.drives) == 0 || p.w.r.IntN(4) == 0 {
		return blocks
	}
	ref, _, ok := d.ledger.FindSpace(p.space)
	if !ok {
		return blocks
	}
	most := 0
	for range 6 {
		b := tierstest.Chain(uint64(p.w.r.IntN(chains)), 16)
		if n := len(d.ledger.OnDrive(ref, uint16(p.rank), tierstest.Pack(b))); n > most {
			blocks, most = b, n
		}
	}
	return blocks
}

// load asks for blocks: where they lie here, or with a ticket to fetch them.
func (p *proc) load(blocks []tiers.Block, ticket *handoff.Ticket) *simOp {
	ids := p.take(len(blocks))
	blocks = blocks[:len(ids)]
	if len(blocks) == 0 {
		return nil
	}
	request := string(rune('a' + p.w.r.IntN(3)))
	o := &simOp{load: true, ticket: ticket, blocks: ids, hashes: blocks, answered: map[uint32]bool{}, daemon: p.node.daemon}
	o.foreign = ticket != nil && ticket.Space != p.space
	o.fetches = ticket == nil && p.engine.found[request]
	l := session.Load{Space: p.space, RequestID: request, Hashes: tierstest.Pack(blocks), Ticket: ticket}
	if ticket != nil && p.node.daemon.direct && p.w.r.IntN(3) > 0 {
		o.direct = true
		l.Region, l.BlockIDs = 1, ids
	}
	n, deadline := p.begin(o), p.w.apart([]time.Duration{500 * time.Millisecond, 3 * time.Second, 8 * time.Second}[p.w.r.IntN(3)])
	if o.direct {
		p.target.lend(n, o.word, ids)
	}
	p.tell(func(s *session.Session) {
		o.deadline = time.Now().Add(deadline)
		l.Operation, l.Word, l.Deadline = n, o.word, deadline
		s.Load(l)
	})
	return o
}

// copyLoaded does the worker's part of a Load, perhaps long after the answer: what the generation and the checksum let pass must be right.
func (w *world) copyLoaded(n *node) {
	p := w.pick(n, session.Worker)
	if p == nil {
		return
	}
	if n := len(p.late); n > 0 && w.r.IntN(2) == 0 {
		p.copyResults(p.late[w.r.IntN(n)])
		return
	}
	for _, n := range sorted(p.ops) {
		o := p.ops[n]
		if !o.last && (len(o.results) == 0 || w.r.IntN(2) == 0) {
			continue
		}
		if !p.copyResults(o) {
			return
		}
		if w.r.IntN(3) > 0 { // else it is left to its deadline
			p.tell(func(s *session.Session) { s.Release([]uint64{n}, uint32(len(o.wrong))) })
			if !p.node.isFrozen() {
				p.node.broken = append(p.node.broken, o.wrong...)
			}
		}
		return
	}
}

// copyResults copies what an operation was told. It answers false when it stopped in the middle, for the world to go on.
func (p *proc) copyResults(o *simOp) bool {
	half := o.halved == 0 && !o.given && !p.engine.dead && p.w.r.IntN(2) == 0
	for i := range o.results {
		r := &o.results[i]
		if r.Lent == nil || o.given {
			continue
		}
		for k := range r.Status {
			if o.source(r, k) == session.InLent {
				p.copyLentBlock(o, r, k, o.views[i], half, i < o.halved)
			}
		}
	}
	if half && len(o.views) > 0 {
		o.halved = len(o.views)
		return false
	}
	for i := range o.results {
		p.copyResult(o, &o.results[i])
	}
	return true
}

// source is where a block of a result is to be had.
func (o *simOp) source(r *session.LoadResult, i int) session.Source {
	if r.Source == nil || session.BlockStatus(r.Status[i]) != session.Ready {
		return session.InPool
	}
	return session.Source(r.Source[i])
}

// pooled is how many blocks of the pool the process was told of.
func (o *simOp) pooled() (n int) {
	for i := range o.results {
		r := &o.results[i]
		for k := range r.Status {
			if session.BlockStatus(r.Status[k]) == session.Ready && o.source(r, k) == session.InPool {
				n++
			}
		}
	}
	return n
}

// copyLentBlock copies a block out of another worker's memory, or one half of it.
func (p *proc) copyLentBlock(o *simOp, r *session.LoadResult, i int, v *lentView, half, rest bool) {
	at := int(r.First) + i
	from, to := 0, planes
	if half {
		to = 1
	} else if rest {
		from = 1
	}
	if v == nil || !p.copyLent(o, r, i, v, from, to) {
		p.w.saw("stale lent blocks", 1)
		return
	}
	if half {
		return
	}
	got := p.read(o.blocks[at])
	if string(got) != string(content(o.hashes[at].Hash, p.ranks, p.rank)) {
		p.w.fatalf("%s: lent block %d of the offer holds wrong bytes", p.name, at)
	}
	p.w.saw("lent blocks", 1)
}

func (p *proc) copyResult(o *simOp, r *session.LoadResult) {
	w := p.w
	for i := range r.Status {
		if session.BlockStatus(r.Status[i]) != session.Ready {
			continue
		}
		at := int(r.First) + i
		if from := o.source(r, i); from != session.InPool {
			if from == session.Delivered {
				p.checkDelivered(o, at)
			}
			continue
		}
		if atomic.LoadUint64((*uint64)(unsafe.Pointer(&p.pool[r.HeaderOffsets[i]]))) != r.Generations[i] && w.mutation != noGenerations {
			if !o.ended {
				w.fatalf("%s: a pinned block changed", p.name)
			}
			if o.daemon == p.node.daemon {
				w.saw("stale loads", 1)
			} else {
				w.saw("stale after a restart", 1)
			}
			continue
		}
		if o.daemon != p.node.daemon && w.mutation != noGenerations {
			w.fatalf("%s: a generation of an earlier epoch still holds", p.name)
		}
		got := p.pool[r.Offsets[i]:][:r.ShardBytes]
		if !o.given { // its memory is still this operation's
			p.write(o.blocks[at], got)
			got = p.read(o.blocks[at])
		}
		if crcOf(got) != r.CRC32C[i] && p.node.flipped.has(r.Offsets[i]) {
			o.wrong = append(o.wrong, r.Offsets[i])
			continue
		}
		if crcOf(got) != r.CRC32C[i] {
			w.fatalf("%s: a block's bytes changed and its generation did not", p.name)
		}
		if string(got) != string(content(o.hashes[at].Hash, p.ranks, p.rank)) {
			w.fatalf("%s: load of %v was served wrong bytes", p.name, o.hashes[at].Hash)
		}
		w.saw("loaded blocks", 1)
	}
}

// checkDelivered: a block that the daemon has written into this worker's memory is there, and stays as long as it is the operation's.
func (p *proc) checkDelivered(o *simOp, at int) {
	if o.given {
		return
	}
	if string(p.read(o.blocks[at])) != string(content(o.hashes[at].Hash, p.ranks, p.rank)) {
		p.w.fatalf("%s: wrong bytes of block %d were delivered", p.name, at)
	}
	p.w.saw("delivered blocks", 1)
}

// result takes a part of a Load's answer: each block is answered once, and all of them by the last part.
func (p *proc) result(e session.LoadResult) {
	o := p.ops[e.Operation]
	if o == nil || o.last {
		p.w.fatalf("%s: operation %d was answered after its last part, or its end", p.name, e.Operation)
	}
	for i, st := range e.Status {
		at := e.First + uint32(i)
		if o.answered[at] || int(at) >= len(o.hashes) {
			p.w.fatalf("%s: block %d of operation %d was answered twice", p.name, at, e.Operation)
		}
		o.answered[at] = true
		if o.ticket == nil && !o.fetches { // whether what came in the instant of the deadline counts is for Go to say
			p.w.note("%s %d block %d: %d", p.name, e.Operation, at, st)
		}
	}
	o.results, o.last = append(o.results, e), e.Last
	var v *lentView
	if e.Lent != nil {
		v = p.view(e.Lent)
	}
	o.views = append(o.views, v)
	for i := range e.Status {
		if o.source(&e, i) == session.Delivered {
			if !o.direct {
				p.w.fatalf("%s: operation %d lent no blocks, and one was written", p.name, e.Operation)
			}
			p.checkDelivered(o, int(e.First)+i)
		}
	}
	if e.Last && len(o.answered) != len(o.hashes) {
		p.w.fatalf("%s: %d of %d blocks of operation %d were answered", p.name, len(o.answered), len(o.hashes), e.Operation)
	}
}
