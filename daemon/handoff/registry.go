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
	OpenEnded  time.Duration // an open-ended offer that is not completed for so long ends
	Waiting    int           // bytes of hashes of claims that are being answered
	ClaimLife  time.Duration // a claim ends after it, however often it is renewed
	Fetches    int           // offers that were made for look-ups of other nodes; the oldest that nobody has claimed goes
}

// DefaultLimits are the daemon's.
var DefaultLimits = Limits{Offers: 1 << 16, Hashes: 1 << 23, EndedKept: 256, Claims: 1 << 16, PerOffer: 4, ClaimLease: 10 * time.Second, OfferWait: time.Second, StoreWait: 2 * time.Second, OpenEnded: 10 * time.Minute,
	Waiting: 64 << 20, ClaimLife: 10 * time.Minute, Fetches: 1024}

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
	Lend        Lend               // nil: nothing is lent here
	// Promote begins to bring blocks up that are on a drive only; nil: there is none. It must not block.
	Promote func(space tiers.SpaceRef, shard uint16, hashes []byte)
	// Served tells a worker that nobody reads its blocks for an offer any more; nil: nobody is told. It is called without a lock held.
	Served func(instance string, rank uint32, offer [16]byte, reason string)
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
	waiting  int           // bytes, of Limits.Waiting
	fetches  []*offer      // that were made for look-ups of other nodes, oldest first
	served   []servedRank  // to be told when mu is free
	released []*Lent       // to be released then
}

type servedRank struct {
	instance string
	rank     uint32
	offer    [16]byte
	reason   string
}

// unlock lets mu go and does what came up while it was held: the sessions' locks come before it, and unmapping memory takes long.
func (r *Registry) unlock() {
	served, released := r.served, r.released
	r.served, r.released = nil, nil
	r.mu.Unlock()
	for _, l := range released {
		l.Release()
	}
	for _, s := range served {
		r.cfg.Served(s.instance, s.rank, s.offer, s.reason)
	}
}

// servedLocked has a rank's worker told, once.
func (r *Registry) servedLocked(o *offer, rank uint32, reason string) {
	if o.told[rank] || o.Blocks.IDs == nil || r.cfg.Served == nil {
		return
	}
	o.told[rank] = true
	r.served = append(r.served, servedRank{o.Instance, rank, o.ID, reason})
}

// NewRegistry makes an empty one.
func NewRegistry(cfg Config) *Registry {
	return &Registry{cfg: cfg, offers: map[[16]byte]*offer{}, claims: map[[16]byte]*claim{}, byClaim: map[claimKey]*claim{}, arrivals: make(chan struct{})}
}

// Register takes an offer. Its last block is leased for the offer's lifetime, so that the chain stays.
func (r *Registry) Register(owner tiers.Owner, o Offer) error { return r.register(owner, o, "") }

// register takes an offer that only claimer may claim; empty: the first that comes.
func (r *Registry) register(owner tiers.Owner, o Offer, claimer string) error {
	now := time.Now()
	n := len(o.Hashes) / kvferry.HashSize
	e := &offer{Offer: o, owner: owner, made: now, until: now.Add(o.Lifetime), comes: now.Add(r.cfg.Limits.StoreWait), blocks: n, router: o.OpenEnded, claimer: claimer, lent: o.Blocks.IDs != nil,
		ranks: map[uint32]bool{}, told: map[uint32]bool{}, reading: map[uint32]int{}, changed: make(chan struct{})}
	e.Blocks.Offered = now
	if o.OpenEnded {
		e.comes, e.until = time.Time{}, now.Add(r.cfg.Limits.OpenEnded)
	}
	r.mu.Lock()
	defer r.unlock()
	if old := r.offers[o.ID]; old != nil {
		return fmt.Errorf("%w: offer.offer_id: %x", ErrExists, o.ID)
	}
	if len(r.offers) >= r.cfg.Limits.Offers {
		return fmt.Errorf("%w: %d offers", ErrLimit, len(r.offers))
	}
	if r.hashes+n > r.cfg.Limits.Hashes {
		return fmt.Errorf("%w: offers of %d blocks", ErrLimit, r.hashes)
	}
	if err := r.leaseLocked(e); err != nil {
		return fmt.Errorf("register offer: %w", err)
	}
	r.offers[o.ID] = e
	r.hashes += n
	close(r.arrivals)
	r.arrivals = make(chan struct{})
	r.cfg.Counters.Add("offers", "registered", 1)
	return nil
}

// leaseLocked leases an offer's last block for as long as it lives.
func (r *Registry) leaseLocked(o *offer) error {
	ref, _, ok := r.cfg.Ledger.FindSpace(o.Space)
	if !ok {
		return nil
	}
	return r.cfg.Ledger.Lease(o.owner, o.leaseKey(), ref, kvferry.Hash(o.Hashes[(o.blocks-1)*kvferry.HashSize:]), o.until)
}

