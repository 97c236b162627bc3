package tiering

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/health"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/nvme/nvmetest"
	"github.com/kvferry/kvferry/tiers/policy"
	"github.com/kvferry/kvferry/tiers/tierstest"
)

func packed(blocks []tiers.Block) (out []byte) {
	for i := range blocks {
		out = append(out, blocks[i].Hash[:]...)
	}
	return out
}

// promote asks for blocks and has so much patience.
func (r *rig) promote(blocks []tiers.Block, patience time.Duration) Promotion {
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	return r.m.Tiering.Promote(ctx, Request{Class: kvferry.ClassLoad, Space: r.ref, Hashes: packed(blocks)})
}

// One transfer that a drive does not end closes it, until it has: there may be no others that could fail, since it keeps all that is at work. A request that had no patience closes none.
func TestHangingDrive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 100)
		r.down()
		r.ledger.Release(time.Now(), tiers.Selection{}, 0)
		chain := tierstest.Chain(1, 100)
		found := func() int { return r.ledger.Match(time.Now(), 1, "", r.ref, packed(chain), time.Time{}).Blocks }
		tick := func(d time.Duration) {
			for range int(d / (250 * time.Millisecond)) {
				time.Sleep(250 * time.Millisecond)
				r.m.Tiering.Tick(time.Now())
			}
		}

		release := r.device.Hold(nvmetest.OpRead)
		for range 5 {
			if p := r.promote(chain[:1], 50*time.Millisecond); p.Came != 0 {
				t.Errorf("%+v", p)
			}
		}
		release()
		tick(10 * time.Second)
		if n := found(); n != 100 {
			t.Errorf("%d blocks are found after requests that had no time: the drive is not to blame", n)
		}

		release = r.device.Hold(nvmetest.OpRead)
		defer release()
		if p := r.promote(chain[1:2], 5*time.Second); p.Came != 0 || !p.Waiting {
			t.Errorf("%+v", p)
		}
		synctest.Wait()
		if s, why, _ := r.m.Tiering.all()[0].health.View(); s != health.Degraded || found() > 2 {
			t.Errorf("a drive that hangs is %v %q, and %d blocks are found", s, why, found())
		}
		tick(2 * time.Minute)
		if found() > 2 {
			t.Error("the drive is used again though it hangs")
		}
		release()
		tick(2 * time.Minute)
		if n := found(); n != 100 {
			t.Errorf("%d blocks are found when it is over", n)
		}
		if p := r.promote(chain, 5*time.Second); p.Failed+p.NoRoom > 0 || r.ledger.Stats().InTier[policy.DRAM] != 100 {
			t.Errorf("%+v", p)
		}
	})
}

// Prefetches from a drive that does not answer leave room for stores, and end.
func TestPrefetchLeavesRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 200)
		r.down()
		r.ledger.Release(time.Now(), tiers.Selection{}, 0)
		release := r.device.Hold(nvmetest.OpRead)
		defer release()
		for range 3 {
			r.m.Tiering.Prefetch(r.ref, 0, packed(tierstest.Chain(1, 200)))
		}
		if st := r.ledger.Stats(); st.Filling != 64 {
			t.Errorf("%d slots of 256 are being filled", st.Filling)
		}
		fills := r.ledger.BeginFill(time.Now(), r.ref, 0, tierstest.Chain(2, 64))
		for i := range fills {
			if fills[i].Status != tiers.FillNew {
				t.Fatalf("block %d of a store: status %d", i, fills[i].Status)
			}
		}
		r.ledger.Abort(time.Now(), fills)
		release()
		synctest.Wait()
		if n := r.m.Tiering.up.Load(); n != 0 || r.ledger.Stats().InTier[policy.DRAM] != 64 {
			t.Errorf("%d bytes are under way at the end, %d blocks came", n, r.ledger.Stats().InTier[policy.DRAM])
		}
		r.m.Tiering.Prefetch(r.ref, 0, packed(tierstest.Chain(1, 200)))
		synctest.Wait()
		if n := r.ledger.Stats().InTier[policy.DRAM]; n != 128 {
			t.Errorf("%d blocks are in DRAM: the next ones come", n)
		}
	})
}

// What a drive that is in trouble cannot read is not lost by that, however much was under way: it is there when the drive is.
func TestUnreadableStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 100)
		r.down()
		r.ledger.Release(time.Now(), tiers.Selection{}, 0)
		chain := tierstest.Chain(1, 100)
		release := r.device.Hold(nvmetest.OpRead)
		defer release()
		for i := range 10 {
			go r.promote(chain[i*10:][:10], time.Second)
		}
		synctest.Wait()
		d := r.m.Tiering.all()[0]
		for range 3 {
			r.m.Tiering.failed(d, unix.EIO)
		}
		r.device.Inject(func(op nvmetest.Op, _ int64, _ int) error {
			if op == nvmetest.OpRead {
				return unix.EIO
			}
			return nil
		})
		release()
		synctest.Wait()
		if st := r.ledger.Stats(); st.InTier[policy.NVMe] != 100 || st.Moving != 0 {
			t.Errorf("%d of 100 blocks are left on the drive", st.InTier[policy.NVMe])
		}
	})
}
