package session

import (
	"context"
	"sync"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/mover"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/policy"
)

// operation is one Store or Load of a session, from its message until OperationEnd.
type operation struct {
	s      *Session
	number uint64
	word   uint32
	kind   string // "store", "load", "accept"

	mu       sync.Mutex
	ended    bool
	transfer *mover.Transfer // store: nil until submitted
	holds    []tiers.HoldID  // load: pins
	places   []tiers.Place   // load: what was answered
	hashes   []byte          // load
	space    tiers.SpaceRef  // load
	timer    *time.Timer     // load: deadline
	stop     context.CancelFunc
	writes   int                   // accept: transfers into lent blocks that are not quiet
	reads    func(reason string)   // accept: gives back what the process reads of another worker's memory
	found    map[kvferry.Hash]bool // load: the only blocks that a look-up has found at a peer; nil: none was
	lent     []lentBlock           // accept: what the daemon may write
	outcome  Outcome
	reason   string
}

// startOperation checks what all operations have in common and takes the word. The process has put the operation into its word before.
func (s *Session) startOperation(kind string, number uint64, word uint32) (*operation, error) {
	if number < 1 || number > OperationMax {
		return nil, invalid(kind+".operation", "%d: must be 1 to 2^56-1", number)
	}
	if word >= WordsPerSession {
		return nil, invalid(kind+".word", "%d: this session has %d words", word, WordsPerSession)
	}
	if s.hello.Role != Worker {
		return nil, fieldErr(ErrState, kind, "a scheduler has no blocks")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ready || s.closing {
		return nil, fieldErr(ErrState, kind, "the session is not attached")
	}
	if number <= s.lastOp {
		return nil, invalid(kind+".operation", "%d: must rise, the last was %d", number, s.lastOp)
	}
	if other, ok := s.words[word]; ok {
		return nil, invalid(kind+".word", "%d: operation %d has not ended yet", word, other)
	}
	if !s.wordsMap.pending(word, number) {
		// Revoked before it came: then there is nothing to do, and nothing wrong.
		if !s.wordsMap.is(word, number, WordRevoked) {
			return nil, invalid(kind+".word", "%d: does not hold {%d, PENDING}", word, number)
		}
	}
	s.lastOp = number
	o := &operation{s: s, number: number, word: word, kind: kind}
	s.operations[number] = o
	s.words[word] = number
	s.quiet.Add(1)
	return o, nil
}

// finish ends an operation that is quiet: its word may be used again. It is called once.
func (o *operation) finish(out Outcome, reason string, stored, present int) {
	s := o.s
	s.wordsMap.quiet(o.word, o.number)
	s.mu.Lock()
	delete(s.operations, o.number)
	delete(s.words, o.word)
	for _, b := range o.lent {
		delete(s.lentTo, b)
	}
	if o.kind == "store" {
		s.storedN += uint64(stored)
	}
	s.mu.Unlock()
	s.m.cfg.Counters.Add(o.kind+"_operations", out.String(), 1)
	s.send(OperationEnd{Operation: o.number, Outcome: out, Reason: reason, Stored: uint32(stored), Present: uint32(present)})
	s.quiet.Done()
}

// cancel ends an operation because its session does.
func (o *operation) cancel() {
	if o.kind != "store" {
		o.endLoad(OutcomeFailed, "session ended")
		return
	}
	o.mu.Lock()
	t := o.transfer
	o.mu.Unlock()
	if t != nil {
		t.End(mover.Cancelled)
	}
}

// Reject answers an operation whose message was wrong.
func (s *Session) Reject(number uint64, kind string, err error) {
	s.m.cfg.Counters.Add(kind+"_operations", OutcomeRejected.String(), 1)
	s.log.Warn("operation rejected", "operation", number, "error", err)
	s.send(OperationEnd{Operation: number, Outcome: OutcomeRejected, Reason: err.Error()})
}

// Store takes a Store. Its end is an OperationEnd event.
func (s *Session) Store(r Store) {
	r.Deadline = orDefault(r.Deadline, s.m.cfg.Limits.StoreDeadline)
	space, blocks, reg, err := s.checkStore(r)
	if err != nil {
		s.Reject(r.Operation, "store", err)
		return
	}
	o, err := s.startOperation("store", r.Operation, r.Word)
	if err != nil {
		s.Reject(r.Operation, "store", err)
		return
	}
	if s.m.isDraining() {
		o.endStore(OutcomeBusy, "draining", 0, 0)
		return
	}
	if s.wordsMap.is(r.Word, r.Operation, WordRevoked) { // before it came
		o.finish(OutcomeRevoked, "", 0, 0)
		return
	}
	fills := s.m.cfg.Ledger.BeginFill(time.Now(), space, s.shard(), blocks)
	if s.m.cfg.Tiering != nil {
		s.m.cfg.Tiering.Filled()
	}
	var todo []tiers.Fill
	t := &mover.Transfer{Class: kvferry.ClassStore, Copier: reg.copier, Deadline: time.Now().Add(r.Deadline)}
	present, busy := 0, 0
	for i, f := range fills {
		switch f.Status {
		case tiers.FillNew:
			todo = append(todo, f)
			t.Batch = append(t.Batch, copyOf(s.m.cfg.Pool.ID, f.Place, reg.segments(r.BlockIDs[i])))
		case tiers.FillBusy:
			busy++
		default:
			present++
		}
	}
	s.m.cfg.Counters.Add("store_blocks", "no_room", busy)
	s.m.cfg.Counters.Add("store_blocks", "present", present)
	if len(todo) == 0 {
		if busy > 0 {
			o.endStore(OutcomeBusy, "pool is full of leased, pinned or filling blocks", 0, present)
		} else {
			o.endStore(OutcomeCommitted, "", 0, present)
		}
		return
	}
	t.Decide = func(out mover.Outcome) mover.Outcome { return o.decideStore(out, len(todo)) }
	t.Quiet = func(out mover.Outcome) { o.storeQuiet(t, out, todo, present) }
	o.mu.Lock()
	o.transfer = t
	o.mu.Unlock()
	if err := s.m.cfg.Local.Submit(t); err != nil {
		s.m.cfg.Ledger.Abort(time.Now(), todo)
		o.mu.Lock()
		o.transfer = nil
		o.mu.Unlock()
		o.endStore(OutcomeBusy, err.Error(), 0, present)
		return
	}
	if s.ctx.Err() != nil { // the session ended while this was set up
		t.End(mover.Cancelled)
	}
}

// endStore ends a Store that copies nothing.
func (o *operation) endStore(out Outcome, reason string, stored, present int) {
	state := WordFailed
	if out == OutcomeCommitted {
		state = WordCommitted
	}
	if !o.s.wordsMap.decide(o.word, o.number, state, out, uint32(stored)) {
		out = OutcomeRevoked
	}
	o.finish(out, reason, stored, present)
}

// decideStore decides between the daemon's commit and the worker's revoke.
func (o *operation) decideStore(out mover.Outcome, blocks int) mover.Outcome {
	state, reason, done := WordFailed, outcomeOf(out), uint32(0)
	if out == mover.Committed {
		state, done = WordCommitted, uint32(blocks)
	}
	if !o.s.wordsMap.decide(o.word, o.number, state, reason, done) {
		return mover.Revoked
	}
	return out
}

func (o *operation) storeQuiet(t *mover.Transfer, out mover.Outcome, fills []tiers.Fill, present int) {
	cfg := &o.s.m.cfg
	if out == mover.Committed {
		crcs := make([]uint32, len(fills))
		for i := range fills {
			crcs[i] = t.Batch[i].CRC32C
		}
		cfg.Ledger.Commit(time.Now(), fills, crcs)
		cfg.Counters.Add("store_blocks", "stored", len(fills))
		o.finish(OutcomeCommitted, "", len(fills), present)
		return
	}
	cfg.Ledger.Abort(time.Now(), fills)
	cfg.Counters.Add("store_blocks", out.String(), len(fills))
	reason := out.String()
	for i := range t.Batch {
		if err := t.Batch[i].Err; err != nil && out == mover.Failed {
			reason = err.Error()
			break
		}
	}
	o.finish(outcomeOf(out), reason, 0, present)
}

func outcomeOf(o mover.Outcome) Outcome {
	switch o {
	case mover.Committed:
		return OutcomeCommitted
	case mover.Revoked:
		return OutcomeRevoked
	case mover.Expired:
		return OutcomeExpired
	}
	return OutcomeFailed
}

func (s *Session) checkStore(r Store) (space tiers.SpaceRef, blocks []tiers.Block, reg *region, err error) {
	limits := s.m.cfg.Limits
	n, err := validateHashes("store.hashes", r.Hashes, 1, limits.StoreBlocks)
	if err != nil {
		return 0, nil, nil, err
	}
	if len(r.BlockIDs) != n {
		return 0, nil, nil, invalid("store.block_ids", "%d ids for %d hashes", len(r.BlockIDs), n)
	}
	if r.Retention >= policy.NumRetentions {
		return 0, nil, nil, invalid("store.retention", "%d is not known", uint8(r.Retention))
	}
	if len(r.Parents) != len(r.Hashes) {
		return 0, nil, nil, invalid("store.parents", "%d bytes, hashes have %d", len(r.Parents), len(r.Hashes))
	}
	if err = validateCommon("store", r.RequestID, r.Deadline, limits); err != nil {
		return 0, nil, nil, err
	}
	if space, err = s.spaceRef("store.space_id", r.Space); err != nil {
		return 0, nil, nil, err
	}
	s.mu.Lock()
	reg = s.regions[r.Region]
	s.mu.Unlock()
	if reg == nil {
		return 0, nil, nil, invalid("store.region", "%d is not a region of this session", r.Region)
	}
	blocks = make([]tiers.Block, n)
	seen := make(map[kvferry.Hash]bool, n)
	for i := range n {
		b := tiers.Block{Hash: hashAt(r.Hashes, i), Parent: hashAt(r.Parents, i), Retention: r.Retention}
		switch {
		case b.Hash.IsZero():
			return 0, nil, nil, invalid("store.hashes", "hash %d is zero", i)
		case seen[b.Hash]:
			return 0, nil, nil, invalid("store.hashes", "hash %d stands twice", i)
		case b.Parent == b.Hash:
			return 0, nil, nil, invalid("store.parents", "block %d is its own parent", i)
		case r.BlockIDs[i] >= reg.spec.Blocks:
			return 0, nil, nil, invalid("store.block_ids", "%d: region %d has %d blocks", r.BlockIDs[i], r.Region, reg.spec.Blocks)
		}
		seen[b.Hash], blocks[i] = true, b
	}
	return space, blocks, reg, nil
}

func orDefault(d, fallback time.Duration) time.Duration {
	if d == 0 {
		return fallback
	}
	return d
}

func validateCommon(kind, request string, deadline time.Duration, limits Limits) error {
	if err := ValidateText(kind+".request_id", request, 0, 256); err != nil {
		return err
	}
	if deadline <= 0 || deadline > limits.DeadlineMax {
		return invalid(kind+".deadline_ms", "%v: must be 1 ms to %v", deadline, limits.DeadlineMax)
	}
	return nil
}
