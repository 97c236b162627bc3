package rpc

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/session"
	pb "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/policy"
)

// explainMax bounds the blocks, and the look-ups, of one answer.
const explainMax = 16

// Explain is pb.AdminServer.
func (a *Admin) Explain(_ context.Context, q *pb.ExplainRequest) (*pb.ExplainResponse, error) {
	switch n := len(q.GetHashPrefix()); {
	case n > kvferry.HashSize:
		return nil, statusOf(invalid("explain.hash_prefix", "at most 32 bytes"))
	case n > 0 && q.GetRequestId() != "":
		return nil, statusOf(invalid("explain.request_id", "must be empty where hash_prefix is not"))
	case n > 0:
		return a.explainBlocks(q.GetHashPrefix()), nil
	}
	if err := session.ValidateText("explain.request_id", q.GetRequestId(), 1, 256); err != nil {
		return nil, statusOf(err)
	}
	r := &pb.ExplainResponse{}
	for _, k := range a.Sessions.Lookups(q.GetRequestId(), explainMax) {
		l := &pb.LookupExplanation{
			AtUnixMs: k.At.UnixMilli(), RequestId: k.RequestID, Instance: k.Instance, SpaceId: k.Space[:], AskedBlocks: uint32(k.Asked), DramBlocks: uint32(k.DRAM), NvmeBlocks: uint32(k.NVMe),
			PeerBlocks: uint32(k.Peer), Reason: k.Reason,
		}
		if !k.FirstMissed.IsZero() {
			l.FirstMissed = a.explainBlock(k.Space, k.FirstMissed)
		}
		r.Lookups = append(r.Lookups, l)
	}
	return r, nil
}

func (a *Admin) explainBlocks(prefix []byte) *pb.ExplainResponse {
	r, now := &pb.ExplainResponse{}, time.Now()
	for _, e := range a.Ledger.Explain(now, tiers.Selection{Prefix: prefix}, explainMax) {
		r.Blocks = append(r.Blocks, explanation(&e, now))
	}
	if len(r.Blocks) == 0 && len(prefix) == kvferry.HashSize {
		r.Blocks = append(r.Blocks, explanation(&tiers.Explanation{Hash: kvferry.Hash(prefix)}, now))
	}
	return r
}

// explainBlock tells of one block that may be here or not.
func (a *Admin) explainBlock(space kvferry.SpaceID, h kvferry.Hash) *pb.BlockExplanation {
	now := time.Now()
	for _, e := range a.Ledger.Explain(now, tiers.Selection{Space: &space, Prefix: h[:]}, 1) {
		return explanation(&e, now)
	}
	return explanation(&tiers.Explanation{Space: space, Hash: h}, now)
}

func explanation(e *tiers.Explanation, now time.Time) *pb.BlockExplanation {
	out := &pb.BlockExplanation{Hash: e.Hash[:], Verdict: verdict(e, now)}
	if e.Space != (kvferry.SpaceID{}) {
		out.SpaceId = e.Space[:]
	}
	if e.Block != nil {
		out.Block = blockInfo(e.Block)
	}
	if c := e.Removed; c != nil {
		out.RemovedReason, out.RemovedUnixMs, out.RemovedTier = c.Reason.String(), c.At/1e6, c.Tier.String()
	}
	if !e.Missing.IsZero() {
		out.MissingAncestor = e.Missing[:]
	}
	return out
}

// verdict says in one line whether a look-up that comes to this block finds it, and why not.
func verdict(e *tiers.Explanation, now time.Time) string {
	b := e.Block
	switch {
	case b == nil:
		return "miss: " + gone(e.Removed, now)
	case !b.Complete && b.FillingShards > 0:
		return fmt.Sprintf("miss: %d of its shards are here, %d are being written", b.Resident, b.FillingShards)
	case !b.Complete:
		return fmt.Sprintf("miss: only %d of its shards are here; %s", b.Resident, gone(e.Removed, now))
	case e.Closed:
		return "miss: it is on a drive that is in trouble: kvferry tiers"
	case e.MissingClosed:
		return fmt.Sprintf("miss: its ancestor %v is on a drive that is in trouble: kvferry tiers", e.Missing)
	case !e.Missing.IsZero():
		return fmt.Sprintf("miss: it is here, but not its ancestor %v: %s", e.Missing, gone(e.MissingRemoved, now))
	case b.InTier[policy.DRAM] == b.Resident:
		return "hit in dram"
	}
	return "hit on nvme"
}

// gone says why something is not here.
func gone(c *tiers.Change, now time.Time) string {
	if c == nil {
		return "it was never stored here, or left too long ago to be remembered"
	}
	why := map[tiers.Reason]string{
		tiers.Evicted: "was evicted to make room", tiers.Demoted: "left DRAM for a drive", tiers.Dropped: "was evicted by hand",
		tiers.Incomplete: "lacked a shard for too long", tiers.Reclaimed: "was removed because its slab went to blocks of another length",
		tiers.Forced: "was evicted to make room where nothing else could leave",
		tiers.Broken: "was broken, or could not be read, and removed",
	}[c.Reason]
	return fmt.Sprintf("it %s, from %v, %v ago", why, c.Tier, max(now.Sub(time.Unix(0, c.At)), 0).Round(time.Second))
}

// Trace is pb.AdminServer.
func (a *Admin) Trace(_ *pb.TraceRequest, s grpc.ServerStreamingServer[pb.TraceResponse]) error {
	f, err := a.Sessions.Follow()
	if err != nil {
		return statusOf(err)
	}
	defer f.Close()
	if err := s.SendHeader(nil); err != nil { // from now on, nothing is missed
		return err
	}
	for {
		select {
		case <-f.Wake():
		case <-s.Context().Done():
			return statusOf(context.Cause(s.Context()))
		}
		for _, k := range f.Take() {
			m := &pb.TraceResponse{AtUnixMs: k.At.UnixMilli(), SpaceId: k.Space[:], BlockTokens: k.BlockTokens, Hashes: k.Hashes, Dropped: k.Dropped, RequestId: k.RequestID, Instance: k.Instance}
			if err := s.Send(m); err != nil {
				return err
			}
		}
	}
}
