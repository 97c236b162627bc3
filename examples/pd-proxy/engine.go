package main

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// refusedFor is how long an engine that refused a connection comes last.
const refusedFor = 5 * time.Second

// engine is where requests go.
type engine struct {
	url     string       // without a slash at its end
	peer    string       // host:port of the Peer service on its node, or empty
	refused atomic.Int64 // when it last refused a connection, unix ns
}

// parseEngine reads URL[,peer=HOST:PORT].
func parseEngine(s string) (*engine, error) {
	address, option, more := strings.Cut(s, ",")
	u, err := url.Parse(address)
	if err != nil {
		return nil, err
	}
	if u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" {
		return nil, errors.New("must be a URL such as http://host:8000")
	}
	e := &engine{url: strings.TrimRight(address, "/")}
	if more {
		peer, ok := strings.CutPrefix(option, "peer=")
		if !ok {
			return nil, fmt.Errorf("unknown option %q: must be peer=HOST:PORT", option)
		}
		if host, port, err := net.SplitHostPort(peer); err != nil || host == "" || port == "" {
			return nil, fmt.Errorf("peer: %q: must be HOST:PORT", peer)
		}
		e.peer = peer
	}
	return e, nil
}

// group is engines that do the same work.
type group struct {
	engines []*engine
	turn    atomic.Uint64
}

// order is the order in which to try them: in turn, and last those that refused a connection a moment ago.
func (g *group) order(now time.Time) []*engine {
	n := len(g.engines)
	first := int((g.turn.Add(1) - 1) % uint64(n))
	out := slices.Concat(g.engines[first:], g.engines[:first])
	slices.SortStableFunc(out, func(a, b *engine) int { return cmp.Compare(a.skipped(now), b.skipped(now)) })
	return out
}

func (e *engine) skipped(now time.Time) int {
	if now.UnixNano()-e.refused.Load() < int64(refusedFor) {
		return 1
	}
	return 0
}

// failed looks at an error of a request: one that says that nobody listens is remembered.
func (e *engine) failed(now time.Time, err error) (refused bool) {
	var op *net.OpError
	if refused = errors.As(err, &op) && op.Op == "dial"; refused {
		e.refused.Store(now.UnixNano())
	}
	return refused
}

// hintsMax is how many peers a prefill engine is told.
const hintsMax = 4

// hints are the peers of decode engines, used last first: there the KV of a conversation's earlier turns may lie.
type hints struct {
	mu    sync.Mutex
	peers []string
}

func newHints(engines []*engine) *hints {
	h := &hints{}
	for _, e := range engines {
		if e.peer != "" && !slices.Contains(h.peers, e.peer) {
			h.peers = append(h.peers, e.peer)
		}
	}
	return h
}

func (h *hints) used(peer string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if i := slices.Index(h.peers, peer); i > 0 {
		h.peers = slices.Insert(slices.Delete(h.peers, i, i+1), 0, peer)
	}
}

func (h *hints) first() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.peers[:min(hintsMax, len(h.peers))])
}
