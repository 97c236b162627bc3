package rpc

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/health"
	"github.com/kvferry/kvferry/daemon/tiering"
	pb "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/policy"
)

// answerIn is what is left of a call's deadline for its answer: the work ends before.
const answerIn = 250 * time.Millisecond

func healthProto(s health.State) pb.Health {
	return map[health.State]pb.Health{health.OK: pb.Health_HEALTH_OK, health.Degraded: pb.Health_HEALTH_DEGRADED, health.Probing: pb.Health_HEALTH_PROBING}[s]
}

// AbsentDrive is one that is configured and could not be opened.
type AbsentDrive struct {
	Path, Reason string
	Since        time.Time
}

// driveProblems are drives that are not used, or only in part.
func (a *Admin) driveProblems() (out []*pb.Problem) {
	for _, d := range a.Tiering.Drives() {
		switch {
		case d.State != health.OK:
			out = append(out, &pb.Problem{Component: "drive " + d.Name, Reason: fmt.Sprintf("%v: %s", d.State, d.Reason), SinceUnixMs: d.Since.UnixMilli(), NextCommand: "kvferry tiers"})
		case d.Slow != "":
			out = append(out, &pb.Problem{Component: "drive " + d.Name, Reason: d.Slow, SinceUnixMs: d.SlowSince.UnixMilli(), NextCommand: "kvferry tiers"})
		}
	}
	for _, d := range a.Absent() {
		out = append(out, &pb.Problem{Component: "drive " + d.Path, Reason: "not used: " + d.Reason, SinceUnixMs: d.Since.UnixMilli(), NextCommand: "kvferry tiers"})
	}
	return out
}

// Tiers is pb.AdminServer.
func (a *Admin) Tiers(context.Context, *pb.TiersRequest) (*pb.TiersResponse, error) {
	st, local := a.Ledger.Stats(), a.Local.Stats()
	r := &pb.TiersResponse{
		Policy: st.Policy, PromotedShards: st.Counts.Promoted, DemotedShards: st.Counts.Demoted, NotAdmittedBlocks: st.Counts.NotAdmitted,
		Stores: []*pb.StoreInfo{{
			Tier: kvferry.DRAM.String(), Name: a.PoolPath, CapacityBytes: st.CapacityBytes, UsedBytes: st.UsedBytes, FreeBytes: st.FreeBytes, Blocks: uint64(st.StoreStats.Blocks),
			Health: pb.Health_HEALTH_OK, ReadRate: a.Local.Rate(), Queued: uint32(local.Queued), Running: uint32(local.Running),
		}},
	}
	for i, d := range a.Tiering.Drives() {
		if i >= len(st.Drives) {
			break // came since
		}
		s, v := st.Drives[i], d.Device
		engine := v.Engine
		if v.Why != "" {
			engine += ": " + v.Why
		}
		info := &pb.StoreInfo{
			Tier: kvferry.NVMe.String(), Name: d.Name, CapacityBytes: s.CapacityBytes, UsedBytes: s.UsedBytes, FreeBytes: s.FreeBytes, Blocks: uint64(s.Blocks),
			Health: healthProto(d.State), Reason: d.Reason, Engine: engine, ReadBytes: v.ReadBytes, WrittenBytes: v.WrittenBytes, ReadErrors: v.ReadErrors, WriteErrors: v.WriteErrors,
			Corrupt: v.Corrupt, ReadP50Us: usOf(v.ReadP50), ReadP99Us: usOf(v.ReadP99), WriteP50Us: usOf(v.WriteP50), WriteP99Us: usOf(v.WriteP99),
			LifetimeWrittenBytes: v.LifetimeWritten, ReadRate: d.Rate, Queued: uint32(d.Link.Queued), Running: uint32(d.Link.Running), Slow: d.Slow,
		}
		if !d.Since.IsZero() {
			info.SinceUnixMs = d.Since.UnixMilli()
		}
		r.Stores = append(r.Stores, info)
	}
	for _, d := range a.Absent() {
		r.Stores = append(r.Stores, &pb.StoreInfo{Tier: kvferry.NVMe.String(), Name: d.Path, Health: pb.Health_HEALTH_DEGRADED, Reason: "could not be opened: " + d.Reason, SinceUnixMs: d.Since.UnixMilli()})
	}
	return r, nil
}

// selectionOf reads which blocks somebody asks for.
func selectionOf(field string, q *pb.BlockSelection) (sel tiers.Selection, err error) {
	if sel.Space, err = spaceFilter(field+".space_id", q.GetSpaceId()); err != nil {
		return sel, err
	}
	sel.Prefix = q.GetHashPrefix()
	switch n := len(sel.Prefix); {
	case n > kvferry.HashSize:
		return sel, invalid(field+".hash_prefix", "at most 32 bytes")
	case n == 0 && !q.GetAll():
		return sel, invalid(field+".hash_prefix", "must not be empty, unless all is set")
	case n > 0 && q.GetAll():
		return sel, invalid(field+".all", "must not be set where hash_prefix is")
	}
	return sel, nil
}

