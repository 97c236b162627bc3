package process

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvferry/kvferry"
	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/standin"
)

var daemonKills = flag.Int("daemon-kills", 20, "how often TestDaemonKilledUnderLoad kills its daemon")

// driveRig is a daemon with a small pool and two drives, which are files on the test's file system, and two engines.
type driveRig struct {
	*testing.T
	config NodeConfig
	drives []string
	node   *Node
}

const (
	driveBytes   = 66 << 20
	drivePrompts = 24 // of 32 blocks of 64 KiB: 48 MiB through a pool of 32
)

// drivePaths are the files of a node's drives.
func drivePaths(dir string) []string {
	return []string{filepath.Join(dir, "nvme0"), filepath.Join(dir, "nvme1")}
}

// driveYAML configures two small drives, which blocks go to as soon as they are idle or the pool is two thirds full.
func driveYAML(dir, idle string) string {
	d := drivePaths(dir)
	return fmt.Sprintf("nvme: {slab: 8MiB, reserve: 0, drives: [{path: %s, size: %d}, {path: %s, size: %d}]}\ndram: {idle: %s, high: 0.7, low: 0.5}\n", d[0], driveBytes, d[1], driveBytes, idle)
}

// checkDrives: the files are not longer than configured, and blocks have gone through them.
func (r *rig) checkDrives(n *Node) {
	r.Helper()
	for _, path := range drivePaths(n.Dir) {
		st, err := os.Stat(path)
		r.must(err)
		if used := st.Sys().(*syscall.Stat_t).Blocks * 512; st.Size() > driveBytes || used > driveBytes+1<<20 {
			r.Errorf("%s has %d bytes and takes %d, of %d", path, st.Size(), used, driveBytes)
		}
	}
	r.must(n.Admin(func(c kvferryv1.AdminClient) error {
		t, err := c.Tiers(r.Context(), &kvferryv1.TiersRequest{})
		if err != nil {
			return err
		}
		r.Logf("%s: %d shards went down to the drives and %d came up since its daemon's start", n.Name, t.DemotedShards, t.PromotedShards)
		for _, s := range t.Stores {
			if s.UsedBytes+s.FreeBytes != s.CapacityBytes || s.Health != kvferryv1.Health_HEALTH_OK {
				r.Errorf("%v", s)
			}
		}
		return nil
	}))
}

func newDriveRig(t *testing.T) *driveRig {
	t.Helper()
	dir, shm := t.TempDir(), ""
	var err error
	if shm, err = os.MkdirTemp("/dev/shm", "kvferry-process-test-"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(shm) })
	r := &driveRig{T: t, drives: drivePaths(dir)}
	extra := driveYAML(dir, "1s")
	r.config = NodeConfig{Daemon: daemonPath, Name: "a", Dir: dir, PoolPath: filepath.Join(shm, "pool"), PoolBytes: 34 << 20, SlabBytes: 8 << 20, Listen: "127.0.0.1", Extra: extra}
	r.start()
	t.Cleanup(func() { r.node.Kill() })
	return r
}

func (r *driveRig) start() {
	r.Helper()
	n, err := StartNode(r.Context(), r.config)
	if err != nil {
		r.Fatal(err)
	}
	r.node = n
}

func (r *driveRig) worker(name string) *Worker {
	r.Helper()
	w, err := StartWorker(name)
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(w.Kill)
	if err := w.Attach(r.Context(), AttachArgs{SocketsDir: r.node.SocketsDir(), Instance: name, Shape: small}); err != nil {
		r.Fatal(err)
	}
	return w
}

// store computes a prompt and stores it.
func (r *driveRig) store(w *Worker, which uint64) (hashes []kvferry.Hash) {
	r.Helper()
	hashes, parents := promptOf(32, which)
	if err := w.Write(r.Context(), numbers(0, 32), hashes); err != nil {
		r.Fatal(err)
	}
	if s, err := w.Store(r.Context(), standin.StoreRequest{RequestID: "r", Blocks: numbers(0, 32), Hashes: hashes, Parents: parents}); err != nil || s.Stored+s.Present != 32 {
		st, _ := r.node.Status(r.Context())
		r.Fatal(s, err, st)
	}
	return hashes
}

// demote has blocks copied to the drives, and answers when they are there.
func demote(ctx context.Context, n *Node, h kvferry.Hash) error {
	return n.Admin(func(c kvferryv1.AdminClient) error {
		a, err := c.Demote(ctx, &kvferryv1.DemoteRequest{Blocks: &kvferryv1.BlockSelection{HashPrefix: h[:]}})
		if err == nil && a.Failed > 0 {
			err = fmt.Errorf("%d blocks failed", a.Failed)
		}
		return err
	})
}

