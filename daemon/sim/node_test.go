package sim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"testing/synctest"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/counters"
	"github.com/kvferry/kvferry/daemon/handoff"
	"github.com/kvferry/kvferry/daemon/mover"
	"github.com/kvferry/kvferry/daemon/session"
	"github.com/kvferry/kvferry/daemon/tiering"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/nvme"
	"github.com/kvferry/kvferry/tiers/policy"
	"github.com/kvferry/kvferry/tiers/pool"
	"github.com/kvferry/kvferry/transport"
)

var (
	errSimulated = errors.New("simulated failure")
	errDead      = fmt.Errorf("%w: the daemon is dead", transport.ErrLink)
)

// claimLease is short, so that claims are renewed, or are not.
const claimLease = 2 * time.Second

// node is a machine: a pool's file, the processes of engines, and at most times a daemon.
type node struct {
	w       *world
	index   int
	name    string
	path    string // of the pool
	epochs  byte
	procs   []*proc
	engines int
	backlog []func() // what processes told a daemon that is frozen
	back    time.Time
	ticked  time.Time // when its timers came last, in this step; zero: they did not
	flipped flips
	disks   []*disk
	left    []tiers.BlockView // were on disks when the last daemon ended
	power   bool              // has failed
	broken  []uint64          // offsets that workers have reported in this step

	mu     sync.Mutex
	daemon *daemon // nil: down. Written by the scheduler's goroutine
	frozen time.Time
}

// daemon is one incarnation of a node's parts.
type daemon struct {
	node      *node
	epoch     kvferry.Epoch
	pool      *pool.Pool
	slots     *slots
	memory    transport.Memory
	ledger    *tiers.Ledger
	link      *mover.Link
	fold      *fold
	drives    []*nvme.Drive
	tiering   *tiering.Tiering
	registry  *handoff.Registry
	fetcher   *handoff.Fetcher
	sessions  *session.Manager
	gate      *gate
	owners    tiers.Owner
	counters  counters.Set
	direct    bool
	attaching *target // of the process that attaches now
	targets   map[kvferry.RegionID]*target
	ctx       context.Context // ends when it dies or is stopped
	end       context.CancelFunc
}

