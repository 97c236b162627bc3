package session

import (
	"context"
	"slices"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/tiering"
	"github.com/kvferry/kvferry/tiers"
)

// onDrive are the indexes of blocks that are to be had from a drive of this node only.
func (s *Session) onDrive(space tiers.SpaceRef, hashes []byte) []int {
	if s.m.cfg.Tiering == nil {
		return nil
	}
	return s.m.cfg.Ledger.OnDrive(space, s.shard(), hashes)
}

// restore answers for what is in the pool at once, then for what is on a drive as it comes.
func (o *operation) restore(ctx context.Context, space tiers.SpaceRef, r Load, drive []int) {
	a := &answer{o: o, space: space, hashes: r.Hashes, until: time.Now().Add(r.Deadline), why: make([]BlockStatus, len(r.Hashes)/kvferry.HashSize)}
	a.send(without(all(r.Hashes), drive), false) // and pins them: making room must not take them away
	a.send(a.promote(ctx, drive), true)
}

// promote brings blocks up from the drives, tells of those that come, and answers the others.
func (a *answer) promote(ctx context.Context, drive []int) (rest []int) {
	if len(drive) == 0 {
		return nil
	}
	o := a.o
	var hashes []byte
	for _, i := range drive {
		hashes = append(hashes, a.hashes[i*kvferry.HashSize:][:kvferry.HashSize]...)
	}
	rest = drive
	res := o.s.m.cfg.Tiering.Promote(ctx, tiering.Request{
		Class: kvferry.ClassLoad, Space: a.space, Shard: o.s.shard(), Hashes: hashes,
		Arrived: func(at []int) {
			come := make([]int, len(at))
			for k, i := range at {
				come[k] = drive[i]
			}
			rest = without(rest, come)
			a.send(come, false)
		},
	})
	why := Broken
	switch {
	case res.Waiting:
		why = Expired
	case res.NoRoom > 0:
		why = Busy
	}
	for _, i := range rest {
		a.why[i] = why
	}
	return rest
}

// without is a rising list without the members of another one.
func without(list, drop []int) []int {
	out := make([]int, 0, len(list))
	for _, i := range list {
		if _, found := slices.BinarySearch(drop, i); !found {
			out = append(out, i)
		}
	}
	return out
}

// Prefetch begins to bring blocks up from the drives: a worker's own shards, or those of all ranks.
func (s *Session) Prefetch(space kvferry.SpaceID, hashes []byte) {
	if _, err := validateHashes("prefetch.hashes", hashes, 1, s.m.cfg.Limits.LoadBlocks); err != nil {
		s.send(Refused{err})
		return
	}
	ref, err := s.spaceRef("prefetch.space_id", space)
	if err != nil {
		s.send(Refused{err})
		return
	}
	if s.m.cfg.Tiering == nil {
		return
	}
	if s.hello.Role == Worker {
		s.m.cfg.Tiering.Hint(ref, s.shard(), hashes)
		return
	}
	_, shape, ok := s.m.cfg.Ledger.FindSpace(space)
	for shard := uint16(0); ok && shard < shape.Shards; shard++ {
		s.m.cfg.Tiering.Hint(ref, shard, hashes)
	}
}
