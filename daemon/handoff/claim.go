package handoff

import (
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/transport"
	"github.com/kvferry/kvferry/transport/tcp"
)

// ClaimStatus is the answer to a block of a claim. The numbers are those of the protocol.
type ClaimStatus uint8

// The statuses.
const (
	Stored  ClaimStatus = iota + 1
	Pending             // its store was still running when the wait was over: ask again
	Missing             // will not come
)

// ClaimRequest takes (a part of) an offer.
type ClaimRequest struct {
	Epoch    kvferry.Epoch
	OfferID  [16]byte
	Secret   [16]byte
	Instance string // that decodes
	Rank, TP uint32
	ClaimID  uint64
	Space    kvferry.SpaceID
	Hashes   []byte
	Wait     time.Duration
	Path     string // how the blocks will go: for people
}

// ClaimAnswer says where the blocks lie, until the lease is over or the claim is ended. The lists run beside the hashes.
type ClaimAnswer struct {
	Epoch       kvferry.Epoch
	DataAddress string
	Key         [16]byte
	Status      []ClaimStatus
	Offsets     []uint64
	CRC32C      []uint32
	Parents     []byte // packed; nil: not told
	ShardBytes  uint64
	Lease       time.Duration
}

type claimKey struct {
	offer    [16]byte
	instance string
	rank     uint32
	id       uint64
}

// span is a range of the pool.
type span struct{ offset, length uint64 }

// claim is a peer's hold on blocks of an offer. Registry.mu guards what changes.
type claim struct {
	key    [16]byte
	id     claimKey
	offer  *offer
	owner  tiers.Owner
	until  time.Time
	hold   tiers.HoldID
	blocks []span // what is pinned, by offset
	users  int    // requests of the data protocol that are being answered
	ended  bool
}

// Claim takes an offer. Asking again with the same claim id changes nothing but adds what has been stored since.
func (r *Registry) Claim(ctx context.Context, q ClaimRequest) (ClaimAnswer, error) {
	if q.Epoch != r.cfg.Epoch {
		return ClaimAnswer{}, fmt.Errorf("%w: claim.epoch: %v, this daemon's is %v", ErrUnknown, q.Epoch, r.cfg.Epoch)
	}
	deadline := time.Now().Add(q.Wait)
	o, err := r.find(ctx, q, time.Now().Add(min(q.Wait, r.cfg.Limits.OfferWait)))
	if err != nil {
		return ClaimAnswer{}, err
	}
	ref, shape, ok := r.cfg.Ledger.FindSpace(q.Space)
	if !ok {
		return ClaimAnswer{}, fmt.Errorf("%w: claim.space_id: nothing of it was ever stored here", ErrUnknown)
	}
	shard := uint16(q.Rank)
	if shape.Shards == 1 { // one rank, or replicated
		shard = 0
	}
	states := r.awaitStores(ctx, o, ref, shard, q.Hashes, deadline)
	return r.pin(q, o, ref, shape, shard, states)
}

