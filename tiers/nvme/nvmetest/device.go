// Package nvmetest is a disk in memory that can fail in every way that a drive does, and the suite that every engine of package nvme must pass.
//
// What was written and not synced may be lost at a crash, torn at 512 bytes, and kept out of order, as a seed says. Errors, hangs and flipped bits are injected.
// Nothing depends on time or on chance: a Device does the same for the same calls in the same order.
package nvmetest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/tiers/nvme"
)

// sector is what a drive writes whole or not at all.
const sector = 512

// ErrCrashed is what everything answers after a crash.
var ErrCrashed = errors.New("nvmetest: crashed")

// Op is what a Device is asked for.
type Op string

// The kinds of Op.
const (
	OpRead      Op = "read"
	OpWrite     Op = "write"
	OpReadMeta  Op = "read metadata"
	OpWriteMeta Op = "write metadata"
	OpSync      Op = "sync"
)

// Device is a disk in memory. It is safe for concurrent use.
type Device struct {
	mu      sync.Mutex
	durable *image
	cache   map[int64][]version // by sector: what was written since and is not durable, oldest first
	number  uint64              // of the last write
	inject  func(op Op, off int64, n int) error
	held    map[Op]chan struct{}
	countIn int // events until the crash; 0: none is near
	events  uint64
	crashed bool
	random  *rand.Rand
	closed  bool
}

// version is what a sector holds after a write.
type version struct {
	number uint64
	data   [sector]byte
	lost   bool // by a failed sync: seen, and never on the drive
}

// New makes a disk of zeros.
func New(size int64) *Device { return &Device{durable: newImage(size)} }

// Restart is the disk as the next daemon finds it: after a crash with what has survived of it, which the seed decides; without one, all that was written.
func (d *Device) Restart(seed uint64) *Device {
	d.mu.Lock()
	defer d.mu.Unlock()
	after := &Device{durable: d.durable.clone()}
	random := rand.New(rand.NewPCG(seed, 0x5ec7))
	mode := random.IntN(4) // of all crashes some keep all, some nothing, most a part
	var sectors []int64
	for s := range d.cache {
		sectors = append(sectors, s)
	}
	slices.Sort(sectors)
	for _, s := range sectors {
		list := slices.DeleteFunc(slices.Clone(d.cache[s]), func(v version) bool { return v.lost })
		if len(list) == 0 {
			continue
		}
		k := len(list) - 1 // which of the versions
		if d.crashed {
			switch mode {
			case 0:
				k = -1
			case 1:
			default:
				k = random.IntN(len(list)+1) - 1
			}
		}
		if k >= 0 {
			after.durable.write(list[k].data[:], s*sector)
		}
	}
	return after
}

// CrashIn has the disk crash at the n-th write or sync from now on: of a write a part may still get to the disk.
func (d *Device) CrashIn(n int, seed uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.countIn, d.random = n, rand.New(rand.NewPCG(seed, 0xc4a5))
}

// Crash has the disk crash now.
func (d *Device) Crash() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.crashed = true
}

// Crashed tells whether it has.
func (d *Device) Crashed() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.crashed
}

// Events is how many writes and syncs there were: the points at which it can crash.
func (d *Device) Events() uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.events
}

// Inject has every operation ask f for an error first; nil ends it. f is called with the disk locked: it may not call it. A sync that f lets fail has lost
// each sector that was written since the one before, or not, by turns.
func (d *Device) Inject(f func(op Op, off int64, n int) error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.inject = f
}

// Hold has all operations of a kind hang from now on until the answer is called.
func (d *Device) Hold(op Op) (release func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.held == nil {
		d.held = map[Op]chan struct{}{}
	}
	hang := make(chan struct{})
	d.held[op] = hang
	return sync.OnceFunc(func() {
		d.mu.Lock()
		if d.held[op] == hang {
			delete(d.held, op)
		}
		d.mu.Unlock()
		close(hang)
	})
}

// Flip turns a bit over, wherever the byte is.
func (d *Device) Flip(off int64, bit uint) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if list := d.cache[off/sector]; len(list) > 0 {
		list[len(list)-1].data[off%sector] ^= 1 << (bit % 8)
		return
	}
	var b [1]byte
	d.durable.read(b[:], off)
	b[0] ^= 1 << (bit % 8)
	d.durable.write(b[:], off)
}

// Peek reads what a reader would see, and Poke overwrites it durably, whatever is held or injected.
func (d *Device) Peek(b []byte, off int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.seeLocked(b, off)
}

// Poke is Peek's counterpart.
func (d *Device) Poke(b []byte, off int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for s := off / sector; s <= (off+int64(len(b))-1)/sector; s++ {
		d.flushSectorLocked(s)
	}
	d.durable.write(b, off)
}

// Resize makes the disk longer, by zeros, or shorter.
func (d *Device) Resize(size int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.durable.resize(size)
	for s := range d.cache {
		if s*sector >= size {
			delete(d.cache, s)
		}
	}
}

