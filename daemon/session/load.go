package session

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/csrc/copyshim"
	"github.com/kvferry/kvferry/daemon/handoff"
	"github.com/kvferry/kvferry/daemon/mover"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/transport"
)

// loadPart is how many blocks one LoadResult answers at most: it keeps messages small beside gRPC's limit.
const loadPart = 2048

// Load takes a Load, or an Accept when it has a ticket. Its end is an OperationEnd event, after Release or the deadline.
func (s *Session) Load(r Load) {
	r.Deadline = orDefault(r.Deadline, s.m.cfg.Limits.LoadDeadline)
	kind := "load"
	if r.Ticket != nil {
		kind = "accept"
	}
	space, err := s.checkLoad(kind, r)
	if err != nil {
		s.Reject(r.Operation, kind, err)
		return
	}
	o, err := s.startOperation(kind, r.Operation, r.Word)
	if err != nil {
		s.Reject(r.Operation, kind, err)
		return
	}
	if s.wordsMap.is(r.Word, r.Operation, WordRevoked) {
		o.endLoad(OutcomeRevoked, "")
		return
	}
	// The last fifth is the worker's, to copy what has come by then.
	ctx, stop := context.WithTimeout(s.ctx, r.Deadline-r.Deadline/5)
	o.mu.Lock()
	o.stop = stop
	o.timer = time.AfterFunc(r.Deadline, func() { o.endLoad(OutcomeExpired, "not released by its deadline") })
	o.mu.Unlock()
	if r.Ticket == nil {
		a := &answer{o: o, space: space, hashes: r.Hashes, until: time.Now().Add(r.Deadline)}
		a.send(all(r.Hashes), true)
		return
	}
	if !s.begin() {
		return // closing: Close ends the operation
	}
	go func() {
		defer s.quiet.Done()
		o.accept(ctx, space, r)
	}()
}

func (s *Session) checkLoad(kind string, r Load) (tiers.SpaceRef, error) {
	if _, err := validateHashes(kind+".hashes", r.Hashes, 1, s.m.cfg.Limits.LoadBlocks); err != nil {
		return 0, err
	}
	if err := validateCommon(kind, r.RequestID, r.Deadline, s.m.cfg.Limits); err != nil {
		return 0, err
	}
	ref, err := s.spaceRef(kind+".space_id", r.Space)
	if err != nil {
		return 0, err
	}
	if t := r.Ticket; t != nil {
		if t.Space != r.Space {
			return 0, invalid("accept.ticket.space_id", "%v, this worker's is %v: see kvferry spaces diff", t.Space, r.Space)
		}
		if len(t.Addresses) == 0 || len(t.Addresses) > 4096 {
			return 0, invalid("accept.ticket.addresses", "%d: must be 1 to 4096", len(t.Addresses))
		}
	}
	return ref, nil
}

// accept answers for what is here at once, then for what the ticket names as it comes into the pool.
func (o *operation) accept(ctx context.Context, space tiers.SpaceRef, r Load) {
	s := o.s
	a := &answer{o: o, space: space, hashes: r.Hashes, until: time.Now().Add(r.Deadline), why: make([]BlockStatus, len(r.Hashes)/kvferry.HashSize)}
	here, _ := s.m.cfg.Ledger.Await(space, s.shard(), r.Hashes)
	var local, at []int
	var missing []byte
	for i, state := range here {
		if state == tiers.SlotResident {
			local = append(local, i)
			continue
		}
		missing = append(missing, r.Hashes[i*kvferry.HashSize:][:kvferry.HashSize]...)
		at = append(at, i)
	}
	s.m.cfg.Counters.Add("accept_blocks", "local", len(local))
	shape := s.shape
	shape.ID = r.Space
	q := handoff.FetchRequest{
		Ticket: *r.Ticket, Instance: s.hello.Instance, Rank: s.hello.Rank, TP: s.hello.Space.TP, ClaimID: s.ID<<32 ^ o.number,
		Space: space, Shape: shape, Shard: s.shard(), Hashes: missing,
	}
	if len(missing) == 0 {
		q.Hashes = r.Hashes
		s.m.cfg.Fetcher.Settle(q)
		a.send(local, true)
		return
	}
	a.send(local, false)
	rest := map[int]bool{}
	for _, i := range at {
		rest[i] = true
	}
	q.Arrived = func(part []int) {
		come := make([]int, len(part))
		for k, i := range part {
			come[k] = at[i]
			delete(rest, at[i])
		}
		a.send(come, false)
	}
	for i, st := range s.m.cfg.Fetcher.Fetch(ctx, q) {
		a.why[at[i]] = statusOf(st)
	}
	a.send(slices.Sorted(maps.Keys(rest)), true)
}

