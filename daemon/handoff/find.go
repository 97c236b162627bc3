package handoff

import (
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/health"
	"github.com/kvferry/kvferry/tiers"
)

// FindRequest asks another node for blocks by space and hash.
type FindRequest struct {
	RequestID string
	Space     kvferry.SpaceID
	Hashes    []byte // the chain from the first block that is wanted
	Instance  string // that will claim
	TP        uint32
	Lease     time.Duration
}

// FindAnswer is an offer of the longest prefix that is resident there. Blocks 0: nothing is.
type FindAnswer struct {
	Epoch      kvferry.Epoch
	OfferID    [16]byte
	Secret     [16]byte
	Blocks     int
	Lease      time.Duration
	ShardBytes uint64
}

// Fetch leases the longest resident prefix of these blocks, and offers it to the instance that asks.
func (r *Registry) Fetch(q FindRequest) (FindAnswer, error) {
	ref, shape, ok := r.cfg.Ledger.FindSpace(q.Space)
	if !ok {
		return FindAnswer{Epoch: r.cfg.Epoch}, nil
	}
	now := time.Now()
	a := FindAnswer{Epoch: r.cfg.Epoch, Lease: q.Lease, ShardBytes: shape.ShardBytes}
	owner := r.cfg.Owners()
	// Leased while the offer is made, which has a lease of its own. It is the asking node's look-up, and counted there.
	a.Blocks = r.cfg.Ledger.Prefix(now, owner, "fetch", ref, q.Hashes, now.Add(q.Lease)).Blocks
	defer r.cfg.Ledger.ReleaseOwner(owner)
	if a.Blocks == 0 {
		return a, nil
	}
	if err := r.makeRoomForFetch(q); err != nil {
		return FindAnswer{}, err
	}
	for _, b := range [][]byte{a.OfferID[:], a.Secret[:]} {
		if _, err := rand.Read(b); err != nil {
			return FindAnswer{}, fmt.Errorf("make offer: %w", err)
		}
	}
	o := Offer{ID: a.OfferID, Secret: a.Secret, Space: q.Space, RequestID: q.RequestID, Instance: "pool", TP: q.TP, Hashes: slices.Clone(q.Hashes[:a.Blocks*kvferry.HashSize]), Lifetime: q.Lease}
	if err := r.register(r.cfg.Owners(), o, q.Instance); err != nil {
		return FindAnswer{}, err
	}
	r.mu.Lock()
	defer r.unlock()
	if e := r.offers[o.ID]; e != nil {
		r.fetches = append(r.fetches, e)
	}
	return a, nil
}

// makeRoomForFetch ends the offer of an earlier look-up of the same request, and the oldest that nobody has claimed where there are too many: look-ups of others may not use up what
// this node's engines need.
func (r *Registry) makeRoomForFetch(q FindRequest) error {
	r.mu.Lock()
	defer r.unlock()
	ended := func(o *offer) bool { return o.state == Ended }
	for _, o := range r.fetches {
		if o.state == Open && o.claimer == q.Instance && o.RequestID == q.RequestID && q.RequestID != "" {
			r.endLocked(o, "replaced")
		}
	}
	r.fetches = slices.DeleteFunc(r.fetches, ended)
	if len(r.fetches) < r.cfg.Limits.Fetches {
		return nil
	}
	oldest := slices.IndexFunc(r.fetches, func(o *offer) bool { return o.state == Open })
	if oldest < 0 {
		return fmt.Errorf("%w: %d look-ups of other nodes are being read", ErrLimit, len(r.fetches))
	}
	r.endLocked(r.fetches[oldest], "replaced")
	r.fetches = slices.DeleteFunc(r.fetches, ended)
	return nil
}

const (
	// rateAssumed is that of a peer from which nothing was read so far, in bytes/s: a tenth of what a 100 Gb/s network carries.
	rateAssumed = 1.25e9
	// findLease is how long what was found, and then computed after all, is kept at its owner.
	findLease = 30 * time.Second
	// decisionsKept are for people to look at.
	decisionsKept = 256
)

// Wanted is a prompt of which other nodes may have more than this one.
type Wanted struct {
	Peers   []string // addresses of Peer services, likeliest first
	Find    FindRequest
	Shape   tiers.SpaceShape
	Compute time.Duration // of a block; 0: not known
}

