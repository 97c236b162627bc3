package handoff

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/health"
	"github.com/kvferry/kvferry/daemon/mover"
	"github.com/kvferry/kvferry/transport"
)

const (
	peerTransfers = 4  // at a time from one peer
	peerQueue     = 64 // transfers of a class that wait for one peer
	peerIdle      = 10 * time.Minute
)

// peer is another node's daemon as this one sees it.
type peer struct {
	address string
	region  kvferry.Region // its pool
	health  health.Tracker
	lookups health.Tracker // those of Find that came late
	link    *mover.Link
	log     func(degraded bool, err error)

	mu    sync.Mutex
	used  time.Time
	dial  func(address string, epoch kvferry.Epoch) PeerLink
	lanes PeerLink // to its current epoch
	epoch string   // data address and epoch that lanes go to
}

// peer finds a peer or meets it.
func (f *Fetcher) peer(address string) (*peer, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return nil, fmt.Errorf("%w: closing", transport.ErrLink)
	}
	now := time.Now()
	if p := f.peers[address]; p != nil {
		p.touch(now)
		return p, nil
	}
	if len(f.peers) >= f.cfg.Peers {
		return nil, fmt.Errorf("%w: %d peers", ErrLimit, len(f.peers))
	}
	p := &peer{
		address: address, dial: f.cfg.NewLink, region: kvferry.Region{ID: math.MaxUint64, Bytes: math.MaxUint64}, link: mover.NewLink("peer "+address, peerTransfers, peerQueue), used: now,
		log: func(degraded bool, err error) {
			if degraded {
				f.cfg.Log.Warn("peer is degraded", "peer", address, "error", err)
				f.cfg.Counters.Add("peers", "degraded", 1)
			} else {
				f.cfg.Log.Info("peer is ok again", "peer", address)
				f.cfg.Counters.Add("peers", "recovered", 1)
			}
		},
	}
	f.peers[address] = p
	return p, nil
}

func (p *peer) touch(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.used = now
}

// copier reads under a claim. Lanes are kept over claims, and made anew for a new epoch of the peer.
func (p *peer) copier(a ClaimAnswer, pool transport.Memory) transport.Copier {
	p.mu.Lock()
	defer p.mu.Unlock()
	id := a.DataAddress + " " + a.Epoch.String()
	if p.lanes == nil || p.epoch != id {
		if p.lanes != nil {
			_ = p.lanes.Close()
		}
		p.lanes, p.epoch = p.dial(a.DataAddress, a.Epoch), id
	}
	return p.lanes.Copier(a.Key, p.region, pool)
}

// report says how something with this peer went. What the peer refuses is no fault of the way to it.
func (p *peer) report(err error) {
	switch {
	case err == nil:
		if p.health.Success() {
			p.log(false, nil)
		}
	case errors.Is(err, transport.ErrLink), errors.Is(err, context.DeadlineExceeded): // a peer that is too slow is no use either
		if p.health.Failure(time.Now(), err.Error()) {
			p.log(true, err)
		}
	case errors.Is(err, context.Canceled):
	default:
		p.health.Success()
	}
}

func (p *peer) close() {
	p.link.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.lanes != nil {
		_ = p.lanes.Close()
	}
}

// Forget closes the links to peers that were not used for long.
func (f *Fetcher) Forget(now time.Time) {
	f.mu.Lock()
	var old []*peer
	for a, p := range f.peers {
		p.mu.Lock()
		if now.Sub(p.used) > peerIdle {
			old = append(old, p)
			delete(f.peers, a)
		}
		p.mu.Unlock()
	}
	f.mu.Unlock()
	for _, p := range old {
		p.close()
	}
}

// Close ends all transfers and returns when they are quiet.
func (f *Fetcher) Close() {
	f.mu.Lock()
	f.closed = true
	peers := f.peers
	f.peers = map[string]*peer{}
	f.mu.Unlock()
	for _, p := range peers {
		p.close()
	}
	f.wg.Wait()
}

// PeerView is a peer as people see it.
type PeerView struct {
	Address         string
	State           health.State
	Reason          string
	Since           time.Time
	Queued, Running int
	Bytes           uint64 // read from it
}

// Peers lists the peers that are known.
func (f *Fetcher) Peers() []PeerView {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []PeerView
	for _, p := range f.peers {
		v := PeerView{Address: p.address}
		v.State, v.Reason, v.Since = p.health.View()
		st := p.link.Stats()
		v.Queued, v.Running = st.Queued, st.Running
		for _, n := range st.Bytes {
			v.Bytes += n
		}
		out = append(out, v)
	}
	return out
}
