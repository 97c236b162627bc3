package tiering

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/csrc/copyshim"
	"github.com/kvferry/kvferry/daemon/counters"
	"github.com/kvferry/kvferry/daemon/health"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/nvme"
	"github.com/kvferry/kvferry/tiers/nvme/nvmetest"
	"github.com/kvferry/kvferry/tiers/policy"
	"github.com/kvferry/kvferry/tiers/tierstest"
	"github.com/kvferry/kvferry/transport"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const shardBytes = 64 << 10

// rig is a pool in memory and a drive that can fail.
type rig struct {
	t      *testing.T
	device *nvmetest.Device
	ledger *tiers.Ledger
	pool   transport.Memory
	m      *Manual
	ref    tiers.SpaceRef
	count  counters.Set
}

func newRig(t *testing.T, blocks int) *rig {
	t.Helper()
	const slabs, slabBytes = 8, 2 << 20
	r := &rig{t: t, device: nvmetest.New(18 << 20), pool: transport.Memory{ID: 1, Bytes: make([]byte, slabs*slabBytes)}}
	drive, _, err := nvme.OpenDevice(nvme.Config{Bytes: 18 << 20, SlabBytes: slabBytes, Depth: 8}, r.device)
	if err != nil {
		t.Fatal(err)
	}
	r.ledger = tiers.New(tiers.Config{Pool: tierstest.NewSlots(slabs, slabBytes), Drives: []tiers.Slots{drive}, Limits: tiers.DefaultLimits})
	log := slog.New(slog.DiscardHandler)
	t1 := New(Config{Ledger: r.ledger, Pool: r.pool, Drives: []*nvme.Drive{drive}, Names: []string{"drive"}, Down: tiers.Down{High: 1, Low: 1}, Transfers: 2, Queue: 64, Counters: &r.count, Log: log})
	r.m = &Manual{Ledger: r.ledger, Pool: r.pool, Tiering: t1, Counters: &r.count, Log: log}
	t.Cleanup(func() {
		t1.Close()
		r.m.Close()
		if err := drive.Close(); err != nil {
			t.Error(err)
		}
		if err := r.ledger.Check(); err != nil || r.ledger.Stats().Moving != 0 {
			t.Error(err, r.ledger.Stats())
		}
	})
	if r.ref, err = r.ledger.Space(tiers.SpaceShape{ID: kvferry.SpaceID{1}, Shards: 1, ShardBytes: shardBytes}); err != nil {
		t.Fatal(err)
	}
	fills := r.ledger.BeginFill(time.Now(), r.ref, 0, tierstest.Chain(1, blocks))
	crcs := make([]uint32, len(fills))
	for i, f := range fills {
		b := r.pool.Bytes[f.Place.Offset:][:shardBytes]
		for k := range b {
			b[k] = byte(i + k*7)
		}
		crcs[i] = copyshim.Checksum(0, b)
	}
	r.ledger.Commit(time.Now(), fills, crcs)
	return r
}

// down copies everything to the drive.
func (r *rig) down() {
	r.t.Helper()
	var copied int
	for from := Cursor(0); ; {
		d, next, err := r.m.Demote(r.t.Context(), tiers.Selection{}, false, from)
		if err != nil || d.Failed+d.NoRoom+d.UnderWay > 0 {
			r.t.Fatal(d, err)
		}
		copied += d.Copied
		if from = next; from == 0 {
			break
		}
	}
	if n := r.ledger.Stats().InTier[policy.NVMe]; n != copied || n == 0 {
		r.t.Fatalf("%d copied, %d on the drive", copied, n)
	}
}

func (r *rig) verify(ctx context.Context, tier int) (Verification, error) {
	return r.m.Verify(ctx, tier, func(Verification) {})
}

// A drive that fails: what cannot be read stays, and after some failures the rest is skipped.
func TestVerifyFailingDrive(t *testing.T) {
	r := newRig(t, 200)
	r.down()
	reads := 0
	r.device.Inject(func(op nvmetest.Op, _ int64, _ int) error {
		if op == nvmetest.OpRead {
			if reads++; reads > 20 {
				return unix.EIO
			}
		}
		return nil
	})
	v, err := r.verify(t.Context(), policy.NumTiers)
	if err != nil || v.Total != 400 || v.Slots != 220 || v.Unreadable == 0 || v.Skipped == 0 && v.Unreadable != 180 || v.Slots+v.Unreadable+v.Skipped != 400 || v.Broken != 0 {
		t.Errorf("%+v %v", v, err)
	}
	if st := r.ledger.Stats(); st.InTier[policy.NVMe] != 200 || st.Moving != 0 {
		t.Errorf("%d blocks are left on the drive", st.InTier[policy.NVMe])
	}
	for range 3 { // now it is degraded for certain
		r.m.Tiering.failed(r.m.Tiering.all()[0], errors.New("again"))
	}
	if s, _, _ := r.m.Tiering.all()[0].health.View(); s != health.Degraded {
		t.Fatal(s)
	}
	if v, err := r.verify(t.Context(), policy.NVMe); err != nil || v.Slots != 0 || v.Skipped != 200 {
		t.Errorf("of a degraded drive: %+v %v", v, err)
	}
	more := tierstest.Chain(9, 3)
	fills := r.ledger.BeginFill(time.Now(), r.ref, 0, more)
	r.ledger.Commit(time.Now(), fills, make([]uint32, len(fills)))
	if d, _, err := r.m.Demote(t.Context(), tiers.Selection{Prefix: more[2].Hash[:]}, false, 0); err != nil || d.NoRoom != 1 || d.Copied != 0 {
		t.Errorf("to a degraded drive: %+v %v", d, err)
	}
	if p, _, err := r.m.Prefetch(t.Context(), tiers.Selection{}, 0); err != nil || p.Came != 0 {
		t.Errorf("from a degraded drive: %+v %v", p, err)
	}
}