// find waits for an offer that may not be registered yet, and checks that the claim may have it.
func (r *Registry) find(ctx context.Context, q ClaimRequest, until time.Time) (*offer, error) {
	timeout := time.NewTimer(time.Until(until))
	defer timeout.Stop()
	for {
		r.mu.Lock()
		o, arrivals := r.offers[q.OfferID], r.arrivals
		if o != nil {
			err := r.takeLocked(o, q)
			r.mu.Unlock()
			return o, err
		}
		past := r.pastLocked(q.OfferID)
		r.mu.Unlock()
		if past != "" {
			return nil, fmt.Errorf("%w: claim.offer_id: %x has ended: %s", ErrUnknown, q.OfferID, past)
		}
		select {
		case <-arrivals:
		case <-timeout.C:
			return nil, fmt.Errorf("%w: claim.offer_id: %x", ErrUnknown, q.OfferID)
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

func (r *Registry) pastLocked(id [16]byte) string {
	for _, o := range r.order {
		if o.ID == id {
			return o.reason
		}
	}
	return ""
}

// takeLocked checks a claim against its offer and binds the offer to the claimer.
func (r *Registry) takeLocked(o *offer, q ClaimRequest) error {
	if !o.secretIs(q.Secret) {
		return fmt.Errorf("%w: claim.secret", ErrSecret)
	}
	if o.claims == 0 && !o.until.After(time.Now()) {
		r.endLocked(o, "expired")
		return fmt.Errorf("%w: claim.offer_id: %x has ended: expired", ErrUnknown, o.ID)
	}
	if o.claimer != "" && o.claimer != q.Instance {
		return fmt.Errorf("%w: claim.instance: %q has it", ErrTaken, o.claimer)
	}
	if o.TP != q.TP {
		return fmt.Errorf("%w: claim.tp: offered by tp=%d, claimed by tp=%d: not supported yet", ErrMismatch, o.TP, q.TP)
	}
	if o.Space != q.Space {
		return fmt.Errorf("%w: claim.space_id: %v, the offer's is %v", ErrMismatch, q.Space, o.Space)
	}
	if i, ok := o.has(q.Hashes); !ok {
		return fmt.Errorf("%w: claim.hashes: block %d is not in the offer, or not in its order", ErrMismatch, i)
	}
	o.claimer, o.path = q.Instance, q.Path
	o.changeState(evClaim)
	return nil
}

// awaitStores waits while blocks of the offer are being stored, or may still come.
func (r *Registry) awaitStores(ctx context.Context, o *offer, ref tiers.SpaceRef, shard uint16, hashes []byte, deadline time.Time) []tiers.SlotState {
	timeout := time.NewTimer(time.Until(deadline))
	defer timeout.Stop()
	comes := time.NewTimer(time.Until(o.made.Add(r.cfg.Limits.StoreWait)))
	defer comes.Stop()
	late := !o.made.Add(r.cfg.Limits.StoreWait).After(time.Now())
	for {
		states, changed := r.cfg.Ledger.Await(ref, shard, hashes)
		wait := false
		for _, s := range states {
			wait = wait || s == tiers.SlotFilling || (s != tiers.SlotResident && !late)
		}
		if !wait {
			return states
		}
		select {
		case <-changed:
		case <-comes.C:
			late = true
		case <-timeout.C:
			return states
		case <-ctx.Done():
			return states
		}
	}
}

// pin keeps what is stored where it is and makes the answer.
func (r *Registry) pin(q ClaimRequest, o *offer, ref tiers.SpaceRef, shape tiers.SpaceShape, shard uint16, states []tiers.SlotState) (ClaimAnswer, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c, err := r.claimLocked(q, o)
	if err != nil {
		return ClaimAnswer{}, err
	}
	now := time.Now()
	c.until = now.Add(r.cfg.Limits.ClaimLease)
	res, err := r.cfg.Ledger.Pin(now, c.owner, ref, shard, q.Hashes, time.Time{})
	if err != nil {
		return ClaimAnswer{}, fmt.Errorf("claim: %w", err)
	}
	r.cfg.Ledger.Unpin(c.hold) // of the time before; what it had is pinned again now
	c.hold, c.blocks = res.Hold, nil
	n := len(res.Places)
	a := ClaimAnswer{
		Epoch: r.cfg.Epoch, DataAddress: r.cfg.DataAddress, Key: c.key, Status: make([]ClaimStatus, n), Offsets: make([]uint64, n), CRC32C: make([]uint32, n),
		ShardBytes: shape.ShardBytes, Lease: r.cfg.Limits.ClaimLease, Parents: r.cfg.Ledger.Parents(ref, q.Hashes),
	}
	late := !o.made.Add(r.cfg.Limits.StoreWait).After(now)
	var count [4]int
	for i, p := range res.Places {
		switch {
		case p.Slot != 0:
			a.Status[i], a.Offsets[i], a.CRC32C[i] = Stored, p.Offset, p.CRC32C
			c.blocks = append(c.blocks, span{p.Offset, p.Length})
		case states[i] == tiers.SlotFilling || !late:
			a.Status[i] = Pending
		default:
			a.Status[i] = Missing
		}
		count[a.Status[i]]++
	}
	for s, n := range count {
		r.cfg.Counters.Add("claim_blocks", claimStatusName(ClaimStatus(s)), n)
	}
	slices.SortFunc(c.blocks, func(x, y span) int { return cmp.Compare(x.offset, y.offset) })
	return a, nil
}

func claimStatusName(s ClaimStatus) string {
	return [...]string{"none", "stored", "pending", "missing"}[s]
}

// claimLocked is the claim of this name, made where there is none.
func (r *Registry) claimLocked(q ClaimRequest, o *offer) (*claim, error) {
	id := claimKey{o.ID, q.Instance, q.Rank, q.ClaimID}
	if c := r.byClaim[id]; c != nil {
		return c, nil
	}
	if o.state == Ended {
		return nil, fmt.Errorf("%w: claim.offer_id: %x has ended: %s", ErrUnknown, o.ID, o.reason)
	}
	if len(r.claims) >= r.cfg.Limits.Claims {
		return nil, fmt.Errorf("%w: %d claims", ErrLimit, len(r.claims))
	}
	if o.claims >= r.cfg.Limits.PerOffer*int(o.TP) {
		return nil, fmt.Errorf("%w: %d claims of this offer", ErrLimit, o.claims)
	}
	c := &claim{id: id, offer: o, owner: r.cfg.Owners()}
	if _, err := rand.Read(c.key[:]); err != nil {
		return nil, fmt.Errorf("make claim key: %w", err)
	}
	r.claims[c.key], r.byClaim[id] = c, c
	o.claims++
	return c, nil
}

// Renew keeps claims alive and answers those that are not.
func (r *Registry) Renew(keys [][16]byte) (ended [][16]byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, k := range keys {
		if c := r.claims[k]; c != nil {
			c.until = time.Now().Add(r.cfg.Limits.ClaimLease)
		} else {
			ended = append(ended, k)
		}
	}
	return ended
}

// EndClaim gives a claim back. The offer ends with the claims of all ranks that took what they wanted.
func (r *Registry) EndClaim(key [16]byte, reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.claims[key]
	if c == nil {
		return
	}
	o := c.offer
	r.endClaimLocked(c, reason)
	if reason != "" || o.state == Ended {
		return
	}
	o.ranks[c.id.rank] = true
	if len(o.ranks) == int(o.TP) && o.claims == 0 {
		r.endLocked(o, "done")
	}
}

// endClaimLocked takes a claim out of the tables. Its pins go when no answer reads them any more.
func (r *Registry) endClaimLocked(c *claim, reason string) {
	delete(r.claims, c.key)
	delete(r.byClaim, c.id)
	c.ended = true
	c.offer.claims--
	if reason == "" {
		reason = "done"
	}
	r.cfg.Log.Debug("claim ended", "offer", fmt.Sprintf("%x", c.offer.ID), "instance", c.id.instance, "rank", c.id.rank, "reason", reason)
	if c.users == 0 {
		r.cfg.Ledger.ReleaseOwner(c.owner)
	}
}

// Acquire is tcp.Grants: a request of the data protocol reads under this claim.
func (r *Registry) Acquire(epoch kvferry.Epoch, key [16]byte) (tcp.Grant, error) {
	if epoch != r.cfg.Epoch {
		return nil, fmt.Errorf("acquire: %w: epoch %v", transport.ErrRefused, epoch)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.claims[key]
	if c == nil {
		return nil, fmt.Errorf("acquire: %w: no such claim", transport.ErrRefused)
	}
	c.users++
	c.until = time.Now().Add(r.cfg.Limits.ClaimLease)
	return &grant{r: r, c: c}, nil
}

// grant is one request's hold on a claim.
type grant struct {
	r *Registry
	c *claim
}

// Bytes is tcp.Grant: a range inside one of the claim's slots.
func (g *grant) Bytes(off, length uint64) ([]byte, error) {
	g.r.mu.Lock()
	defer g.r.mu.Unlock()
	i, _ := slices.BinarySearchFunc(g.c.blocks, off, func(b span, off uint64) int { return cmp.Compare(b.offset, off) })
	for _, k := range []int{i, i - 1} { // the block that starts there, or the one before it
		if k < 0 || k >= len(g.c.blocks) {
			continue
		}
		if b := g.c.blocks[k]; off >= b.offset && off-b.offset <= b.length && length <= b.length-(off-b.offset) {
			return g.r.cfg.Pool.Bytes[off : off+length : off+length], nil
		}
	}
	return nil, fmt.Errorf("read %d bytes at %d: %w: not in the claim", length, off, transport.ErrRange)
}

// Release is tcp.Grant.
func (g *grant) Release() {
	g.r.mu.Lock()
	defer g.r.mu.Unlock()
	g.c.users--
	if g.c.ended && g.c.users == 0 {
		g.r.cfg.Ledger.ReleaseOwner(g.c.owner)
	}
}
