package daemon

import (
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvferry/kvferry"
	pb "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/tiers/policy"
)

var everything = &pb.BlockSelection{All: true}

// demote asks until all is done.
func demote(t *testing.T, a pb.AdminClient, sel *pb.BlockSelection, move bool) *pb.DemoteResponse {
	t.Helper()
	sum := &pb.DemoteResponse{}
	for q := (&pb.DemoteRequest{Blocks: sel, Move: move}); ; {
		r, err := a.Demote(ctx10(t), q)
		if err != nil {
			t.Fatal(err)
		}
		sum.Blocks, sum.Failed, sum.Present, sum.Left, sum.NoRoom, sum.UnderWay = sum.Blocks+r.Blocks, sum.Failed+r.Failed, sum.Present+r.Present, sum.Left+r.Left, sum.NoRoom+r.NoRoom, sum.UnderWay+r.UnderWay
		if q.From = r.Next; q.From == 0 {
			return sum
		}
	}
}

func evict(t *testing.T, a pb.AdminClient, sel *pb.BlockSelection, tier string) uint64 {
	t.Helper()
	r, err := a.Evict(ctx10(t), &pb.EvictRequest{Blocks: sel, Tier: tier})
	if err != nil || r.Next != 0 {
		t.Fatal(r, err)
	}
	return r.Blocks
}

func verify(t *testing.T, a pb.AdminClient, tier string) *pb.VerifyResponse {
	t.Helper()
	s, err := a.Verify(ctx10(t), &pb.VerifyRequest{Tier: tier})
	if err != nil {
		t.Fatal(err)
	}
	for {
		r, err := s.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if r.Done {
			if _, err := s.Recv(); !errors.Is(err, io.EOF) {
				t.Errorf("after the end: %v", err)
			}
			return r
		}
	}
}

func explain(t *testing.T, a pb.AdminClient, h kvferry.Hash) *pb.BlockExplanation {
	t.Helper()
	r, err := a.Explain(ctx10(t), &pb.ExplainRequest{HashPrefix: h[:]})
	if err != nil || len(r.Blocks) != 1 {
		t.Fatal(r, err)
	}
	return r.Blocks[0]
}

// flip changes one bit of a file.
func flip(t *testing.T, path string, at int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	var b [1]byte
	if _, err := f.ReadAt(b[:], at); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 4
	if _, err := f.WriteAt(b[:], at); err != nil {
		t.Fatal(err)
	}
}

