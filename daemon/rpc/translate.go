package rpc

import (
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/handoff"
	"github.com/kvferry/kvferry/daemon/session"
	pb "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/tiers/policy"
)

const ticketBytesMax = 64 << 10

func ms(v uint32) time.Duration { return time.Duration(v) * time.Millisecond }

func msOf(d time.Duration) uint32 { return uint32(max(0, min(d.Milliseconds(), 1<<32-1))) }

func usOf(d time.Duration) uint32 { return uint32(max(0, min(d.Microseconds(), 1<<32-1))) }

// id16 reads a field of exactly 16 bytes.
func id16(field string, b []byte) (out [16]byte, err error) {
	if len(b) != len(out) {
		return out, invalid(field, "must have 16 bytes")
	}
	return [16]byte(b), nil
}

// id32 reads a field of exactly 32 bytes.
func id32(field string, b []byte) (out [32]byte, err error) {
	if len(b) != len(out) {
		return out, invalid(field, "must have 32 bytes")
	}
	return [32]byte(b), nil
}

func spaceOf(s *pb.Space) kvferry.Space {
	kind := map[pb.ShardKind]kvferry.ShardKind{pb.ShardKind_SHARD_KIND_SHARDED: kvferry.Sharded, pb.ShardKind_SHARD_KIND_REPLICATED: kvferry.Replicated}
	return kvferry.Space{
		Model: s.GetModel(), Revision: s.GetRevision(), WeightsGeneration: s.GetWeightsGeneration(), KVDtype: s.GetKvDtype(), BlockTokens: s.GetBlockTokens(),
		Group: s.GetGroup(), Attention: s.GetAttention(), Layers: s.GetLayers(), Heads: s.GetHeads(), HeadSize: s.GetHeadSize(), Layout: s.GetLayout(),
		TP: s.GetTp(), PP: s.GetPp(), DCP: s.GetDcp(), ShardKind: kind[s.GetShardKind()], HashAlgorithm: s.GetHashAlgorithm(), HashSeed: s.GetHashSeed(),
	}
}

func spaceProto(s kvferry.Space) *pb.Space {
	kind := map[kvferry.ShardKind]pb.ShardKind{kvferry.Sharded: pb.ShardKind_SHARD_KIND_SHARDED, kvferry.Replicated: pb.ShardKind_SHARD_KIND_REPLICATED}
	return &pb.Space{
		Model: s.Model, Revision: s.Revision, WeightsGeneration: s.WeightsGeneration, KvDtype: s.KVDtype, BlockTokens: s.BlockTokens, Group: s.Group,
		Attention: s.Attention, Layers: s.Layers, Heads: s.Heads, HeadSize: s.HeadSize, Layout: s.Layout, Tp: s.TP, Pp: s.PP, Dcp: s.DCP,
		ShardKind: kind[s.ShardKind], HashAlgorithm: s.HashAlgorithm, HashSeed: s.HashSeed,
	}
}

func helloOf(h *pb.Hello) session.Hello {
	out := session.Hello{
		WireVersion: h.GetWireVersion(), Role: session.Role(h.GetRole()), Instance: h.GetInstance(), Rank: h.GetRank(), Ranks: h.GetRanks(), Space: spaceOf(h.GetSpace()),
		Engine: h.GetEngine(), EngineVersion: h.GetEngineVersion(), ServingAddress: h.GetServingAddress(), Tenant: h.GetTenant(),
		Generations: h.GetGenerations(), EngineStart: h.GetEngineStart(), ReadsLent: h.GetReadsLent(),
	}
	for _, r := range h.GetRegions() {
		spec := session.RegionSpec{ID: r.GetId(), Kind: session.RegionKind(r.GetKind()), Bytes: r.GetBytes(), Blocks: r.GetBlocks(), Writable: r.GetWritable()}
		for _, p := range r.GetPlanes() {
			spec.Planes = append(spec.Planes, kvferry.Plane{Base: p.GetBase(), Stride: p.GetStride(), Bytes: p.GetBytes()})
		}
		out.Regions = append(out.Regions, spec)
	}
	return out
}

func storeOf(m *pb.Store) (session.Store, error) {
	space, err := id32("store.space_id", m.GetSpaceId())
	return session.Store{
		Operation: m.GetOperation(), Word: m.GetWord(), Space: space, RequestID: m.GetRequestId(), Region: m.GetRegion(), BlockIDs: m.GetBlockIds(),
		Hashes: m.GetHashes(), Parents: m.GetParents(), Deadline: ms(m.GetDeadlineMs()), Retention: policy.Retention(m.GetRetention()),
	}, err
}

func loadOf(field string, m *pb.Load) (session.Load, error) {
	space, err := id32(field+".space_id", m.GetSpaceId())
	return session.Load{
		Operation: m.GetOperation(), Word: m.GetWord(), Space: space, RequestID: m.GetRequestId(), Hashes: m.GetHashes(), Deadline: ms(m.GetDeadlineMs()),
	}, err
}

