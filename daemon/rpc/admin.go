package rpc

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/counters"
	"github.com/kvferry/kvferry/daemon/handoff"
	"github.com/kvferry/kvferry/daemon/health"
	"github.com/kvferry/kvferry/daemon/mover"
	"github.com/kvferry/kvferry/daemon/session"
	pb "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/policy"
	"github.com/kvferry/kvferry/tiers/pool"
)

// Admin serves the Admin API. All fields are set before it serves and never modified after.
type Admin struct {
	pb.UnimplementedAdminServer
	Node       string
	Epoch      kvferry.Epoch
	Started    time.Time
	Build      string
	GoVersion  string
	ConfigYAML string
	Sessions   *session.Manager
	Ledger     *tiers.Ledger
	Registry   *handoff.Registry
	Fetcher    *handoff.Fetcher
	Local      *mover.Link
	Counters   *counters.Set
	Draining   func() time.Time // since when; zero: it does not
}

// Status is pb.AdminServer.
func (a *Admin) Status(context.Context, *pb.StatusRequest) (*pb.StatusResponse, error) {
	st, link := a.Ledger.Stats(), a.Local.Stats()
	r := &pb.StatusResponse{
		Node: a.Node, Health: pb.Health_HEALTH_OK, Epoch: a.Epoch[:], StartedUnixMs: a.Started.UnixMilli(), Version: a.Build, Spaces: uint32(st.Spaces),
		OffersOpen: uint32(a.Registry.OpenOffers()), TransfersQueued: uint32(link.Queued), TransfersRunning: uint32(link.Running), Draining: !a.Draining().IsZero(),
		Claims: uint32(a.Registry.ActiveClaims()),
		Tiers: []*pb.TierStatus{{
			Tier: kvferry.DRAM.String(), CapacityBytes: st.CapacityBytes, UsedBytes: st.UsedBytes, FreeBytes: st.FreeBytes, Blocks: uint64(st.InTier[policy.DRAM]),
			LeasedBlocks: uint64(st.Leases), PinnedSlots: uint64(st.Pins), FillingSlots: uint64(st.Filling),
		}},
		Problems: a.problems(st),
	}
	for _, p := range a.Fetcher.Peers() {
		r.TransfersQueued += uint32(p.Queued)
		r.TransfersRunning += uint32(p.Running)
	}
	for _, s := range a.Sessions.All() {
		if s.Hello().Role == session.Worker {
			r.Workers++
		} else {
			r.Schedulers++
		}
	}
	for _, c := range append(a.Counters.All(), LedgerCounters(st.Counts)...) {
		r.Counters = append(r.Counters, &pb.Counter{Name: c.Name, Reason: c.Reason, Value: c.Value})
	}
	if len(r.Problems) > 0 {
		r.Health = pb.Health_HEALTH_DEGRADED
	}
	return r, nil
}

// LedgerCounters are the ledger's totals in the form of the others.
func LedgerCounters(c tiers.Counts) []counters.Count {
	n := func(name, reason string, v uint64) counters.Count {
		return counters.Count{Key: counters.Key{Name: name, Reason: reason}, Value: v}
	}
	return []counters.Count{
		n("lookup_blocks", "dram", c.DRAM), n("lookup_blocks", "nvme", c.NVMe), n("lookup_blocks", "peer", c.Peer), n("lookup_blocks", "miss", c.Missed), n("removed_blocks", "evicted", c.Evicted), n("removed_blocks", "dropped", c.Dropped),
		n("removed_blocks", "incomplete", c.Incomplete), n("slabs", "reclaimed", c.Reclaimed),
	}
}

