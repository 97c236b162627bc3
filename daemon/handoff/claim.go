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
)

// ClaimStatus is the answer to a block of a claim. The numbers are those of the protocol.
type ClaimStatus uint8

// The statuses.
const (
	Stored  ClaimStatus = iota + 1
	Pending             // its store was still running when the wait was over: ask again
	Missing             // will not come
	InLent              // in the memory of the worker that offers it; to be believed after Confirm, or a comparison of the generation
)

func (s ClaimStatus) String() string {
	return [...]string{"none", "stored", "pending", "missing", "lent"}[min(int(s), 4)]
}

// ClaimRequest takes (a part of) an offer.
type ClaimRequest struct {
	Epoch    kvferry.Epoch // zero: any, of an offer whose id the router chose
	OfferID  [16]byte
	Secret   [16]byte
	Instance string // that decodes
	Rank, TP uint32
	ClaimID  uint64
	Space    kvferry.SpaceID
	Hashes   []byte
	Wait     time.Duration
	Lease    time.Duration // 0: the usual. Only of claims of this node, which nobody renews
	Path     string        // how the blocks will go: for people
	// ReadsLent: the claimer can read the memory of the worker that offers. PreferLent: rather than the pool.
	ReadsLent, PreferLent bool
	// Planes are those of a claimer on this node, which copies plane by plane; nil: it does not matter how the memory is laid out.
	Planes []kvferry.Plane
}

// ClaimAnswer says where the blocks lie, until the lease is over or the claim is ended. The lists run beside the hashes. A zero Key: the offer is not known yet, all is pending.
type ClaimAnswer struct {
	Epoch       kvferry.Epoch
	DataAddress string
	Key         [16]byte
	Status      []ClaimStatus
	Offsets     []uint64 // in the data protocol
	CRC32C      []uint32 // of what is stored
	Parents     []byte   // packed; nil: not told
	ShardBytes  uint64
	Lease       time.Duration

	// Of a claim of this node, where the status is InLent.
	Lent        *Lent // held by the claim
	Blocks      []uint32
	Generations []uint64
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
	key        [16]byte
	id         claimKey
	offer      *offer
	owner      tiers.Owner
	until      time.Time
	last       time.Time // it ends then, however often it is renewed
	hold       tiers.HoldID
	blocks     []span            // what is pinned, by offset
	lent       *Lent             // what InLent was answered for; nil: nothing
	lentBlocks map[uint32]uint64 // the generations that they must have
	users      int               // requests of the data protocol that are being answered
	ended      bool
}

// Claim takes an offer. Asking again with the same claim id changes nothing but adds what has been stored since. It waits while nothing of what is asked for can be read and
// some of it may still come.
func (r *Registry) Claim(ctx context.Context, q ClaimRequest) (ClaimAnswer, error) {
	if q.Epoch != r.cfg.Epoch && q.Epoch != (kvferry.Epoch{}) {
		return ClaimAnswer{}, fmt.Errorf("%w: claim.epoch: %v, this daemon's is %v", ErrUnknown, q.Epoch, r.cfg.Epoch)
	}
	if !r.beginWait(len(q.Hashes)) {
		return ClaimAnswer{}, fmt.Errorf("%w: claims of %d MiB of hashes are being answered", ErrLimit, r.cfg.Limits.Waiting>>20)
	}
	defer r.endWait(len(q.Hashes))
	deadline := time.Now().Add(q.Wait)
	patience := min(q.Wait, r.cfg.Limits.OfferWait)
	if q.Epoch == (kvferry.Epoch{}) {
		patience = q.Wait // the router has sent both legs at once
	}
	o, at, err := r.find(ctx, q, time.Now().Add(patience))
	if err != nil {
		return ClaimAnswer{}, err
	}
	if o == nil {
		n := len(q.Hashes) / kvferry.HashSize
		return ClaimAnswer{Epoch: r.cfg.Epoch, DataAddress: r.cfg.DataAddress, Status: slices.Repeat([]ClaimStatus{Pending}, n), Offsets: make([]uint64, n),
			CRC32C: make([]uint32, n), Lease: r.cfg.Limits.ClaimLease}, nil
	}
	ref, shape, ok := r.cfg.Ledger.FindSpace(q.Space)
	if !ok {
		return ClaimAnswer{}, fmt.Errorf("%w: claim.space_id: nothing of it was ever stored here", ErrUnknown)
	}
	shard := uint16(q.Rank)
	if shape.Shards == 1 { // one rank, or replicated
		shard = 0
	}
	v := r.await(ctx, q, o, at, ref, shard, shape.ShardBytes, deadline)
	a, err := ClaimAnswer{}, context.Cause(ctx)
	if err == nil {
		a, err = r.pin(q, o, at, ref, shape, shard, &v)
	} else {
		r.forsake(o) // nobody hears the answer, and nobody would end the claim
	}
	if v.lent != nil && !v.taken {
		v.lent.Release()
	}
	return a, err
}

