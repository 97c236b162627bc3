package handoff

import (
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

// FetchRequest asks for blocks of an offer to be brought into the pool.
type FetchRequest struct {
	Ticket   Ticket
	Instance string // that decodes
	Rank, TP uint32
	ClaimID  uint64
	Space    tiers.SpaceRef
	Shape    tiers.SpaceShape
	Shard    uint16
	Hashes   []byte
	// Arrived is called, from Fetch's own goroutine, with the indexes of blocks that have come while others are still on their way. May be nil.
	Arrived func(at []int)
}

// FetchStatus is how a block of a fetch ended. Only Fetched means that it is in the pool.
type FetchStatus uint8

// The statuses.
const (
	Fetched FetchStatus = iota + 1
	NotThere
	NoRoom
	Failed
	TooLate
)

func (s FetchStatus) String() string {
	return [...]string{"none", "fetched", "not_there", "no_room", "failed", "too_late"}[min(s, 5)]
}

// Control is the Peer service of other daemons; package rpc has the client.
type Control interface {
	Claim(ctx context.Context, address string, q ClaimRequest) (ClaimAnswer, error)
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
}

// Fetcher brings offered blocks from where they lie into the pool of this node.
type Fetcher struct {
	cfg FetcherConfig

	mu      sync.Mutex
	peers   map[string]*peer
	waiting int // background work
	closed  bool
	wg      sync.WaitGroup
}

// NewFetcher makes one without peers.
func NewFetcher(cfg FetcherConfig) *Fetcher { return &Fetcher{cfg: cfg, peers: map[string]*peer{}} }

// partBytes is about how much one transfer of a fetch has: what has come is used while the rest is under way.
const partBytes = 8 << 20

// claimWait is how long a peer may wait for stores that are still running, at a time.
const claimWait = 3 * time.Second

// Fetch brings blocks into the pool. It returns when ctx ends at the latest; slots that a transfer still writes then are given back when that is quiet.
func (f *Fetcher) Fetch(ctx context.Context, q FetchRequest) []FetchStatus {
	n := len(q.Hashes) / kvferry.HashSize
	out := make([]FetchStatus, n)
	var err error
	if q.Ticket.Epoch == f.cfg.Epoch {
		err = f.local(ctx, q, out)
	} else {
		err = f.remote(ctx, q, out)
	}
	if err != nil {
		f.cfg.Log.Warn("fetch offered blocks", "offer", fmt.Sprintf("%x", q.Ticket.OfferID), "blocks", n, "error", err)
	}
	var count [6]int
	for i := range out {
		if out[i] == 0 {
			out[i] = Failed
			if ctx.Err() != nil {
				out[i] = TooLate
			}
		}
		count[out[i]]++
	}
	for s, n := range count {
		f.cfg.Counters.Add("fetch_blocks", FetchStatus(s).String(), n)
	}
	return out
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
		if q.Ticket.Epoch == f.cfg.Epoch {
			c.Path = "pool of this node"
			if a, err := f.cfg.Registry.Claim(ctx, c); err == nil {
				f.cfg.Registry.EndClaim(a.Key, "")
			}
			return
		}
		address, err := f.resolve(ctx, q.Ticket.address(q.Rank))
		if err == nil {
			var a ClaimAnswer
			if a, err = f.cfg.Control.Claim(ctx, address, c); err == nil {
				err = f.cfg.Control.EndClaim(ctx, address, q.Ticket.Epoch, a.Key, 0, "")
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

// local takes an offer of an engine on this node: its blocks are in this pool, or will be.
func (f *Fetcher) local(ctx context.Context, q FetchRequest, out []FetchStatus) error {
	for {
		c := f.claimRequest(ctx, q, q.Hashes)
		c.Path = "pool of this node"
		a, err := f.cfg.Registry.Claim(ctx, c)
		if err != nil {
			return err
		}
		pending := 0
		for i, s := range a.Status {
			switch s {
			case Stored:
				out[i] = Fetched
			case Missing:
				out[i] = NotThere
			default:
				pending++
			}
		}
		if err := ctx.Err(); err != nil {
			f.cfg.Registry.EndClaim(a.Key, err.Error())
			return err
		}
		if pending == 0 {
			f.cfg.Registry.EndClaim(a.Key, "")
			return nil
		}
	}
}

// remote claims an offer at the node that has it and reads the blocks from there.
func (f *Fetcher) remote(ctx context.Context, q FetchRequest, out []FetchStatus) error {
	address, err := f.resolve(ctx, q.Ticket.address(q.Rank))
	if err != nil {
		return err
	}
	p, err := f.peer(address)
	if err != nil {
		return err
	}
	if !p.health.Allow(time.Now()) {
		state, reason, since := p.health.View()
		return fmt.Errorf("%w: peer %s is %v since %s: %s", transport.ErrLink, address, state, since.Format(time.RFC3339), reason)
	}
	todo := make([]int, len(out))
	for i := range todo {
		todo[i] = i
	}
	var key [16]byte
	for len(todo) > 0 {
		a, err := f.cfg.Control.Claim(ctx, address, f.claimRequest(ctx, q, pick(q.Hashes, todo)))
		if err != nil {
			p.report(err)
			if key != ([16]byte{}) { // of an earlier round
				f.endClaim(p, q, key, 0, err)
			}
			return fmt.Errorf("claim at %s: %w", address, err)
		}
		key = a.Key
		if a.DataAddress, err = f.resolve(ctx, a.DataAddress); err != nil {
			f.endClaim(p, q, key, 0, err)
			return err
		}
		if a.ShardBytes != q.Shape.ShardBytes {
			err = fmt.Errorf("%w: shard of %d bytes, here %d", ErrMismatch, a.ShardBytes, q.Shape.ShardBytes)
			f.endClaim(p, q, key, 0, err)
			return err
		}
		pending, err := f.read(ctx, p, q, a, todo, out)
		if err != nil {
			p.report(err)
			f.endClaim(p, q, key, 0, err)
			return fmt.Errorf("read from %s: %w", address, err)
		}
		todo = pending
	}
	p.report(nil)
	received := uint32(0)
	for _, s := range out {
		if s == Fetched {
			received++
		}
	}
	f.endClaim(p, q, key, received, nil)
	return nil
}

func pick(hashes []byte, at []int) []byte {
	out := make([]byte, 0, len(at)*kvferry.HashSize)
	for _, i := range at {
		out = append(out, hashes[i*kvferry.HashSize:][:kvferry.HashSize]...)
	}
	return out
}

// read copies what a claim says is stored, and answers the indexes of what is pending there. at are the indexes of the claimed blocks.
func (f *Fetcher) read(ctx context.Context, p *peer, q FetchRequest, a ClaimAnswer, at []int, out []FetchStatus) (pending []int, err error) {
	var blocks []tiers.Block
	var source []int // index into the claim, beside blocks
	for i, s := range a.Status {
		switch s {
		case Stored:
			b := tiers.Block{Hash: kvferry.Hash(q.Hashes[at[i]*kvferry.HashSize:])}
			if a.Parents != nil {
				b.Parent = kvferry.Hash(a.Parents[i*kvferry.HashSize:])
			}
			blocks, source = append(blocks, b), append(source, i)
		case Pending:
			pending = append(pending, at[i])
		default:
			out[at[i]] = NotThere
		}
	}
	if len(blocks) == 0 {
		return pending, nil
	}
	var parts []*transferIn
	var running []int
	for k, fill := range f.cfg.Ledger.BeginFill(q.Space, q.Shard, blocks) {
		i := source[k]
		switch fill.Status {
		case tiers.FillNew:
			if len(parts) == 0 || parts[len(parts)-1].bytes >= partBytes {
				parts = append(parts, &transferIn{f: f, done: make(chan struct{})})
			}
			parts[len(parts)-1].add(f.cfg.Pool.ID, fill, kvferry.Segment{Region: p.region.ID, Offset: a.Offsets[i], Length: a.ShardBytes}, a.CRC32C[i], at[i])
		case tiers.FillBusy:
			out[at[i]] = NoRoom
		case tiers.FillPresent:
			out[at[i]] = Fetched
		default:
			running = append(running, at[i])
		}
	}
	err = f.transfer(ctx, p, q, a, parts, out)
	f.awaitOthers(ctx, q, running, out)
	return pending, err
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

// endClaim gives a claim back without making anybody wait for it.
func (f *Fetcher) endClaim(p *peer, q FetchRequest, key [16]byte, received uint32, cause error) {
	reason := ""
	if cause != nil {
		reason = cause.Error()
		reason = reason[:min(len(reason), 256)]
	}
	f.background(func(ctx context.Context) {
		if err := f.cfg.Control.EndClaim(ctx, p.address, q.Ticket.Epoch, key, received, reason); err != nil {
			f.cfg.Log.Debug("end claim", "peer", p.address, "error", err) // it ends with its lease
		}
	})
}
