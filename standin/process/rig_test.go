package process

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/kvferry/kvferry"
	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/standin"
)

// A prompt of the tests of failures takes a second or more over the link when that is slow: what happens after slowFirst bytes happens in mid-transfer.
var wide = standin.Shape{Blocks: 640, Planes: 4, PlaneBytes: 32 << 10}

const (
	promptBlocks = 80
	slowRate     = 8 << 20
	slowFirst    = 1 << 20
	deadline     = 5 * time.Second
	port         = 7400 // in networks of their own, nobody else has it
	watchdog     = time.Second
)

// way is how a prompt goes from one engine to another.
type way uint8

const (
	pooled way = iota // stored, then read by the other node into its pool
	pulled            // read by the other node out of the prefill worker's memory into its pool
	direct            // out of the prefill worker's memory into the decode worker's, on another node
	lent              // out of the prefill worker's memory, by the decode worker on the same node
)

func (w way) String() string { return [...]string{"pooled", "pulled", "direct", "lent"}[w] }

// rig is two nodes with a link between them: a with prefill and a decode worker beside it, b with the decode worker.
type rig struct {
	*testing.T
	net                *Network // nil: both are on the loopback, and nothing can happen to their link
	a, b               *Node
	prefill, near, far *Worker
	prompts            uint64
	lifetime           time.Duration // of offers that nobody claims
	deadline           time.Duration // of Loads
}

// newRig starts all of it in two network namespaces. Where none can be made, it is on the loopback, and what needs a link of its own is skipped.
func newRig(t *testing.T, change ...func(a, b *NodeConfig)) *rig {
	t.Helper()
	r := &rig{T: t, lifetime: 8 * time.Second, deadline: deadline}
	here, there := "127.0.0.1", "127.0.0.1"
	var err error
	if r.net, err = network(t); err == nil {
		here, there = r.net.Here, r.net.There
	} else {
		t.Logf("on the loopback: %v", err)
	}
	a, b := r.config("a", there, r.net), r.config("b", here, nil)
	a.Port, b.Port = freePorts(t, there, r.net != nil), freePorts(t, here, r.net != nil)
	b.Supervise = watchdog
	for _, f := range change {
		f(&a, &b)
	}
	r.a, r.b = r.node(a), r.node(b)
	r.prefill, r.near, r.far = r.worker("prefill", r.a), r.worker("near", r.a), r.worker("far", r.b)
	return r
}

// freePorts are three in a row; in networks of their own, nobody else has them.
func freePorts(t *testing.T, host string, own bool) int {
	for own {
		return port
	}
	for range 100 {
		l, err := net.Listen("tcp", host+":0")
		if err != nil {
			t.Fatal(err)
		}
		at := l.Addr().(*net.TCPAddr).Port
		free := at < 65000
		for i := 1; i < 3 && free; i++ {
			next, err := net.Listen("tcp", fmt.Sprintf("%s:%d", host, at+i))
			if free = err == nil; free {
				_ = next.Close()
			}
		}
		_ = l.Close()
		if free {
			return at
		}
	}
	t.Fatal("no three ports in a row are free")
	return 0
}

func (r *rig) config(name, host string, network *Network) NodeConfig {
	r.Helper()
	shm, err := os.MkdirTemp("/dev/shm", "kvferry-process-test-")
	r.must(err)
	r.Cleanup(func() { _ = os.RemoveAll(shm) })
	return NodeConfig{Daemon: daemonPath, Name: name, Dir: r.TempDir(), PoolPath: filepath.Join(shm, "pool"), PoolBytes: 74 << 20, SlabBytes: 8 << 20, Listen: host, Network: network,
		Extra: "log: {level: debug}\n"}
}

func (r *rig) node(c NodeConfig) *Node {
	r.Helper()
	n, err := StartNode(r.Context(), c)
	r.must(err)
	r.Cleanup(func() {
		n.Kill()
		if r.Failed() {
			r.Logf("log of %s:\n%s", n.Name, n.LogTail())
		}
	})
	return n
}

