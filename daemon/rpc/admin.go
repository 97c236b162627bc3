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
	"github.com/kvferry/kvferry/daemon/tiering"
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
	Tiering    *tiering.Tiering // nil: there are no drives
	Manual     *tiering.Manual
	Absent     func() []AbsentDrive
	PoolPath   string
	Counters   *counters.Set
	Draining   func() time.Time // since when; zero: it does not
}

// Status is pb.AdminServer.
func (a *Admin) Status(context.Context, *pb.StatusRequest) (*pb.StatusResponse, error) {
	st, link := a.Ledger.Stats(), a.Local.Stats()
	r := &pb.StatusResponse{
		Node: a.Node, Health: pb.Health_HEALTH_OK, Epoch: a.Epoch[:], StartedUnixMs: a.Started.UnixMilli(), Version: a.Build, Spaces: uint32(st.Spaces),
		OffersOpen: uint32(a.Registry.OpenOffers()), TransfersQueued: uint32(link.Queued), TransfersRunning: uint32(link.Running), Draining: !a.Draining().IsZero(),
		Claims:   uint32(a.Registry.ActiveClaims()),
		Tiers:    tierStatuses(st),
		Problems: a.problems(),
	}
	for _, p := range a.Fetcher.Peers() {
		r.TransfersQueued += uint32(p.Queued)
		r.TransfersRunning += uint32(p.Running)
	}
	for _, d := range a.Tiering.Drives() {
		r.TransfersQueued += uint32(d.Link.Queued)
		r.TransfersRunning += uint32(d.Link.Running)
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

// tierStatuses are the tiers that this node has. Leases, pins and filling slots are of the node, and stand with the first.
func tierStatuses(st tiers.Stats) []*pb.TierStatus {
	out := []*pb.TierStatus{{
		Tier: kvferry.DRAM.String(), CapacityBytes: st.CapacityBytes, UsedBytes: st.UsedBytes, FreeBytes: st.FreeBytes, Blocks: uint64(st.InTier[policy.DRAM]),
		LeasedBlocks: uint64(st.Leases), PinnedSlots: uint64(st.Pins), FillingSlots: uint64(st.Filling),
	}}
	if len(st.Drives) == 0 {
		return out
	}
	nvme := &pb.TierStatus{Tier: kvferry.NVMe.String(), Blocks: uint64(st.InTier[policy.NVMe])}
	for _, d := range st.Drives {
		nvme.CapacityBytes, nvme.UsedBytes, nvme.FreeBytes = nvme.CapacityBytes+d.CapacityBytes, nvme.UsedBytes+d.UsedBytes, nvme.FreeBytes+d.FreeBytes
	}
	return append(out, nvme)
}

// LedgerCounters are the ledger's totals in the form of the others.
func LedgerCounters(c tiers.Counts) []counters.Count {
	n := func(name, reason string, v uint64) counters.Count {
		return counters.Count{Key: counters.Key{Name: name, Reason: reason}, Value: v}
	}
	return []counters.Count{
		n("lookup_blocks", "dram", c.DRAM), n("lookup_blocks", "nvme", c.NVMe), n("lookup_blocks", "peer", c.Peer), n("lookup_blocks", "miss", c.Missed), n("removed_blocks", "evicted", c.Evicted), n("removed_blocks", "dropped", c.Dropped), n("removed_blocks", "forced", c.Forced),
		n("removed_blocks", "incomplete", c.Incomplete), n("slabs", "reclaimed", c.Reclaimed),
		n("removed_blocks", "released", c.Released), n("removed_blocks", "drive_evicted", c.DriveEvicted), n("moved_shards", "demoted", c.Demoted), n("moved_shards", "promoted", c.Promoted),
		n("not_admitted_blocks", "write_budget", c.NotAdmitted), n("not_admitted_blocks", "drive_full", c.NotWorth),
	}
}

func (a *Admin) problems() []*pb.Problem {
	out := a.driveProblems()
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
	{"broken_blocks", "nvme", "integrity", "blocks on a drive had a wrong checksum and were thrown away: suspect the drive", "kvferry tiers", time.Hour},
	{"broken_blocks", "peer", "integrity", "blocks from peers had a wrong checksum and were thrown away: suspect the network or a peer's memory", "kvferry offers", time.Hour},
	{"store_blocks", "no_room", "pool", "blocks were not stored: the pool is full of leased, pinned or filling blocks", "kvferry workers", time.Minute},
	{"store_operations", "busy", "stores", "stores were refused as busy", "kvferry workers", time.Minute},
	{"peers", "refused", "tickets", "tickets named peers outside of peer.allow", "kvferry config", time.Hour},
}

// Config is pb.AdminServer.
func (a *Admin) Config(context.Context, *pb.ConfigRequest) (*pb.ConfigResponse, error) {
	return &pb.ConfigResponse{Yaml: a.ConfigYAML}, nil
}

// Version is pb.AdminServer.
func (a *Admin) Version(context.Context, *pb.VersionRequest) (*pb.VersionResponse, error) {
	return &pb.VersionResponse{Version: a.Build, WireVersion: session.WireVersion, PoolFormat: pool.Format, GoVersion: a.GoVersion}, nil
}