// Run is nvme.Device. The I/Os go one after the other.
func (d *Device) Run(ctx context.Context, write bool, batch []nvme.IO, done func(i int)) {
	op := OpRead
	if write {
		op = OpWrite
	}
	for i := range batch {
		io := &batch[i]
		switch {
		case ctx.Err() != nil:
			io.Err = context.Cause(ctx)
		case io.Offset%nvme.Align != 0 || len(io.Buf)%nvme.Align != 0:
			io.Err = unix.EINVAL
		default:
			io.Err = d.do(op, io.Buf, io.Offset)
		}
		if done != nil {
			done(i)
		}
	}
}

// ReadAt is nvme.Device.
func (d *Device) ReadAt(p []byte, off int64) error { return d.do(OpReadMeta, p, off) }

// WriteAt is nvme.Device.
func (d *Device) WriteAt(p []byte, off int64) error { return d.do(OpWriteMeta, p, off) }

func (d *Device) do(op Op, p []byte, off int64) error {
	d.wait(op)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.crashed {
		return ErrCrashed
	}
	if off < 0 || off+int64(len(p)) > d.durable.size {
		return fmt.Errorf("%w: %d bytes at %d of %d", unix.EINVAL, len(p), off, d.durable.size)
	}
	var err error
	if d.inject != nil {
		err = d.inject(op, off, len(p))
	}
	if op == OpRead || op == OpReadMeta {
		if err == nil {
			d.seeLocked(p, off)
		}
		return err
	}
	if d.eventLocked() {
		d.storeLocked(part(p, off, d.random.IntN(len(p)+1)), off) // in the middle of it
		return ErrCrashed
	}
	if err != nil {
		d.storeLocked(part(p, off, len(p)/2), off) // what failed may have been written in part
		return err
	}
	d.storeLocked(p, off)
	return nil
}

// part is the first n bytes of p, and as many less as it takes to end with a sector.
func part(p []byte, off int64, n int) []byte {
	if n == len(p) {
		return p
	}
	return p[:max(0, (off+int64(n))&^(sector-1)-off)]
}

// wait hangs while the kind is held.
func (d *Device) wait(op Op) {
	d.mu.Lock()
	hang := d.held[op]
	d.mu.Unlock()
	if hang != nil {
		<-hang
	}
}

// eventLocked counts a write or sync, and tells whether the crash comes with it.
func (d *Device) eventLocked() bool {
	d.events++
	if d.countIn > 0 {
		if d.countIn--; d.countIn == 0 {
			d.crashed = true
			return true
		}
	}
	return false
}

// Sync is nvme.Device: what was written before the call is durable after it.
func (d *Device) Sync() error {
	d.mu.Lock()
	upTo := d.number
	d.mu.Unlock()
	d.wait(OpSync)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.crashed || d.eventLocked() {
		return ErrCrashed
	}
	if d.inject != nil {
		if err := d.inject(OpSync, 0, 0); err != nil {
			d.loseLocked()
			return err
		}
	}
	for s, list := range d.cache {
		kept, last := list[:0], -1
		for k, v := range list {
			if v.number <= upTo && !v.lost {
				last = k
			}
		}
		if last >= 0 {
			d.durable.write(list[last].data[:], s*sector)
		}
		kept = append(kept, list[last+1:]...)
		if len(kept) == 0 {
			delete(d.cache, s)
		} else {
			d.cache[s] = kept
		}
	}
	return nil
}

// loseLocked is a failed sync: every other sector that was written is seen as before, counts as clean, and never gets to the disk.
func (d *Device) loseLocked() {
	for s, list := range d.cache {
		for k := range list {
			list[k].lost = list[k].lost || (uint64(s)+d.events)%2 == 0
		}
	}
}

// Size is nvme.Device.
func (d *Device) Size() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.durable.size
}

// Info is nvme.Device.
func (d *Device) Info() nvme.Info { return nvme.Info{Engine: "nvmetest", Direct: true, Depth: 1} }

// Close is nvme.Device.
func (d *Device) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return errors.New("nvmetest: closed twice")
	}
	d.closed = true
	return nil
}

// seeLocked reads the newest of everything.
func (d *Device) seeLocked(p []byte, off int64) {
	d.durable.read(p, off)
	if len(d.cache) == 0 {
		return
	}
	for s := off / sector; s <= (off+int64(len(p))-1)/sector; s++ {
		if list := d.cache[s]; len(list) > 0 {
			overlay(p, off, list[len(list)-1].data[:], s*sector)
		}
	}
}

// overlay copies the part of data, which lies at dataAt, that p, which lies at off, covers.
func overlay(p []byte, off int64, data []byte, dataAt int64) {
	from, to := max(off, dataAt), min(off+int64(len(p)), dataAt+int64(len(data)))
	copy(p[from-off:to-off], data[from-dataAt:to-dataAt])
}

func (d *Device) storeLocked(p []byte, off int64) {
	if len(p) == 0 {
		return
	}
	if d.cache == nil {
		d.cache = map[int64][]version{}
	}
	d.number++
	for s := off / sector; s <= (off+int64(len(p))-1)/sector; s++ {
		v := version{number: d.number}
		d.seeLocked(v.data[:], s*sector)
		overlay(v.data[:], s*sector, p, off)
		d.cache[s] = append(d.cache[s], v)
	}
}

func (d *Device) flushSectorLocked(s int64) {
	if list := d.cache[s]; len(list) > 0 {
		d.durable.write(list[len(list)-1].data[:], s*sector)
		delete(d.cache, s)
	}
}

func address(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
