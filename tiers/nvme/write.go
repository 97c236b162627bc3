package nvme

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvferry/kvferry/tiers/pool"
)

// WriteOp is one slot to be written.
type WriteOp struct {
	Slab, Slot int
	// Header is what the slot will say of itself: Generation as Fill gave it, Length that of Payload, CRC32C its checksum. State is set by Write.
	Header  pool.Header
	Payload []byte // does not change meanwhile
	Err     error  // set by Write
}

// Write writes a batch of slots. An Err of nil says that payload and header are durable. With any other the slot holds nothing: also after a crash, from the
// next Flush or Write on that succeeds; until then a crash may bring it back, whole. It returns when nothing is in flight from any Payload. When ctx ends nothing
// more is begun, and what is not durable has the cause of ctx as its Err.
func (d *Drive) Write(ctx context.Context, batch []WriteOp) {
	if err := d.enter(); err != nil {
		for i := range batch {
			batch[i].Err = err
		}
		return
	}
	defer d.users.Done()
	w := writing{d: d, ctx: ctx, batch: batch, start: time.Now(), entries: make([]*inFlight, len(batch))}
	w.admit()
	defer w.leave()
	if d.mutate&noPending == 0 {
		w.stage(d.settled)
	}
	if d.mutate&headerFirst != 0 {
		w.stage(w.headers)
	}
	w.since = d.epoch()
	w.payloads()
	d.noteWear()
	if d.mutate&noPayloadSync == 0 {
		w.stage(func() error { return d.commit(w.since) })
	}
	w.stage(w.headers)
	w.stage(func() error { return d.commit(w.since) })
	took := time.Since(w.start)
	for i := range batch {
		if batch[i].Err == nil {
			d.counters.write(uint64(len(batch[i].Payload)), took)
		}
	}
}

// wearStep is how much is written before the count of it is written too, with whatever is written next: so much a crash may lose.
const wearStep = 64 << 20

// noteWear has the bytes written in the file's life written down now and then.
func (d *Drive) noteWear() {
	written := d.counters.lifetime.Load()
	d.mu.Lock()
	defer d.mu.Unlock()
	if written-d.wear >= wearStep {
		d.wear, d.state = written, true
	}
}

// writing is a Write under way.
type writing struct {
	d       *Drive
	ctx     context.Context
	batch   []WriteOp
	entries []*inFlight // nil: not admitted
	start   time.Time
	since   uint64 // epoch
}

// admit checks each operation and takes its slot. A header that may still be there is noted as to be killed.
func (w *writing) admit() {
	d := w.d
	d.mu.Lock()
	defer d.mu.Unlock()
	var highest uint64
	for i := range w.batch {
		op := &w.batch[i]
		if _, op.Err = d.placeLocked(op.Slab, op.Slot, len(op.Payload)); op.Err != nil {
			continue
		}
		g, key := uint64(op.Header.Generation), slotKey(op.Slab, op.Slot)
		switch s := &d.slabs[op.Slab]; {
		case op.Header.Length != uint64(len(op.Payload)):
			op.Err = fmt.Errorf("%w: %d bytes under a header of %d", ErrArgument, len(op.Payload), op.Header.Length)
		case g&1 != 0 || g <= s.floor || g > d.generation:
			op.Err = fmt.Errorf("%w: generation %d was not given out for slab %d", ErrArgument, g, op.Slab)
		case d.inFlight[key] != nil:
			op.Err = fmt.Errorf("%w: slab %d, slot %d is being written", ErrArgument, op.Slab, op.Slot)
		default:
			w.entries[i] = &inFlight{}
			d.inFlight[key] = w.entries[i]
			s.writing++
			highest = max(highest, g)
			d.killLocked(op.Slab, op.Slot)
		}
	}
	if highest > d.limit {
		d.state = true
	}
}

// leave gives the slots back. What has no success to show must not be found by a later Open.
func (w *writing) leave() {
	d := w.d
	d.mu.Lock()
	defer d.mu.Unlock()
	for i, e := range w.entries {
		if e == nil {
			continue
		}
		op := &w.batch[i]
		delete(d.inFlight, slotKey(op.Slab, op.Slot))
		d.slabs[op.Slab].writing--
		if op.Err != nil {
			d.killLocked(op.Slab, op.Slot)
		}
	}
}

// active answers whether anything is left to be done, and ends everything when ctx has ended.
func (w *writing) active() bool {
	if w.ctx.Err() != nil {
		w.fail(context.Cause(w.ctx))
	}
	return slices.ContainsFunc(w.batch, func(op WriteOp) bool { return op.Err == nil })
}

// stage does one step of the whole batch.
func (w *writing) stage(do func() error) {
	if !w.active() {
		return
	}
	if err := do(); err != nil {
		w.fail(err)
	}
}

func (w *writing) fail(err error) {
	for i := range w.batch {
		if w.batch[i].Err == nil {
			w.batch[i].Err = err
			w.d.counters.writeErrors.Add(1)
		}
	}
}

// payloads writes all payloads.
func (w *writing) payloads() {
	if !w.active() {
		return
	}
	d, p := w.d, newPlan(len(w.batch))
	d.mu.Lock()
	for i := range w.batch {
		op := &w.batch[i]
		if op.Err != nil {
			continue
		}
		at, _ := d.placeLocked(op.Slab, op.Slot, len(op.Payload)) // was checked, and the slab cannot be cut meanwhile
		p.add(i, at, op.Payload, true)
	}
	d.mu.Unlock()
	d.counters.inFlight.Add(int64(len(p.ios)))
	d.dev.Run(w.ctx, true, p.ios, func(int) { d.counters.inFlight.Add(-1) })
	for i := range w.batch {
		op := &w.batch[i]
		if op.Err != nil {
			continue
		}
		if err := p.err(i); err != nil {
			op.Err = deviceError(w.ctx, "write", op.Slab, op.Slot, err)
			if errors.Is(op.Err, ErrDevice) {
				d.counters.writeErrors.Add(1)
			}
			continue
		}
		d.counters.lifetime.Add(uint64(len(op.Payload)))
	}
}

// headers logs all headers. They may be on the drive from its first line on.
func (w *writing) headers() error {
	d := w.d
	var list []record
	d.order.Lock() // a tombstone that is noted after the header is written after it
	defer d.order.Unlock()
	d.mu.Lock()
	for i := range w.batch {
		op := &w.batch[i]
		if op.Err != nil {
			continue
		}
		if w.entries[i].cleared {
			op.Err = ErrCleared
			continue
		}
		d.slabs[op.Slab].live[op.Slot/64] |= 1 << (op.Slot % 64)
		h := op.Header
		h.State = pool.StateResident
		r := record{op.Slab, op.Slot, uint64(h.Generation), make([]byte, pool.HeaderBytes)}
		encodeHeader(r.header, h, d.id, op.Slab, op.Slot)
		list = append(list, r)
	}
	d.mu.Unlock()
	return d.appendLog(list)
}

// Flush makes all that was noted before it durable: a block that was cleared does not come back. After trouble it is the probe.
func (d *Drive) Flush(ctx context.Context) error {
	if err := d.enter(); err != nil {
		return err
	}
	defer d.users.Done()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return d.settled()
}
