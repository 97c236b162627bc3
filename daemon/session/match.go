package session

import (
	"context"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers"
)

// Match answers how much of a prompt is resident, and leases it.
func (s *Session) Match(ctx context.Context, r Match) (MatchResult, error) {
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
	if len(r.Peers) > findPeers {
		return MatchResult{}, invalid("match.peers", "%d: at most %d", len(r.Peers), findPeers)
	}
	for _, p := range r.Peers {
		if err := ValidateText("match.peers", p, 1, 256); err != nil {
			return MatchResult{}, err
		}
	}
	if !s.begin() {
		return MatchResult{}, fieldErr(ErrState, "session_id", "the session is closing")
	}
	defer s.quiet.Done()
	s.dropFinds([]string{r.RequestID}, r.Space) // of an earlier look-up
	ref, shape, ok := s.m.cfg.Ledger.FindSpace(r.Space)
	now := time.Now()
	if !ok {
		s.m.cfg.Ledger.Missed(len(r.Hashes) / kvferry.HashSize)
		s.looked(now, r, MatchResult{}, tiers.MatchResult{}, false, false)
		return MatchResult{}, nil
	}
	res, restore, slow := s.prefix(now, ref, shape, r, now.Add(lease))
	s.m.cfg.Ledger.Count(len(r.Hashes)/kvferry.HashSize, res)
	out := MatchResult{Blocks: res.Blocks, NVMe: res.NVMe, Restore: restore}
	if res.Leased {
		out.Lease = lease
	}
	s.findMore(ctx, r, shape, &out, lease)
	s.looked(now, r, out, res, true, slow)
	return out, nil
}

// prefix looks up how much is resident, and estimates how long it takes to load. What is on a drive only counts where reading it is estimated to beat computing it: slow tells where that is not so.
func (s *Session) prefix(now time.Time, ref tiers.SpaceRef, shape tiers.SpaceShape, r Match, until time.Time) (res tiers.MatchResult, restore time.Duration, slow bool) {
	l, t := s.m.cfg.Ledger, s.m.cfg.Tiering
	res = l.Prefix(now, s.owner(), r.RequestID, ref, r.Hashes, until)
	if res.NVMe > 0 {
		restore = t.Restore(uint64(res.NVMe) * shape.ShardBytes * uint64(shape.Shards))
		if !t.Worth(now, restore, r.Compute*time.Duration(res.Blocks-res.First)) {
			res, restore, slow = l.Prefix(now, s.owner(), r.RequestID, ref, r.Hashes[:res.First*kvferry.HashSize], until), 0, true
		}
	}
	if rate := s.m.cfg.Local.Rate(); rate > 0 { // ranks load side by side
		restore += time.Duration(float64(res.Blocks) * float64(shape.ShardBytes) / rate * float64(time.Second))
	}
	return res, restore, slow
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
	s.dropFinds(requests, s.allSpaces()...)
}
