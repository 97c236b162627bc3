package session

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/handoff"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/transport"
)

// checkLentBlocks checks the blocks that an Accept lends to be written.
func (s *Session) checkLentBlocks(r Load) error {
	if len(r.BlockIDs) != len(r.Hashes)/kvferry.HashSize {
		return invalid("accept.block_ids", "%d ids for %d hashes", len(r.BlockIDs), len(r.Hashes)/kvferry.HashSize)
	}
	reg := s.region(r.Region)
	if reg == nil || !reg.spec.Writable {
		return invalid("accept.region", "%d is not a writable region of this session", r.Region)
	}
	seen := make(map[uint32]bool, len(r.BlockIDs))
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range r.BlockIDs {
		other, lent := s.lentTo[lentBlock{r.Region, b}]
		switch {
		case b >= reg.spec.Blocks:
			return invalid("accept.block_ids", "%d: region %d has %d blocks", b, r.Region, reg.spec.Blocks)
		case seen[b]:
			return invalid("accept.block_ids", "%d stands twice", b)
		case lent:
			return invalid("accept.block_ids", "%d is lent to operation %d, which has not ended", b, other)
		}
		seen[b] = true
	}
	return nil
}

// lentBlock is a block that the daemon may write.
type lentBlock struct{ region, block uint32 }

// lend notes the blocks of an Accept until its operation is quiet.
func (o *operation) lend(r Load) {
	o.s.mu.Lock()
	defer o.s.mu.Unlock()
	for _, b := range r.BlockIDs {
		k := lentBlock{r.Region, b}
		o.lent, o.s.lentTo[k] = append(o.lent, k), o.number
	}
}

// accept answers for what is here at once, then for what the ticket names as it comes.
func (o *operation) accept(ctx context.Context, space tiers.SpaceRef, r Load, drive []int) {
	s, n := o.s, len(r.Hashes)/kvferry.HashSize
	a := &answer{o: o, space: space, hashes: r.Hashes, until: time.Now().Add(r.Deadline), why: make([]BlockStatus, n), from: make([]Source, n), lent: make([]handoff.LentPlace, n)}
	here, _ := s.m.cfg.Ledger.Await(space, s.shard(), r.Hashes)
	lends := s.m.cfg.Fetcher.Here(*r.Ticket, s.hello.Rank) && s.hello.ReadsLent && o.found == nil // then the worker's own memory goes before the pool
	if lends {
		drive = nil
	}
	var local, at []int
	for i, state := range here {
		if _, below := slices.BinarySearch(drive, i); below {
			continue
		}
		switch {
		case state == tiers.SlotResident && !lends:
			local = append(local, i)
		case o.found != nil && !o.found[hashAt(r.Hashes, i)]:
			a.why[i] = Miss
			local = append(local, i)
		default:
			at = append(at, i)
		}
	}
	a.send(local, false) // and pins them: making room for what comes must not take them away
	s.m.cfg.Counters.Add(o.kind+"_blocks", "local", len(local))
	local = nil
	if drive = a.restoreSoon(ctx, r, drive); len(drive) > 0 {
		here, _ = s.m.cfg.Ledger.Await(space, s.shard(), r.Hashes)
	}
	for _, i := range drive {
		if here[i] == tiers.SlotResident || o.found != nil && !o.found[hashAt(r.Hashes, i)] { // come by somebody else's doing, or nowhere to be had
			local = append(local, i)
		} else {
			at = append(at, i) // whom the ticket names may have it
		}
	}
	slices.Sort(at)
	var missing []byte
	for _, i := range at {
		missing = append(missing, r.Hashes[i*kvferry.HashSize:][:kvferry.HashSize]...)
	}
	shape := s.shape
	shape.ID = r.Space
	q := handoff.FetchRequest{
		Ticket: *r.Ticket, Instance: s.hello.Instance, Rank: s.hello.Rank, TP: s.hello.Space.TP, ClaimID: s.ID<<32 ^ o.number,
		Space: space, Shape: shape, Shard: s.shard(), Hashes: missing, ReadsLent: s.hello.ReadsLent,
		Planes: s.hello.Regions[0].Planes, Until: a.until,
	}
	if len(missing) == 0 {
		if o.found == nil { // what was found by a look-up ends by itself
			q.Hashes = r.Hashes
			s.m.cfg.Fetcher.Settle(q)
		}
		a.send(local, true)
		return
	}
	a.send(local, false)
	q.Into, q.Pooled = o.destination(r, at)
	rest := map[int]bool{}
	for _, i := range at {
		rest[i] = true
	}
	var got handoff.FetchResult
	take := func(k int) {
		i := at[k]
		a.why[i], a.lent[i] = statusOf(got.Status[k]), got.Lent[k]
		switch got.Status[k] {
		case handoff.Delivered:
			a.from[i] = Delivered
		case handoff.Readable:
			a.from[i] = InLent
			a.memory = got.Memory
		}
	}
	q.Arrived = func(part []int) {
		come := make([]int, len(part))
		for k, i := range part {
			take(i)
			come[k] = at[i]
			delete(rest, at[i])
		}
		slices.Sort(come)
		a.send(come, false)
	}
	s.m.cfg.Fetcher.Fetch(ctx, q, &got)
	for k, i := range at {
		if rest[i] {
			take(k)
		}
	}
	if got.End != nil && !o.readsUntil(got.End) {
		got.End("the operation has ended")
	}
	a.send(slices.Sorted(maps.Keys(rest)), true)
}

// restoreSoon brings blocks up from the drives, and answers those that have not come in half of the time: the other half is for the nodes that may have them.
func (a *answer) restoreSoon(ctx context.Context, r Load, drive []int) (rest []int) {
	ctx, cancel := context.WithTimeout(ctx, r.Deadline*2/5) // ctx has four fifths
	defer cancel()
	return a.promote(ctx, drive)
}

// readsUntil keeps what the process reads of another worker until the operation ends. It answers false when it has ended.
func (o *operation) readsUntil(end func(reason string)) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.ended {
		o.reads = end
	}
	return !o.ended
}

// beginWrite counts a transfer into lent blocks. It answers false when the operation has ended.
func (o *operation) beginWrite() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ended {
		return false
	}
	o.writes++
	return true
}

// endWrite is called when such a transfer is quiet. An operation that has ended is quiet with the last of them.
func (o *operation) endWrite() {
	o.mu.Lock()
	o.writes--
	quiet := o.ended && o.writes == 0
	o.mu.Unlock()
	if quiet {
		o.finish(o.outcome, o.reason, 0, 0)
	}
}

// destination is what an Accept lends to be written; nil, and why, where nothing is.
func (o *operation) destination(r Load, at []int) (*handoff.Destination, string) {
	s := o.s
	if !s.m.cfg.Direct {
		return nil, "no watchdog ends the claimer's daemon when it freezes"
	}
	if r.BlockIDs == nil {
		return nil, "the decode worker lends no blocks"
	}
	reg := s.region(r.Region)
	if reg == nil || reg.target == nil {
		return nil, "the decode worker's memory is not writable"
	}
	return &handoff.Destination{
		Memory:   transport.Memory{ID: reg.memory.ID, Bytes: reg.target.mapping.Bytes()},
		Segments: func(i int) []kvferry.Segment { return reg.segments(r.BlockIDs[at[i]]) },
		Begin: func() (func(), bool) {
			if !o.beginWrite() {
				return nil, false
			}
			if !reg.target.acquire() {
				o.endWrite()
				return nil, false
			}
			return func() {
				reg.target.release()
				o.endWrite()
			}, true
		},
	}, ""
}
