package daemon

import (
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry"
	pb "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/standin"
	"github.com/kvferry/kvferry/tiers/nvme"
	"github.com/kvferry/kvferry/tiers/policy"
	"github.com/kvferry/kvferry/tiers/replay"
)

// withDrives gives a node drives: files in the test's folder, which stand for NVMe.
func withDrives(t *testing.T, n int, size Bytes) func(*Config) {
	dir := t.TempDir()
	return func(c *Config) {
		c.NVMe.Slab, c.NVMe.Reserve = 8<<20, 0
		for i := range n {
			c.NVMe.Drives = append(c.NVMe.Drives, DriveConfig{Path: filepath.Join(dir, string(rune('a'+i))), Size: size})
		}
	}
}

// onDrives waits until every block of the pool is on a drive too.
func (n *node) onDrives(blocks int) {
	n.t.Helper()
	eventually(n.t, "blocks are on the drives", func() bool {
		n.tiering.Tick(time.Now().Add(time.Hour)) // by then all of them are idle
		st := n.ledger.Stats()
		return st.InTier[policy.NVMe] >= blocks && st.Moving == 0
	})
}

func ready(r *standin.LoadReport) (n int) {
	for _, st := range r.Status {
		if st == pb.BlockStatus_BLOCK_STATUS_READY {
			n++
		}
	}
	return n
}

// Blocks that are idle go down, leave DRAM, survive a restart and a new pool, and come up again, right.
func TestDownAndUp(t *testing.T) {
	n := newNode(t, withDrives(t, 2, 64<<20), func(c *Config) { c.DRAM.OnIdle = "move" })
	s, m := n.attach(worker)
	hashes, parents := prompt(40, 1)
	if end := store(t, s, m, 0, hashes, parents); end.BlocksStored != 40 {
		t.Fatalf("stored %+v", end)
	}
	n.onDrives(40)
	eventually(t, "blocks have left DRAM", func() bool {
		n.tiering.Tick(time.Now().Add(time.Hour))
		return n.ledger.Stats().InTier[policy.DRAM] == 0
	})
	if r := load(t, s, m, 100, hashes, nil); ready(r) != 40 {
		t.Fatalf("load from the drives: %v", r.Status)
	}
	if st := n.ledger.Stats(); st.Counts.Promoted != 40 || st.InTier[policy.DRAM] != 40 {
		t.Fatalf("after the load: %+v", st)
	}
	_ = s.Close()
	n.nothingHeld()

	n.Stop()
	if err := os.Remove(n.cfg.Pool.Path); err != nil { // as after a reboot
		t.Fatal(err)
	}
	n.start()
	if st := n.ledger.Stats(); st.InTier[policy.NVMe] != 40 || st.InTier[policy.DRAM] != 0 {
		t.Fatalf("after a restart without a pool: %+v", st)
	}
	s, m = n.attach(worker)
	if r := load(t, s, m, 100, hashes, nil); ready(r) != 40 {
		t.Fatalf("load after a restart: %v", r.Status)
	}
	_ = s.Close()
	n.nothingHeld()
	if st := n.ledger.Stats(); st.UsedBytes+st.FreeBytes != st.CapacityBytes || st.Drives[0].UsedBytes+st.Drives[1].UsedBytes == 0 {
		t.Errorf("%+v", st)
	}
}

