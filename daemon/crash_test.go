package daemon

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/standin"
	"github.com/kvferry/kvferry/standin/process"
)

// descriptors is how many this process has open.
func descriptors(t *testing.T) int {
	t.Helper()
	e, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(e)
}

// mappings is how many memfds are mapped: lent memory and operation words.
func mappings(t *testing.T) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(b), "/memfd:")
}

// TestKilledWorkers kills 200 workers with SIGKILL at random moments of storing, matching, offering and loading. Nothing may stay leased, pinned, lent or half stored,
// and what others load is right.
func TestKilledWorkers(t *testing.T) {
	total, side := 200, 4
	if testing.Short() {
		total = 24
	}
	n := newNode(t)
	shape := standin.Shape{Blocks: 256, Planes: 4, PlaneBytes: 16 << 10}
	survivor, m := n.attach(worker)
	beforeFDs, beforeMaps := descriptors(t), mappings(t)
	var wg sync.WaitGroup
	for w := range side {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 1))
			for k := range total / side {
				crashOne(t, n, shape, fmt.Sprintf("crash-%d-%d", w, k), r)
			}
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	hashes, parents := prompt(32, 1)
	for i := 0; ; i++ { // the others go on
		select {
		case <-done:
		default:
			store(t, survivor, m, 0, hashes, parents)
			load(t, survivor, m, 100, hashes, nil)
			continue
		}
		break
	}
	_ = survivor.Close()
	n.nothingHeld()
	if st := n.ledger.Stats(); st.UsedBytes+st.FreeBytes != st.CapacityBytes {
		t.Errorf("used %d + free %d is not %d", st.UsedBytes, st.FreeBytes, st.CapacityBytes)
	}
	eventually(t, "descriptors are closed", func() bool { return descriptors(t) <= beforeFDs })
	if now := mappings(t); now > beforeMaps {
		t.Errorf("%d memfds are mapped, %d before", now, beforeMaps)
	}
	if n := n.counters.Value("sessions_closed", "process_gone") + n.counters.Value("sessions_closed", "stream_ended"); n < uint64(total) {
		t.Errorf("%d sessions were closed", n)
	}
}

// crashOne runs a worker and kills it while it works.
func crashOne(t *testing.T, n *node, shape standin.Shape, name string, r *rand.Rand) {
	w, err := process.StartWorker(name)
	if err != nil {
		t.Error(err)
		return
	}
	defer w.Kill()
	ctx := t.Context()
	attached := r.IntN(8) > 0 // else it is killed while it attaches
	if attached {
		if err := w.Attach(ctx, process.AttachArgs{SocketsDir: n.cfg.Sockets.Dir, Instance: name, Shape: shape, Staging: r.IntN(4) == 0}); err != nil {
			t.Errorf("attach %s: %v", name, err)
			return
		}
	}
	killed := make(chan struct{})
	kill := time.AfterFunc(time.Duration(r.IntN(30_000))*time.Microsecond, func() { w.Kill(); close(killed) })
	defer kill.Stop()
	go func() { // every call fails once the worker is dead
		if !attached {
			_ = w.Attach(ctx, process.AttachArgs{SocketsDir: n.cfg.Sockets.Dir, Instance: name, Shape: shape})
		}
		for i := uint64(0); ; i++ {
			hashes, parents := prompt(32, 1000*(i%7))
			if err := w.Write(ctx, numbers(0, 32), hashes); err != nil {
				return
			}
			if _, err := w.Store(ctx, standin.StoreRequest{RequestID: "r", Blocks: numbers(0, 32), Hashes: hashes, Parents: parents}); err != nil {
				return
			}
			_, _ = w.Match(ctx, process.MatchArgs{RequestID: "r", Hashes: hashes})
			_, _ = w.Offer(ctx, standin.OfferRequest{RequestID: "r", Hashes: hashes, Tokens: 512})
			if got, err := w.Load(ctx, standin.LoadRequest{RequestID: "r", Blocks: numbers(100, 32), Hashes: hashes}); err != nil {
				return
			} else if got.Report.Wrong > 0 {
				t.Errorf("%s: %d blocks were wrong", name, got.Report.Wrong)
			}
		}
	}()
	<-killed
}

// A daemon that is killed with SIGKILL under load leaves a pool that the next one adopts without a wrong byte.
func TestKilledDaemon(t *testing.T) {
	daemonPath := buildDaemon(t)
	shm, err := os.MkdirTemp("/dev/shm", "kvferry-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(shm) })
	cfg := process.NodeConfig{Daemon: daemonPath, Name: "killed", Dir: t.TempDir(), PoolPath: filepath.Join(shm, "pool"), PoolBytes: 34 << 20, SlabBytes: 8 << 20, Listen: "127.0.0.1"}
	shape := standin.Shape{Blocks: 256, Planes: 4, PlaneBytes: 16 << 10}
	rounds := 10
	if testing.Short() {
		rounds = 3
	}
	r := rand.New(rand.NewPCG(7, 7))
	warm := 0
	for round := range rounds {
		node, err := process.StartNode(ctx10(t), cfg)
		if err != nil {
			t.Fatal(err)
		}
		mem, err := standin.NewMemory(shape)
		if err != nil {
			t.Fatal(err)
		}
		s, err := standin.Attach(ctx10(t), standin.Config{SocketsDir: cfg.SocketsDir(), Role: worker, Instance: "w", Space: testSpace(), Memory: mem})
		if err != nil {
			t.Fatal(err)
		}
		for p := range 7 { // whatever is left of the rounds before must be right
			hashes, _ := prompt(32, uint64(1000*p))
			warm += load(t, s, mem, 100, hashes, nil).Loaded
		}
		kill := time.AfterFunc(time.Duration(20+r.IntN(60))*time.Millisecond, node.Kill)
		for i := uint64(round); ; i++ {
			hashes, parents := prompt(32, 1000*(i%7))
			for k, h := range hashes {
				mem.Write(uint32(k), h)
			}
			o, err := s.Store(standin.StoreRequest{RequestID: "r", Blocks: numbers(0, 32), Hashes: hashes, Parents: parents})
			if err != nil {
				break
			}
			if _, err := o.Wait(ctx10(t)); err != nil {
				break
			}
		}
		kill.Stop()
		node.Kill()
		_ = s.Close()
		_ = mem.Close()
	}
	if warm == 0 {
		t.Error("no block survived any kill")
	}
	t.Logf("%d blocks were loaded after kills", warm)
}