// forsake is for a claim whose claimer has gone while it waited.
func (r *Registry) forsake(o *offer) {
	r.mu.Lock()
	defer r.unlock()
	o.drop(time.Now().Add(r.cfg.Limits.ClaimLease))
}

// beginWait counts a claim that may wait, by what it holds in memory.
func (r *Registry) beginWait(bytes int) bool {
	r.mu.Lock()
	defer r.unlock()
	if r.waiting+bytes > r.cfg.Limits.Waiting {
		return false
	}
	r.waiting += bytes
	return true
}

func (r *Registry) endWait(bytes int) {
	r.mu.Lock()
	defer r.unlock()
	r.waiting -= bytes
}

// find waits for an offer that may not be registered yet, and checks that the claim may have it. at is where the claim's blocks are in it. The answer is nil where an offer
// whose id the router chose may still come.
func (r *Registry) find(ctx context.Context, q ClaimRequest, until time.Time) (o *offer, at []int, err error) {
	timeout := time.NewTimer(time.Until(until))
	defer timeout.Stop()
	for {
		r.mu.Lock()
		o, arrivals := r.offers[q.OfferID], r.arrivals
		if o != nil {
			at, err := r.takeLocked(o, q)
			r.unlock()
			return o, at, err
		}
		past := r.pastLocked(q.OfferID)
		r.unlock()
		if past != nil {
			return nil, nil, fmt.Errorf("%w: claim.offer_id: %x has ended: %s", ErrUnknown, q.OfferID, past.reason)
		}
		select {
		case <-arrivals:
		case <-timeout.C:
			if q.Epoch == (kvferry.Epoch{}) {
				return nil, nil, nil
			}
			return nil, nil, fmt.Errorf("%w: claim.offer_id: %x", ErrUnknown, q.OfferID)
		case <-ctx.Done():
			return nil, nil, context.Cause(ctx)
		}
	}
}

// pastLocked is an offer that has ended, if it is still known.
func (r *Registry) pastLocked(id [16]byte) *offer {
	for _, o := range r.order {
		if o.ID == id {
			return o
		}
	}
	return nil
}

// takeLocked checks a claim against its offer and binds the offer to the claimer.
func (r *Registry) takeLocked(o *offer, q ClaimRequest) (at []int, err error) {
	if !o.secretIs(q.Secret) {
		return nil, fmt.Errorf("%w: claim.secret", ErrSecret)
	}
	if q.Epoch != r.cfg.Epoch && !o.router {
		return nil, fmt.Errorf("%w: claim.epoch: must name this daemon's", ErrUnknown)
	}
	if o.overAt(time.Now()) {
		r.endLocked(o, o.lapse())
		return nil, fmt.Errorf("%w: claim.offer_id: %x has ended: %s", ErrUnknown, o.ID, o.reason)
	}
	if o.claimer != "" && o.claimer != q.Instance {
		return nil, fmt.Errorf("%w: claim.instance: %q has it", ErrTaken, o.claimer)
	}
	if o.TP != q.TP {
		return nil, fmt.Errorf("%w: claim.tp: offered by tp=%d, claimed by tp=%d: not supported yet", ErrMismatch, o.TP, q.TP)
	}
	if o.Space != q.Space {
		return nil, fmt.Errorf("%w: claim.space_id: %v, the offer's is %v", ErrMismatch, q.Space, o.Space)
	}
	at, i, ok := o.find(q.Hashes)
	if !ok {
		return nil, fmt.Errorf("%w: claim.hashes: block %d is not in the offer, or not in its order", ErrMismatch, i)
	}
	o.claimer, o.path = q.Instance, q.Path
	o.changeState(evClaim)
	return at, nil
}