// answer tells a Load's process where its blocks lie, in as many parts as they come in. It is used by one goroutine.
type answer struct {
	o      *operation
	space  tiers.SpaceRef
	hashes []byte        // of the whole Load
	why    []BlockStatus // reasons for blocks that are not there; nil: they are misses
	until  time.Time
	hits   int
}

// all are the indexes of a Load's blocks.
func all(hashes []byte) []int {
	out := make([]int, len(hashes)/kvferry.HashSize)
	for i := range out {
		out[i] = i
	}
	return out
}

// send pins the blocks at these rising indexes and tells where they lie. last: nothing comes after them.
func (a *answer) send(at []int, last bool) {
	o, s := a.o, a.o.s
	if len(at) == 0 && !last {
		return
	}
	hashes := make([]byte, 0, len(at)*kvferry.HashSize)
	for _, i := range at {
		hashes = append(hashes, a.hashes[i*kvferry.HashSize:][:kvferry.HashSize]...)
	}
	pin, err := s.m.cfg.Ledger.Pin(time.Now(), s.owner(), a.space, s.shard(), hashes, a.until)
	if err != nil {
		o.endLoad(OutcomeBusy, err.Error())
		return
	}
	o.mu.Lock()
	if o.ended { // revoked, expired or closed in the meantime
		o.mu.Unlock()
		s.m.cfg.Ledger.Unpin(pin.Hold)
		return
	}
	o.holds = append(o.holds, pin.Hold)
	o.places, o.hashes, o.space = append(o.places, pin.Places...), append(o.hashes, hashes...), a.space
	o.mu.Unlock()
	s.mu.Lock()
	s.loadedN += uint64(pin.Hits)
	s.mu.Unlock()
	a.hits += pin.Hits
	a.sendParts(at, pin.Places, last)
	if last {
		s.wordsMap.decide(o.word, o.number, WordCommitted, OutcomeCommitted, uint32(a.hits))
	}
}

// sendParts sends a LoadResult for each run of neighbours.
func (a *answer) sendParts(at []int, places []tiers.Place, last bool) {
	if len(at) == 0 {
		a.o.s.send(LoadResult{Operation: a.o.number, ShardBytes: a.o.s.shape.ShardBytes, Last: true})
		return
	}
	var count [6]int
	for from := 0; from < len(at); {
		to := from + 1
		for to < len(at) && at[to] == at[to-1]+1 && to-from < loadPart {
			to++
		}
		r := LoadResult{Operation: a.o.number, First: uint32(at[from]), Last: last && to == len(at), ShardBytes: a.o.s.shape.ShardBytes}
		for k := from; k < to; k++ {
			st, p := Ready, places[k]
			if p.Slot == 0 {
				st = Miss
				if a.why != nil && a.why[at[k]] > Ready {
					st = a.why[at[k]]
				}
			}
			count[st]++
			r.Status = append(r.Status, byte(st))
			r.Offsets, r.HeaderOffsets = append(r.Offsets, p.Offset), append(r.HeaderOffsets, p.HeaderOffset)
			r.Generations, r.CRC32C = append(r.Generations, uint64(p.Generation)), append(r.CRC32C, p.CRC32C)
		}
		a.o.s.send(r)
		from = to
	}
	for st, n := range count {
		a.o.s.m.cfg.Counters.Add(a.o.kind+"_blocks", BlockStatus(st).String(), n)
	}
}

