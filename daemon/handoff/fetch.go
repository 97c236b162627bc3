package handoff

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/counters"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/transport"
)

// Ticket names an offer of an instance, here or on another node.
type Ticket struct {
	Addresses []string // of Peer services, by rank; one entry serves all ranks
	OfferID   [16]byte
	Secret    [16]byte
	Epoch     kvferry.Epoch
	Space     kvferry.SpaceID
}

// FetchRequest asks for blocks of an offer.
type FetchRequest struct {
	Ticket   Ticket
	Instance string // that decodes
	Rank, TP uint32
	ClaimID  uint64
	Space    tiers.SpaceRef
	Shape    tiers.SpaceShape
	Shard    uint16
	Hashes   []byte
	// Into, where it is set, is worker memory that blocks from other nodes are written into; else they go into the pool.
	Into *Destination
	// Pooled says why nothing is written into worker memory, for people.
	Pooled string
	// ReadsLent: the worker reads memory that other workers of this node lend, of these planes, until a moment that is later than the fetch's deadline.
	ReadsLent bool
	Planes    []kvferry.Plane
	Until     time.Time
	// Arrived is called, from Fetch's own goroutine, with the indexes of blocks that have come while others are still on their way. May be nil.
	Arrived func(at []int)
}

// Destination is memory that a worker has lent to be written.
type Destination struct {
	Memory   transport.Memory
	Segments func(i int) []kvferry.Segment // of block i of the request
	// Begin is called before something may be written, and answers false when it no longer may; its end is called when that is quiet.
	Begin func() (end func(), ok bool)
}

// FetchStatus is how a block of a fetch ended.
type FetchStatus uint8

// The statuses.
const (
	Fetched FetchStatus = iota + 1 // is in the pool
	NotThere
	NoRoom
	Failed
	TooLate
	Delivered // was written into the destination, and is right
	Readable  // in lent memory of this node: see FetchResult
	numFetchStatuses
)

func (s FetchStatus) String() string {
	return [...]string{"none", "fetched", "not_there", "no_room", "failed", "too_late", "delivered", "lent"}[min(s, 7)]
}

// FetchResult is what became of each block of a request. It grows while the fetch runs; Arrived tells of what.
type FetchResult struct {
	Status []FetchStatus
	// Where blocks lie that are Readable: beside Status.
	Lent []LentPlace
	// Memory is what they lie in, held until End.
	Memory *Lent
	// End gives back what keeps blocks readable, and says why the worker has not read them; empty: it has. Nil: nothing keeps them.
	End func(reason string)
}

// LentPlace is where a block lies in lent memory.
type LentPlace struct {
	Block      uint32
	Generation uint64
}

// Control is the Peer service of other daemons; package rpc has the client.
type Control interface {
	Claim(ctx context.Context, address string, q ClaimRequest) (ClaimAnswer, error)
	// Confirm tells which blocks, read as InLent, were what they should be, and their checksums.
	Confirm(ctx context.Context, address string, epoch kvferry.Epoch, key [16]byte, offsets []uint64) (held []bool, crcs []uint32, err error)
	Fetch(ctx context.Context, address string, q FindRequest) (FindAnswer, error)
	Renew(ctx context.Context, address string, epoch kvferry.Epoch, keys [][16]byte) error
	EndClaim(ctx context.Context, address string, epoch kvferry.Epoch, key [16]byte, received uint32, reason string) error
}

// PeerLink is the way to the data of one epoch of a peer: transport/tcp's Link, or that of the simulation.
type PeerLink interface {
	Copier(key [16]byte, src kvferry.Region, dst transport.Memory) transport.Copier
	Close() error
}

// FetcherConfig is what a Fetcher works with; never modified after NewFetcher.
type FetcherConfig struct {
	Epoch    kvferry.Epoch
	Address  string // of this node's Peer service, as tickets name it
	Ledger   *tiers.Ledger
	Pool     transport.Memory
	Registry *Registry // of this node: a ticket may be of an engine here
	Control  Control
	NewLink  func(address string, epoch kvferry.Epoch) PeerLink
	// Resolve is the address to dial for one that a ticket or a peer names, or why it may not be dialled.
	Resolve  func(ctx context.Context, address string) (string, error)
	Counters *counters.Set
	Log      *slog.Logger
	Peers    int // at most
	// PartBytes is about how much one transfer of a fetch has; 0: 8 MiB. The simulation's blocks are small.
	PartBytes uint64
}

// Fetcher brings offered blocks from where they lie into the pool of this node.
type Fetcher struct {
	cfg FetcherConfig

	mu      sync.Mutex
	peers   map[string]*peer
	waiting int // background work
	closed  bool
	wg      sync.WaitGroup

	decisions decisionLog
}

// NewFetcher makes one without peers.
func NewFetcher(cfg FetcherConfig) *Fetcher {
	if cfg.PartBytes == 0 {
		cfg.PartBytes = partBytes
	}
	return &Fetcher{cfg: cfg, peers: map[string]*peer{}}
}