func (a *Admin) problems(st tiers.Stats) []*pb.Problem {
	var out []*pb.Problem
	for _, p := range a.Fetcher.Peers() {
		if p.State != health.OK {
			out = append(out, &pb.Problem{Component: "peer " + p.Address, Reason: fmt.Sprintf("%v: %s", p.State, p.Reason), SinceUnixMs: p.Since.UnixMilli(),
				NextCommand: "kvferry offers"})
		}
	}
	slices.SortFunc(out, func(x, y *pb.Problem) int { return cmp.Compare(x.Component, y.Component) })
	now := time.Now()
	for _, e := range events {
		if last := a.Counters.Last(e.name, e.reason); now.Sub(last) < e.shown {
			out = append(out, &pb.Problem{Component: e.component, Reason: fmt.Sprintf("%s (%d since the start)", e.text, a.Counters.Value(e.name, e.reason)),
				SinceUnixMs: last.UnixMilli(), NextCommand: e.next})
		}
	}
	if since := a.Draining(); !since.IsZero() {
		out = append(out, &pb.Problem{Component: "daemon", Reason: "draining: no new stores and offers", SinceUnixMs: since.UnixMilli(), NextCommand: "kvferry workers"})
	}
	return out
}

// events are what makes a problem when it is counted, and for how long after the last time it is shown.
var events = []struct {
	name, reason, component, text, next string
	shown                               time.Duration
}{
	{"broken_blocks", "pool", "integrity", "blocks in the pool had a wrong checksum and were thrown away: suspect this host's memory", "kvferry status -o json", time.Hour},
	{"broken_blocks", "peer", "integrity", "blocks from peers had a wrong checksum and were thrown away: suspect the network or a peer's memory", "kvferry offers", time.Hour},
	{"store_blocks", "no_room", "pool", "blocks were not stored: the pool is full of leased, pinned or filling blocks", "kvferry workers", time.Minute},
	{"store_operations", "busy", "stores", "stores were refused as busy", "kvferry workers", time.Minute},
	{"peers", "refused", "tickets", "tickets named peers outside of peer.allow", "kvferry config", time.Hour},
}

// Workers is pb.AdminServer.
func (a *Admin) Workers(context.Context, *pb.WorkersRequest) (*pb.WorkersResponse, error) {
	r := &pb.WorkersResponse{}
	for _, s := range a.Sessions.All() {
		v := s.View()
		r.Workers = append(r.Workers, &pb.Worker{
			SessionId: s.ID, Role: pb.Role(v.Hello.Role), Instance: v.Hello.Instance, Rank: v.Hello.Rank, Ranks: v.Hello.Ranks, Pid: v.Credentials.PID, Uid: v.Credentials.UID,
			Engine: v.Hello.Engine, EngineVersion: v.Hello.EngineVersion, SpaceId: v.Space[:], LentBytes: v.LentBytes, Mode: v.Mode, AttachedUnixMs: v.Attached.UnixMilli(),
			Operations: uint32(v.Operations), PinnedSlots: uint32(v.Pins), Leases: uint32(v.Leases), StoredBlocks: v.Stored, LoadedBlocks: v.Loaded,
			ServingAddress: v.Hello.ServingAddress,
		})
	}
	slices.SortFunc(r.Workers, func(x, y *pb.Worker) int { return cmp.Compare(x.SessionId, y.SessionId) })
	return r, nil
}

// Spaces is pb.AdminServer.
func (a *Admin) Spaces(context.Context, *pb.SpacesRequest) (*pb.SpacesResponse, error) {
	r := &pb.SpacesResponse{}
	for _, s := range a.Ledger.Spaces() {
		i := &pb.SpaceInfo{SpaceId: s.Shape.ID[:], ShardBytes: s.Shape.ShardBytes, Shards: uint32(s.Shape.Shards), Blocks: uint64(s.Blocks), Bytes: s.Bytes[policy.DRAM] + s.Bytes[policy.NVMe]}
		if space, ok := a.Sessions.Space(s.Shape.ID); ok {
			i.Space, i.Preimage = spaceProto(space), space.Preimage()
		}
		r.Spaces = append(r.Spaces, i)
	}
	slices.SortFunc(r.Spaces, func(x, y *pb.SpaceInfo) int { return slices.Compare(x.SpaceId, y.SpaceId) })
	return r, nil
}

