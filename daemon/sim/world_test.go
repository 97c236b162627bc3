package sim

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/csrc/copyshim"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/nvme/nvmetest"
	"github.com/kvferry/kvferry/tiers/tierstest"
)

const (
	blocksOfWorker = 40
	planes         = 2
	planeBytes     = 32768
	chains         = 20 // some 1000 shards, where a pool has slots for 62
	shardBytes     = planes * planeBytes
)

// world is two nodes, the network between them, and a router.
type world struct {
	t        *testing.T
	seed     uint64
	mutation mutation
	at       int
	r        *rand.Rand // of the scheduler's goroutine
	dir      string
	nodes    [2]*node
	net      *network
	book     *book
	router   router
	armed    bool // a daemon crashes as soon as something is on its way between them
	trace    []string
	notes    []string // of this step

	mu     sync.Mutex
	seen   counts
	rolls  map[string]int
	broken broken // what a goroutine other than the scheduler's found
}

func newWorld(t *testing.T, n uint64, m mutation) *world {
	dir, err := os.MkdirTemp("/dev/shm", "kvferry-sim-")
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, seed: n, mutation: m, r: rand.New(rand.NewPCG(n, 1)), dir: dir, seen: counts{}, rolls: map[string]int{}, book: newBook()}
	w.net = newNetwork(w)
	for i, name := range []string{"a", "b"} {
		w.nodes[i] = &node{w: w, index: i, name: name, flipped: flips{at: map[uint64]bool{}}, path: filepath.Join(dir, name)}
		for k := range n / (1 + uint64(i)) % 3 {
			w.nodes[i].disks = append(w.nodes[i].disks, &disk{node: w.nodes[i], name: fmt.Sprint(name, k), content: nvmetest.New(diskBytes)})
		}
		w.nodes[i].start()
	}
	return w
}

// fatalf ends the seed. It is called by the scheduler's goroutine alone.
func (w *world) fatalf(format string, args ...any) { panic(broken(fmt.Sprintf(format, args...))) }

// breaks notes a broken invariant from any goroutine; the scheduler's ends the seed when it looks next.
func (w *world) breaks(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.broken == "" {
		w.broken = broken(fmt.Sprintf(format, args...))
	}
}

func (w *world) saw(what string, n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.seen[what] += n
}

// note adds to what two runs of a seed are compared by.
func (w *world) note(format string, args ...any) {
	w.notes = append(w.notes, fmt.Sprintf("step %d: ", w.at)+fmt.Sprintf(format, args...))
}

// digest takes the notes of a step into the trace. What happens at one instant happens in no order.
func (w *world) digest() {
	slices.Sort(w.notes)
	w.trace = append(w.trace, w.notes...)
	w.notes = nil
}

// roll is the randomness of an event: the same for the nth event of this name, whichever goroutine it happens in and whatever happens beside it.
func (w *world) roll(event string) *rand.Rand {
	w.mu.Lock()
	w.rolls[event]++
	n := w.rolls[event]
	w.mu.Unlock()
	h := fnv.New64a()
	_, _ = fmt.Fprintf(h, "%s %d", event, n)
	return rand.New(rand.NewPCG(w.seed, h.Sum64()))
}

// apart is about t: what begins at one instant must not end at one.
func (w *world) apart(t time.Duration) time.Duration {
	return t + time.Duration(w.r.IntN(int(time.Millisecond)))
}

// apartFromNext lets everything that was just begun come to rest before the next thing begins, and no two of them have one time.
func (w *world) apartFromNext() {
	synctest.Wait()
	time.Sleep(time.Microsecond)
	synctest.Wait()
}

// step does one random thing, and lets time pass.
func (w *world) step() {
	node := w.nodes[w.r.IntN(2)]
	if w.armed && w.net.busy() {
		w.armed = false
		node.crash()
	}
	if w.net.readsLent() && w.r.IntN(3) == 0 {
		w.reuse()
	}
	switch n := w.r.IntN(1000); {
	case n < 60:
		w.openEngine(node)
	case n < 170:
		w.prefill(node)
	case n < 270:
		w.deliver(node)
	case n < 335:
		w.store(node)
	case n < 345:
		w.reuse()
	case n < 395:
		w.chunk()
	case n < 575:
		for range 1 + w.r.IntN(3) {
			node.releaseCopy(nil)
			w.apartFromNext()
		}
	case n < 590:
		node.releaseCopy(errSimulated)
	case n < 640:
		w.revoke(node)
	case n < 710:
		w.load(node)
	case n < 870:
		w.copyLoaded(node)
	case n < 900:
		w.match(node)
	case n < 912:
		w.claim(node)
	case n < 945:
		w.readClaim()
	case n < 956:
		w.kill(node)
	case n < 962:
		w.net.partition(w.r)
	case n < 968:
		node.freeze()
	case n < 970:
		node.crash()
	case n < 972:
		w.armed = true
	case n < 974:
		node.restart()
	case n < 982:
		node.flip()
	case n < 988:
		node.diskTrouble()
	case n < 993:
		node.diskFlip()
	case n < 995:
		node.powerFails()
	default:
		w.prefetch(node)
	}
	w.pass(w.r)
}

