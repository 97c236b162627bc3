package session

import (
	"context"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/handoff"
	"github.com/kvferry/kvferry/tiers"
)

const (
	findTimeout = 50 * time.Millisecond // the engine waits for less
	findPeers   = 4
	findsMax    = 4096
)

// finds are the blocks that Matches have found at peers, until a Load fetches them. Manager.mu guards them.
type finds map[findKey]find

// findKey names a request of an engine: its scheduler matches, its workers load.
type findKey struct {
	instance, request string
	space             kvferry.SpaceID
}

type find struct {
	ticket handoff.Ticket
	blocks map[kvferry.Hash]bool
	until  time.Time
}

// found is where a request's Match has found blocks, if it has.
func (m *Manager) found(instance, request string, space kvferry.SpaceID) (*handoff.Ticket, map[kvferry.Hash]bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f, ok := m.finds[findKey{instance, request, space}]
	if !ok || !f.until.After(time.Now()) {
		return nil, nil
	}
	return &f.ticket, f.blocks
}

func (m *Manager) addFind(k findKey, f find) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	if m.finds == nil {
		m.finds = finds{}
	}
	if len(m.finds) >= findsMax {
		for old, g := range m.finds {
			if !g.until.After(now) {
				delete(m.finds, old)
			}
		}
	}
	if len(m.finds) < findsMax {
		m.finds[k] = f
	}
}

func (m *Manager) dropFinds(instance string, requests []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.finds) == 0 {
		return
	}
	gone := map[string]bool{}
	for _, r := range requests {
		gone[r] = true
	}
	for k := range m.finds {
		if k.instance == instance && gone[k.request] {
			delete(m.finds, k)
		}
	}
}

// findMore asks the nodes that may have more of a prompt than this one, from block have on.
func (s *Session) findMore(ctx context.Context, r Match, shape tiers.SpaceShape, out *MatchResult, lease time.Duration) {
	rest := r.Hashes[out.Blocks*kvferry.HashSize:]
	rest = rest[:min(len(rest), s.m.cfg.Limits.LoadBlocks*kvferry.HashSize)]
	if len(rest) == 0 || len(r.Peers) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, findTimeout)
	defer cancel()
	ticket, d := s.m.cfg.Fetcher.Find(ctx, handoff.Wanted{
		RequestID: r.RequestID, Peers: r.Peers, Shape: shape, Compute: r.Compute,
		Find: handoff.FindRequest{Space: r.Space, Hashes: rest, Instance: s.hello.Instance, TP: s.hello.Space.TP, Lease: lease},
	})
	out.Reason, out.Fetch = d.Reason, d.Fetch
	if !d.Fetched {
		return
	}
	blocks := make(map[kvferry.Hash]bool, d.Blocks)
	for i := range d.Blocks {
		blocks[hashAt(rest, i)] = true
	}
	s.m.addFind(findKey{s.hello.Instance, r.RequestID, r.Space}, find{ticket, blocks, time.Now().Add(lease)})
	s.m.cfg.Counters.Add("match_blocks", "peer", d.Blocks)
	out.Blocks += d.Blocks
	out.Peer = d.Blocks
}