// view is what a claim sees of its blocks.
type view struct {
	states []tiers.SlotState
	late   bool  // what is not stored or being stored will not come
	lent   *Lent // nil: nothing is lent, or the claimer does not read it
	taken  bool  // by the claim
	blocks LentBlocks
}

// held tells whether block i of the offer can be read where its engine lends it.
func (v *view) held(i int) bool {
	return v.lent != nil && v.blocks.IDs != nil && v.lent.holds(v.blocks.IDs[i], v.blocks.Generations[i])
}

// await returns when something of what is claimed can be read, or nothing more will come, or the wait is over.
func (r *Registry) await(ctx context.Context, q ClaimRequest, o *offer, at []int, ref tiers.SpaceRef, shard uint16, shardBytes uint64, deadline time.Time) (v view) {
	timeout := time.NewTimer(time.Until(deadline))
	defer timeout.Stop()
	if r.cfg.Promote != nil {
		r.cfg.Promote(ref, shard, q.Hashes) // what is on a drive comes like what is still being stored
	}
	for tried := false; ; {
		r.mu.Lock()
		comes, ended, changed := o.comes, o.state == Ended, o.changed
		v.blocks = o.Blocks // none once it has ended
		r.unlock()
		if !tried && v.blocks.IDs != nil && q.ReadsLent {
			v.lent, tried = r.lend(o, q, v.blocks, shardBytes), true
		}
		v.late = ended || (!comes.IsZero() && !comes.After(time.Now()))
		var filled <-chan struct{}
		v.states, filled = r.cfg.Ledger.Await(ref, shard, q.Hashes)
		readable, coming := false, false
		for i, s := range v.states {
			here := s == tiers.SlotResident || v.held(at[i])
			readable = readable || here
			coming = coming || s == tiers.SlotFilling || (!here && !v.late)
		}
		if readable || !coming {
			return v
		}
		var late <-chan time.Time
		if !v.late && !comes.IsZero() {
			late = time.After(time.Until(comes))
		}
		select {
		case <-filled:
		case <-changed:
		case <-late:
		case <-timeout.C:
			return v
		case <-ctx.Done():
			return v
		}
	}
}

// lend takes hold of a rank's memory for a claim; nil where it is not there.
func (r *Registry) lend(o *offer, q ClaimRequest, blocks LentBlocks, shardBytes uint64) *Lent {
	if r.cfg.Lend == nil {
		return nil
	}
	l, err := r.cfg.Lend(o.owner, o.Instance, q.Rank, blocks.Region, blocks.Offered)
	if err == nil && (l.ShardBytes != shardBytes || (q.Planes != nil && !samePlanes(q.Planes, l.Planes))) {
		l.Release()
		err = fmt.Errorf("%w: shards of %d bytes in %d planes, want %d bytes in %d", ErrMismatch, l.ShardBytes, len(l.Planes), shardBytes, len(q.Planes))
	}
	if err != nil {
		r.cfg.Counters.Add("lend", "refused", 1)
		r.cfg.Log.Debug("lent memory is not to be had", "offer", fmt.Sprintf("%x", o.ID), "rank", q.Rank, "error", err)
		return nil
	}
	return l
}

