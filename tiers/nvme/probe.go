package nvme

import (
	"context"
	"fmt"
)

// probeAt is a block that nothing else is in (WIRE.md).
const probeAt = 48 << 10

// Probe tries whether the drive works: metadata is written and synced, a block is written and one read past the page cache. After trouble it also makes durable what was noted since.
func (d *Drive) Probe(ctx context.Context) error {
	if err := d.enter(); err != nil {
		return err
	}
	defer d.users.Done()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	d.mu.Lock()
	d.state = true
	d.mu.Unlock()
	if err := d.settled(); err != nil {
		return err
	}
	scratch := []IO{{Offset: probeAt, Buf: alignedBuffer(Align)}}
	if d.dev.Run(ctx, true, scratch, nil); scratch[0].Err != nil {
		return fmt.Errorf("%w: write past the page cache: %w", ErrDevice, scratch[0].Err)
	}
	io := []IO{{Offset: 0, Buf: alignedBuffer(Align)}}
	d.dev.Run(ctx, false, io, nil)
	if io[0].Err != nil {
		return fmt.Errorf("%w: read the superblock: %w", ErrDevice, io[0].Err)
	}
	if s, ok := parseSuper(io[0].Buf); !ok || s.id != d.id {
		return fmt.Errorf("%w: the superblock is not this drive's", ErrDevice)
	}
	return nil
}