// start makes an incarnation over the pool's file.
func (n *node) start() {
	n.nextDisks()
	p, found, err := pool.Open(pool.Config{Path: n.path, Bytes: 2<<20 + 2*(2<<20), SlabBytes: 2 << 20, BootID: "sim"})
	if err != nil {
		n.w.fatalf("open pool: %v", err)
	}
	n.epochs++
	d := &daemon{node: n, epoch: kvferry.Epoch{byte(n.index + 1), n.epochs}, pool: p, memory: transport.Memory{ID: 1, Bytes: p.Bytes()}, gate: &gate{}, targets: map[kvferry.RegionID]*target{}, direct: n.w.seed%4 > 0, fold: newFold()}
	d.ctx, d.end = context.WithCancel(context.Background())
	d.slots = &slots{Pool: p, w: n.w, reserved: map[uint64]bool{}, resident: map[uint64]bool{}, writers: map[uint64]int{}, flipped: &n.flipped}
	onDisks := n.openDisks(d)
	cfg := tiers.Config{Pool: d.slots, Limits: tiers.DefaultLimits}
	cfg.Limits.Changes = 4096
	if cfg.Policy, err = policy.New([]string{"lru", "reuse", "s3fifo"}[n.w.seed/3%3], 200); err != nil {
		n.w.fatalf("policy: %v", err)
	}
	for _, k := range d.drives {
		cfg.Drives = append(cfg.Drives, k)
	}
	d.ledger = tiers.New(cfg)
	d.ledger.Adopt(time.Now(), 0, found)
	for i, keep := range onDisks {
		d.ledger.Adopt(time.Now(), tiers.StoreID(i+1), keep)
	}
	log := slog.New(slog.DiscardHandler)
	if len(d.drives) > 0 {
		d.tiering = tiering.New(tiering.Config{Ledger: d.ledger, Pool: d.memory, Drives: d.drives, Names: []string{"0", "1"}, Down: down, Transfers: 2, Queue: 8, Counters: &d.counters, Log: log})
	}
	offers := handoff.DefaultLimits
	offers.ClaimLease, offers.OpenEnded = claimLease, 5*time.Second
	d.link = mover.NewLink("local", 2, 8)
	d.registry = handoff.NewRegistry(handoff.Config{
		Epoch: d.epoch, Ledger: d.ledger, Pool: d.memory, DataAddress: n.name + "/data", Limits: offers, Counters: &d.counters, Log: log,
		Owners:  d.owner,
		Promote: d.promote(),
		Lend: func(scheduler tiers.Owner, instance string, rank, region uint32, offered time.Time) (*handoff.Lent, error) {
			return d.sessions.Lend(scheduler, instance, rank, region, offered)
		},
		Served: func(instance string, rank uint32, offer [16]byte, reason string) {
			d.sessions.Served(instance, rank, offer, reason)
		},
	})
	d.fetcher = handoff.NewFetcher(handoff.FetcherConfig{
		Epoch: d.epoch, Address: n.name, Ledger: d.ledger, Pool: d.memory, Registry: d.registry, Control: n.w.mutation.control(&control{d}), NewLink: d.newLink, Resolve: n.resolve,
		Counters: &d.counters, Log: log, Peers: 4, PartBytes: 3 * shardBytes,
	})
	limits := session.DefaultLimits
	limits.StoreDeadline, limits.LoadDeadline = 2*time.Second, 3*time.Second
	d.sessions = session.New(session.Config{
		Ledger: d.ledger, Pool: d.memory, PoolFile: p.ReadOnly(), Local: d.link, Offers: d.registry, Fetcher: d.fetcher, Tiering: d.tiering, Limits: limits, Counters: &d.counters, Log: log,
		Allowed:   func(uint32) bool { return true },
		Direct:    d.direct,
		NewCopier: d.newCopier,
		// Real pidfds wait in the runtime's poller, which no simulated clock can see through.
		Watch: func(_ context.Context, _ *os.File, _, done func()) error { done(); return nil },
	})
	n.mu.Lock()
	n.daemon = d
	n.mu.Unlock()
	n.checkDisks(onDisks)
	n.checkDurable()
}

func (d *daemon) promote() func(tiers.SpaceRef, uint16, []byte) {
	if d.tiering == nil {
		return nil
	}
	return d.tiering.Prefetch
}

func (d *daemon) owner() tiers.Owner {
	d.node.mu.Lock()
	defer d.node.mu.Unlock()
	d.owners++
	return 1<<40 + d.owners
}

func (n *node) resolve(_ context.Context, address string) (string, error) {
	if n.w.nodeAt(address) == nil {
		return "", fmt.Errorf("%q is not a node", address)
	}
	return address, nil
}

// now is the incarnation of this moment, for goroutines other than the scheduler's.
func (n *node) now() *daemon {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.daemon
}

// down takes the incarnation out of the world.
func (n *node) down() *daemon {
	n.mu.Lock()
	defer n.mu.Unlock()
	d := n.daemon
	n.daemon, n.frozen = nil, time.Time{}
	n.backlog, n.broken = nil, nil
	return d
}

// stop ends the daemon as a signal does: everything becomes quiet first.
func (n *node) stop() {
	for _, k := range n.disks {
		k.set(healthy)
	}
	for _, p := range n.procs {
		p.target.end()
		if p.s != nil {
			go p.s.Close(context.Canceled)
			synctest.Wait()
		}
	}
	n.drain()
	d := n.down()
	d.close()
	n.left = d.durable() // until it has stopped, blocks leave
	for _, p := range n.procs {
		p.lost()
	}
}

// crash ends the daemon in the middle of whatever it does. Its parts are closed behind the scenes, over memory that is no longer the pool's: nobody sees what they still do.
func (n *node) crash() {
	if n.daemon == nil {
		return
	}
	d := n.down()
	n.left = d.durable()
	if d.slots.busy() {
		n.w.saw("crashes in mid-copy", 1)
	}
	n.w.saw("crashes", 1)
	if err := detach(d.memory.Bytes); err != nil {
		n.w.fatalf("detach the pool of a dead daemon: %v", err)
	}
	_ = os.Remove(n.path + ".lock") // the kernel gives back a dead process's locks
	d.end()
	d.gate.openAll()
	for _, p := range n.procs {
		p.lost()
	}
	d.close()
	n.back = time.Now().Add(time.Duration(n.w.r.Int64N(int64(time.Second))))
}

