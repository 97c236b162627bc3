package sim

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/csrc/copyshim"
	"github.com/kvferry/kvferry/daemon/counters"
	"github.com/kvferry/kvferry/daemon/handoff"
	"github.com/kvferry/kvferry/daemon/mover"
	"github.com/kvferry/kvferry/daemon/session"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/pool"
	"github.com/kvferry/kvferry/tiers/tierstest"
	"github.com/kvferry/kvferry/transport"
)

var (
	seed  = flag.Uint64("seed", 1, "first seed")
	seeds = flag.Int("seeds", 30, "how many")
	steps = flag.Int("steps", 400, "steps of each")
)

const (
	blocksOfWorker = 48
	planes         = 2
	planeBytes     = 8192
	chains         = 24 // more than the pool holds
	shardBytes     = planes * planeBytes
)

// TestSim runs the seeds. A seed that fails is printed, and replays alone.
func TestSim(t *testing.T) {
	totals := map[string]int{}
	for n := *seed; n < *seed+uint64(*seeds); n++ {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, n)
			defer w.cleanup()
			for i := range *steps {
				w.at = i
				w.step()
				synctest.Wait()
				w.check()
			}
			w.finish()
			for _, c := range w.counters.All() {
				totals[c.Name+"/"+c.Reason] += int(c.Value)
			}
			for k, v := range w.seen {
				totals[k] += v
			}
		})
		if t.Failed() {
			return
		}
	}
	for _, k := range []string{"store_operations/committed", "store_operations/revoked", "store_operations/failed", "store_operations/expired", "load_operations/committed",
		"load_operations/expired", "offers/done", "offers/expired", "offers/session ended", "loaded blocks", "stale loads", "claimed blocks", "restarts", "sessions_closed/process_gone"} {
		if totals[k] == 0 && *seeds >= 100 {
			t.Errorf("the simulation never reached %q: %v", k, totals)
		}
	}
	t.Logf("%v", totals)
}

// world is a node and the processes around it.
type world struct {
	t    *testing.T
	seed uint64
	at   int
	r    *rand.Rand
	dir  string

	epoch    kvferry.Epoch
	pool     *pool.Pool
	ledger   *tiers.Ledger
	link     *mover.Link
	registry *handoff.Registry
	fetcher  *handoff.Fetcher
	sessions *session.Manager
	gate     *gate
	owners   tiers.Owner

	counters counters.Set
	seen     map[string]int
	procs    []*proc
	claims   []simClaim
	offers   []session.Offer
}

func newWorld(t *testing.T, n uint64) *world {
	dir, err := os.MkdirTemp("/dev/shm", "kvferry-sim-")
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, seed: n, r: rand.New(rand.NewPCG(n, 1)), dir: dir, seen: map[string]int{}}
	w.start()
	return w
}

func (w *world) fatalf(format string, args ...any) {
	w.t.Helper()
	w.t.Fatalf("seed %d step %d: %s (replay: go test ./daemon/sim -args -seed %d -seeds 1)", w.seed, w.at, fmt.Sprintf(format, args...), w.seed)
}

// start makes an incarnation of the daemon's parts over the pool's file.
func (w *world) start() {
	p, found, err := pool.Open(pool.Config{Path: filepath.Join(w.dir, "pool"), Bytes: 2<<20 + 2*(2<<20), SlabBytes: 2 << 20, BootID: "sim"})
	if err != nil {
		w.fatalf("open pool: %v", err)
	}
	w.epoch[0]++
	w.pool, w.ledger = p, tiers.New(p, tiers.DefaultLimits)
	w.ledger.Adopt(found)
	memory := transport.Memory{ID: 1, Bytes: p.Bytes()}
	log := slog.New(slog.DiscardHandler)
	w.link = mover.NewLink("local", 2, 8)
	w.gate = &gate{}
	w.registry = handoff.NewRegistry(handoff.Config{Epoch: w.epoch, Ledger: w.ledger, Pool: memory, Limits: handoff.DefaultLimits, Counters: &w.counters, Log: log,
		Owners: func() tiers.Owner { w.owners++; return 1<<40 + w.owners }})
	w.fetcher = handoff.NewFetcher(handoff.FetcherConfig{Epoch: w.epoch, Ledger: w.ledger, Pool: memory, Registry: w.registry, Counters: &w.counters, Log: log, Peers: 1})
	limits := session.DefaultLimits
	limits.StoreDeadline, limits.LoadDeadline = 2*time.Second, 3*time.Second
	g := w.gate
	w.sessions = session.New(session.Config{
		Ledger: w.ledger, Pool: memory, PoolFile: p.ReadOnly(), Local: w.link, Offers: w.registry, Fetcher: w.fetcher, Limits: limits, Counters: &w.counters, Log: log,
		Allowed: func(uint32) bool { return true },
		NewCopier: func(dst, src transport.Memory) transport.Copier {
			return &copier{transport.NewLocal(dst, src, 1), g, w.r.IntN(2) == 0}
		},
		// Real pidfds wait in the runtime's poller, which no simulated clock can see through.
		Watch: func(_ context.Context, _ *os.File, _, done func()) error { done(); return nil },
	})
}

// stop ends the incarnation: everything becomes quiet first.
func (w *world) stop() {
	w.gate.openAll()
	for _, p := range w.procs {
		p.die(nil)
	}
	w.sessions.CloseAll(context.Canceled)
	synctest.Wait()
	w.procs, w.claims, w.offers = nil, nil, nil
	w.fetcher.Close()
	w.link.Close()
	if err := w.pool.Close(); err != nil {
		w.fatalf("close pool: %v", err)
	}
}