func (r *rig) worker(name string, n *Node) *Worker {
	r.Helper()
	w, err := StartWorker(name)
	r.must(err)
	r.Cleanup(w.Kill)
	r.attach(w, n)
	return w
}

// again is a new process in the place of one that was killed, when the daemon has noticed that.
func (r *rig) again(name string, n *Node) *Worker {
	r.Helper()
	r.until("the daemon notices that "+name+" is dead", time.Second, func() bool {
		gone := false
		err := n.Admin(func(c kvferryv1.AdminClient) error {
			all, err := c.Workers(r.Context(), &kvferryv1.WorkersRequest{})
			gone = !slices.ContainsFunc(all.GetWorkers(), func(w *kvferryv1.Worker) bool { return w.Instance == name })
			return err
		})
		return err == nil && gone
	})
	return r.worker(name, n)
}

func (r *rig) attach(w *Worker, n *Node) {
	r.Helper()
	r.must(w.Attach(r.Context(), AttachArgs{SocketsDir: n.SocketsDir(), Instance: w.Name, Shape: wide}))
}

func (r *rig) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

// slow makes the link slow until the function that it returns is called, or the test ends.
func (r *rig) slow() (fast func()) {
	r.Helper()
	if r.net == nil {
		r.Skip("the rest needs a link of its own, which root can make")
	}
	r.must(r.net.Slow(slowRate))
	return func() { r.Helper(); r.must(r.net.Fast()) }
}

// handoff is a prompt on its way.
type handoff struct {
	r       *rig
	way     way
	hashes  []kvferry.Hash
	parents []kvferry.Hash
	source  []uint32 // prefill's
	target  []uint32 // of to
	ticket  []byte
	request string
	id      [16]byte
	to      *Worker
	begun   time.Time
	carried int64
	replies chan reply
}

type reply struct {
	LoadReply
	err  error
	took time.Duration
}

// prompt computes one that nobody has seen, and stores it where its way is by the pool.
func (r *rig) prompt(w way) *handoff {
	r.Helper()
	place := int(r.prompts%4) * promptBlocks // four of them may be on their way
	r.prompts++
	h := &handoff{r: r, way: w, source: numbers(place, promptBlocks), target: numbers(4*promptBlocks+place, promptBlocks), to: r.far, replies: make(chan reply, 1)}
	if w == lent {
		h.to = r.near
	}
	h.hashes, h.parents = promptOf(promptBlocks, r.prompts)
	r.must(r.prefill.Bump(r.Context(), h.source))
	r.must(r.prefill.Write(r.Context(), h.source, h.hashes))
	if w == pooled {
		h.store(0, promptBlocks)
	}
	return h
}

func (h *handoff) store(from, to int) {
	h.r.Helper()
	for ; from < to; from += 40 {
		end := min(to, from+40)
		s, err := h.r.prefill.Store(h.r.Context(), standin.StoreRequest{RequestID: "p", Blocks: h.source[from:end], Hashes: h.hashes[from:end], Parents: h.parents[from:end]})
		if err != nil || s.Failed > 0 {
			h.r.Fatal("store: ", s, err)
		}
	}
}

// offer offers it, lending its blocks unless it goes by the pool.
func (h *handoff) offer(change ...func(*standin.OfferRequest)) *handoff {
	h.r.Helper()
	r := h.r
	q := standin.OfferRequest{RequestID: "p", Hashes: h.hashes, Tokens: promptBlocks * 512, LifetimeMs: uint32(r.lifetime.Milliseconds())}
	if h.way != pooled {
		q.Blocks = h.source
	}
	for _, f := range change {
		f(&q)
	}
	var err error
	h.ticket, err = r.prefill.Offer(r.Context(), q)
	r.must(err)
	h.id, err = standin.OfferID(h.ticket)
	r.must(err)
	return h
}

