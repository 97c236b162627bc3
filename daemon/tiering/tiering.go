// Package tiering moves blocks between the pool and the drives: down when they are idle or room is wanted, up when they are asked for.
//
// The ledger plans each move and keeps its places; the mover copies it, on a link for each drive, by class; here the two are joined, and here it is known how each drive does. It owns the links and the
// drives' health, not the drives. Safe for concurrent use.
package tiering

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/counters"
	"github.com/kvferry/kvferry/daemon/health"
	"github.com/kvferry/kvferry/daemon/mover"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/nvme"
	"github.com/kvferry/kvferry/transport"
)

const (
	// transferBytes is about how much one transfer moves: what has come is used while the rest is under way, and syncs are shared by so much.
	transferBytes = 16 << 20
	// downBytesMax bounds what is on its way down to one drive.
	downBytesMax = 64 << 20
	// planMax bounds the blocks that one tick plans, and with them the time that the ledger's mutex is held.
	planMax = 1024
	// probeTimeout bounds a probe of a drive that is in trouble.
	probeTimeout = 10 * time.Second
	// downDeadline is what a drive has for a transfer down. It has failed where it has not answered by then.
	downDeadline = 30 * time.Second
)

// Config is what a Tiering works with; never modified after New.
type Config struct {
	Ledger *tiers.Ledger
	Pool   transport.Memory
	Drives []*nvme.Drive // those of the ledger's Config, in its order
	Names  []string      // of them, for people
	Down   tiers.Down
	// Transfers at a time, and that may wait in each class, of each drive.
	Transfers, Queue int
	Counters         *counters.Set
	Log              *slog.Logger
}

// Tiering has the drives.
type Tiering struct {
	cfg    Config
	drives atomic.Pointer[[]*drive] // never modified: replaced
	up     atomic.Int64             // bytes that prefetches are filling
	kick   chan struct{}
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// drive is one of them as this package sees it.
type drive struct {
	id     tiers.StoreID
	name   string
	device *nvme.Drive
	link   *mover.Link
	mu     sync.Mutex // held while health changes and the ledger is told; before the ledger's, after a transfer's
	health health.Tracker
	hung   int            // transfers that are late and not quiet
	slow   health.Tracker // slower than recomputing: probed by reading anyway, now and then
	down   atomic.Int64   // bytes on their way down
	probes atomic.Bool    // one is under way
	rate   rate           // of reads
}

// New starts the links.
func New(cfg Config) *Tiering {
	t := &Tiering{cfg: cfg, kick: make(chan struct{}, 1)}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	t.drives.Store(new([]*drive))
	for i, d := range cfg.Drives {
		t.Add(tiers.StoreID(i+1), cfg.Names[i], d)
	}
	t.wg.Go(t.relieve)
	return t
}

// Add takes over a drive that the ledger has under this number: the next one. It is called by one goroutine.
func (t *Tiering) Add(id tiers.StoreID, name string, d *nvme.Drive) {
	all := append(slices.Clone(t.all()), &drive{id: id, name: name, device: d, link: mover.NewLink(name, t.cfg.Transfers, t.cfg.Queue)})
	t.drives.Store(&all)
}

// all are the drives, by number less one.
func (t *Tiering) all() []*drive { return *t.drives.Load() }

// Close ends what is moving and returns when all of it is quiet.
func (t *Tiering) Close() {
	t.cancel()
	for _, d := range t.all() {
		d.link.Close()
	}
	t.wg.Wait()
}

// Tick plans what goes down, and probes drives that are in trouble. It is called a few times a second, by one goroutine.
func (t *Tiering) Tick(now time.Time) {
	if len(t.all()) == 0 {
		return
	}
	for _, d := range t.all() {
		if s, _, _ := d.health.View(); s != health.OK && !d.hangs() && d.health.Allow(now) {
			t.probe(d)
		}
	}
	t.down(now, t.cfg.Down)
}

// Filled is told that room in the pool was taken: there may be too little left.
func (t *Tiering) Filled() {
	select {
	case t.kick <- struct{}{}:
	default:
	}
}

// relieve makes room as it is taken, and goes on when something has gone down.
func (t *Tiering) relieve() {
	d := t.cfg.Down
	d.Idle = 0
	for {
		select {
		case <-t.kick:
			t.down(time.Now(), d)
		case <-t.ctx.Done():
			return
		}
	}
}

func (t *Tiering) down(now time.Time, d tiers.Down) {
	for _, d := range t.all() {
		if s, _, _ := d.health.View(); s == health.OK && d.down.Load() >= downBytesMax { // drives share what goes down: the slowest sets the pace
			return
		}
	}
	moves := t.cfg.Ledger.PlanDown(now, d, planMax)
	t.start(moves, kvferry.ClassDemote, now.Add(downDeadline), nil)
	if moves.More {
		t.Filled()
	}
}

// start submits moves, in transfers of one drive each. ended is told of each transfer when it is quiet: the indexes into the list of its moves, and which of them succeeded. It must not block.
func (t *Tiering) start(m tiers.Moves, class kvferry.Class, deadline time.Time, ended func(at []int, ok []bool)) (transfers int) {
	parts := map[tiers.StoreID][]int{}
	flush := func(id tiers.StoreID) {
		if at := parts[id]; len(at) > 0 {
			t.submit(t.all()[id-1], m, at, class, deadline, ended)
			transfers++
		}
		parts[id] = nil
	}
	bytes := map[tiers.StoreID]uint64{}
	for i := range m.List {
		move := &m.List[i]
		parts[move.Drive] = append(parts[move.Drive], i)
		if bytes[move.Drive] += move.From.Length; bytes[move.Drive] >= transferBytes {
			flush(move.Drive)
			bytes[move.Drive] = 0
		}
	}
	for _, d := range t.all() {
		flush(d.id)
	}
	return transfers
}

func (t *Tiering) submit(d *drive, m tiers.Moves, at []int, class kvferry.Class, deadline time.Time, ended func(at []int, ok []bool)) {
	c := &copier{d: d, pool: t.cfg.Pool, writes: class == kvferry.ClassDemote, moves: make(map[uint64]*tiers.Move, len(at))}
	transfer := &mover.Transfer{Class: class, Copier: c, Deadline: deadline}
	var n int64
	for _, i := range at {
		transfer.Batch = append(transfer.Batch, c.add(&m.List[i]))
		n += int64(m.List[i].From.Length)
	}
	if c.writes {
		d.down.Add(n)
	}
	transfer.Decide = t.decide(d, &c.turn)
	transfer.Quiet = func(mover.Outcome) {
		d.over(&c.turn)
		ok := make([]bool, len(at))
		now := time.Now()
		for k, i := range at {
			ok[k] = transfer.Batch[k].Err == nil
			t.cfg.Ledger.EndMove(now, &m.List[i], ok[k])
		}
		t.account(d, c, transfer.Batch, m, at)
		if c.writes {
			d.down.Add(-n)
			t.Filled() // more may wait
		}
		if ended != nil {
			ended(at, ok)
		}
	}
	if err := d.link.Submit(transfer); err != nil {
		for k := range transfer.Batch {
			transfer.Batch[k].Err = fmt.Errorf("%w: %w", errNotTried, err)
		}
		transfer.Quiet(mover.Cancelled)
	}
}

// Flush returns when what was removed from the drives is removed durably.
func (t *Tiering) Flush(ctx context.Context) error {
	for _, d := range t.all() {
		if err := d.device.Flush(ctx); err != nil {
			return fmt.Errorf("flush %s: %w", d.name, err)
		}
	}
	return nil
}