// pass lets simulated time pass: most often about as long as a message takes, sometimes longer than a deadline.
func (w *world) pass(r *rand.Rand) {
	d := time.Duration(r.Int64N(int64(12 * time.Millisecond)))
	if r.IntN(25) == 0 {
		d = time.Duration(r.Int64N(int64(1500 * time.Millisecond)))
	}
	time.Sleep(d)
	for _, n := range w.nodes {
		n.tick()
	}
}

// settle waits until nothing can go on without time, and checks the invariants of design.md section 9.
func (w *world) settle() {
	synctest.Wait()
	w.mu.Lock()
	found := w.broken
	w.mu.Unlock()
	if found != "" {
		panic(found)
	}
	for _, n := range w.nodes {
		n.check()
	}
	w.digest()
	if w.at%8 == 0 {
		w.nodes[w.at/8%2].checkPool()
		w.nodes[w.at/8%2].checkFold()
	}
}

// finish ends everything and looks for what was left.
func (w *world) finish() {
	w.net.heal()
	for len(w.router.claims) > 0 {
		w.forgetClaim(0)
	}
	for _, n := range w.nodes {
		n.thaw()
		if n.daemon == nil {
			n.start()
		}
		n.daemon.gate.openAll()
		for _, k := range n.disks {
			k.set(healthy)
		}
	}
	w.rest(20 * time.Second) // every deadline of an operation is over
	for _, n := range w.nodes {
		n.checkPool()
		n.checkFold()
		n.checkIdle()
		for _, p := range n.procs {
			p.die(nil)
		}
		n.daemon.sessions.CloseAll(context.Canceled)
	}
	w.rest(2 * time.Minute) // every claim and offer is over
	for _, n := range w.nodes {
		n.checkEmpty()
		n.procs = nil
		n.stop()
	}
}

// rest lets time pass as the daemons' timers see it.
func (w *world) rest(d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); {
		time.Sleep(250 * time.Millisecond)
		for _, n := range w.nodes {
			n.tick()
		}
	}
	w.settle()
}

// cleanup leaves no goroutine behind, whatever state the world is in.
func (w *world) cleanup() {
	w.net.heal()
	for _, n := range w.nodes {
		n.thaw()
		if n.daemon != nil {
			n.crash()
		}
		for _, p := range n.procs {
			p.die(nil)
		}
	}
	time.Sleep(time.Minute) // for messages that are on their way
	_ = os.RemoveAll(w.dir)
}

type shardKey struct {
	hash  kvferry.Hash
	ranks uint32
	shard uint32
}

var contents = struct {
	sync.Mutex
	m map[shardKey][]byte
}{m: map[shardKey][]byte{}}

// content is what a block's shard must hold.
func content(h kvferry.Hash, ranks, shard uint32) []byte {
	contents.Lock()
	defer contents.Unlock()
	b := contents.m[shardKey{h, ranks, shard}]
	if b == nil {
		b = make([]byte, shardBytes)
		x := binary.LittleEndian.Uint64(h[:]) + uint64(shard)*7919 + uint64(ranks)*104729
		for i := 0; i < len(b); i += 8 {
			x = x*6364136223846793005 + 1442695040888963407
			binary.LittleEndian.PutUint64(b[i:], x)
		}
		contents.m[shardKey{h, ranks, shard}] = b
	}
	return b
}

func chain(r *rand.Rand) []tiers.Block {
	return tierstest.Chain(uint64(r.IntN(chains)), 1+r.IntN(16))
}

// prompt is a chain that this node computes: most of them are its own, so that the other one has to fetch them.
func (n *node) prompt() []tiers.Block {
	name := n.w.r.IntN(chains)
	if n.w.r.IntN(8) > 0 {
		name = name/2*2 + n.index
	}
	return tierstest.Chain(uint64(name), 1+n.w.r.IntN(16))
}

func space(ranks uint32) kvferry.Space {
	return kvferry.Space{Model: "sim", KVDtype: "bfloat16", BlockTokens: 16, Attention: "full", Layers: planes, Heads: 1, HeadSize: 64, Layout: "sim/v1", TP: ranks, PP: 1, DCP: 1,
		ShardKind: kvferry.Sharded, HashAlgorithm: "sha256_cbor"}
}

func crcOf(b []byte) uint32 { return copyshim.Checksum(0, b) }

// nodeAt is the node that an address names; its data address is that with "/data".
func (w *world) nodeAt(address string) *node {
	for _, n := range w.nodes {
		if strings.TrimSuffix(address, "/data") == n.name {
			return n
		}
	}
	return nil
}