func (r *rig) offered(w way) *handoff { r.Helper(); return r.prompt(w).offer() }

// load begins to load into blocks that held something else.
func (h *handoff) load() *handoff {
	h.r.Helper()
	r := h.r
	r.must(h.to.Scribble(r.Context(), h.target))
	if r.net != nil {
		var err error
		h.carried, err = r.net.Carried()
		r.must(err)
	}
	h.begun = time.Now()
	go func() {
		q := standin.LoadRequest{RequestID: h.request, Blocks: h.target, Hashes: h.hashes, Ticket: h.ticket, Direct: h.way == direct, DeadlineMs: uint32(r.deadline.Milliseconds())}
		got, err := h.to.Load(r.Context(), q)
		h.replies <- reply{got, err, time.Since(h.begun)}
	}()
	return h
}

// under waits until a part has come and the rest has not.
func (h *handoff) under() *handoff {
	h.r.Helper()
	h.r.until("bytes come over the link", deadline, func() bool {
		now, err := h.r.net.Carried()
		return err == nil && now-h.carried > slowFirst
	})
	if len(h.replies) > 0 {
		h.r.Fatal("the transfer was over before anything could happen to it")
	}
	return h
}

// end waits for the answer, which must come by the deadline: what is reported right is right, and what is not comes never. Blocks that did not come are scribbled at once; written tells whether
// somebody writes there all the same.
func (h *handoff) end() reply {
	h.r.Helper()
	return h.answer(h.r.deadline + time.Second)
}

func (h *handoff) answer(within time.Duration) reply {
	h.r.Helper()
	r := h.r
	var got reply
	select {
	case got = <-h.replies:
	case <-time.After(within + 5*time.Second):
		r.Fatalf("%v: no answer after %v", h.way, time.Since(h.begun))
	}
	if got.took > within {
		r.Errorf("%v: answered after %v", h.way, got.took)
	}
	h.check(got)
	return got
}

func (h *handoff) check(got reply) {
	h.r.Helper()
	r := h.r
	ready := 0
	for i, s := range got.Report.Status {
		if s != kvferryv1.BlockStatus_BLOCK_STATUS_READY {
			continue
		}
		ready++
		if wrong, err := h.to.Check(r.Context(), h.target[i:i+1], h.hashes[i:i+1]); err != nil || wrong > 0 {
			r.Fatalf("%v: block %d has %d wrong bytes: %v", h.way, i, wrong, err)
		}
	}
	if got.err == nil && ready != got.Report.Loaded {
		r.Errorf("%v: %d blocks are ready, %d were loaded", h.way, ready, got.Report.Loaded)
	}
	r.must(h.to.Scribble(r.Context(), h.target))
}

// lost waits for the end of a Load whose worker was killed.
func (h *handoff) lost() {
	h.r.Helper()
	select {
	case <-h.replies:
	case <-time.After(deadline):
		h.r.Fatal("a killed worker's call does not end")
	}
}

// again is the same ticket in another worker, or in the same one once more.
func (h *handoff) again(to *Worker) *handoff {
	c := *h
	c.to, c.replies = to, make(chan reply, 1)
	return &c
}

// untouched fails where somebody has written into the blocks since they were given back.
func (h *handoff) untouched() {
	h.r.Helper()
	n, err := h.to.Written(h.r.Context(), h.target)
	h.r.must(err)
	if n > 0 {
		h.r.Fatalf("%v: %d bytes were written after the worker had its blocks back", h.way, n)
	}
}

// all fails unless every block has come.
func (h *handoff) all() {
	h.r.Helper()
	if got := h.end(); got.err != nil || got.Report.Loaded != promptBlocks {
		h.r.Fatalf("%v: %d of %d blocks came: %v", h.way, got.Report.Loaded, promptBlocks, got.err)
	}
}

