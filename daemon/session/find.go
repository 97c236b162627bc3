package session

import (
	"context"
	"slices"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/handoff"
	"github.com/kvferry/kvferry/tiers"
)

const (
	findPeers     = 4
	findsMax      = 4096
	findsBytesMax = 64 << 20 // of hashes
)

// finds are the blocks that Matches have found at peers, until a Load fetches them. Manager.mu guards them.
type finds struct {
	byKey map[findKey]find
	bytes int
}

// findKey names a request of an engine: its scheduler matches, its workers load.
type findKey struct {
	instance, request string
	space             kvferry.SpaceID
}

type find struct {
	ticket handoff.Ticket
	hashes []byte // packed
	until  time.Time
}

// found is where a request's Match has found blocks, and which, if it has.
func (m *Manager) found(instance, request string, space kvferry.SpaceID) (*handoff.Ticket, map[kvferry.Hash]bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f, ok := m.finds.byKey[findKey{instance, request, space}]
	if !ok || !f.until.After(time.Now()) {
		return nil, nil
	}
	blocks := make(map[kvferry.Hash]bool, len(f.hashes)/kvferry.HashSize)
	for i := range len(f.hashes) / kvferry.HashSize {
		blocks[hashAt(f.hashes, i)] = true
	}
	return &f.ticket, blocks
}

// addFind notes what was found. It answers false when there is no room.
func (m *Manager) addFind(k findKey, f find) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	t := &m.finds
	if t.byKey == nil {
		t.byKey = map[findKey]find{}
	}
	full := func() bool { return len(t.byKey) >= findsMax || t.bytes+len(f.hashes) > findsBytesMax }
	if full() {
		now := time.Now()
		for old, g := range t.byKey {
			if !g.until.After(now) {
				t.dropLocked(old)
			}
		}
	}
	if full() {
		return false
	}
	t.dropLocked(k)
	t.byKey[k] = f
	t.bytes += len(f.hashes)
	return true
}

func (t *finds) dropLocked(k findKey) {
	t.bytes -= len(t.byKey[k].hashes)
	delete(t.byKey, k)
}

// dropFinds forgets what was found for these requests of the session's engine, in these spaces.
func (s *Session) dropFinds(requests []string, spaces ...kvferry.SpaceID) {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	if len(s.m.finds.byKey) == 0 {
		return
	}
	for _, r := range requests {
		for _, space := range spaces {
			s.m.finds.dropLocked(findKey{s.hello.Instance, r, space})
		}
	}
}

// allSpaces are those that the session uses.
func (s *Session) allSpaces() []kvferry.SpaceID {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.order)
}

// findMore asks the nodes that may have more of a prompt than this one, from block have on.
func (s *Session) findMore(ctx context.Context, r Match, shape tiers.SpaceShape, out *MatchResult, lease time.Duration) {
	rest := r.Hashes[out.Blocks*kvferry.HashSize:]
	rest = rest[:min(len(rest), s.m.cfg.Limits.LoadBlocks*kvferry.HashSize)]
	if len(rest) == 0 || len(r.Peers) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, s.m.cfg.Limits.FindTimeout)
	defer cancel()
	ticket, d := s.m.cfg.Fetcher.Find(ctx, handoff.Wanted{
		Peers: r.Peers, Shape: shape, Compute: r.Compute,
		Find: handoff.FindRequest{RequestID: r.RequestID, Space: r.Space, Hashes: rest, Instance: s.hello.Instance, TP: s.hello.Space.TP, Lease: lease},
	})
	out.Reason, out.Fetch = d.Reason, d.Fetch
	if !d.Fetched {
		return
	}
	f := find{ticket, slices.Clone(rest[:d.Blocks*kvferry.HashSize]), time.Now().Add(d.Lease)}
	if !s.m.addFind(findKey{s.hello.Instance, r.RequestID, r.Space}, f) {
		out.Reason = "too many look-ups wait for their loads"
		return
	}
	s.m.cfg.Ledger.AtPeer(d.Blocks)
	out.Blocks, out.Peer = out.Blocks+d.Blocks, d.Blocks
	if out.Lease == 0 || d.Lease < out.Lease {
		out.Lease = d.Lease
	}
}