// endLoad gives the pins of a Load back and ends it. Only the first call does something.
func (o *operation) endLoad(out Outcome, reason string) {
	o.mu.Lock()
	if o.ended {
		o.mu.Unlock()
		return
	}
	o.ended = true
	holds := o.holds
	if o.timer != nil {
		o.timer.Stop()
	}
	if o.stop != nil {
		o.stop()
	}
	o.mu.Unlock()
	for _, h := range holds {
		o.s.m.cfg.Ledger.Unpin(h)
	}
	if out != OutcomeCommitted {
		o.s.wordsMap.decide(o.word, o.number, WordFailed, out, 0)
	}
	o.finish(out, reason, 0, 0)
}

// Release ends Loads: the process has copied, or no longer wants to. wrong counts blocks whose generation or checksum did not hold: those operations' blocks are read again here,
// and what is broken leaves.
func (s *Session) Release(operations []uint64, wrong uint32) {
	if len(operations) > 4096 {
		s.send(Refused{invalid("release.operations", "%d: at most 4096", len(operations))})
		return
	}
	left := int(wrong) // to be counted: an operation cannot have had more than its blocks
	for _, n := range operations {
		s.mu.Lock()
		o := s.operations[n]
		s.mu.Unlock()
		if o == nil || o.kind == "store" { // ended by its deadline before: not an error
			continue
		}
		o.mu.Lock()
		told := min(left, len(o.places))
		o.mu.Unlock()
		left -= told
		s.m.cfg.Counters.Add(o.kind+"_blocks", "wrong", told)
		if wrong == 0 || !s.begin() { // which of the operations had them is not told: all are read again
			o.endLoad(OutcomeCommitted, "")
			continue
		}
		go func() { // reading everything again takes longer than other messages may wait
			defer s.quiet.Done()
			o.dropBroken()
			o.endLoad(OutcomeCommitted, "")
		}()
	}
}

// dropBroken reads the blocks of a Load again, which are still pinned, and removes those whose bytes are not what was stored.
func (o *operation) dropBroken() {
	o.mu.Lock()
	places, hashes, space := o.places, o.hashes, o.space
	if o.ended {
		places = nil
	}
	o.mu.Unlock()
	var broken []kvferry.Hash
	for i, p := range places {
		if p.Slot != 0 && copyshim.Checksum(0, o.s.m.cfg.Pool.Bytes[p.Offset:][:p.Length]) != p.CRC32C {
			broken = append(broken, hashAt(hashes, i))
		}
	}
	if n := o.s.m.cfg.Ledger.Drop(space, broken); n > 0 {
		o.s.log.Error("blocks in the pool were broken, and removed", "blocks", n, "first", broken[0])
		o.s.m.cfg.Counters.Add("broken_blocks", "pool", n)
	}
}

// Revoke drops copies that wait for operations that the process has taken back in their words.
func (s *Session) Revoke(operations []uint64) {
	if len(operations) > 4096 {
		s.send(Refused{invalid("revoke.operations", "%d: at most 4096", len(operations))})
		return
	}
	for _, n := range operations {
		s.mu.Lock()
		o := s.operations[n]
		s.mu.Unlock()
		if o == nil {
			continue
		}
		if !s.wordsMap.is(o.word, o.number, WordRevoked) {
			continue // a hint alone revokes nothing
		}
		if o.kind != "store" {
			o.endLoad(OutcomeRevoked, "")
			continue
		}
		o.mu.Lock()
		t := o.transfer
		o.mu.Unlock()
		if t != nil {
			t.End(mover.Revoked)
		}
	}
}