// loadAll loads every prompt: what is there must be right. It answers how many blocks were.
func (r *driveRig) loadAll(w *Worker) (found int) {
	r.Helper()
	for which := range uint64(drivePrompts) {
		hashes, _ := promptOf(32, which)
		n, err := loadOne(r.Context(), w, hashes)
		if err != nil {
			r.Fatal(err)
		}
		found += n
	}
	return found
}

func loadOne(ctx context.Context, w *Worker, hashes []kvferry.Hash) (found int, err error) {
	if err := w.Scribble(ctx, numbers(32, len(hashes))); err != nil {
		return 0, err
	}
	l, err := w.Load(ctx, standin.LoadRequest{RequestID: "r", Blocks: numbers(32, len(hashes)), Hashes: hashes})
	if err != nil {
		return 0, err
	}
	for i, s := range l.Report.Status {
		if s != kvferryv1.BlockStatus_BLOCK_STATUS_READY {
			continue
		}
		found++
		if wrong, err := w.Check(ctx, numbers(32+i, 1), hashes[i:i+1]); err != nil {
			return found, err
		} else if wrong > 0 {
			return found, errWrong
		}
	}
	return found, nil
}

// exact compares what the stores say they have in use with the blocks that they have.
func (r *driveRig) exact() {
	r.Helper()
	err := r.node.Admin(func(c kvferryv1.AdminClient) error {
		t, err := c.Tiers(r.Context(), &kvferryv1.TiersRequest{})
		if err != nil {
			return err
		}
		blocks, err := c.Blocks(r.Context(), &kvferryv1.BlocksRequest{Limit: 10000})
		if err != nil {
			return err
		}
		var used, listed uint64
		for _, s := range t.Stores {
			if s.UsedBytes+s.FreeBytes != s.CapacityBytes {
				return fmt.Errorf("%s: used %d + free %d is not %d", s.Name, s.UsedBytes, s.FreeBytes, s.CapacityBytes)
			}
			used += s.UsedBytes
		}
		for _, b := range blocks.Blocks {
			listed += b.Bytes
		}
		// Slots that a drive was writing when the daemon was killed are in use for 30 s, and no block's.
		if apart := used - listed; used < listed || apart%(64<<10) != 0 || apart > 16<<20 {
			return fmt.Errorf("%d bytes are in use, blocks have %d", used, listed)
		}
		return nil
	})
	if err != nil {
		r.Error(err)
	}
}

// verify has the daemon read all of it back.
func (r *driveRig) verify() (slots, broken uint64) {
	r.Helper()
	err := r.node.Admin(func(c kvferryv1.AdminClient) error {
		s, err := c.Verify(r.Context(), &kvferryv1.VerifyRequest{})
		if err != nil {
			return err
		}
		for {
			m, err := s.Recv()
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return err
			}
			slots, broken = m.Slots, m.Broken+m.Unreadable
		}
	})
	if err != nil {
		r.Fatal(err)
	}
	return slots, broken
}

// churn stores and loads until its daemon dies under it.
func churn(ctx context.Context, w *Worker, random *rand.Rand) error {
	for {
		hashes, parents := promptOf(32, random.Uint64N(drivePrompts))
		if err := w.Write(ctx, numbers(0, 32), hashes); err != nil {
			return err
		}
		if _, err := w.Store(ctx, standin.StoreRequest{RequestID: "r", Blocks: numbers(0, 32), Hashes: hashes, Parents: parents}); err != nil {
			return err
		}
		wanted, _ := promptOf(32, random.Uint64N(drivePrompts))
		if _, err := loadOne(ctx, w, wanted); err != nil {
			return err
		}
	}
}