func ticketOf(b []byte) (*handoff.Ticket, error) {
	if len(b) > ticketBytesMax {
		return nil, invalid("accept.ticket", "longer than 64 KiB")
	}
	var t pb.Ticket
	if err := proto.Unmarshal(b, &t); err != nil {
		return nil, invalid("accept.ticket", "not a Ticket message")
	}
	if t.GetWireVersion() != session.WireVersion {
		return nil, invalid("accept.ticket.wire_version", "not spoken here")
	}
	out := &handoff.Ticket{Addresses: t.GetAddresses()}
	var err error
	if out.OfferID, err = id16("accept.ticket.offer_id", t.GetOfferId()); err != nil {
		return nil, err
	}
	if out.Secret, err = id16("accept.ticket.secret", t.GetSecret()); err != nil {
		return nil, err
	}
	if out.Epoch, err = id16("accept.ticket.epoch", t.GetEpoch()); err != nil {
		return nil, err
	}
	if out.Space, err = id32("accept.ticket.space_id", t.GetSpaceId()); err != nil {
		return nil, err
	}
	return out, nil
}

func offerOf(m *pb.Offer) (session.Offer, error) {
	o := session.Offer{RequestID: m.GetRequestId(), Hashes: m.GetHashes(), Tokens: m.GetTokens(), Lifetime: ms(m.GetLifetimeMs()), OpenEnded: m.GetOpenEnded(), Blocks: lentBlocksOf(m)}
	var err error
	if o.ID, err = id16("offer.offer_id", m.GetOfferId()); err != nil {
		return o, err
	}
	if o.Secret, err = id16("offer.secret", m.GetSecret()); err != nil {
		return o, err
	}
	o.Space, err = id32("offer.space_id", m.GetSpaceId())
	return o, err
}

// lentBlocksOf reads what Offer and CompleteOffer have in common.
func lentBlocksOf(m interface {
	GetRegion() uint32
	GetBlockIds() []uint32
	GetGenerations() []uint64
}) handoff.LentBlocks {
	return handoff.LentBlocks{Region: m.GetRegion(), IDs: m.GetBlockIds(), Generations: m.GetGenerations()}
}

func lentProto(l *session.LentView) *pb.Lent {
	if l == nil {
		return nil
	}
	out := &pb.Lent{Handle: l.Handle, Token: l.Token[:], Bytes: l.Bytes, Blocks: l.Blocks, Generations: l.Generations}
	for _, p := range l.Planes {
		out.Planes = append(out.Planes, &pb.Plane{Base: p.Base, Stride: p.Stride, Bytes: p.Bytes})
	}
	return out
}

// response is an event as it goes to the process.
func response(e session.Event) *pb.SessionResponse {
	switch e := e.(type) {
	case session.Attached:
		return &pb.SessionResponse{Message: &pb.SessionResponse_Attached{Attached: &pb.Attached{}}}
	case session.SpaceReady:
		return &pb.SessionResponse{Message: &pb.SessionResponse_SpaceReady{SpaceReady: &pb.SpaceReady{Sequence: e.Sequence, SpaceId: e.Space[:]}}}
	case session.OperationEnd:
		return &pb.SessionResponse{Message: &pb.SessionResponse_OperationEnd{OperationEnd: &pb.OperationEnd{
			Operation: e.Operation, Outcome: pb.Outcome(e.Outcome), Reason: e.Reason, BlocksStored: e.Stored, BlocksPresent: e.Present,
		}}}
	case session.LoadResult:
		return &pb.SessionResponse{Message: &pb.SessionResponse_LoadResult{LoadResult: &pb.LoadResult{
			Operation: e.Operation, First: e.First, Status: e.Status, Offsets: e.Offsets, HeaderOffsets: e.HeaderOffsets, Generations: e.Generations,
			Crc32C: e.CRC32C, ShardBytes: e.ShardBytes, Last: e.Last, Source: e.Source, Lent: lentProto(e.Lent),
		}}}
	case session.OfferServed:
		return &pb.SessionResponse{Message: &pb.SessionResponse_OfferServed{OfferServed: &pb.OfferServed{OfferId: e.ID[:], Reason: e.Reason}}}
	case session.LentGone:
		return &pb.SessionResponse{Message: &pb.SessionResponse_LentGone{LentGone: &pb.LentGone{Handle: e.Handle}}}
	case session.Refused:
		f := &pb.Refused{Reason: e.Err.Error(), Code: uint32(Code(e.Err))}
		if fe, ok := e.Err.(*session.FieldError); ok {
			f.Field, f.Reason = fe.Field, fe.Reason
		}
		return &pb.SessionResponse{Message: &pb.SessionResponse_Refused{Refused: f}}
	case session.Draining:
		return &pb.SessionResponse{Message: &pb.SessionResponse_Draining{Draining: &pb.Draining{DeadlineMs: msOf(e.Within)}}}
	}
	return nil
}