// spaceFilter reads a space's id; empty is none.
func spaceFilter(field string, b []byte) (*kvferry.SpaceID, error) {
	if len(b) == 0 {
		return nil, nil
	}
	id, err := id32(field, b)
	return (*kvferry.SpaceID)(&id), err
}

// tierFilter reads a tier's name; empty is all, as policy.NumTiers.
func tierFilter(field, name string) (int, error) {
	switch name {
	case "":
		return policy.NumTiers, nil
	case kvferry.DRAM.String():
		return policy.DRAM, nil
	case kvferry.NVMe.String():
		return policy.NVMe, nil
	}
	return 0, invalid(field, fmt.Sprintf("%q: must be dram, nvme or empty", name))
}

// within is ctx with time left for the answer.
func within(ctx context.Context) (context.Context, context.CancelFunc) {
	if d, ok := ctx.Deadline(); ok {
		return context.WithDeadline(ctx, d.Add(-min(answerIn, time.Until(d)/2)))
	}
	return context.WithCancel(ctx)
}

// Evict is pb.AdminServer.
func (a *Admin) Evict(ctx context.Context, q *pb.EvictRequest) (*pb.EvictResponse, error) {
	sel, err := selectionOf("evict.blocks", q.GetBlocks())
	if err != nil {
		return nil, statusOf(err)
	}
	tier, err := tierFilter("evict.tier", q.GetTier())
	if err != nil {
		return nil, statusOf(err)
	}
	ctx, cancel := within(ctx)
	defer cancel()
	n, next, err := a.Manual.Evict(ctx, sel, tier, tiering.Cursor(q.GetFrom()))
	if err != nil {
		return nil, statusOf(err)
	}
	return &pb.EvictResponse{Blocks: uint64(n), Next: uint64(next)}, nil
}

// Demote is pb.AdminServer.
func (a *Admin) Demote(ctx context.Context, q *pb.DemoteRequest) (*pb.DemoteResponse, error) {
	sel, err := selectionOf("demote.blocks", q.GetBlocks())
	if err != nil {
		return nil, statusOf(err)
	}
	ctx, cancel := within(ctx)
	defer cancel()
	d, next, err := a.Manual.Demote(ctx, sel, q.GetMove(), tiering.Cursor(q.GetFrom()))
	if err != nil {
		return nil, statusOf(err)
	}
	return &pb.DemoteResponse{
		Blocks: uint64(d.Copied), Failed: uint64(d.Failed), Present: uint64(d.Present), Left: uint64(d.Left), NoRoom: uint64(d.NoRoom), UnderWay: uint64(d.UnderWay), Next: uint64(next),
	}, nil
}

// PrefetchBlocks is pb.AdminServer.
func (a *Admin) PrefetchBlocks(ctx context.Context, q *pb.PrefetchBlocksRequest) (*pb.PrefetchBlocksResponse, error) {
	sel, err := selectionOf("prefetch_blocks.blocks", q.GetBlocks())
	if err != nil {
		return nil, statusOf(err)
	}
	ctx, cancel := within(ctx)
	defer cancel()
	p, next, err := a.Manual.Prefetch(ctx, sel, tiering.Cursor(q.GetFrom()))
	if err != nil {
		return nil, statusOf(err)
	}
	return &pb.PrefetchBlocksResponse{Blocks: uint64(p.Came), Failed: uint64(p.Failed), NoRoom: uint64(p.NoRoom), UnderWay: uint64(p.UnderWay), Next: uint64(next)}, nil
}

// Verify is pb.AdminServer.
func (a *Admin) Verify(q *pb.VerifyRequest, s grpc.ServerStreamingServer[pb.VerifyResponse]) error {
	tier, err := tierFilter("verify.tier", q.GetTier())
	if err != nil {
		return statusOf(err)
	}
	answer := func(v tiering.Verification, done bool) *pb.VerifyResponse {
		return &pb.VerifyResponse{
			Slots: uint64(v.Slots), SlotsTotal: uint64(v.Total), Bytes: v.Bytes, Broken: uint64(v.Broken), Unreadable: uint64(v.Unreadable), Skipped: uint64(v.Skipped), Done: done,
		}
	}
	v, err := a.Manual.Verify(s.Context(), tier, func(v tiering.Verification) { _ = s.Send(answer(v, false)) }) // who is gone is told by the context
	if err != nil {
		return statusOf(err)
	}
	return s.Send(answer(v, true))
}
