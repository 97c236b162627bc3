package session

import (
	"context"
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
	o.lend(r)
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
		r.Ticket, o.found = s.m.found(s.hello.Instance, r.RequestID, r.Space)
	}
	drive := s.onDrive(space, r.Hashes)
	if r.Ticket == nil && len(drive) == 0 {
		a := &answer{o: o, space: space, hashes: r.Hashes, until: time.Now().Add(r.Deadline)}
		a.send(all(r.Hashes), true)
		return
	}
	if !s.begin() {
		return // closing: Close ends the operation
	}
	go func() {
		defer s.quiet.Done()
		if r.Ticket == nil {
			o.restore(ctx, space, r, drive)
		} else {
			o.accept(ctx, space, r, drive)
		}
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
	if r.BlockIDs != nil {
		if err := s.checkLentBlocks(r); err != nil {
			return 0, err
		}
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

// answer tells a Load's process where its blocks lie, in as many parts as they come in. It is used by one goroutine.
type answer struct {
	o      *operation
	space  tiers.SpaceRef
	hashes []byte        // of the whole Load
	why    []BlockStatus // reasons for blocks that are not there; nil: they are misses
	from   []Source      // nil: all from the pool
	lent   []handoff.LentPlace
	memory *handoff.Lent
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

func (a *answer) source(i int) Source {
	if a.from == nil {
		return InPool
	}
	return a.from[i]
}

// send pins the blocks at these rising indexes that are in the pool, and tells where all of them lie. last: nothing comes after them.
func (a *answer) send(at []int, last bool) {
	o, s := a.o, a.o.s
	if len(at) == 0 && !last {
		return
	}
	var pooled []int
	var hashes []byte
	for k, i := range at {
		if a.source(i) == InPool {
			pooled, hashes = append(pooled, k), append(hashes, a.hashes[i*kvferry.HashSize:][:kvferry.HashSize]...)
		}
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
	places := make([]tiers.Place, len(at))
	for n, k := range pooled {
		places[k] = pin.Places[n]
	}
	hits := pin.Hits + len(at) - len(pooled)
	s.mu.Lock()
	s.loadedN += uint64(hits)
	s.mu.Unlock()
	a.hits += hits
	a.sendParts(at, places, last)
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
	var sources [Delivered + 1]int
	for from := 0; from < len(at); {
		to := from + 1
		for to < len(at) && at[to] == at[to-1]+1 && to-from < loadPart {
			to++
		}
		r := LoadResult{Operation: a.o.number, First: uint32(at[from]), Last: last && to == len(at), ShardBytes: a.o.s.shape.ShardBytes}
		for k := from; k < to; k++ {
			a.add(&r, at[k], places[k])
		}
		a.addMemory(&r)
		for i, st := range r.Status {
			count[st]++
			if r.Source != nil && BlockStatus(st) == Ready {
				sources[r.Source[i]]++
			} else if BlockStatus(st) == Ready {
				sources[InPool]++
			}
		}
		a.o.s.send(r)
		from = to
	}
	for st, n := range count {
		a.o.s.m.cfg.Counters.Add(a.o.kind+"_blocks", BlockStatus(st).String(), n)
	}
	for f, n := range sources {
		a.o.s.m.cfg.Counters.Add("ready_blocks", Source(f).String(), n)
	}
}

// add tells of block i.
func (a *answer) add(r *LoadResult, i int, p tiers.Place) {
	st, from := Ready, a.source(i)
	offset, generation, crc := p.Offset, uint64(p.Generation), p.CRC32C
	switch {
	case from == InLent:
		offset, generation, crc = uint64(a.lent[i].Block), a.lent[i].Generation, 0
	case from == InPool && p.Slot == 0:
		st = Miss
		if a.why != nil && a.why[i] > Ready {
			st = a.why[i]
		}
	}
	r.Status, r.Source = append(r.Status, byte(st)), append(r.Source, byte(from))
	r.Offsets, r.HeaderOffsets = append(r.Offsets, offset), append(r.HeaderOffsets, p.HeaderOffset)
	r.Generations, r.CRC32C = append(r.Generations, generation), append(r.CRC32C, crc)
}

// addMemory tells how to map the memory that blocks of the result are lent in; where its lender is gone by now, they have failed. A result all of whose blocks are in the pool does not
// speak of sources.
func (a *answer) addMemory(r *LoadResult) {
	if slices.Contains(r.Source, byte(InLent)) {
		var err error
		if r.Lent, err = a.o.s.m.lentView(a.o.s, a.memory); err != nil {
			for i, f := range r.Source {
				if Source(f) == InLent {
					r.Source[i], r.Status[i] = byte(InPool), byte(Broken)
					r.Offsets[i], r.Generations[i] = 0, 0
				}
			}
		}
	}
	if !slices.ContainsFunc(r.Source, func(f byte) bool { return Source(f) != InPool }) {
		r.Source = nil
	}
}

// endLoad gives the pins of a Load back and ends it; it is finished when nothing writes into its blocks any more. Only the first call does something.
func (o *operation) endLoad(out Outcome, reason string) {
	o.mu.Lock()
	if o.ended {
		o.mu.Unlock()
		return
	}
	o.ended, o.outcome, o.reason = true, out, reason
	holds, reads := o.holds, o.reads
	o.writes++ // until all of this is done: a transfer that becomes quiet meanwhile must not finish the operation
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
	if reads != nil {
		why := reason
		if out != OutcomeCommitted {
			why = out.String() + " " + reason
		}
		reads(why)
	}
	if out != OutcomeCommitted {
		o.s.wordsMap.decide(o.word, o.number, WordFailed, out, 0)
	}
	o.endWrite()
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
	if n := o.s.m.cfg.Ledger.DropFromPool(space, broken); n > 0 {
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

// copyOf is the copy that fills a slot from these segments.
func copyOf(pool kvferry.RegionID, p tiers.Place, src []kvferry.Segment) transport.Copy {
	return transport.Copy{Dst: []kvferry.Segment{{Region: pool, Offset: p.Offset, Length: p.Length}}, Src: src}
}

// Refuse answers a message that has no operation and could not be read.
func (s *Session) Refuse(err error) { s.send(Refused{err}) }