// A daemon that is killed (SIGKILL) again and again while engines store and load through a pool that is too small onto real files: no wrong byte is served, what it has said is on a drive is there, and what is
// counted is exact. The files stand for NVMe drives; a kill loses nothing that was written, power failures are daemon/sim's.
func TestDaemonKilledUnderLoad(t *testing.T) {
	if testing.Short() {
		t.Skip("kills daemons for some seconds")
	}
	t.Parallel()
	r := newDriveRig(t)
	random := rand.New(rand.NewPCG(*seed, 99))
	acknowledged, again := 0, 0
	for round := range *daemonKills {
		// One prompt of its own is on a drive, as the daemon says.
		quiet := r.worker("quiet")
		own := r.store(quiet, uint64(1000+round%8)) // all prompts together fit onto the drives: nothing has to leave them
		for _, h := range own {
			if err := demote(t.Context(), r.node, h); err != nil {
				t.Fatalf("round %d: %v", round, err)
			}
		}
		quiet.Kill()
		var group sync.WaitGroup
		for k := range 2 {
			w := r.worker(fmt.Sprint("engine", k))
			seed := random.Uint64()
			group.Go(func() {
				defer w.Kill()
				if err := churn(t.Context(), w, rand.New(rand.NewPCG(seed, 1))); errors.Is(err, errWrong) {
					t.Errorf("round %d: %v", round, err)
				}
			})
		}
		time.Sleep(time.Duration(20+random.IntN(400)) * time.Millisecond)
		r.node.Kill()
		group.Wait()
		if t.Failed() {
			t.Fatalf("log:\n%s", r.node.LogTail())
		}
		if round%4 == 3 { // as if the machine had been started anew
			if err := os.Remove(r.config.PoolPath); err != nil {
				t.Fatal(err)
			}
		}
		r.start()
		r.exact()
		slots, broken := r.verify()
		if broken > 0 {
			t.Errorf("round %d: %d of %d slots are broken", round, broken, slots)
		}
		w := r.worker("after")
		n, err := loadOne(t.Context(), w, own)
		if err != nil {
			t.Fatal(err)
		}
		acknowledged, again = acknowledged+len(own), again+n
		if n < len(own) {
			t.Errorf("round %d: of %d blocks that were said to be on a drive, %d are there", round, len(own), n)
		}
		found := r.loadAll(w)
		w.Kill()
		if round == *daemonKills-1 {
			t.Logf("in the last round %d of %d blocks were found, %d slots verified", found, drivePrompts*32, slots)
		}
	}
	t.Logf("%d kills; %d of %d acknowledged blocks are there", *daemonKills, again, acknowledged)
}

var flipRounds = flag.Int("flip-rounds", 6, "rounds of TestFlips")

// flip turns a bit over in a file.
func flip(t *testing.T, path string, random *rand.Rand, within int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	at := random.Int64N(within)
	var b [1]byte
	if _, err := f.ReadAt(b[:], at); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 1 << random.IntN(8)
	if _, err := f.WriteAt(b[:], at); err != nil {
		t.Fatal(err)
	}
}

// flipSome turns bits over everywhere: in payloads most of all, in header tables and superblocks more than their share.
func (r *driveRig) flipSome(random *rand.Rand, n int) {
	r.Helper()
	for range n {
		path, size := r.config.PoolPath, int64(r.config.PoolBytes)
		if k := random.IntN(3); k < 2 {
			path, size = r.drives[k], driveBytes
		}
		switch random.IntN(6) {
		case 0:
			size = 4096
		case 1:
			size = 2<<20 + 64<<10 // the first slab's header table
		}
		flip(r.T, path, random, size)
	}
}

// Flipped bits in pool and drives, in headers and payloads, while the daemon runs and while it does not: no wrong byte is served, and nobody crashes.
func TestFlips(t *testing.T) {
	if testing.Short() {
		t.Skip("flips bits for some seconds")
	}
	t.Parallel()
	r := newDriveRig(t)
	random := rand.New(rand.NewPCG(*seed, 7))
	w := r.worker("first")
	for which := range uint64(drivePrompts) {
		r.store(w, which)
	}
	for round := range *flipRounds {
		for range 4 { // while it runs
			r.flipSome(random, 40)
			r.loadAll(w)
			r.store(w, random.Uint64N(drivePrompts))
		}
		r.verify() // what is broken is removed
		if _, broken := r.verify(); broken > 0 {
			t.Errorf("round %d: %d slots are broken after what was broken was removed", round, broken)
		}
		if why := r.node.Ended(); why != "" {
			t.Fatalf("round %d: the daemon has %s\n%s", round, why, r.node.LogTail())
		}
		w.Kill()
		r.node.Stop()
		r.flipSome(random, 40) // while it does not
		r.start()
		w = r.worker(fmt.Sprint("round", round))
		found := r.loadAll(w)
		t.Logf("round %d: %d of %d blocks were found", round, found, drivePrompts*32)
		for which := range uint64(drivePrompts) {
			r.store(w, which)
		}
	}
}
