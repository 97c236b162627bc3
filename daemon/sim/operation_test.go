package sim

import (
	"sync/atomic"
	"time"

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
