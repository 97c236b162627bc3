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

// simOp is an operation as its process knows it.
type simOp struct {
	load     bool
	direct   bool            // the daemon may write into its blocks until it is quiet
	fetches  bool            // a look-up has found blocks at a peer
	halved   int             // results of which the first plane of what is lent was copied
	wrong    []uint64        // offsets of blocks whose checksum did not hold
	views    []*lentView     // beside results
	ticket   *handoff.Ticket // accept
	foreign  bool            // the ticket does not fit, and the daemon may say so
	word     uint32
	blocks   []uint32
	hashes   []tiers.Block
	deadline time.Time // zero: the daemon has not read of it
	results  []session.LoadResult
	answered map[uint32]bool
	last     bool
	revoked  bool
	ended    bool
	given    bool // blocks
	daemon   *daemon
}

func (w *world) store(n *node) {
	if p := w.pick(n, session.Worker); p != nil {
		blocks := n.prompt()
		ids := p.take(len(blocks))
		p.store(blocks[:len(ids)], ids)
	}
}

// compute writes blocks as a forward pass does.
func (p *proc) compute(blocks []tiers.Block, ids []uint32) {
	for i, b := range blocks {
		p.write(ids[i], content(b.Hash, p.ranks, p.rank))
	}
}

// store computes blocks and has them stored.
func (p *proc) store(blocks []tiers.Block, ids []uint32) {
	if len(blocks) == 0 {
		return
	}
	p.compute(blocks, ids)
	o := &simOp{blocks: ids, hashes: blocks, daemon: p.node.daemon}
	var parents []byte
	for _, b := range blocks {
		parents = append(parents, b.Parent[:]...)
	}
	n, deadline := p.begin(o), p.w.apart(2*time.Second)
	p.tell(func(s *session.Session) {
		o.deadline = time.Now().Add(deadline)
		s.Store(session.Store{Deadline: deadline, Operation: n, Word: o.word, Space: p.space, RequestID: "r", Region: 1, BlockIDs: ids, Hashes: tierstest.Pack(blocks), Parents: parents})
	})
}

// revoke takes an operation back, and overwrites its blocks at once if that won, as an engine does.
func (w *world) revoke(n *node) {
	p := w.pick(n, session.Worker)
	if p == nil {
		return
	}
	for _, n := range sorted(p.ops) {
		o := p.ops[n]
		if o.revoked || w.r.IntN(2) == 0 && !(o.ticket != nil && w.net.busy()) {
			continue // an Accept that may be on its way is a good one
		}
		if w.mutation != noRevoke && !atomic.CompareAndSwapUint64(p.wordAt(o.word), n<<8|uint64(session.WordPending), n<<8|uint64(session.WordRevoked)) {
			continue
		}
		o.revoked = w.mutation != noRevoke
		if !o.given && !o.direct && !p.engine.dead {
			if w.mutation != noRevoke {
				p.engine.bump(o.blocks)
			}
			for _, b := range o.blocks {
				p.write(b, make([]byte, shardBytes))
			}
		}
		if !o.direct { // else they are the daemon's until it is quiet
			p.giveBack(o)
		}
		if o.revoked && w.r.IntN(2) == 0 {
			p.tell(func(s *session.Session) { s.Revoke([]uint64{n}) })
		}
		return
	}
}

func (w *world) load(n *node) {
	if p := w.pick(n, session.Worker); p != nil {
		p.load(chain(w.r), nil)
	}
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

// receive takes what the daemon has told.
func (p *proc) receive() {
	if p.s == nil || p.dead {
		return
	}
	for {
		events, ok := p.s.Poll()
		if !ok {
			return
		}
		for _, e := range events {
			switch e := e.(type) {
			case session.LoadResult:
				p.result(e)
			case session.OperationEnd:
				p.end(e)
			case session.OfferServed:
				p.offerServed(e.ID)
			case session.LentGone:
				p.forget(e.Handle)
			case session.Refused:
				p.w.saw("refused messages", 1)
			}
		}
	}
}

// offerServed: the blocks of an offer may be used again. It is told once.
func (p *proc) offerServed(offer [16]byte) {
	if p.served[offer] {
		p.w.fatalf("%s was told twice that an offer is served", p.name)
	}
	p.served[offer] = true
	p.unkeep(offer)
	p.w.saw("offers served", 1)
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

func (p *proc) end(e session.OperationEnd) {
	o := p.ops[e.Operation]
	if o == nil {
		p.w.fatalf("%s: operation %d ended twice: %+v", p.name, e.Operation, e)
	}
	p.target.takeBack(e.Operation)
	p.w.note("%s %d ends %v", p.name, e.Operation, e.Outcome)
	if e.Outcome == session.OutcomeRejected && !o.foreign {
		p.w.fatalf("%s: operation %d was rejected: %s", p.name, e.Operation, e.Reason)
	}
	if o.revoked && !o.load && e.Outcome == session.OutcomeCommitted {
		p.w.fatalf("%s: operation %d was revoked and committed", p.name, e.Operation)
	}
	state := session.WordState(atomic.LoadUint64(p.wordAt(o.word)))
	if !o.load && (state == session.WordCommitted) != (e.Outcome == session.OutcomeCommitted) {
		p.w.fatalf("%s: operation %d ended %v with its word in state %d", p.name, e.Operation, e.Outcome, state)
	}
	p.giveBack(o)
	delete(p.ops, e.Operation)
	p.keepLate(o)
}

// keepLate ends an operation for its process, which may look at what it was told for long.
func (p *proc) keepLate(o *simOp) {
	o.ended = true
	if len(o.results) == 0 {
		return
	}
	p.late = append(p.late, o)
	if len(p.late) > 4 {
		p.late = p.late[1:]
	}
}

// checkDeadlines: every outcome is decided by its deadline, quiet or not.
func (p *proc) checkDeadlines() {
	if p.s == nil || p.dead {
		return
	}
	for n, o := range p.ops {
		if !o.deadline.IsZero() && time.Now().After(o.deadline) && atomic.LoadUint64(p.wordAt(o.word)) == n<<8|uint64(session.WordPending) {
			p.w.fatalf("%s: operation %d is not decided after its deadline", p.name, n)
		}
	}
}

func (w *world) match(n *node) {
	p := w.pick(n, session.Scheduler)
	if p == nil || n.isFrozen() {
		return
	}
	blocks, request := chain(w.r), string(rune('a'+w.r.IntN(3)))
	p.matched[request] = true
	m := session.Match{RequestID: request, Space: p.space, Hashes: tierstest.Pack(blocks), Lease: time.Duration(1+w.r.IntN(5000)) * time.Millisecond}
	if w.r.IntN(2) == 0 {
		m.Peers = []string{"elsewhere", w.nodes[0].name, w.nodes[1].name}
		m.Compute = time.Duration(w.r.IntN(3)) * time.Second / 1000
	}
	r, err := p.s.Match(w.t.Context(), m)
	p.engine.found[request] = r.Peer > 0
	w.saw("blocks found at peers", r.Peer)
	if err != nil || r.Blocks > len(blocks) {
		w.fatalf("%s: match: %+v %v", p.name, r, err)
	}
}