// pin keeps what can be read where it is and makes the answer.
func (r *Registry) pin(q ClaimRequest, o *offer, at []int, ref tiers.SpaceRef, shape tiers.SpaceShape, shard uint16, v *view) (ClaimAnswer, error) {
	r.mu.Lock()
	defer r.unlock()
	c, err := r.claimLocked(q, o)
	if err != nil {
		return ClaimAnswer{}, err
	}
	now := time.Now()
	lease := r.cfg.Limits.ClaimLease
	if q.Lease > 0 {
		lease = q.Lease
	}
	c.renewLocked(now.Add(lease))
	res, err := r.cfg.Ledger.Pin(now, c.owner, ref, shard, q.Hashes, time.Time{})
	if err != nil {
		return ClaimAnswer{}, fmt.Errorf("claim: %w", err)
	}
	r.cfg.Ledger.Unpin(c.hold) // of the time before; what it had is pinned again now
	c.hold, c.blocks = res.Hold, nil
	n := len(res.Places)
	a := ClaimAnswer{
		Epoch: r.cfg.Epoch, DataAddress: r.cfg.DataAddress, Key: c.key, Status: make([]ClaimStatus, n), Offsets: make([]uint64, n), CRC32C: make([]uint32, n),
		ShardBytes: shape.ShardBytes, Lease: lease, Parents: r.cfg.Ledger.Parents(ref, q.Hashes),
		Blocks: make([]uint32, n), Generations: make([]uint64, n),
	}
	var count [InLent + 1]int
	for i, p := range res.Places {
		held := v.held(at[i])
		switch {
		case p.Slot != 0 && !(held && q.PreferLent):
			a.Status[i], a.Offsets[i], a.CRC32C[i] = Stored, p.Offset, p.CRC32C
			c.blocks = append(c.blocks, span{p.Offset, p.Length})
		case held:
			b, g := v.blocks.IDs[at[i]], v.blocks.Generations[at[i]]
			c.lendLocked(v, b, g)
			// The pool's checksum, where there is one, is not that of these bytes: another engine may have stored the same tokens with other roundings.
			a.Status[i], a.Offsets[i], a.Blocks[i], a.Generations[i], a.Lent = InLent, c.lent.offset(b), b, g, c.lent
		case v.states[i] == tiers.SlotFilling || !v.late:
			a.Status[i] = Pending
		default:
			a.Status[i] = Missing
		}
		count[a.Status[i]]++
	}
	for s, n := range count {
		r.cfg.Counters.Add("claim_blocks", ClaimStatus(s).String(), n)
	}
	slices.SortFunc(c.blocks, func(x, y span) int { return cmp.Compare(x.offset, y.offset) })
	return a, nil
}

// lendLocked lets the claim read a lent block. It keeps the hold of its first time.
func (c *claim) lendLocked(v *view, block uint32, generation uint64) {
	if c.lent == nil {
		c.lent, c.lentBlocks, v.taken = v.lent, map[uint32]uint64{}, true
	}
	c.lentBlocks[block] = generation
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
	c := &claim{id: id, offer: o, owner: r.cfg.Owners(), last: time.Now().Add(r.cfg.Limits.ClaimLife)}
	if _, err := rand.Read(c.key[:]); err != nil {
		return nil, fmt.Errorf("make claim key: %w", err)
	}
	r.claims[c.key], r.byClaim[id] = c, c
	o.claims++
	o.reading[q.Rank]++
	return c, nil
}

// Renew keeps claims alive and answers those that are not.
func (r *Registry) Renew(keys [][16]byte) (ended [][16]byte) {
	r.mu.Lock()
	defer r.unlock()
	for _, k := range keys {
		if c := r.claims[k]; c != nil {
			c.renewLocked(time.Now().Add(r.cfg.Limits.ClaimLease))
		} else {
			ended = append(ended, k)
		}
	}
	return ended
}

// EndClaim gives a claim back. The offer ends with the claims of all ranks that took what they wanted.
func (r *Registry) EndClaim(key [16]byte, reason string) {
	r.mu.Lock()
	defer r.unlock()
	if c := r.claims[key]; c != nil {
		r.endClaimLocked(c, reason)
	}
}

// endClaimLocked takes a claim out of the tables, and the offer with it when all ranks have been served: the claim that ends last may be one that failed. Its pins go when no answer
// reads them any more.
func (r *Registry) endClaimLocked(c *claim, reason string) {
	delete(r.claims, c.key)
	delete(r.byClaim, c.id)
	c.ended = true
	o, rank := c.offer, c.id.rank
	o.claims--
	o.reading[rank]--
	if reason == "" {
		o.ranks[rank] = true
	}
	switch {
	case o.state == Ended:
	case len(o.ranks) == int(o.TP) && o.claims == 0:
		r.endLocked(o, "done")
	case o.ranks[rank]: // perhaps by another claim than this one
		r.doneLocked(o, rank)
	default:
		o.drop(c.until)
	}
	r.cfg.Log.Debug("claim ended", "offer", fmt.Sprintf("%x", o.ID), "instance", c.id.instance, "rank", rank, "reason", cmp.Or(reason, "done"))
	r.freeLocked(c)
}