// partBytes is about how much one transfer of a fetch has: what has come is used while the rest is under way.
const partBytes = 8 << 20

// claimWait is how long a peer may wait for stores that are still running, at a time.
const claimWait = 3 * time.Second

// answerTime is what is left of a fetch's time for the answer to a claim that has waited: a peer that has nothing yet is not one that cannot be reached.
const answerTime = 100 * time.Millisecond

// transferWait is how long an offer whose id the router chose may be unknown to the node that the router named.
const transferWait = 10 * time.Second

// Here tells whether a ticket is of an engine on this node.
func (f *Fetcher) Here(t Ticket, rank uint32) bool {
	return t.Epoch == f.cfg.Epoch || (t.Epoch == kvferry.Epoch{} && t.address(rank) == f.cfg.Address)
}

// Fetch brings blocks to where the request wants them. It returns when ctx ends at the latest; what a transfer still writes into then is given back when that is quiet.
func (f *Fetcher) Fetch(ctx context.Context, q FetchRequest, out *FetchResult) {
	n := len(q.Hashes) / kvferry.HashSize
	*out = FetchResult{Status: make([]FetchStatus, n), Lent: make([]LentPlace, n)}
	var err error
	if f.Here(q.Ticket, q.Rank) {
		err = f.local(ctx, q, out)
	} else {
		err = f.remote(ctx, q, out.Status)
	}
	if err != nil {
		f.cfg.Log.Warn("fetch offered blocks", "offer", fmt.Sprintf("%x", q.Ticket.OfferID), "blocks", n, "error", err)
	}
	var count [numFetchStatuses]int
	for i, s := range out.Status {
		if s == 0 {
			s = Failed
			if ctx.Err() != nil {
				s = TooLate
			}
			out.Status[i] = s
		}
		count[s]++
	}
	for s, n := range count {
		f.cfg.Counters.Add("fetch_blocks", FetchStatus(s).String(), n)
	}
}

const (
	settleTimeout = 2 * time.Second // of messages that nobody waits for
	backgroundMax = 1024            // of them at a time
)

// Settle tells the offering node that the blocks are here already, so that the offer ends and its lease goes. Nobody waits for it; where it fails, the offer ends with its lifetime.
func (f *Fetcher) Settle(q FetchRequest) {
	f.background(func(ctx context.Context) {
		c := f.claimRequest(ctx, q, q.Hashes[:kvferry.HashSize])
		c.Wait = 0
		c.Path = "pool of the claimer's node: all blocks were there"
		if f.Here(q.Ticket, q.Rank) {
			if a, err := f.cfg.Registry.Claim(ctx, c); err == nil {
				f.cfg.Registry.EndClaim(a.Key, "")
			}
			return
		}
		address, err := f.resolve(ctx, q.Ticket.address(q.Rank))
		if err == nil {
			var a ClaimAnswer
			if a, err = f.cfg.Control.Claim(ctx, address, c); err == nil {
				err = f.cfg.Control.EndClaim(ctx, address, a.Epoch, a.Key, 0, "")
			}
		}
		if err != nil {
			f.cfg.Log.Debug("settle offer", "peer", address, "error", err)
		}
	})
}

func (f *Fetcher) resolve(ctx context.Context, address string) (string, error) {
	to, err := f.cfg.Resolve(ctx, address)
	if err != nil {
		f.cfg.Counters.Add("peers", "refused", 1)
		return "", fmt.Errorf("%w: %v", transport.ErrRefused, err)
	}
	return to, nil
}

// background runs what nobody waits for, until Close at the latest.
func (f *Fetcher) background(work func(ctx context.Context)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed || f.waiting >= backgroundMax {
		return // claims and offers end with their leases
	}
	f.waiting++
	f.wg.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), settleTimeout)
		defer cancel()
		work(ctx)
		f.mu.Lock()
		f.waiting--
		f.mu.Unlock()
	})
}

// address is where the Peer service for a rank is.
func (t Ticket) address(rank uint32) string {
	if int(rank) < len(t.Addresses) {
		return t.Addresses[rank]
	}
	return t.Addresses[0]
}

func (f *Fetcher) claimRequest(ctx context.Context, q FetchRequest, hashes []byte) ClaimRequest {
	wait := claimWait
	if until, ok := ctx.Deadline(); ok {
		wait = min(wait, time.Until(until))
	}
	return ClaimRequest{
		Epoch: q.Ticket.Epoch, OfferID: q.Ticket.OfferID, Secret: q.Ticket.Secret, Instance: q.Instance, Rank: q.Rank, TP: q.TP, ClaimID: q.ClaimID,
		Space: q.Ticket.Space, Hashes: hashes, Wait: max(wait, 0),
	}
}