// Blocks is pb.AdminServer.
func (a *Admin) Blocks(_ context.Context, q *pb.BlocksRequest) (*pb.BlocksResponse, error) {
	var space *kvferry.SpaceID
	if b := q.GetSpaceId(); len(b) > 0 {
		id, err := id32("blocks.space_id", b)
		if err != nil {
			return nil, statusOf(err)
		}
		space = (*kvferry.SpaceID)(&id)
	}
	limit := int(q.GetLimit())
	if limit == 0 {
		limit = 100
	}
	if limit > 10000 {
		return nil, statusOf(invalid("blocks.limit", "at most 10000"))
	}
	if len(q.GetHashPrefix()) > kvferry.HashSize {
		return nil, statusOf(invalid("blocks.hash_prefix", "at most 32 bytes"))
	}
	views, total := a.Ledger.Blocks(time.Now(), space, q.GetHashPrefix(), limit)
	r := &pb.BlocksResponse{Total: uint64(total)}
	for _, v := range views {
		r.Blocks = append(r.Blocks, &pb.BlockInfo{
			SpaceId: v.Space[:], Hash: v.Hash[:], Parent: v.Parent[:], Matchable: v.Reachable, ShardsResident: uint32(v.Resident), Children: uint32(v.Children),
			Leases: uint32(v.Leases), Pins: uint32(v.Pins), Tier: tiersOf(v), Bytes: v.Bytes, IdleMs: v.Idle.Milliseconds(),
		})
	}
	return r, nil
}

// tiersOf names the tiers that have something of a block.
func tiersOf(v tiers.BlockView) string {
	switch {
	case v.InTier[policy.NVMe] == 0:
		return kvferry.DRAM.String()
	case v.InTier[policy.DRAM] == 0:
		return kvferry.NVMe.String()
	}
	return kvferry.DRAM.String() + "+" + kvferry.NVMe.String()
}

// Offers is pb.AdminServer.
func (a *Admin) Offers(context.Context, *pb.OffersRequest) (*pb.OffersResponse, error) {
	r := &pb.OffersResponse{}
	for _, v := range a.Registry.List(time.Now()) {
		r.Offers = append(r.Offers, &pb.OfferInfo{
			OfferId: v.ID[:], RequestId: v.RequestID, Instance: v.Instance, State: v.State.String(), Reason: v.Reason, Blocks: uint32(v.Size),
			OpenEnded: v.OpenEnded, Lent: v.Lent, Tokens: v.Tokens, AgeMs: v.Age.Milliseconds(), ExpiresInMs: v.ExpiresIn.Milliseconds(), ClaimedBy: v.Claimer, Path: v.Path,
		})
	}
	return r, nil
}

// Fetches is pb.AdminServer.
func (a *Admin) Fetches(context.Context, *pb.FetchesRequest) (*pb.FetchesResponse, error) {
	r := &pb.FetchesResponse{}
	for _, d := range a.Fetcher.Decisions() {
		r.Decisions = append(r.Decisions, &pb.FetchDecision{
			AtUnixMs: d.At.UnixMilli(), RequestId: d.RequestID, Instance: d.Instance, Peer: d.Peer, Blocks: uint32(d.Blocks), Bytes: d.Bytes, FetchUs: d.Fetch.Microseconds(),
			ComputeUs: d.Compute.Microseconds(), BytesPerSecond: d.Rate, Measured: d.Measured, Fetched: d.Fetched, Reason: d.Reason,
		})
	}
	return r, nil
}

// Config is pb.AdminServer.
func (a *Admin) Config(context.Context, *pb.ConfigRequest) (*pb.ConfigResponse, error) {
	return &pb.ConfigResponse{Yaml: a.ConfigYAML}, nil
}

// Version is pb.AdminServer.
func (a *Admin) Version(context.Context, *pb.VersionRequest) (*pb.VersionResponse, error) {
	return &pb.VersionResponse{Version: a.Build, WireVersion: session.WireVersion, PoolFormat: pool.Format, GoVersion: a.GoVersion}, nil
}