// Match answers how much of a prompt is resident, and leases it.
func (s *Session) Match(r Match) (MatchResult, error) {
	limits := s.m.cfg.Limits
	if err := ValidateText("match.request_id", r.RequestID, 1, 256); err != nil {
		return MatchResult{}, err
	}
	if _, err := validateHashes("match.hashes", r.Hashes, 0, limits.MatchBlocks); err != nil {
		return MatchResult{}, err
	}
	lease := r.Lease
	if lease == 0 {
		lease = limits.LeaseDefault
	}
	if lease < 0 || lease > limits.LeaseMax {
		return MatchResult{}, invalid("match.lease_ms", "%v: must be at most %v", lease, limits.LeaseMax)
	}
	if _, err := s.spaceRef("match.space_id", r.Space); err != nil {
		return MatchResult{}, err
	}
	if !s.begin() {
		return MatchResult{}, fieldErr(ErrState, "session_id", "the session is closing")
	}
	defer s.quiet.Done()
	ref, shape, ok := s.m.cfg.Ledger.FindSpace(r.Space)
	if !ok {
		s.m.cfg.Ledger.Missed(len(r.Hashes) / kvferry.HashSize)
		return MatchResult{}, nil
	}
	now := time.Now()
	res := s.m.cfg.Ledger.Match(now, s.owner(), r.RequestID, ref, r.Hashes, now.Add(lease))
	out := MatchResult{Blocks: res.Blocks}
	if res.Leased {
		out.Lease = lease
	}
	if rate := s.m.cfg.Local.Rate(); rate > 0 { // ranks load side by side
		out.Restore = time.Duration(float64(res.Blocks) * float64(shape.ShardBytes) / rate * float64(time.Second))
	}
	return out, nil
}

// ReleaseLease gives back what Match leased.
func (s *Session) ReleaseLease(requests []string) {
	if len(requests) > 4096 {
		s.send(Refused{invalid("release_lease.request_ids", "%d: at most 4096", len(requests))})
		return
	}
	for _, r := range requests {
		s.m.cfg.Ledger.ReleaseKey(s.owner(), r)
	}
}

// Offer registers an offer of this engine.
func (s *Session) Offer(r Offer) {
	if err := s.checkOffer(&r); err != nil {
		s.send(Refused{err})
		return
	}
	err := s.m.cfg.Offers.Register(s.owner(), handoff.Offer{
		ID: r.ID, Secret: r.Secret, Space: r.Space, RequestID: r.RequestID, Instance: s.hello.Instance, TP: s.hello.Space.TP, Hashes: r.Hashes,
		Tokens: r.Tokens, Lifetime: r.Lifetime,
	})
	if err != nil {
		s.send(Refused{err})
	}
}

func (s *Session) checkOffer(r *Offer) error {
	limits := s.m.cfg.Limits
	if s.hello.Role != Scheduler {
		return fieldErr(ErrState, "offer", "only a scheduler's session offers")
	}
	if s.m.isDraining() {
		return fieldErr(ErrLimit, "offer", "the daemon is draining")
	}
	if _, err := validateHashes("offer.hashes", r.Hashes, 1, limits.LoadBlocks); err != nil {
		return err
	}
	if err := ValidateText("offer.request_id", r.RequestID, 0, 256); err != nil {
		return err
	}
	if r.Tokens < 1 || r.Tokens >= 1<<31 {
		return invalid("offer.tokens", "%d: must be 1 to 2^31-1", r.Tokens)
	}
	if r.Lifetime == 0 {
		r.Lifetime = limits.OfferLifetime
	}
	if r.Lifetime < 0 || r.Lifetime > time.Hour {
		return invalid("offer.lifetime_ms", "%v: must be at most an hour", r.Lifetime)
	}
	_, err := s.spaceRef("offer.space_id", r.Space)
	return err
}

// copyOf is the copy that fills a slot from these segments.
func copyOf(pool kvferry.RegionID, p tiers.Place, src []kvferry.Segment) transport.Copy {
	return transport.Copy{Dst: []kvferry.Segment{{Region: pool, Offset: p.Offset, Length: p.Length}}, Src: src}
}

// Refuse answers a message that has no operation and could not be read.
func (s *Session) Refuse(err error) { s.send(Refused{err}) }
