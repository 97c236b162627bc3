// Package handoff is the daemon's part in handing a prompt's KV over: the offers of this node's engines and the claims on them (Registry), and the fetching of what other nodes
// offer (Fetcher).
//
// It owns offers and claims, and through claims the pins that keep blocks readable while a peer reads them. It copies with the mover and plans with the ledger. Safe for concurrent use.
package handoff

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/counters"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/transport"
)

// Errors of claims. Nothing was pinned.
var (
	// ErrUnknown is returned for an offer that this epoch does not know (any more), and for another epoch. A retry is useless.
	ErrUnknown = errors.New("handoff: unknown offer")
	// ErrSecret is returned when the secret is not the offer's. A retry is useless.
	ErrSecret = errors.New("handoff: wrong secret")
	// ErrTaken is returned when another instance has claimed the offer. A retry is useless.
	ErrTaken = errors.New("handoff: offer is claimed by another instance")
	// ErrMismatch is returned when claim and offer do not fit: space, tp, hashes. A retry is useless.
	ErrMismatch = errors.New("handoff: claim does not fit the offer")
	// ErrExists is returned when an offer's id is taken. A retry with another id succeeds.
	ErrExists = errors.New("handoff: offer is registered already")
	// ErrLimit is returned when a table is full. A retry may succeed.
	ErrLimit = errors.New("handoff: limit reached")
)

// Limits bound the tables.
type Limits struct {
	Offers     int
	Hashes     int // of all live offers together
	EndedKept  int // for people to look at
	Claims     int
	PerOffer   int           // claims of one offer at a time, for each rank
	ClaimLease time.Duration // a claim that is not renewed for so long ends
	OfferWait  time.Duration // for an offer that is not registered yet
	StoreWait  time.Duration // after its registration, blocks of an offer may still come
}

// DefaultLimits are the daemon's.
var DefaultLimits = Limits{Offers: 1 << 16, Hashes: 1 << 23, EndedKept: 256, Claims: 1 << 16, PerOffer: 4, ClaimLease: 10 * time.Second, OfferWait: time.Second, StoreWait: 2 * time.Second}

// Config is what a Registry works with; never modified after New.
type Config struct {
	Epoch       kvferry.Epoch
	Ledger      *tiers.Ledger
	Pool        transport.Memory
	DataAddress string // of the data protocol, for peers
	Limits      Limits
	Counters    *counters.Set
	Log         *slog.Logger
	Owners      func() tiers.Owner // makes an owner that no session has
}

// Registry has the offers of this node and the claims on them.
type Registry struct {
	cfg Config

	mu       sync.Mutex
	offers   map[[16]byte]*offer
	hashes   int      // of all of them
	order    []*offer // ended ones, oldest first
	claims   map[[16]byte]*claim
	byClaim  map[claimKey]*claim
	arrivals chan struct{} // closed at the next registration
}

// NewRegistry makes an empty one.
func NewRegistry(cfg Config) *Registry {
	return &Registry{cfg: cfg, offers: map[[16]byte]*offer{}, claims: map[[16]byte]*claim{}, byClaim: map[claimKey]*claim{}, arrivals: make(chan struct{})}
}

// Register takes an offer. Its last block is leased for the offer's lifetime, so that the chain stays.
func (r *Registry) Register(owner tiers.Owner, o Offer) error {
	now := time.Now()
	n := len(o.Hashes) / kvferry.HashSize
	e := &offer{Offer: o, owner: owner, made: now, until: now.Add(o.Lifetime), blocks: n, ranks: map[uint32]bool{}}
	r.mu.Lock()
	defer r.mu.Unlock()
	if old := r.offers[o.ID]; old != nil {
		return fmt.Errorf("%w: offer.offer_id: %x", ErrExists, o.ID)
	}
	if len(r.offers) >= r.cfg.Limits.Offers {
		return fmt.Errorf("%w: %d offers", ErrLimit, len(r.offers))
	}
	if r.hashes+n > r.cfg.Limits.Hashes {
		return fmt.Errorf("%w: offers of %d blocks", ErrLimit, r.hashes)
	}
	if ref, _, ok := r.cfg.Ledger.FindSpace(o.Space); ok {
		tail := kvferry.Hash(o.Hashes[(n-1)*kvferry.HashSize:])
		if err := r.cfg.Ledger.Lease(owner, e.leaseKey(), ref, tail, e.until); err != nil {
			return fmt.Errorf("register offer: %w", err)
		}
	}
	r.offers[o.ID] = e
	r.hashes += n
	close(r.arrivals)
	r.arrivals = make(chan struct{})
	r.cfg.Counters.Add("offers", "registered", 1)
	return nil
}

func (o *offer) leaseKey() string { return "offer " + string(o.ID[:]) }

// SessionEnded ends the offers of a session that nobody has claimed. Claims that are alive go on: their blocks are in the pool.
func (r *Registry) SessionEnded(owner tiers.Owner) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, o := range r.offers {
		if o.owner == owner && o.state == Open {
			r.endLocked(o, "session ended")
		}
	}
}

// endLocked ends an offer, once.
func (r *Registry) endLocked(o *offer, reason string) {
	if o.state == Ended {
		return
	}
	o.changeState(evEnd)
	o.reason, o.ended = reason, time.Now()
	r.cfg.Ledger.ReleaseKey(o.owner, o.leaseKey())
	delete(r.offers, o.ID)
	r.hashes -= o.blocks
	o.Hashes = nil
	r.order = append(r.order, o)
	if over := len(r.order) - r.cfg.Limits.EndedKept; over > 0 {
		r.order = append(r.order[:0], r.order[over:]...)
	}
	r.cfg.Counters.Add("offers", reason, 1)
}

// Expire ends claims that were not renewed and offers whose lifetime is over.
func (r *Registry) Expire(now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.claims {
		if !c.until.After(now) {
			r.endClaimLocked(c, "not renewed")
		}
	}
	for _, o := range r.offers {
		if o.claims == 0 && !o.until.After(now) {
			r.endLocked(o, "expired")
		}
	}
}

// List is what people see: live offers, oldest first, then those that ended last.
func (r *Registry) List(now time.Time) []View {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []View
	for _, o := range r.offers {
		out = append(out, o.view(now))
	}
	slices.SortFunc(out, func(x, y View) int { return cmp.Compare(y.Age, x.Age) })
	for _, o := range r.order {
		out = append(out, o.view(now))
	}
	return out
}

func (o *offer) view(now time.Time) View {
	v := View{Offer: o.Offer, Blocks: o.blocks, State: o.state, Reason: o.reason, Age: now.Sub(o.made), ExpiresIn: o.until.Sub(now), Claimer: o.claimer, Path: o.path}
	v.Secret, v.Hashes = [16]byte{}, nil // nobody needs to see them
	if o.state == Ended {
		v.ExpiresIn = 0
	}
	return v
}

// ActiveClaims is how many claims have not ended.
func (r *Registry) ActiveClaims() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.claims)
}

// OpenOffers is how many have not ended.
func (r *Registry) OpenOffers() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.offers)
}
