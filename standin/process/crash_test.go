package process

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/standin"
)

var (
	kills = flag.Int("kills", 80, "workers that TestWorkersKilled kills")
	seed  = flag.Uint64("seed", 1, "of TestWorkersKilled")
)

var small = standin.Shape{Blocks: 96, Planes: 4, PlaneBytes: 16 << 10}

func numbers(first, n int) []uint32 {
	list := make([]uint32, n)
	for i := range list {
		list[i] = uint32(first + i)
	}
	return list
}

func promptOf(n int, seed uint64) (hashes, parents []kvferry.Hash) {
	var parent kvferry.Hash
	for i := range n {
		h := standin.Chain(parent, seed*1000+uint64(i))
		hashes, parents = append(hashes, h), append(parents, parent)
		parent = h
	}
	return hashes, parents
}

// live does what engines do, until the process is killed under it: then its calls fail.
func live(ctx context.Context, w *Worker, random *rand.Rand) error {
	for {
		which := random.Uint64N(12)
		hashes, parents := promptOf(32, which)
		if err := w.Write(ctx, numbers(0, 32), hashes); err != nil {
			return err
		}
		if _, err := w.Store(ctx, standin.StoreRequest{RequestID: "r", Blocks: numbers(0, 32), Hashes: hashes, Parents: parents}); err != nil {
			return err
		}
		if _, err := w.Match(ctx, MatchArgs{RequestID: fmt.Sprint("m", which), Hashes: hashes, LeaseMs: 600_000}); err != nil {
			return err
		}
		if _, err := w.Offer(ctx, standin.OfferRequest{RequestID: "o", Hashes: hashes, Tokens: 512, LifetimeMs: 600_000}); err != nil {
			return err
		}
		r, err := w.Load(ctx, standin.LoadRequest{RequestID: "r", Blocks: numbers(32, 32), Hashes: hashes})
		if err != nil {
			return err
		}
		for i, s := range r.Report.Status {
			if s != 1 {
				continue
			}
			wrong, err := w.Check(ctx, numbers(32+i, 1), hashes[i:i+1])
			if err != nil {
				return err
			}
			if wrong > 0 {
				return errWrong
			}
		}
	}
}

var errWrong = fmt.Errorf("wrong bytes")

// Workers that are killed at random moments leave nothing leased, pinned or used.
func TestWorkersKilled(t *testing.T) {
	if testing.Short() {
		t.Skip("kills processes for some seconds")
	}
	t.Logf("-seed %d", *seed)
	n := startNode(t, "a", 74<<20)
	const side = 4
	var group sync.WaitGroup
	for k := range side {
		group.Go(func() {
			random := rand.New(rand.NewPCG(*seed, uint64(k)))
			for i := k; i < *kills; i += side {
				if err := oneLife(t.Context(), n, fmt.Sprintf("e%d", i), random); err != nil {
					t.Errorf("life %d: %v", i, err)
					return
				}
			}
		})
	}
	group.Wait()
	if t.Failed() {
		t.Fatalf("log:\n%s", n.LogTail())
	}
	nothingHeld(t, n)
}

func oneLife(ctx context.Context, n *Node, instance string, random *rand.Rand) error {
	w, err := StartWorker(instance)
	if err != nil {
		return err
	}
	defer w.Kill()
	attach := AttachArgs{SocketsDir: n.SocketsDir(), Instance: instance, Shape: small}
	if random.IntN(8) == 0 { // dies while it attaches
		time.AfterFunc(time.Duration(random.IntN(10_000))*time.Microsecond, func() { _ = w.cmd.Process.Kill() })
		_ = w.Attach(ctx, attach)
		return nil
	}
	if err := w.Attach(ctx, attach); err != nil {
		return err
	}
	timer := time.AfterFunc(time.Duration(random.IntN(60_000))*time.Microsecond, func() { _ = w.cmd.Process.Kill() })
	defer timer.Stop()
	if err := live(ctx, w, random); err == errWrong {
		return err
	}
	return nil
}

// nothingHeld fails unless the daemon has given everything back within a second.
func nothingHeld(t *testing.T, n *Node) {
	t.Helper()
	for deadline := time.Now().Add(time.Second); ; time.Sleep(20 * time.Millisecond) {
		s, err := n.Status(t.Context())
		if err != nil {
			t.Fatal("the daemon is gone:", err, n.LogTail())
		}
		var leased, pinned uint64
		for _, tier := range s.Tiers {
			leased, pinned = leased+tier.LeasedBlocks, pinned+tier.PinnedSlots
			if tier.UsedBytes+tier.FreeBytes != tier.CapacityBytes {
				t.Errorf("%s: used %d + free %d is not %d", tier.Tier, tier.UsedBytes, tier.FreeBytes, tier.CapacityBytes)
			}
		}
		if s.Workers == 0 && s.Schedulers == 0 && leased == 0 && pinned == 0 && s.OffersOpen == 0 && s.TransfersQueued == 0 && s.TransfersRunning == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("after a second: %d workers, %d schedulers, %d leased blocks, %d pinned slots, %d open offers, %d+%d transfers", s.Workers, s.Schedulers, leased, pinned,
				s.OffersOpen, s.TransfersQueued, s.TransfersRunning)
		}
	}
}

// A worker that is killed and comes back finds what it had stored.
func TestWorkerComesBack(t *testing.T) {
	n := startNode(t, "a", 74<<20)
	hashes, parents := promptOf(32, 1)
	for life := range 3 {
		w, err := StartWorker("e")
		if err != nil {
			t.Fatal(err)
		}
		defer w.Kill()
		if err := w.Attach(t.Context(), AttachArgs{SocketsDir: n.SocketsDir(), Instance: "e", Shape: small, Staging: life == 1}); err != nil {
			t.Fatal(err)
		}
		if life == 0 {
			if err := w.Write(t.Context(), numbers(0, 32), hashes); err != nil {
				t.Fatal(err)
			}
			if r, err := w.Store(t.Context(), standin.StoreRequest{RequestID: "r", Blocks: numbers(0, 32), Hashes: hashes, Parents: parents}); err != nil || r.Stored != 32 {
				t.Fatal(r, err)
			}
		}
		r, err := w.Load(t.Context(), standin.LoadRequest{RequestID: "r", Blocks: numbers(50, 32), Hashes: hashes})
		if err != nil || r.Report.Loaded != 32 {
			t.Fatal(r, err)
		}
		if wrong, err := w.Check(t.Context(), numbers(50, 32), hashes); wrong != 0 || err != nil {
			t.Fatal(wrong, err)
		}
		w.Kill()
		if _, err := w.Match(t.Context(), MatchArgs{RequestID: "r", Hashes: hashes}); err == nil {
			t.Error("a killed worker answers")
		}
	}
	nothingHeld(t, n)
}

func TestNodeThatCannotStart(t *testing.T) {
	_, err := StartNode(t.Context(), NodeConfig{Daemon: daemonPath, Name: "a", Dir: t.TempDir(), PoolPath: "/dev/shm/kvferry-process-test-none", PoolBytes: 1, SlabBytes: 8 << 20, Listen: "127.0.0.1"})
	if err == nil {
		t.Fatal("a pool of one byte")
	}
	t.Log(err)
}
