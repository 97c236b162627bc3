package rpc

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/kvferry/kvferry"
	pb "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/policy"
)

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
		i := &pb.SpaceInfo{
			SpaceId: s.Shape.ID[:], ShardBytes: s.Shape.ShardBytes, Shards: uint32(s.Shape.Shards), Blocks: uint64(s.Blocks), Bytes: s.Bytes[policy.DRAM] + s.Bytes[policy.NVMe],
			DramBlocks: uint64(s.InTier[policy.DRAM]), NvmeBlocks: uint64(s.InTier[policy.NVMe]), DramBytes: s.Bytes[policy.DRAM], NvmeBytes: s.Bytes[policy.NVMe],
		}
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
	space, err := spaceFilter("blocks.space_id", q.GetSpaceId())
	if err != nil {
		return nil, statusOf(err)
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
	for i := range views {
		r.Blocks = append(r.Blocks, blockInfo(&views[i]))
	}
	return r, nil
}

func blockInfo(v *tiers.BlockView) *pb.BlockInfo {
	return &pb.BlockInfo{
		SpaceId: v.Space[:], Hash: v.Hash[:], Parent: v.Parent[:], Matchable: v.Reachable, ShardsResident: uint32(v.Resident), Children: uint32(v.Children),
		Leases: uint32(v.Leases), Pins: uint32(v.Pins), Tier: tiersOf(v), Bytes: v.Bytes, IdleMs: v.Idle.Milliseconds(),
	}
}

// tiersOf names the tiers that have something of a block.
func tiersOf(v *tiers.BlockView) string {
	switch {
	case v.InTier == [policy.NumTiers]int{}: // it is still being filled
		return ""
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