// Decision is whether the blocks of a peer are fetched, and why.
type Decision struct {
	At        time.Time
	RequestID string
	Instance  string
	Peer      string
	Blocks    int // that the peer has
	Bytes     uint64
	Fetch     time.Duration // estimates
	Compute   time.Duration // 0: not known
	Lease     time.Duration // of what was found
	Rate      float64       // bytes/s that the estimate counts with
	Measured  bool          // the rate; else it is assumed
	Fetched   bool
	Reason    string
}

// Find asks peers for the blocks that are wanted, one after the other until one has some, and decides whether fetching them beats computing them. The ticket is good where the decision says so.
func (f *Fetcher) Find(ctx context.Context, w Wanted) (Ticket, Decision) {
	d := Decision{At: time.Now(), RequestID: w.Find.RequestID, Instance: w.Find.Instance, Reason: "no peer was reachable"}
	w.Find.Lease = min(w.Find.Lease, findLease)
	for _, address := range w.Peers {
		if address == f.cfg.Address {
			continue // this node
		}
		p, err := f.known(ctx, address)
		asked := time.Now()
		if err == nil && !p.lookups.Allow(asked) {
			continue
		}
		if err == nil {
			err = p.usable()
		}
		if err != nil {
			f.cfg.Log.Debug("find blocks", "peer", address, "error", err)
			continue
		}
		a, err := f.cfg.Control.Fetch(ctx, p.address, w.Find)
		if ctx.Err() != nil {
			p.lookups.Failure(time.Now(), "late")
			if state, _, _ := p.health.View(); state != health.OK {
				p.report(context.DeadlineExceeded) // it was the one try of a peer that had been unreachable
			} // else: the engine's patience is short, and transfers may go all the same
		} else {
			p.lookups.Success()
			p.report(err)
		}
		if err != nil {
			f.cfg.Log.Debug("find blocks", "peer", address, "error", err)
			continue
		}
		d.Reason = "no peer has more"
		if a.Blocks == 0 || a.ShardBytes != w.Shape.ShardBytes {
			continue
		}
		d.decide(w, p, a, time.Since(asked))
		t := Ticket{Addresses: []string{address}, OfferID: a.OfferID, Secret: a.Secret, Epoch: a.Epoch, Space: w.Find.Space}
		return t, f.decided(d)
	}
	return Ticket{}, f.decided(d)
}

// decide compares what fetching and computing take.
func (d *Decision) decide(w Wanted, p *peer, a FindAnswer, trip time.Duration) {
	d.Peer, d.Blocks, d.Lease = p.address, a.Blocks, a.Lease
	d.Bytes = uint64(a.Blocks) * a.ShardBytes * uint64(w.Shape.Shards)
	d.Rate = p.link.Rate() * float64(min(peerTransfers, 1+d.Bytes/partBytes)) // of those that run side by side
	d.Measured = d.Rate > 0
	if !d.Measured {
		d.Rate = rateAssumed
	}
	d.Fetch = 2*trip + time.Duration(float64(d.Bytes)/d.Rate*float64(time.Second)) // to claim, and to read
	d.Compute = time.Duration(a.Blocks) * w.Compute
	d.Fetched, d.Reason = true, "fetch is faster"
	switch {
	case d.Compute == 0:
		d.Reason = "fetch: how long computing takes is not known"
	case d.Fetch >= d.Compute:
		d.Fetched, d.Reason = false, "compute is faster"
	}
}

func (f *Fetcher) decided(d Decision) Decision {
	f.cfg.Counters.Add("fetch_decisions", d.Reason, 1)
	f.decisions.add(d)
	return d
}

// decisionLog has the last decisions.
type decisionLog struct {
	mu   sync.Mutex
	last []Decision
}

func (l *decisionLog) add(d Decision) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.last) >= decisionsKept {
		l.last = append(l.last[:0], l.last[1:]...)
	}
	l.last = append(l.last, d)
}

// Decisions are the last, oldest first.
func (f *Fetcher) Decisions() []Decision {
	f.decisions.mu.Lock()
	defer f.decisions.mu.Unlock()
	return slices.Clone(f.decisions.last)
}