// detach puts private memory with the same content in the place of a mapping of a file. Nothing else runs.
func detach(b []byte) error {
	kept := append([]byte{}, b...)
	if _, err := unix.MmapPtr(-1, 0, unsafe.Pointer(&b[0]), uintptr(len(b)), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE|unix.MAP_FIXED); err != nil {
		return err
	}
	copy(b, kept)
	return nil
}

func (d *daemon) close() {
	d.sessions.CloseAll(context.Canceled)
	d.end()
	d.fetcher.Close()
	d.link.Close()
	if d.tiering != nil {
		d.tiering.Close()
	}
	for _, k := range d.drives {
		_ = k.Close() // a dead one's is dead
	}
	d.registry.Expire(time.Now().Add(time.Hour)) // what a dead process has mapped is gone with it
	synctest.Wait()                              // whoever reads the pool has seen that it is gone
	for _, c := range d.counters.All() {
		d.node.w.saw(c.Name+"/"+c.Reason, int(c.Value))
	}
	d.slots.mu.Lock()
	d.slots.closed = true // a real daemon waits for those whom it serves
	d.slots.mu.Unlock()
	if err := d.pool.Close(); err != nil {
		d.node.w.fatalf("close pool: %v", err)
	}
}

// restart stops the daemon and starts it again.
func (n *node) restart() {
	if n.daemon == nil || n.isFrozen() || n.w.r.IntN(2) > 0 {
		return
	}
	n.stop()
	n.start()
	n.w.saw("restarts", 1)
}

// freeze lets a daemon do nothing for a while that others can see.
func (n *node) freeze() {
	if n.daemon == nil || n.isFrozen() {
		return
	}
	n.mu.Lock()
	n.frozen = time.Now().Add(time.Duration(n.w.r.Int64N(int64(2500 * time.Millisecond))))
	n.mu.Unlock()
	n.w.saw("freezes", 1)
}

func (n *node) isFrozen() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.frozen.After(time.Now())
}

func (n *node) thaw() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.frozen = time.Time{}
}

// tick is what the daemon's timers do, and its coming back.
func (n *node) tick() {
	n.ticked = time.Time{}
	for _, p := range n.procs {
		for id, k := range p.kept {
			if !k.until.After(time.Now()) {
				p.unkeep(id) // the engine's patience is over
			}
		}
	}
	if n.daemon == nil {
		if !n.back.After(time.Now()) {
			n.start()
		}
		return
	}
	if n.isFrozen() {
		return
	}
	now := time.Now()
	n.ticked = now
	n.daemon.ledger.Expire(now)
	n.daemon.registry.Expire(now)
	n.daemon.fetcher.Forget(now)
	if n.daemon.tiering != nil {
		n.daemon.tiering.Tick(now)
	}
	told := n.backlog
	n.backlog = nil
	for _, f := range told {
		f()
	}
}

// pause is time that passes for a daemon. It ends early with ctx or the daemon's death; while the daemon is frozen it does not end.
func (d *daemon) pause(ctx context.Context, t time.Duration) error {
	timer := time.NewTimer(t)
	defer timer.Stop()
	var err error
	select {
	case <-timer.C:
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-d.ctx.Done():
		return errDead
	}
	if !d.awake() {
		return errDead
	}
	return err
}

// awake waits while the daemon is frozen. It answers false when it is dead.
func (d *daemon) awake() bool {
	for {
		d.node.mu.Lock()
		frozen := d.node.frozen
		d.node.mu.Unlock()
		if d.ctx.Err() != nil {
			return false
		}
		if left := time.Until(frozen); left <= 0 {
			return true
		} else if left > 50*time.Millisecond { // it may be woken early
			frozen = time.Now().Add(50 * time.Millisecond)
		}
		timer := time.NewTimer(time.Until(frozen))
		select {
		case <-timer.C:
		case <-d.ctx.Done():
			timer.Stop()
		}
	}
}