// A flipped byte on a drive is a miss, and gone.
func TestFlippedOnDrive(t *testing.T) {
	n := newNode(t, withDrives(t, 1, 64<<20), func(c *Config) { c.DRAM.OnIdle = "move" })
	s, m := n.attach(worker)
	hashes, parents := prompt(8, 1)
	store(t, s, m, 0, hashes, parents)
	n.onDrives(8)
	eventually(t, "blocks have left DRAM", func() bool {
		n.tiering.Tick(time.Now().Add(time.Hour))
		return n.ledger.Stats().InTier[policy.DRAM] == 0
	})
	f, err := os.OpenFile(n.cfg.NVMe.Drives[0].Path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	at := int64(n.drives[0].SlotOffset(0, 3)) + 4711
	var b [1]byte
	if _, err := f.ReadAt(b[:], at); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 4
	if _, err := f.WriteAt(b[:], at); err != nil {
		t.Fatal(err)
	}
	if r := load(t, s, m, 100, hashes, nil); ready(r) != 7 {
		t.Fatalf("%v", r.Status)
	}
	if got := n.counters.Value("broken_blocks", "nvme"); got != 1 {
		t.Errorf("%d broken blocks are counted", got)
	}
	if st := n.ledger.Stats(); st.InTier[policy.NVMe] != 7 {
		t.Errorf("%d blocks are on the drive", st.InTier[policy.NVMe])
	}
	_ = s.Close()
	n.nothingHeld()
}

// A working set of many times the pool goes through it: nothing is refused, and what was stored is there, in whichever tier, as far as there is room.
func TestPressure(t *testing.T) {
	n := newNode(t, withDrives(t, 2, 256<<20))
	s, m := n.attach(worker)
	const prompts, blocks = 96, 64 // 6,144 blocks of 64 KiB: 384 MiB through 32 MiB, onto 496 MiB
	var all [][]kvferry.Hash
	for p := range prompts {
		hashes, parents := prompt(blocks, uint64(p)*1000)
		if end := store(t, s, m, 0, hashes, parents); end.Outcome != pb.Outcome_OUTCOME_COMMITTED || end.BlocksStored != blocks {
			t.Fatalf("prompt %d: %+v", p, end)
		}
		eventually(t, "the drives have kept up", func() bool { return n.ledger.Stats().Moving == 0 }) // as at a pace that they can keep
		all = append(all, hashes)
	}
	found := 0
	for _, hashes := range all {
		found += ready(load(t, s, m, 100, hashes, nil))
	}
	t.Logf("%d of %d blocks found; %+v", found, prompts*blocks, n.ledger.Stats().Counts)
	if found < prompts*blocks*9/10 {
		t.Errorf("only %d of %d blocks were found", found, prompts*blocks)
	}
	_ = s.Close()
	n.nothingHeld()
}

// A drive that is not there stops nobody, and is used when it has come.
func TestAbsentDrive(t *testing.T) {
	var missing string
	n := newNode(t, withDrives(t, 2, 64<<20), func(c *Config) {
		missing = filepath.Join(filepath.Dir(c.NVMe.Drives[0].Path), "not-mounted")
		c.NVMe.Drives[0].Path = filepath.Join(missing, "a")
	})
	st, err := n.admin().Status(t.Context(), &pb.StatusRequest{})
	if err != nil || st.Health != pb.Health_HEALTH_DEGRADED || len(st.Problems) != 1 || !strings.Contains(st.Problems[0].Reason, "not used") {
		t.Fatalf("%v, %v", st, err)
	}
	state := func(want string) {
		t.Helper()
		series := n.scrape()
		for _, s := range driveStates {
			if got, ok := series["kvferry_drive_state "+filepath.Join(missing, "a")+" "+s]; !ok || (got == 1) != (s == want) {
				t.Errorf("state %s is %v, %v; it must be %s", s, got, ok, want)
			}
		}
	}
	state("absent")
	s, m := n.attach(worker)
	hashes, parents := prompt(40, 1)
	store(t, s, m, 0, hashes, parents)
	n.onDrives(40)
	if err := os.Mkdir(missing, 0o755); err != nil {
		t.Fatal(err)
	}
	n.retryDrives()
	if st, err = n.admin().Status(t.Context(), &pb.StatusRequest{}); err != nil || st.Health != pb.Health_HEALTH_OK {
		t.Fatalf("%v, %v", st, err)
	}
	state("ok")
	more, parents := prompt(40, 1000)
	store(t, s, m, 0, more, parents)
	n.onDrives(80)
	if drives := n.ledger.Stats().Drives; len(drives) != 2 || drives[0].Blocks == 0 || drives[1].Blocks == 0 {
		t.Errorf("%+v", drives)
	}
	if r := load(t, s, m, 100, more, nil); ready(r) != 40 {
		t.Errorf("%v", r.Status)
	}
}

// demoTrace is the beginning of a real trace, which the demo has without its times: three requests a second.
func demoTrace(t *testing.T) *replay.Trace {
	t.Helper()
	f, err := os.Open("../cmd/kvferry-demo/testdata/conversation.jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	var timed strings.Builder
	for i, line := range strings.Split(strings.TrimSpace(string(b)), "\n") {
		fmt.Fprintf(&timed, "{\"timestamp\": %d, %s\n", i*333, strings.TrimPrefix(line, "{"))
	}
	trace, err := replay.Read(strings.NewReader(timed.String()), 0)
	if err != nil {
		t.Fatal(err)
	}
	return trace
}

// The hit ratio that kvferry simulate foretells is the one that a daemon has, with a working set of ten times the pool on a real file. The requests are the beginning of a real trace.
func TestHitsAsSimulated(t *testing.T) {
	trace := demoTrace(t)
	if testing.Short() || slower > 1 {
		trace.Requests = trace.Requests[:300]
	}
	const shard = 4 << 10
	n := newNode(t, withDrives(t, 1, 22<<20), func(c *Config) {
		c.Pool.Size, c.Pool.Slab, c.NVMe.Slab, c.DRAM.Idle = 6<<20, 2<<20, 2<<20, 0
	})
	cfg := replay.Config{DRAM: 2 * n.pool.SlotsPerSlab(shard), NVMe: 10 * n.pool.SlotsPerSlab(shard), Policy: n.cfg.Policy, Down: n.cfg.down()}
	want, err := replay.Run(trace, cfg)
	if err != nil {
		t.Fatal(err)
	}
	m, err := standin.NewMemory(standin.Shape{Blocks: 256, Planes: 1, PlaneBytes: shard})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = m.Close() }()
	w, _ := n.attach(worker, func(c *standin.Config) { c.Memory = m })
	asked, hits, refused := 0, 0, 0
	for i := range trace.Requests {
		var hashes, parents []kvferry.Hash
		for _, b := range trace.Blocks(&trace.Requests[i]) {
			hashes, parents = append(hashes, b.Hash), append(parents, b.Parent)
		}
		r, err := w.Match(t.Context(), "r", hashes, 60_000)
		if err != nil {
			t.Fatal(err)
		}
		found := int(r.Blocks)
		asked, hits = asked+len(hashes), hits+found
		for at := 0; at < found; at += 256 {
			part := hashes[at:min(at+256, found)]
			l, err := w.Load(ctx10(t), standin.LoadRequest{RequestID: "r", Blocks: numbers(0, len(part)), Hashes: part})
			if err != nil || ready(l) < len(part) {
				t.Fatalf("of %d blocks that were found %d were loaded: %v", len(part), ready(l), err)
			}
		}
		for at := found; at < len(hashes); at += 64 {
			end := store(t, w, m, 0, hashes[at:min(at+64, len(hashes))], parents[at:min(at+64, len(hashes))])
			if end.Outcome != pb.Outcome_OUTCOME_COMMITTED {
				refused++
			}
			eventually(t, "the drives have kept up", func() bool { return n.ledger.Stats().Moving == 0 })
		}
		if err := w.ReleaseLease("r"); err != nil {
			t.Fatal(err)
		}
	}
	got := replay.Ratio(hits, asked)
	t.Logf("hit ratio %.4f, simulated %.4f; %d blocks asked, %d stored, %d written to the drive; %d stores refused", got, want.HitRatio(), asked, n.ledger.Stats().Counts.Stored, n.ledger.Stats().Counts.Demoted, refused)
	if math.Abs(got-want.HitRatio()) > 0.02 || refused > 0 {
		t.Errorf("hit ratio %.4f, simulated %.4f; %d stores refused", got, want.HitRatio(), refused)
	}
}

// An Accept of what is partly here answers for the pool at once, and pins it, before it waits for a drive; what a drive has lost comes from where the ticket points.
func TestAcceptBesideADrive(t *testing.T) {
	a, b := newNode(t), newNode(t, withDrives(t, 1, 64<<20), func(c *Config) { c.DRAM.OnIdle = "move" })
	small := func(instance string) func(*standin.Config) { // as a raw session has them
		return func(c *standin.Config) {
			m, err := standin.NewMemory(standin.Shape{Blocks: 32, Planes: 4, PlaneBytes: rawPlane})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = m.Close() })
			c.Instance, c.Memory = instance, m
		}
	}
	memory := func(n *node, instance string) (s *standin.Session, m *standin.Memory) {
		s, _ = n.attach(worker, small(instance), func(c *standin.Config) { m = c.Memory })
		return s, m
	}
	s, m := memory(a, "engine")
	sched, _ := a.attach(scheduler)
	hashes, parents := prompt(24, 3)
	ticket, err := sched.Offer(standin.OfferRequest{RequestID: "r", Hashes: hashes, Tokens: 24 * 16, LifetimeMs: 60_000})
	if err != nil {
		t.Fatal(err)
	}
	store(t, s, m, 0, hashes, parents)
	d, dm := memory(b, "other")
	store(t, d, dm, 0, hashes[:8], parents[:8])
	b.onDrives(8)
	eventually(t, "blocks have left DRAM", func() bool {
		b.tiering.Tick(time.Now().Add(time.Hour))
		return b.ledger.Stats().InTier[policy.DRAM] == 0
	})
	store(t, d, dm, 8, hashes[8:16], parents[8:16])
	f, err := os.OpenFile(b.cfg.NVMe.Drives[0].Path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if _, err := f.WriteAt([]byte("broken"), int64(b.drives[0].SlotOffset(0, 3))); err != nil {
		t.Fatal(err)
	}
	h := helloOf(worker)
	h.Space = testSpace()
	raw := b.rawSession(h)
	raw.word(0, 1)
	raw.send(&pb.SessionRequest{Message: &pb.SessionRequest_Accept{Accept: &pb.Accept{
		Load: &pb.Load{Operation: 1, SpaceId: raw.welcome.SpaceId, Hashes: packed(hashes)}, Ticket: ticket,
	}}})
	ready, first := 0, true
	for last := false; !last; {
		m := raw.receive()
		r := m.GetLoadResult()
		if r == nil {
			t.Fatal(m)
		}
		if first && r.GetFirst() != 8 {
			t.Errorf("the first answer is for block %d: what is in the pool waits for the drive", r.GetFirst())
		}
		for _, st := range r.GetStatus() {
			if pb.BlockStatus(st) == pb.BlockStatus_BLOCK_STATUS_READY {
				ready++
			}
		}
		first, last = false, r.GetLast()
	}
	if ready != 24 {
		t.Errorf("%d of 24 blocks came", ready)
	}
}

