package daemon

import (
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	pb "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/standin"
	"github.com/kvferry/kvferry/standin/process"
)

// prefill is a daemon process with a stored and offered prompt: what can be killed under a decode node.
type prefill struct {
	*process.Node
	s, sched *standin.Session
}

func newPrefill(t *testing.T, daemonPath string, cfg process.NodeConfig) *prefill {
	t.Helper()
	node, err := process.StartNode(ctx10(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(node.Kill)
	p := &prefill{Node: node}
	mem, err := standin.NewMemory(standin.Shape{Blocks: 256, Planes: 4, PlaneBytes: 16 << 10})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = mem.Close() })
	for _, c := range []struct {
		to  **standin.Session
		cfg standin.Config
	}{
		{&p.s, standin.Config{SocketsDir: cfg.SocketsDir(), Role: worker, Instance: "prefill", Space: testSpace(), Memory: mem}},
		{&p.sched, standin.Config{SocketsDir: cfg.SocketsDir(), Role: scheduler, Instance: "prefill", Space: testSpace()}},
	} {
		s, err := standin.Attach(ctx10(t), c.cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Close() })
		*c.to = s
	}
	for i := range 4 {
		hashes, parents := prompt(64, uint64(1000*i))
		store(t, p.s, mem, 0, hashes, parents)
	}
	return p
}

func prefillConfig(t *testing.T) process.NodeConfig {
	t.Helper()
	shm, err := os.MkdirTemp("/dev/shm", "kvferry-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(shm) })
	return process.NodeConfig{Daemon: buildDaemon(t), Name: "prefill", Dir: t.TempDir(), PoolPath: filepath.Join(shm, "pool"), PoolBytes: 34 << 20, SlabBytes: 8 << 20, Listen: "127.0.0.1"}
}

// TestPeerFails: a prefill daemon that dies before or during the fetch, or is frozen, costs the decode side its blocks and nothing else: it knows in bounded time, nothing stays held, and what
// came before is right. (Bounds are three times those of design.md section 10, for machines that are busy with other tests.) When the peer is back, a handoff works again.
func TestPeerFails(t *testing.T) {
	cfg := prefillConfig(t)
	b := newNode(t)
	d, dm := b.attach(worker, func(c *standin.Config) { c.Instance = "decode" })
	hashes, _ := prompt(64, 0)
	ref, _, _ := b.ledger.FindSpace(d.Space)
	fetch := func(ticket []byte, deadlineMs uint32) (*standin.LoadReport, time.Duration) {
		b.ledger.Drop(ref, hashes)
		start := time.Now()
		r, err := d.Load(ctx10(t), standin.LoadRequest{RequestID: "r", Blocks: numbers(0, 64), Hashes: hashes, Ticket: ticket, DeadlineMs: deadlineMs})
		if err != nil {
			t.Fatal(err)
		}
		for i, st := range r.Status {
			if st == pb.BlockStatus_BLOCK_STATUS_READY && dm.Wrong(uint32(i), hashes[i]) != 0 {
				t.Fatalf("block %d was served with wrong bytes", i)
			}
		}
		return r, time.Since(start)
	}
	offer := func(p *prefill) []byte {
		ticket, err := p.sched.Offer(standin.OfferRequest{RequestID: "r", Hashes: hashes, Tokens: 64 * 16, LifetimeMs: 60_000})
		if err != nil {
			t.Fatal(err)
		}
		return ticket
	}

	p := newPrefill(t, cfg.Daemon, cfg)
	if r, _ := fetch(offer(p), 5000); r.Loaded != 64 {
		t.Fatalf("before anything failed: %+v", r)
	}
	before := offer(p)
	p.Kill()
	if r, took := fetch(before, 5000); r.Loaded != 0 || took > 3*time.Second {
		t.Errorf("killed before the fetch: %d loaded after %v", r.Loaded, took)
	}

	p = newPrefill(t, cfg.Daemon, cfg) // another port: tickets name it
	if r, _ := fetch(before, 5000); r.Loaded != 0 {
		t.Errorf("a ticket of the killed daemon was followed: %+v", r)
	}
	during := offer(p)
	var killer sync.WaitGroup
	killer.Go(func() {
		<-time.After(500 * time.Microsecond)
		p.Kill()
	})
	if r, took := fetch(during, 5000); took > 3*time.Second {
		t.Errorf("killed during the fetch: %d loaded after %v", r.Loaded, took)
	}
	killer.Wait()

	p = newPrefill(t, cfg.Daemon, cfg)
	frozen := offer(p)
	if err := p.Freeze(); err != nil {
		t.Fatal(err)
	}
	if r, took := fetch(frozen, 3000); r.Loaded != 0 || took > 4*time.Second {
		t.Errorf("frozen: %d loaded after %v", r.Loaded, took)
	}
	_ = syscall.Kill(p.Pid(), syscall.SIGCONT)
	eventually(t, "the peer serves again", func() bool { r, _ := fetch(offer(p), 3000); return r.Loaded == 64 })
	_ = d.Close()
	b.nothingHeld()
}
