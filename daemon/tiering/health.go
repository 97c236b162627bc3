package tiering

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/daemon/health"
	"github.com/kvferry/kvferry/daemon/mover"
	"github.com/kvferry/kvferry/tiers/nvme"
)

// failed counts a failure of a drive. One that fails again and again is closed: it is neither written nor read until a probe of it succeeds.
func (t *Tiering) failed(d *drive, err error) {
	d.mu.Lock() // the ledger is told of changes in their order: else a drive that is ok could stay closed, and nobody would probe it
	defer d.mu.Unlock()
	t.closeLocked(d, d.health.Failure(time.Now(), err.Error()), err)
}

func (t *Tiering) closeLocked(d *drive, degraded bool, err error) {
	if !degraded {
		return
	}
	t.cfg.Ledger.SetOpen(d.id, false)
	t.cfg.Log.Error("drive is degraded: nothing is written to it or read from it", "drive", d.name, "error", err)
	t.cfg.Counters.Add("drives", "degraded", 1)
}

func (t *Tiering) succeeded(d *drive) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.hung > 0 || !d.health.Success() {
		return
	}
	t.cfg.Ledger.SetOpen(d.id, true)
	t.cfg.Log.Info("drive is ok again", "drive", d.name)
	t.cfg.Counters.Add("drives", "recovered", 1)
}

// hangs tells whether something that is late is still at the drive.
func (d *drive) hangs() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.hung > 0
}

// hangAfter is what a drive has at least for what it has begun, however near the deadline was.
const hangAfter = 2 * time.Second

// turn is a transfer's turn at its drive.
type turn struct {
	began  atomic.Int64 // unix ns; 0: the drive has nothing of it
	quiet  bool         // guarded by the drive's mutex, like the next
	blamed bool
}

func (r *turn) begin() (end func()) {
	r.began.Store(time.Now().UnixNano())
	return func() { r.began.Store(0) }
}

// decide is mover.Transfer's: a drive that does not end what it has by the deadline is closed until it has.
func (t *Tiering) decide(d *drive, r *turn) func(mover.Outcome) mover.Outcome {
	return func(out mover.Outcome) mover.Outcome {
		if out == mover.Expired {
			t.late(d, r)
		}
		return out
	}
}

func (t *Tiering) late(d *drive, r *turn) {
	began := r.began.Load()
	if began == 0 {
		return
	}
	if left := hangAfter - time.Since(time.Unix(0, began)); left > 0 {
		time.AfterFunc(left, func() { t.late(d, r) })
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if r.quiet || r.blamed {
		return
	}
	r.blamed = true
	d.hung++
	t.closeLocked(d, d.health.Break(time.Now(), errLate.Error()), errLate) // at once: it may keep all that is at work, and then nothing else would ever fail
}

// over is told that a transfer is quiet.
func (d *drive) over(r *turn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	r.quiet = true
	if r.blamed {
		d.hung--
	}
}

// probe tries a degraded drive, beside everything else.
func (t *Tiering) probe(d *drive) {
	if !d.probes.CompareAndSwap(false, true) {
		return // the last one hangs in the drive
	}
	t.wg.Go(func() {
		defer d.probes.Store(false)
		ctx, cancel := context.WithTimeout(t.ctx, probeTimeout)
		defer cancel()
		if err := d.device.Probe(ctx); err != nil {
			t.failed(d, err)
			return
		}
		t.succeeded(d)
	})
}

// Worth decides whether blocks that are only on a drive are to be restored, for which restoring must be estimated to beat computing them; zero: not known. A drive that is found slower is left alone,
// but for one try now and then that measures it again.
func (t *Tiering) Worth(now time.Time, restore, compute time.Duration) bool {
	slower := compute > 0 && restore > compute
	worth := !slower
	for _, d := range t.all() {
		if !slower {
			d.slow.Success()
		} else if d.slow.Allow(now) {
			worth = true
			if d.slow.Failure(now, "slower than recomputing: "+restore.String()+" against "+compute.String()) {
				t.cfg.Log.Warn("drive is slower than recomputing", "drive", d.name, "restore", restore, "compute", compute)
				t.cfg.Counters.Add("drives", "slow", 1)
			}
		}
	}
	if !worth {
		t.cfg.Counters.Add("drives", "not_worth_reading", 1)
	}
	return worth
}

// DriveView is a drive as people see it.
type DriveView struct {
	Name      string
	State     health.State
	Reason    string
	Since     time.Time
	Slow      string // why it is left alone where computing is faster; empty: it is not
	SlowSince time.Time
	Rate      float64
	Link      mover.Stats
	Device    nvme.Stats
}

// Drives are all of them, in the order of the ledger's. A Tiering that is nil has none.
func (t *Tiering) Drives() []DriveView {
	if t == nil {
		return nil
	}
	var out []DriveView
	for _, d := range t.all() {
		v := DriveView{Name: d.name, Rate: d.rate.now(), Link: d.link.Stats(), Device: d.device.Stats()}
		v.State, v.Reason, v.Since = d.health.View()
		if s, why, since := d.slow.View(); s != health.OK {
			v.Slow, v.SlowSince = why, since
		}
		out = append(out, v)
	}
	return out
}