// A drive that is slower than computing is left alone, but for a try now and then that measures it again.
func TestSlowerThanComputing(t *testing.T) {
	n := newNode(t, withDrives(t, 1, 64<<20), func(c *Config) { c.DRAM.OnIdle = "move" })
	s, m := n.attach(worker)
	hashes, parents := prompt(40, 1)
	store(t, s, m, 0, hashes, parents)
	down := func() {
		n.onDrives(40)
		eventually(t, "blocks have left DRAM", func() bool {
			n.tiering.Tick(time.Now().Add(time.Hour))
			return n.ledger.Stats().InTier[policy.DRAM] == 0
		})
	}
	down()
	if r := load(t, s, m, 100, hashes, nil); ready(r) != 40 { // measures it
		t.Fatalf("%v", r.Status)
	}
	down()
	found := func(computeUs uint32) int {
		r, err := s.MatchPeers(t.Context(), "r", hashes, 1000, nil, computeUs)
		if err != nil {
			t.Fatal(err)
		}
		return int(r.NvmeBlocks)
	}
	if got := found(1_000_000); got != 40 {
		t.Errorf("computing takes a second a block: %d blocks of the drive count", got)
	}
	left := 0
	for range 6 { // of a microsecond a block
		if found(1) == 0 {
			left++
		}
	}
	if left < 3 {
		t.Errorf("computing takes a microsecond a block: in %d of 6 look-ups the drive was left alone", left)
	}
	st, err := n.admin().Status(t.Context(), &pb.StatusRequest{})
	if err != nil || len(st.Problems) == 0 || !strings.Contains(st.Problems[0].Reason, "slower than recomputing") {
		t.Errorf("%v, %v", st.GetProblems(), err)
	}
	if got := found(0); got != 40 {
		t.Errorf("not known: %d blocks of the drive count", got)
	}
}

// One file under two names is one drive: the second name is refused, and nothing of the first is harmed. Growing a drive beyond its file system costs nothing that it has, and its wear outlives a kill.
func TestDriveFileOddities(t *testing.T) {
	dir := t.TempDir()
	cfg := nvme.Config{Path: filepath.Join(dir, "a"), Bytes: 34 << 20, SlabBytes: 8 << 20}
	d, _, err := nvme.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Link(cfg.Path, filepath.Join(dir, "b")); err != nil {
		t.Fatal(err)
	}
	other := cfg
	other.Path = filepath.Join(dir, "b")
	if _, _, err := nvme.Open(other); !errors.Is(err, nvme.ErrLocked) {
		t.Fatalf("the same file under another name: %v", err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	cfg.Bytes, cfg.Reserve = 42<<20, 1<<60 // more than any file system has
	if d, _, err = nvme.Open(cfg); err != nil || d.Slabs() != 4 || len(d.Notes()) == 0 {
		t.Fatalf("grown beyond what there is: %v", err)
	}
	_ = d.Close()
}