// Complete ends the computing of an open-ended offer's prompt: its lifetime begins, and blocks that its engine lends are known.
func (r *Registry) Complete(owner tiers.Owner, id [16]byte, blocks LentBlocks) error {
	r.mu.Lock()
	defer r.unlock()
	if o := r.pastLocked(id); o != nil && o.owner == owner && o.OpenEnded {
		// It ended before its engine was done. What that keeps for it now, it need not keep.
		o.OpenEnded, o.Blocks, o.lent = false, blocks, blocks.IDs != nil
		r.servedAllLocked(o)
		return nil
	}
	o, err := r.ownLocked("complete_offer", owner, id)
	if err != nil {
		return err
	}
	if !o.OpenEnded {
		return fmt.Errorf("%w: complete_offer.offer_id: %x is not open-ended", ErrMismatch, id)
	}
	if blocks.IDs != nil && len(blocks.IDs) != o.blocks {
		return fmt.Errorf("%w: complete_offer.block_ids: %d for an offer of %d blocks", ErrMismatch, len(blocks.IDs), o.blocks)
	}
	now := time.Now()
	blocks.Offered = now
	o.OpenEnded, o.Blocks, o.comes = false, blocks, now.Add(r.cfg.Limits.StoreWait)
	if !o.dropped {
		o.until = now.Add(o.Lifetime)
		if err := r.leaseLocked(o); err != nil {
			return fmt.Errorf("complete offer: %w", err)
		}
	}
	o.lent = blocks.IDs != nil
	for rank := range o.ranks { // served before there was anything to keep
		r.doneLocked(o, rank)
	}
	o.wakeLocked()
	return nil
}

// Withdraw ends an offer whose request was aborted.
func (r *Registry) Withdraw(owner tiers.Owner, id [16]byte, reason string) error {
	r.mu.Lock()
	defer r.unlock()
	o, err := r.ownLocked("end_offer", owner, id)
	if err != nil {
		return err
	}
	if reason == "" {
		reason = "withdrawn"
	}
	r.cfg.Log.Debug("offer withdrawn", "offer", fmt.Sprintf("%x", id), "reason", reason)
	r.endLocked(o, "withdrawn")
	return nil
}

// ownLocked is a live offer of this owner.
func (r *Registry) ownLocked(message string, owner tiers.Owner, id [16]byte) (*offer, error) {
	o := r.offers[id]
	if o == nil || o.owner != owner {
		return nil, fmt.Errorf("%w: %s.offer_id: %x is not a live offer of this session", ErrUnknown, message, id)
	}
	return o, nil
}

func (o *offer) leaseKey() string { return "offer " + string(o.ID[:]) }

// SessionEnded ends the offers of a session that nobody has claimed. Claims that are alive go on: their blocks are in the pool, or in memory that stays mapped. But nothing more will come.
func (r *Registry) SessionEnded(owner tiers.Owner) {
	r.mu.Lock()
	defer r.unlock()
	now := time.Now()
	for _, o := range r.offers {
		switch {
		case o.owner != owner:
		case o.state == Open:
			r.endLocked(o, "session ended")
		case o.comes.IsZero() || o.comes.After(now):
			o.comes = now
			o.wakeLocked()
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
	r.servedAllLocked(o)
	o.wakeLocked()
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

// servedAllLocked tells all ranks of an offer that has ended.
func (r *Registry) servedAllLocked(o *offer) {
	for rank := range o.TP {
		r.servedLocked(o, rank, o.reason)
	}
	o.Blocks = LentBlocks{}
}

// doneLocked tells a rank that was served whole, unless another claim of it still reads.
func (r *Registry) doneLocked(o *offer, rank uint32) {
	if o.reading[rank] == 0 {
		r.servedLocked(o, rank, "done")
	}
}

// Expire ends claims that were not renewed and offers whose lifetime is over.
func (r *Registry) Expire(now time.Time) {
	r.mu.Lock()
	defer r.unlock()
	for _, c := range r.claims {
		if !c.until.After(now) {
			r.endClaimLocked(c, "not renewed")
		}
	}
	for _, o := range r.offers {
		if o.overAt(now) {
			r.endLocked(o, o.lapse())
		}
	}
}

// List is what people see: live offers, oldest first, then those that ended last.
func (r *Registry) List(now time.Time) []View {
	r.mu.Lock()
	defer r.unlock()
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
	v := View{Offer: o.Offer, Size: o.blocks, Lent: o.lent, State: o.state, Reason: o.reason, Age: now.Sub(o.made), ExpiresIn: o.until.Sub(now), Claimer: o.claimer, Path: o.path}
	v.Secret, v.Hashes, v.Blocks = [16]byte{}, nil, LentBlocks{} // nobody needs to see them
	if o.state == Ended {
		v.ExpiresIn = 0
	}
	return v
}

// ActiveClaims is how many claims have not ended.
func (r *Registry) ActiveClaims() int {
	r.mu.Lock()
	defer r.unlock()
	return len(r.claims)
}

// OpenOffers is how many have not ended.
func (r *Registry) OpenOffers() int {
	r.mu.Lock()
	defer r.unlock()
	return len(r.offers)
}