func (w *world) cleanup() {
	if w.t.Failed() {
		w.gate.openAll()
		w.sessions.CloseAll(context.Canceled)
		w.link.Close()
	}
	_ = os.RemoveAll(w.dir)
}

// step does one random thing.
func (w *world) step() {
	switch n := w.r.IntN(100); {
	case n < 8:
		w.open()
	case n < 34:
		w.store()
	case n < 47:
		w.gate.release(w.r, nil)
	case n < 49:
		w.gate.release(w.r, errors.New("simulated failure"))
	case n < 54:
		w.revoke()
	case n < 66:
		w.load()
	case n < 78:
		w.copyLoaded()
	case n < 82:
		w.match()
	case n < 86:
		w.offer()
	case n < 89:
		w.claim()
	case n < 92:
		w.readClaim()
	case n < 94:
		w.kill()
	case n < 99:
		time.Sleep(time.Duration(w.r.IntN(1500)) * time.Millisecond) // simulated
		w.ledger.Expire(time.Now())
		w.registry.Expire(time.Now())
	default:
		if w.r.IntN(6) == 0 {
			w.stop()
			w.start()
			w.seen["restarts"]++
		}
	}
}

type shardKey struct {
	hash  kvferry.Hash
	shard uint32
}

var contents = map[shardKey][]byte{}

// content is what a block's shard must hold.
func content(h kvferry.Hash, shard uint32) []byte {
	b := contents[shardKey{h, shard}]
	if b == nil {
		b = make([]byte, shardBytes)
		x := binary.LittleEndian.Uint64(h[:]) + uint64(shard)*7919
		for i := 0; i < len(b); i += 8 {
			x = x*6364136223846793005 + 1442695040888963407
			binary.LittleEndian.PutUint64(b[i:], x)
		}
		contents[shardKey{h, shard}] = b
	}
	return b
}

func chain(r *rand.Rand) []tiers.Block {
	return tierstest.Chain(uint64(r.IntN(chains)), 1+r.IntN(16))
}

// check holds the invariants of design.md section 9.
func (w *world) check() {
	w.t.Helper()
	if err := w.ledger.Check(); err != nil {
		w.fatalf("ledger: %v", err)
	}
	if st := w.ledger.Stats(); st.UsedBytes+st.FreeBytes != st.CapacityBytes {
		w.fatalf("used %d + free %d is not %d", st.UsedBytes, st.FreeBytes, st.CapacityBytes)
	}
	for _, p := range w.procs {
		p.receive()
		p.checkDeadlines()
	}
	if w.at%8 == 0 {
		w.checkPool()
	}
}

// checkPool reads everything that can be found and compares it.
func (w *world) checkPool() {
	w.t.Helper()
	now := time.Now()
	for name := range uint64(chains) {
		blocks := tierstest.Chain(name, 16)
		hashes := tierstest.Pack(blocks)
		for _, ranks := range []uint32{1, 2} {
			ref, _, ok := w.ledger.FindSpace(space(ranks).ID())
			if !ok {
				continue
			}
			for shard := range ranks {
				res, err := w.ledger.Pin(now, 1<<50, ref, uint16(shard), hashes, now.Add(time.Second))
				if err != nil {
					w.fatalf("pin: %v", err)
				}
				for i, p := range res.Places {
					if p.Slot == 0 {
						continue
					}
					if got := w.pool.Bytes()[p.Offset:][:p.Length]; string(got) != string(content(blocks[i].Hash, shard)) {
						w.fatalf("block %v shard %d holds wrong bytes", blocks[i].Hash, shard)
					}
				}
				w.ledger.Unpin(res.Hold)
			}
		}
	}
}

// finish ends everything and looks for what was left.
func (w *world) finish() {
	w.checkPool()
	w.gate.openAll()
	for _, p := range w.procs {
		p.die(nil)
	}
	w.sessions.CloseAll(context.Canceled)
	synctest.Wait()
	time.Sleep(time.Hour) // simulated: every claim and offer is over
	w.ledger.Expire(time.Now())
	w.registry.Expire(time.Now())
	synctest.Wait()
	if err := w.ledger.Check(); err != nil {
		w.fatalf("at the end: %v", err)
	}
	if st := w.ledger.Stats(); st.Leases != 0 || st.Pins != 0 || st.Filling != 0 || len(w.sessions.All()) != 0 || w.registry.OpenOffers() != 0 || w.registry.ActiveClaims() != 0 {
		w.fatalf("at the end something is held: %+v", st)
	}
	w.procs = nil
	w.stop()
}

func space(ranks uint32) kvferry.Space {
	return kvferry.Space{Model: "sim", KVDtype: "bfloat16", BlockTokens: 16, Attention: "full", Layers: planes, Heads: 1, HeadSize: 64, Layout: "sim/v1", TP: ranks, PP: 1, DCP: 1,
		ShardKind: kvferry.Sharded, HashAlgorithm: "sha256_cbor"}
}

func memfd(t *testing.T, bytes int64) *os.File {
	fd, err := unix.MemfdCreate("kvferry-sim", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err == nil {
		err = unix.Ftruncate(fd, bytes)
	}
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK)
	}
	if err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fd), "kvferry-sim")
}

func crcOf(b []byte) uint32 { return copyshim.Checksum(0, b) }
