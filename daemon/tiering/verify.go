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

const (
	// verifyBytes is about how much is pinned, and read, at a time; one slot that is longer goes alone.
	verifyBytes = 8 << 20
	verifySlots = 256
	// progressEvery is how often a caller is told how far it is.
	progressEvery = 100 * time.Millisecond
	// busyWait is how long to wait where a drive's queue is full, or as much is being moved as may be.
	busyWait = 50 * time.Millisecond
	// quietWait is how long a caller that has no patience waits for the read that is under way.
	quietWait = time.Second
)

// Verification is how far a Verify is.
type Verification struct {
	Slots, Total int // read; about how many there are
	Bytes        uint64
	Broken       int // their bytes were not what was stored: removed
	Unreadable   int // the device failed; they stay, since it may come back
	Skipped      int // on a drive that is in trouble
}

// Verify reads everything back that lies in a tier, or in all (policy.NumTiers), and removes what is broken. It reads drives behind all other traffic, and keeps a few MiB of memory. progress is called about ten times a
// second, and not after Verify has returned. When ctx ends, what was read until then counts.
func (m *Manual) Verify(ctx context.Context, tier int, progress func(Verification)) (Verification, error) {
	if tier == policy.NVMe && m.Tiering == nil {
		return Verification{}, ErrNoDrives
	}
	if !m.verifying.TryLock() {
		return Verification{}, ErrVerifying
	}
	v := &verifier{m: m, tier: tier}
	done := make(chan struct{})
	m.running.Go(func() { // of its own: a device that hangs must not keep the caller
		defer close(done)
		defer m.verifying.Unlock()
		v.run(ctx)
	})
	t := time.NewTicker(progressEvery)
	defer t.Stop()
	for stopped := ctx.Done(); ; {
		select {
		case <-t.C:
			progress(v.view())
			continue
		case <-done:
		case <-stopped:
			select {
			case <-done:
			case <-time.After(quietWait):
			}
		}
		return v.view(), context.Cause(ctx)
	}
}

// Close returns when nothing reads the pool or uses a drive any more. All calls have returned, and the drives' links are closed.
func (m *Manual) Close() { m.running.Wait() }

// verifier is one Verify.
type verifier struct {
	m    *Manual
	tier int
	buf  []byte // that drives are read into

	mu   sync.Mutex
	seen Verification
}

func (v *verifier) view() Verification {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.seen
}

func (v *verifier) add(d Verification) {
	v.mu.Lock()
	defer v.mu.Unlock()
	s := &v.seen
	s.Slots, s.Bytes, s.Broken, s.Unreadable, s.Skipped, s.Total = s.Slots+d.Slots, s.Bytes+d.Bytes, s.Broken+d.Broken, s.Unreadable+d.Unreadable, s.Skipped+d.Skipped, s.Total+d.Total
}

func (v *verifier) run(ctx context.Context) {
	l := v.m.Ledger
	var drives []*drive
	if v.m.Tiering != nil {
		drives = v.m.Tiering.all()
	}
	var stores []tiers.StoreID
	for i := range min(l.Stores(), 1+len(drives)) { // those that come later are not read
		if id := tiers.StoreID(i); v.tier == policy.NumTiers || v.tier == tiers.TierOfStore(id) {
			stores = append(stores, id)
			v.add(Verification{Total: l.SlotsIn(id)})
		}
	}
	for _, id := range stores {
		if tiers.TierOfStore(id) == policy.DRAM {
			v.pool(ctx, id)
		} else {
			v.drive(ctx, id, drives[id-1])
		}
	}
}

// pool checks what is in the pool, where it lies.
func (v *verifier) pool(ctx context.Context, id tiers.StoreID) {
	for from := tiers.SlotRef(0); ctx.Err() == nil; {
		list, next := v.m.Ledger.BeginReading(id, from, verifySlots, verifyBytes)
		d := Verification{Slots: len(list)}
		for i := range list {
			p := &list[i].Place
			list[i].Broken = copyshim.Checksum(0, v.m.Pool.Bytes[p.Offset:][:p.Length]) != p.CRC32C
			d.Bytes += p.Length
		}
		d.Broken = v.end(list, "pool", "pool")
		v.add(d)
		if from = next; from == 0 {
			return
		}
	}
}

// end gives back what was read, and counts what was broken.
func (v *verifier) end(list []tiers.Reading, counter, name string) int {
	broken := v.m.Ledger.EndReading(time.Now(), list)
	if broken > 0 {
		v.m.Counters.Add("broken_blocks", counter, broken)
		for i := range list {
			if list[i].Broken {
				v.m.Log.Error("a block was broken, and removed", "where", name, "space", list[i].Space, "hash", list[i].Hash)
			}
		}
	}
	return broken
}