// none fails where a block has come.
func (h *handoff) none() {
	h.r.Helper()
	if got := h.end(); got.Report.Loaded != 0 {
		h.r.Fatalf("%v: %d blocks came", h.way, got.Report.Loaded)
	}
}

// served waits until the prefill worker has its blocks back, and they can be used: the reason is one of these.
func (h *handoff) served(within time.Duration, reasons ...string) {
	h.r.Helper()
	if h.way == pooled {
		return
	}
	ctx, cancel := context.WithTimeout(h.r.Context(), within)
	defer cancel()
	got, err := h.r.prefill.Served(ctx, h.id)
	if err != nil {
		h.r.Fatalf("%v: the prefill worker has not its blocks back after %v: %v", h.way, within, err)
	}
	for _, want := range reasons {
		if got == want {
			return
		}
	}
	h.r.Fatalf("%v: the prefill worker has its blocks back: %q, want one of %q", h.way, got, reasons)
}

// once fails where the prefill worker was told twice.
func (h *handoff) once() {
	h.r.Helper()
	if h.way == pooled {
		return
	}
	if got, err := h.r.prefill.Served(h.r.Context(), h.id); err != nil || got == "twice" {
		h.r.Fatalf("%v: served %s: %v", h.way, got, err)
	}
}

func (r *rig) until(what string, within time.Duration, f func() bool) {
	r.Helper()
	for over := time.Now().Add(within); !f(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(over) {
			r.Fatalf("did not happen within %v: %s", within, what)
		}
	}
}

// nothingHeld waits until nothing is pinned, leased, filled, claimed, offered or copied on either node, and no operation is left.
func (r *rig) nothingHeld(within time.Duration) {
	r.Helper()
	for _, n := range []*Node{r.a, r.b} {
		var last string
		over := time.Now().Add(within)
		for {
			last = held(r.Context(), n)
			if last == "" {
				break
			}
			if time.Now().After(over) {
				r.Fatalf("node %s holds after %v: %s", n.Name, within, last)
			}
			time.Sleep(5 * time.Millisecond)
		}
	}
}

// held says what a node holds; empty: nothing.
func held(ctx context.Context, n *Node) string {
	s, err := n.Status(ctx)
	if err != nil {
		return err.Error()
	}
	var leased, pinned, filling uint64
	for _, t := range s.Tiers {
		leased, pinned, filling = leased+t.LeasedBlocks, pinned+t.PinnedSlots, filling+t.FillingSlots
		if t.UsedBytes+t.FreeBytes != t.CapacityBytes {
			return fmt.Sprintf("%s: used %d + free %d is not %d", t.Tier, t.UsedBytes, t.FreeBytes, t.CapacityBytes)
		}
	}
	operations, offers := uint32(0), ""
	err = n.Admin(func(c kvferryv1.AdminClient) error {
		all, err := c.Workers(ctx, &kvferryv1.WorkersRequest{})
		if err != nil {
			return err
		}
		for _, w := range all.Workers {
			operations += w.Operations
		}
		list, err := c.Offers(ctx, &kvferryv1.OffersRequest{})
		for _, o := range list.GetOffers() {
			if o.State != "ended" {
				offers += fmt.Sprintf("\n%s by %s, %q, age %d ms, expires in %d ms", o.State, o.ClaimedBy, o.Path, o.AgeMs, o.ExpiresInMs)
			}
		}
		return err
	})
	if err != nil {
		return err.Error()
	}
	if leased+pinned+filling == 0 && s.Claims+s.OffersOpen+operations+s.TransfersQueued+s.TransfersRunning == 0 {
		return ""
	}
	return fmt.Sprintf("%d leased, %d pinned and %d filling slots, %d claims, %d open offers, %d operations, %d+%d transfers%s", leased, pinned, filling, s.Claims, s.OffersOpen, operations,
		s.TransfersQueued, s.TransfersRunning, offers)
}

// running tells whether a process is not dead.
func running(pid int) bool { return syscall.Kill(pid, 0) == nil }