// A drive that hangs does not keep who asked; there is one verification at a time.
func TestVerifyHangingDrive(t *testing.T) {
	r := newRig(t, 100)
	r.down()
	release := r.device.Hold(nvmetest.OpRead)
	defer release()
	ctx, cancel := context.WithTimeout(t.Context(), 150*time.Millisecond)
	defer cancel()
	start := time.Now()
	if v, err := r.verify(ctx, policy.NVMe); !errors.Is(err, context.DeadlineExceeded) || v.Slots != 0 {
		t.Errorf("%+v %v", v, err)
	}
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("it took %v", took)
	}
	if _, err := r.verify(t.Context(), policy.DRAM); !errors.Is(err, ErrVerifying) {
		t.Errorf("a second one: %v", err)
	}
	release()
	deadline := time.Now().Add(5 * time.Second)
	for {
		v, err := r.verify(t.Context(), policy.NumTiers)
		if err == nil {
			if v.Slots != 200 || v.Broken+v.Unreadable+v.Skipped != 0 {
				t.Errorf("when it is over: %+v", v)
			}
			break
		}
		if !errors.Is(err, ErrVerifying) || time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond)
	}
}

// What is moved by hand and not waited for goes on; the next call begins after it.
func TestDemoteWithoutPatience(t *testing.T) {
	r := newRig(t, 100)
	release := r.device.Hold(nvmetest.OpWrite)
	defer release()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	d, next, err := r.m.Demote(ctx, tiers.Selection{}, false, 0)
	if err != nil || d.UnderWay == 0 || d.Copied != 0 || next == 0 {
		t.Fatalf("%+v %d %v", d, next, err)
	}
	release()
	copied := d.UnderWay
	for next != 0 {
		if d, next, err = r.m.Demote(t.Context(), tiers.Selection{}, false, next); err != nil || d.Failed+d.NoRoom+d.UnderWay > 0 {
			t.Fatal(d, err)
		}
		copied += d.Copied
	}
	deadline := time.Now().Add(5 * time.Second)
	for r.ledger.Stats().InTier[policy.NVMe] != 100 {
		if time.Now().After(deadline) {
			t.Fatal(r.ledger.Stats())
		}
		time.Sleep(time.Millisecond)
	}
	if copied != 100 {
		t.Errorf("%d were copied", copied)
	}
}

// An eviction by hand that the drive does not make durable says so.
func TestEvictNotDurable(t *testing.T) {
	r := newRig(t, 10)
	r.down()
	r.device.Inject(func(op nvmetest.Op, _ int64, _ int) error {
		if op == nvmetest.OpSync {
			return unix.EIO
		}
		return nil
	})
	if n, _, err := r.m.Evict(t.Context(), tiers.Selection{}, policy.NumTiers, 0); n != 10 || !errors.Is(err, nvme.ErrDevice) || !errors.Is(err, ErrNotDurable) {
		t.Error(n, err)
	}
	r.device.Inject(nil)
	release := r.device.Hold(nvmetest.OpSync)
	fills := r.ledger.BeginFill(time.Now(), r.ref, 0, tierstest.Chain(3, 4))
	r.ledger.Commit(time.Now(), fills, make([]uint32, len(fills)))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if n, _, err := r.m.Evict(ctx, tiers.Selection{}, policy.NumTiers, 0); n != 4 || !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, ErrNotDurable) {
		t.Error(n, err) // a drive that hangs does not keep who asked
	}
	if n, _, err := r.m.Evict(t.Context(), tiers.Selection{}, policy.DRAM, 0); n != 0 || err != nil {
		t.Error(n, err)
	}
	release()
	if err := r.m.Tiering.Flush(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestCursors(t *testing.T) {
	c := newCursor(0xfffffffe, movedWhole+5, againMax-1)
	if c.ledger() != 0xfffffffe || c.moved() != movedWhole || c.again() != againMax-1 || c&cursorRelease != 0 {
		t.Errorf("%x", uint64(c))
	}
	if n, gaveUp := c.after(0xfffffffe, 3); n.ledger() != 0xffffffff || n.again() != 0 || n.moved() != 3 || !gaveUp {
		t.Errorf("after the last try: %x", uint64(n))
	}
	if r := newRoom(1<<43, newCursor(1, 1<<17, 0)); r.left != 1<<42 {
		t.Errorf("half of the room: %d", r.left)
	}
	if n := newCursor(0, 5, 5); n != 0 {
		t.Errorf("the end: %x", uint64(n))
	}
}