// local takes an offer of an engine on this node: the worker reads what that lends, and else the pool.
func (f *Fetcher) local(ctx context.Context, q FetchRequest, out *FetchResult) error {
	begun, todo := time.Now(), indexes(len(out.Status))
	var key [16]byte
	for len(todo) > 0 {
		c := f.claimRequest(ctx, q, pick(q.Hashes, todo))
		c.ReadsLent, c.PreferLent, c.Path = q.ReadsLent, true, "worker memory of this node"
		if !q.ReadsLent {
			c.Path = "pool of this node: the decode worker does not read lent memory"
		}
		c.Planes, c.Lease = q.Planes, time.Until(q.Until)
		a, err := f.cfg.Registry.Claim(ctx, c)
		if err != nil || (a.Key == [16]byte{} && !f.patient(ctx, a, begun)) {
			f.endLocal(key, out, "failed")
			return err
		}
		key = a.Key
		todo = out.take(q, a, todo)
		if err := over(ctx); err != nil {
			f.endLocal(key, out, err.Error())
			return err
		}
	}
	f.endLocal(key, out, "")
	return nil
}

// take notes the answer to a claim of this node, and answers the indexes of what is pending. at are the indexes of the claimed blocks.
func (out *FetchResult) take(q FetchRequest, a ClaimAnswer, at []int) (pending []int) {
	var come []int
	for k, s := range a.Status {
		i := at[k]
		switch s {
		case Stored:
			out.Status[i] = Fetched
		case InLent:
			out.Status[i], out.Memory = Readable, a.Lent
			out.Lent[i] = LentPlace{a.Blocks[k], a.Generations[k]}
		case Missing:
			out.Status[i] = NotThere
			continue
		default:
			pending = append(pending, i)
			continue
		}
		come = append(come, i)
	}
	if q.Arrived != nil && len(come) > 0 {
		q.Arrived(come)
	}
	return pending
}

// endLocal ends a claim of this node, at once or when the worker has read what is lent.
func (f *Fetcher) endLocal(key [16]byte, out *FetchResult, reason string) {
	if out.Memory != nil {
		out.End = func(later string) { f.cfg.Registry.EndClaim(key, cmp.Or(reason, later)) }
		return
	}
	f.cfg.Registry.EndClaim(key, reason)
}

func indexes(n int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = i
	}
	return out
}

// over is why there is no time left. It does not wait for ctx's timer: a claim that may not wait any more would be made again and again until that has fired.
func over(ctx context.Context) error {
	if until, ok := ctx.Deadline(); ok && !time.Now().Before(until) {
		return context.DeadlineExceeded
	}
	return ctx.Err()
}

// late tells that there is no time for another claim.
func late(ctx context.Context) bool {
	until, ok := ctx.Deadline()
	return ok && time.Until(until) <= answerTime
}

// patient tells whether to ask again for what is pending.
func (f *Fetcher) patient(ctx context.Context, a ClaimAnswer, begun time.Time) bool {
	return over(ctx) == nil && (a.Key != [16]byte{} || time.Since(begun) < transferWait)
}

// remote claims an offer at the node that has it and reads the blocks from there.
func (f *Fetcher) remote(ctx context.Context, q FetchRequest, out []FetchStatus) error {
	p, err := f.known(ctx, q.Ticket.address(q.Rank))
	if err == nil {
		err = p.usable()
	}
	if err != nil {
		return err
	}
	r := &remote{f: f, p: p, q: q, out: out, lent: true, begun: time.Now()}
	err = r.run(ctx)
	p.report(err)
	if r.key != ([16]byte{}) {
		r.end(err)
	}
	return err
}

// known is the peer at an address that a ticket names, if it may be dialled.
func (f *Fetcher) known(ctx context.Context, address string) (*peer, error) {
	address, err := f.resolve(ctx, address)
	if err != nil {
		return nil, err
	}
	return f.peer(address)
}

// usable fails for a peer that is known to be unreachable. Who gets it reports how it went.
func (p *peer) usable() error {
	if p.health.Allow(time.Now()) {
		return nil
	}
	state, reason, since := p.health.View()
	return fmt.Errorf("%w: peer %s is %v since %s: %s", transport.ErrLink, p.address, state, since.Format(time.RFC3339), reason)
}

func pick(hashes []byte, at []int) []byte {
	out := make([]byte, 0, len(at)*kvferry.HashSize)
	for _, i := range at {
		out = append(out, hashes[i*kvferry.HashSize:][:kvferry.HashSize]...)
	}
	return out
}

// awaitOthers waits for blocks that somebody else is fetching already: requests that share a prefix fetch it once.
func (f *Fetcher) awaitOthers(ctx context.Context, q FetchRequest, at []int, out []FetchStatus) {
	if len(at) == 0 {
		return
	}
	hashes := pick(q.Hashes, at)
	for {
		states, changed := f.cfg.Ledger.Await(q.Space, q.Shard, hashes)
		filling := 0
		for i, s := range states {
			switch s {
			case tiers.SlotFilling:
				filling++
			case tiers.SlotResident:
				out[at[i]] = Fetched
			default:
				out[at[i]] = Failed
			}
		}
		if filling == 0 {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}
