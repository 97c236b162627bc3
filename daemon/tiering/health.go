package tiering

import (
	"context"
	"time"

	"github.com/kvferry/kvferry/daemon/health"
	"github.com/kvferry/kvferry/daemon/mover"
	"github.com/kvferry/kvferry/tiers/nvme"
)

// failed counts a failure of a drive. One that fails again and again is closed: it is neither written nor read until a probe of it succeeds.
func (t *Tiering) failed(d *drive, err error) {
	if !d.health.Failure(time.Now(), err.Error()) {
		return
	}
	t.cfg.Ledger.SetOpen(d.id, false)
	t.cfg.Log.Error("drive is degraded: nothing is written to it or read from it", "drive", d.name, "error", err)
	t.cfg.Counters.Add("drives", "degraded", 1)
}

func (t *Tiering) succeeded(d *drive) {
	if !d.health.Success() {
		return
	}
	t.cfg.Ledger.SetOpen(d.id, true)
	t.cfg.Log.Info("drive is ok again", "drive", d.name)
	t.cfg.Counters.Add("drives", "recovered", 1)
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