// scrape is what a Prometheus gets: the value of each series, by its name and the values of its labels.
func (n *node) scrape() map[string]float64 {
	n.t.Helper()
	reg := prometheus.NewRegistry()
	reg.MustRegister(collector{n.Daemon})
	families, err := reg.Gather()
	if err != nil {
		n.t.Fatal(err)
	}
	series := map[string]float64{}
	for _, f := range families {
		for _, m := range f.Metric {
			name := f.GetName()
			for _, l := range m.Label {
				name += " " + l.GetValue()
			}
			series[name] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	return series
}

// What people do with blocks by hand, over the Admin API of a real daemon with a real drive file: each step shows in the next.
func TestByHand(t *testing.T) {
	n := newNode(t, withDrives(t, 1, 64<<20))
	s, m := n.attach(worker)
	sched, _ := n.attach(scheduler)
	a := n.admin()
	hashes, parents := prompt(40, 1)
	store(t, s, m, 0, hashes, parents)

	if d := demote(t, a, everything, true); d.Blocks != 40 || d.Left != 40 || d.Failed+d.NoRoom+d.UnderWay != 0 {
		t.Fatalf("demote: %v", d)
	}
	r, err := a.Tiers(ctx10(t), &pb.TiersRequest{})
	if err != nil || len(r.Stores) != 2 {
		t.Fatal(r, err)
	}
	if dram, nvme := r.Stores[0], r.Stores[1]; dram.Blocks != 0 || nvme.Blocks != 40 || nvme.WrittenBytes != 40*64<<10 || nvme.WriteP50Us == 0 || nvme.Health != pb.Health_HEALTH_OK || nvme.Engine == "" ||
		nvme.UsedBytes == 0 || nvme.UsedBytes+nvme.FreeBytes != nvme.CapacityBytes || nvme.LifetimeWrittenBytes != nvme.WrittenBytes || r.DemotedShards != 40 {
		t.Errorf("tiers: %v", r)
	}
	if got := load(t, s, m, 100, hashes, nil); ready(got) != 40 { // load compares the bytes
		t.Fatalf("load: %v", got.Status)
	}
	if v := verify(t, a, ""); v.Slots != 80 || v.SlotsTotal != 80 || v.Bytes != 80*64<<10 || v.Broken+v.Unreadable+v.Skipped != 0 {
		t.Errorf("verify: %v", v)
	}
	if e := explain(t, a, hashes[39]); e.Verdict != "hit in dram" || e.Block.Tier != "dram+nvme" {
		t.Errorf("explain: %v", e)
	}
	spaces, err := a.Spaces(ctx10(t), &pb.SpacesRequest{})
	if err != nil || spaces.Spaces[0].DramBlocks != 40 || spaces.Spaces[0].NvmeBlocks != 40 || spaces.Spaces[0].Blocks != 40 {
		t.Error(spaces, err)
	}

	if got := evict(t, a, everything, "dram"); got != 40 {
		t.Errorf("evicted %d", got)
	}
	flip(t, n.cfg.NVMe.Drives[0].Path, int64(n.drives[0].SlotOffset(0, 7))+4711)
	if v := verify(t, a, "nvme"); v.Slots != 40 || v.Broken != 1 {
		t.Errorf("verify with a flipped byte: %v", v)
	}
	if got := n.counters.Value("broken_blocks", "nvme"); got != 1 {
		t.Errorf("%d broken blocks are counted", got)
	}
	lost := -1
	for i, h := range hashes {
		if e := explain(t, a, h); e.Block == nil {
			lost = i
			if e.RemovedReason != "broken" || e.RemovedTier != "nvme" || !strings.Contains(e.Verdict, "was broken") {
				t.Errorf("the lost one: %v", e)
			}
		} else if lost < 0 && e.Verdict != "hit on nvme" || lost >= 0 && (kvferry.Hash(e.MissingAncestor) != hashes[lost] || !strings.HasPrefix(e.Verdict, "miss: it is here, but not its ancestor")) {
			t.Errorf("block %d: %v", i, e)
		}
	}
	if lost < 0 {
		t.Fatal("no block is lost")
	}
	if _, err := sched.Match(ctx10(t), "the-request", hashes, 5000); err != nil {
		t.Fatal(err)
	}
	why, err := a.Explain(ctx10(t), &pb.ExplainRequest{RequestId: "the-request"})
	if err != nil || len(why.Lookups) != 1 {
		t.Fatal(why, err)
	}
	if k := why.Lookups[0]; k.AskedBlocks != 40 || int(k.NvmeBlocks) != lost || k.DramBlocks != 0 || kvferry.Hash(k.FirstMissed.Hash) != hashes[lost] || !strings.Contains(k.FirstMissed.Verdict, "was broken") {
		t.Errorf("the look-up: %v", k)
	}

	p, err := a.PrefetchBlocks(ctx10(t), &pb.PrefetchBlocksRequest{Blocks: everything})
	if err != nil || p.Blocks != 39 || p.Next != 0 || p.Failed+p.NoRoom+p.UnderWay != 0 {
		t.Errorf("prefetch: %v %v", p, err)
	}
	if st := n.ledger.Stats(); st.InTier[policy.DRAM] != 39 {
		t.Errorf("%d blocks are in DRAM", st.InTier[policy.DRAM])
	}
	n.pool.Bytes()[n.pool.SlotOffset(0, 3)+99] ^= 1
	if v := verify(t, a, "dram"); v.Slots != 39 || v.Broken != 1 {
		t.Errorf("verify with a flipped byte of the pool: %v", v)
	}
	if st := n.ledger.Stats(); st.InTier[policy.DRAM] != 38 || st.InTier[policy.NVMe] != 39 {
		t.Errorf("after that: %v: what is right on the drive stays", st.InTier)
	}
	space, _, _ := n.ledger.FindSpace(kvferry.SpaceID(s.Space))
	pin, err := n.ledger.Pin(time.Now(), 99, space, 0, hashes[0][:], time.Now().Add(time.Minute))
	if err != nil || pin.Hits != 1 {
		t.Fatal(pin, err)
	}
	n.pool.Bytes()[pin.Places[0].Offset+99] ^= 1 // found by an engine: the copy on the drive serves the next load
	n.ledger.Unpin(pin.Hold)
	if got := load(t, s, m, 100, hashes[:lost], nil); got.Wrong != 1 {
		t.Errorf("a load with a flipped byte of the pool: %+v", got)
	}
	eventually(t, "the broken block is removed from the pool", func() bool { return n.counters.Value("broken_blocks", "pool") == 2 })
	if got := load(t, s, m, 100, hashes[:lost], nil); ready(got) != lost || got.Wrong != 0 {
		t.Errorf("the next load: %+v", got)
	}
	names := map[string]bool{}
	for series := range n.scrape() {
		name, _, _ := strings.Cut(series, " ")
		names[name] = true
	}
	for _, name := range []string{"tier_bytes", "tier_blocks", "blocks", "drive_bytes", "drive_blocks", "drive_read_bytes_total", "drive_written_bytes_total", "drive_errors_total", "drive_corrupt_total",
		"drive_latency_seconds", "drive_lifetime_written_bytes", "drive_read_bytes_per_second", "drive_state", "moved_shards_total", "removed_blocks_total", "not_admitted_blocks_total", "lookup_blocks_total"} {
		if !names["kvferry_"+name] {
			t.Errorf("no metric %s", name)
		}
	}
	if st, err := a.Status(ctx10(t), &pb.StatusRequest{}); err != nil || len(st.Tiers) != 2 || st.Tiers[1].Tier != "nvme" || st.Tiers[1].Blocks != 39 || st.Health != pb.Health_HEALTH_DEGRADED {
		t.Errorf("status: %v %v", st, err)
	}

	evict(t, a, everything, "")
	_ = sched.Close()
	_ = s.Close()
	n.nothingHeld()
	if st := n.ledger.Stats(); st.Blocks != 0 || st.UsedBytes != 0 || st.Drives[0].UsedBytes != 0 {
		t.Errorf("after all is evicted: %+v", st)
	}
	n.restart()
	if st := n.ledger.Stats(); st.Records != 0 {
		t.Errorf("what was evicted is back: %+v", st)
	}
}

// A selection that is larger than the pool and the drive: it ends, and says what did not fit.
func TestByHandMoreThanThereIs(t *testing.T) {
	n := newNode(t, withDrives(t, 1, 18<<20)) // two slabs of 8 MiB: half of the pool
	s, m := n.attach(worker)
	a := n.admin()
	for p := range 7 {
		hashes, parents := prompt(64, uint64(p)*1000) // 28 MiB in all
		store(t, s, m, 0, hashes, parents)
	}
	d := demote(t, a, everything, false)
	st := n.ledger.Stats()
	t.Logf("%v: %v", d, st.InTier)
	if d.Blocks < 200 || d.Blocks > 300 || d.NoRoom != 448-d.Blocks || d.UnderWay != 0 || st.InTier[policy.NVMe] < 150 || st.InTier[policy.DRAM] != 448 {
		t.Errorf("demote: %v: %v", d, st.InTier)
	}
	_ = s.Close()
	n.nothingHeld()
}

func TestTrace(t *testing.T) {
	n := newNode(t)
	sched, _ := n.attach(scheduler)
	ctx, cancel := context.WithCancel(ctx10(t))
	s, err := n.admin().Trace(ctx, &pb.TraceRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Header(); err != nil { // it follows now
		t.Fatal(err)
	}
	hashes, _ := prompt(5, 1)
	if _, err := sched.Match(ctx10(t), "r1", hashes, 5000); err != nil {
		t.Fatal(err)
	}
	r, err := s.Recv()
	if err != nil || len(r.Hashes) != 5*kvferry.HashSize || r.BlockTokens != 16 || r.RequestId != "r1" || r.Instance != "engine" || r.AtUnixMs == 0 || len(r.SpaceId) != 32 {
		t.Errorf("%v %v", r, err)
	}
	cancel()
	if _, err := s.Recv(); status.Code(err) != codes.Canceled {
		t.Error(err)
	}
}

// A node without drives, and requests that are wrong.
func TestByHandRefused(t *testing.T) {
	n := newNode(t)
	s, m := n.attach(worker)
	hashes, parents := prompt(6, 1)
	store(t, s, m, 0, hashes, parents)
	a, ctx := n.admin(), ctx10(t)
	if v := verify(t, a, ""); v.Slots != 6 || v.Broken != 0 {
		t.Errorf("verify: %v", v)
	}
	if r, err := a.Tiers(ctx, &pb.TiersRequest{}); err != nil || len(r.Stores) != 1 || r.Stores[0].Blocks != 6 {
		t.Error(r, err)
	}
	if st, err := a.Status(ctx, &pb.StatusRequest{}); err != nil || len(st.Tiers) != 1 || st.Health != pb.Health_HEALTH_OK {
		t.Error(st, err)
	}
	n.scrape()
	long := &pb.BlockSelection{HashPrefix: make([]byte, 33)}
	for want, call := range map[string]func() error{
		"FailedPrecondition: no drives": func() error { _, err := a.Demote(ctx, &pb.DemoteRequest{Blocks: everything}); return err },
		"FailedPrecondition: no drives ": func() error {
			_, err := a.PrefetchBlocks(ctx, &pb.PrefetchBlocksRequest{Blocks: everything})
			return err
		},
		"FailedPrecondition: no drives  ": func() error {
			s, err := a.Verify(ctx, &pb.VerifyRequest{Tier: "nvme"})
			if err == nil {
				_, err = s.Recv()
			}
			return err
		},
		"InvalidArgument: evict.tier":                func() error { _, err := a.Evict(ctx, &pb.EvictRequest{Blocks: everything, Tier: "hbm"}); return err },
		"InvalidArgument: evict.blocks.hash_prefix":  func() error { _, err := a.Evict(ctx, &pb.EvictRequest{}); return err },
		"InvalidArgument: demote.blocks.hash_prefix": func() error { _, err := a.Demote(ctx, &pb.DemoteRequest{Blocks: long}); return err },
		"InvalidArgument: evict.blocks.all": func() error {
			_, err := a.Evict(ctx, &pb.EvictRequest{Blocks: &pb.BlockSelection{All: true, HashPrefix: hashes[0][:]}})
			return err
		},
		"InvalidArgument: evict.blocks.space_id": func() error {
			_, err := a.Evict(ctx, &pb.EvictRequest{Blocks: &pb.BlockSelection{All: true, SpaceId: []byte{1}}})
			return err
		},
		"InvalidArgument: explain.request_id":  func() error { _, err := a.Explain(ctx, &pb.ExplainRequest{}); return err },
		"InvalidArgument: explain.hash_prefix": func() error { _, err := a.Explain(ctx, &pb.ExplainRequest{HashPrefix: make([]byte, 33)}); return err },
		"InvalidArgument: explain.request_id must be ": func() error {
			_, err := a.Explain(ctx, &pb.ExplainRequest{HashPrefix: []byte{1}, RequestId: "r"})
			return err
		},
	} {
		code, text, _ := strings.Cut(strings.TrimSpace(want), ": ")
		if s := status.Convert(call()); s.Code().String() != code || !strings.Contains(strings.ReplaceAll(s.Message(), ":", ""), strings.ReplaceAll(text, ":", "")) {
			t.Errorf("%s: %v", want, s)
		}
	}
	if st := n.ledger.Stats(); st.Blocks != 6 {
		t.Errorf("%d blocks are left", st.Blocks)
	}
	var unknown kvferry.Hash
	unknown[0] = 77
	if e := explain(t, a, unknown); e.Block != nil || e.Verdict != "miss: it was never stored here, or left too long ago to be remembered" {
		t.Error(e)
	}
}
