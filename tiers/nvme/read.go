package nvme

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvferry/kvferry/csrc/copyshim"
)

// ReadOp is one slot to be read.
type ReadOp struct {
	Slab, Slot int
	Into       []byte // as long as the payload
	CRC32C     uint32 // that the payload must have
	Err        error  // set by Read
}

// Read reads a batch of slots and checks each against its CRC32C. It returns when nothing is in flight into any Into; where an Err is set, what is in Into means
// nothing. When ctx ends no further I/O is begun, and what was not read has the cause of ctx as its Err. The slots are pinned by the caller.
func (d *Drive) Read(ctx context.Context, batch []ReadOp) {
	if err := d.enter(); err != nil {
		for i := range batch {
			batch[i].Err = err
		}
		return
	}
	defer d.users.Done()
	p := newPlan(len(batch))
	d.mu.Lock()
	for i := range batch {
		op := &batch[i]
		var at uint64
		if at, op.Err = d.placeLocked(op.Slab, op.Slot, len(op.Into)); op.Err == nil {
			p.add(i, at, op.Into, false)
		}
	}
	d.mu.Unlock()
	start := time.Now()
	d.counters.inFlight.Add(int64(len(p.ios)))
	d.dev.Run(ctx, false, p.ios, func(io int) {
		d.counters.inFlight.Add(-1)
		i, all := p.ended(io, false)
		if !all {
			return
		}
		op := &batch[i]
		if err := p.err(i); err != nil {
			op.Err = deviceError(ctx, "read", op.Slab, op.Slot, err)
			if errors.Is(op.Err, ErrDevice) {
				d.counters.readErrors.Add(1)
			}
			return
		}
		if crc := copyshim.Checksum(0, op.Into); crc != op.CRC32C && d.mutate&noChecksum == 0 {
			op.Err = fmt.Errorf("%w: slab %d, slot %d: %08x, must be %08x", ErrCorrupt, op.Slab, op.Slot, crc, op.CRC32C)
			d.counters.corrupt.Add(1)
			return
		}
		d.counters.read(uint64(len(op.Into)), time.Since(start))
	})
}

// placeLocked is where a slot's payload lies.
func (d *Drive) placeLocked(i, slot, length int) (uint64, error) {
	if i < 0 || i >= len(d.slabs) || slot < 0 || slot >= int(d.slabs[i].slots) {
		return 0, fmt.Errorf("%w: no slot %d in slab %d", ErrArgument, slot, i)
	}
	s := &d.slabs[i]
	if length <= 0 || uint64(length) > s.slotBytes {
		return 0, fmt.Errorf("%w: %d bytes in a slot of %d", ErrArgument, length, s.slotBytes)
	}
	return s.slotsAt + uint64(slot)*s.slotBytes, nil
}
