package tiering

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/csrc/copyshim"
	"github.com/kvferry/kvferry/daemon/health"
	"github.com/kvferry/kvferry/daemon/mover"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/nvme"
	"github.com/kvferry/kvferry/tiers/policy"
	"github.com/kvferry/kvferry/transport"
)

// errNotTried is in the copies of a transfer that the link has refused.
var errNotTried = errors.New("tiering: not tried")

// errLate is why a drive has failed that has not ended a transfer by its deadline.
var errLate = errors.New("tiering: no answer by the deadline")

// errBroken is in the copy of a block whose bytes in the pool are not what was stored.
var errBroken = errors.New("tiering: checksum does not hold in the pool")

// copier makes the moves of one transfer, all of one drive and one direction. The mover knows them by their places in the pool.
type copier struct {
	d      *drive
	pool   transport.Memory
	writes bool
	moves  map[uint64]*tiers.Move // by offset in the pool
	turn   turn
}

// add takes a move over, and is its copy.
func (c *copier) add(m *tiers.Move) transport.Copy {
	memory, file := m.Fill.Place, m.From
	if c.writes {
		memory, file = file, memory
	}
	c.moves[memory.Offset] = m
	inPool := []kvferry.Segment{{Region: c.pool.ID, Offset: memory.Offset, Length: memory.Length}}
	onDrive := []kvferry.Segment{{Offset: file.Offset, Length: file.Length}}
	if c.writes {
		return transport.Copy{Dst: onDrive, Src: inPool}
	}
	return transport.Copy{Dst: inPool, Src: onDrive}
}

// Copy is transport.Copier.
func (c *copier) Copy(ctx context.Context, batch []transport.Copy) error {
	defer c.turn.begin()()
	for i := range batch {
		batch[i].Err = errNotTried
	}
	if c.writes {
		return c.write(ctx, batch)
	}
	ops := make([]nvme.ReadOp, len(batch))
	var bytes uint64
	for i := range batch {
		s := batch[i].Dst[0]
		m := c.moves[s.Offset]
		into, err := c.pool.Slice(s)
		if err != nil {
			return err
		}
		ops[i] = nvme.ReadOp{Slab: m.DriveSlab, Slot: m.DriveSlot, Into: into, CRC32C: m.From.CRC32C}
		bytes += s.Length
	}
	start := time.Now()
	c.d.device.Read(ctx, ops)
	failed := false
	for i := range ops {
		batch[i].Err = ops[i].Err
		failed = failed || ops[i].Err != nil
	}
	if !failed {
		c.d.rate.add(bytes, time.Since(start))
	}
	return ctx.Err()
}

func (c *copier) write(ctx context.Context, batch []transport.Copy) error {
	ops, at := make([]nvme.WriteOp, 0, len(batch)), make([]int, 0, len(batch))
	for i := range batch {
		s := batch[i].Src[0]
		m := c.moves[s.Offset]
		payload, err := c.pool.Slice(s)
		if err != nil {
			return err
		}
		if copyshim.Checksum(0, payload) != m.From.CRC32C { // memory flips bits too, and what it has lost is not to look durable
			batch[i].Err = errBroken
			continue
		}
		ops, at = append(ops, nvme.WriteOp{Slab: m.DriveSlab, Slot: m.DriveSlot, Header: m.Header, Payload: payload}), append(at, i)
	}
	c.d.device.Write(ctx, ops)
	for k, i := range at {
		batch[i].Err = ops[k].Err
	}
	return ctx.Err()
}

// Close is transport.Copier.
func (c *copier) Close() error { return nil }

// rate is how fast something reads, smoothed.
type rate struct {
	mu    sync.Mutex
	value float64 // bytes/s; 0: not measured
}

// rateBytesMin is what a measurement must have to tell the rate and not the cost of starting.
const rateBytesMin = 256 << 10

func (r *rate) add(bytes uint64, took time.Duration) {
	if bytes < rateBytesMin || took <= 0 {
		return
	}
	now := float64(bytes) / took.Seconds()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.value == 0 {
		r.value = now
	}
	r.value += (now - r.value) / 8
}

func (r *rate) now() float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.value
}

// account keeps a drive's health, and removes what it can no longer be read from.
func (t *Tiering) account(d *drive, c *copier, batch []transport.Copy, m tiers.Moves, at []int) {
	moved, corrupt, lost, broken := 0, 0, 0, 0
	var failure error
	state, _, _ := d.health.View()
	for k := range batch {
		err := batch[k].Err
		switch {
		case err == nil:
			moved++
			continue
		case errors.Is(err, errNotTried), errors.Is(err, mover.ErrNotCopied), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
			lost++
			continue
		case errors.Is(err, errBroken):
			broken++
			t.cfg.Ledger.DropFrom(m.List[at[k]].Header.Space, m.List[at[k]].Fill.Block.Hash, policy.DRAM)
		case errors.Is(err, nvme.ErrCorrupt):
			corrupt++
		default:
			failure = err
			if state != health.OK { // all of it fails: what was under way is there again with the drive
				continue
			}
		}
		if !c.writes {
			b := m.List[at[k]].Fill.Block
			t.cfg.Ledger.DropFrom(m.List[at[k]].Header.Space, b.Hash, policy.NVMe)
		}
	}
	name := "promote_blocks"
	if c.writes {
		name = "demote_blocks"
	}
	t.cfg.Counters.Add(name, "moved", moved)
	t.cfg.Counters.Add(name, "corrupt", corrupt)
	t.cfg.Counters.Add(name, "not_tried", lost)
	t.cfg.Counters.Add(name, "failed", len(batch)-moved-corrupt-lost-broken)
	if broken > 0 {
		t.cfg.Log.Error("blocks in the pool were broken, and removed", "blocks", broken)
		t.cfg.Counters.Add("broken_blocks", "pool", broken)
	}
	if corrupt > 0 {
		t.cfg.Log.Error("blocks on a drive were broken, and removed", "drive", d.name, "blocks", corrupt)
		t.cfg.Counters.Add("broken_blocks", "nvme", corrupt)
	}
	switch {
	case failure != nil:
		t.failed(d, failure)
	case moved > 0:
		t.succeeded(d)
	}
}