// drive reads a drive, as long as it is not in trouble.
func (v *verifier) drive(ctx context.Context, id tiers.StoreID, d *drive) {
	total, read, broken := v.m.Ledger.SlotsIn(id), 0, 0
	for from := tiers.SlotRef(0); ctx.Err() == nil; {
		if s, _, _ := d.health.View(); s != health.OK {
			v.add(Verification{Skipped: max(total-read, 0)})
			return
		}
		list, next := v.m.Ledger.BeginReading(id, from, verifySlots, verifyBytes)
		seen := v.read(ctx, d, list)
		read += len(list)
		seen.Broken = v.end(list, "nvme", d.name)
		broken += seen.Broken
		v.add(seen)
		if from = next; from == 0 {
			break
		}
	}
	if broken > 0 { // else it is found, and removed, once more after a crash
		if err := d.device.Flush(ctx); err != nil {
			v.m.Log.Warn("what was broken is removed, but not durably", "drive", d.name, "error", err)
		}
	}
}

// read reads slots of a drive, in the queue of its link behind all other traffic, and marks those that are broken.
func (v *verifier) read(ctx context.Context, d *drive, list []tiers.Reading) (out Verification) {
	if len(list) == 0 {
		return out
	}
	r := &readBack{d: d, at: map[uint64]int{}, ops: make([]nvme.ReadOp, len(list))}
	t := &mover.Transfer{Class: kvferry.ClassDemote, Copier: r, Deadline: time.Now().Add(downDeadline)}
	into := v.buffers(list)
	for i := range list {
		p := &list[i]
		r.ops[i] = nvme.ReadOp{Slab: p.Slab, Slot: p.Slot, Into: into[i], CRC32C: p.Place.CRC32C, Err: errNotTried}
		r.at[p.Place.Offset] = i
		t.Batch = append(t.Batch, transport.Copy{Dst: []kvferry.Segment{{Offset: p.Place.Offset, Length: p.Place.Length}}})
	}
	t.Decide = v.m.Tiering.decide(d, &r.turn)
	quiet := make(chan struct{})
	t.Quiet = func(mover.Outcome) {
		d.over(&r.turn)
		close(quiet)
	}
	for {
		err := d.link.Submit(t)
		if err == nil {
			break
		}
		if !errors.Is(err, mover.ErrBusy) {
			return Verification{Skipped: len(list)}
		}
		if pause(ctx, busyWait); ctx.Err() != nil {
			return out
		}
	}
	select {
	case <-quiet:
	case <-ctx.Done():
		t.End(mover.Cancelled)
		<-quiet
	}
	return v.m.Tiering.judge(d, r.ops, list)
}

// buffers are as long as the slots, and used for all batches.
func (v *verifier) buffers(list []tiers.Reading) [][]byte {
	const page = nvme.Align
	round := func(n uint64) uint64 { return (n + page - 1) &^ (page - 1) }
	var total uint64
	for i := range list {
		total += round(list[i].Place.Length)
	}
	if uint64(len(v.buf)) < total {
		v.buf = make([]byte, total) // so large that it lies on a page; else the drive only reads by way of memory that does
	}
	out, at := make([][]byte, len(list)), uint64(0)
	for i := range list {
		n := list[i].Place.Length
		out[i] = v.buf[at : at+n : at+n]
		at += round(n)
	}
	return out
}

// readBack is the copier of a verification: it reads into memory that nobody looks at.
type readBack struct {
	d    *drive
	at   map[uint64]int // operations by offset on the drive
	ops  []nvme.ReadOp
	turn turn
}

// Copy is transport.Copier. What is broken is no failure of the transfer: the rest of it is to be read too.
func (r *readBack) Copy(ctx context.Context, batch []transport.Copy) error {
	defer r.turn.begin()()
	first := r.at[batch[0].Dst[0].Offset] // the mover goes over a batch in its order
	r.d.device.Read(ctx, r.ops[first:first+len(batch)])
	return ctx.Err()
}

// Close is transport.Copier.
func (r *readBack) Close() error { return nil }

// judge counts what was read, marks what is broken, and keeps the drive's health.
func (t *Tiering) judge(d *drive, ops []nvme.ReadOp, list []tiers.Reading) (out Verification) {
	var failure error
	for i := range ops {
		switch err := ops[i].Err; {
		case err == nil, errors.Is(err, nvme.ErrCorrupt):
			list[i].Broken = err != nil
			out.Slots++
			out.Bytes += uint64(len(ops[i].Into))
		case errors.Is(err, errNotTried), errors.Is(err, context.Canceled), errors.Is(err, nvme.ErrClosed):
		default:
			out.Unreadable++
			failure = err
		}
	}
	if failure != nil {
		t.failed(d, failure)
	}
	return out
}
