package nvme_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/tiers/nvme"
	"github.com/kvferry/kvferry/tiers/nvme/nvmetest"
	"github.com/kvferry/kvferry/tiers/pool"
)

// formatted is a drive on a new device whose first slab has slots of 64 KiB.
func formatted(t *testing.T, m nvme.Mutation) (*nvme.Drive, *nvmetest.Device) {
	t.Helper()
	dev := nvmetest.New(int64(modelConfig.Bytes))
	d, _, err := nvme.OpenMutated(modelConfig, dev, m)
	if err != nil {
		t.Fatal(err)
	}
	d.FormatSlab(0, 64<<10)
	if err := d.Flush(context.Background()); err != nil {
		t.Fatal(err)
	}
	return d, dev
}

// started has one block written in the background; the channel brings its error.
func started(ctx context.Context, d *nvme.Drive, slot int) chan error {
	b := nvmetest.NewBlock(uint64(slot), 1, 64<<10)
	done := make(chan error, 1)
	go func() {
		_, err := nvmetest.Write(ctx, d, 0, slot, b)
		done <- err
	}()
	synctest.Wait() // it hangs somewhere, or has ended
	return done
}

// TestSyncOfAnother: of two batches the first one's sync fails, and takes with it what the second had written before. The second's own sync succeeds.
func TestSyncOfAnother(t *testing.T) {
	for name, m := range map[string]nvme.Mutation{"": 0, "believes in its own sync": nvme.NoEpoch} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d, dev := formatted(t, m)
				release := dev.Hold(nvmetest.OpSync)
				first := started(context.Background(), d, 0)
				failed := false
				dev.Inject(func(op nvmetest.Op, _ int64, _ int) error {
					if op == nvmetest.OpSync && !failed {
						failed = true
						return unix.EIO
					}
					return nil
				})
				second := started(context.Background(), d, 1)
				release()
				if err := <-first; !errors.Is(err, nvme.ErrDevice) || !errors.Is(err, unix.EIO) {
					t.Errorf("first: %v", err)
				}
				err := <-second
				dev.Crash()
				after, keep, e := nvme.OpenDevice(modelConfig, dev.Restart(1))
				if e != nil {
					t.Fatal(e)
				}
				torn := false
				for _, r := range keep {
					_, err := nvmetest.Read(context.Background(), after, r.Slab, r.Slot, r.Header)
					torn = torn || err != nil
				}
				if m == 0 && (!errors.Is(err, nvme.ErrDevice) || torn) || m != 0 && !torn {
					t.Errorf("second: %v, a torn block is found: %v", err, torn)
				}
			})
		})
	}
}

// TestSharedSyncs: batches that wait for a sync while one runs share the next.
func TestSharedSyncs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, dev := formatted(t, 0)
		before := d.Stats().Syncs
		release := dev.Hold(nvmetest.OpSync)
		var all []chan error
		for slot := range 10 {
			all = append(all, started(context.Background(), d, slot))
		}
		release()
		for _, done := range all {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		if n := d.Stats().Syncs - before; n > 12 { // alone, each takes two
			t.Errorf("%d syncs for ten batches that waited for one", n)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
}

// TestQuiet: a call whose context has ended returns when nothing of it is in flight, and no sooner.
func TestQuiet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, dev := formatted(t, 0)
		h, err := nvmetest.Write(context.Background(), d, 0, 5, nvmetest.NewBlock(5, 1, 64<<10))
		if err != nil {
			t.Fatal(err)
		}
		for _, op := range []nvmetest.Op{nvmetest.OpWrite, nvmetest.OpSync, nvmetest.OpRead} {
			release := dev.Hold(op)
			ctx, cancel := context.WithCancel(context.Background())
			done := make(chan error, 1)
			go func() {
				var err error
				if op == nvmetest.OpRead {
					_, err = nvmetest.Read(ctx, d, 0, 5, h)
				} else {
					_, err = nvmetest.Write(ctx, d, 0, 6, nvmetest.NewBlock(6, 1, 64<<10))
				}
				done <- err
			}()
			synctest.Wait()
			cancel()
			synctest.Wait()
			select {
			case err := <-done:
				t.Errorf("%s: returned (%v) while it was in flight", op, err)
			default:
			}
			release()
			if err := <-done; op != nvmetest.OpRead && !errors.Is(err, context.Canceled) {
				t.Errorf("%s: %v", op, err)
			}
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
}

// TestClearWhileWriting: a slot that is cleared while it is written holds nothing afterwards, at whatever moment that was.
func TestClearWhileWriting(t *testing.T) {
	for _, op := range []nvmetest.Op{nvmetest.OpWrite, nvmetest.OpWriteMeta, nvmetest.OpSync} {
		synctest.Test(t, func(t *testing.T) {
			d, dev := formatted(t, 0)
			release := dev.Hold(op)
			done := started(context.Background(), d, 0)
			d.Clear(0, 0)
			release()
			err := <-done
			if err != nil && !errors.Is(err, nvme.ErrCleared) {
				t.Errorf("%s: %v", op, err)
			}
			if err := d.Flush(context.Background()); err != nil {
				t.Error(err)
			}
			dev.Crash()
			_, keep, err := nvme.OpenDevice(modelConfig, dev.Restart(1))
			if err != nil || len(keep) != 0 {
				t.Errorf("%s: %v, %v", op, keep, err)
			}
		})
	}
}

// TestTrouble: errors of every kind of operation are answered, change nothing that was acknowledged, and end with their cause.
func TestTrouble(t *testing.T) {
	ctx := context.Background()
	for _, op := range []nvmetest.Op{nvmetest.OpWrite, nvmetest.OpWriteMeta, nvmetest.OpSync, nvmetest.OpRead} {
		for _, errno := range []error{unix.EIO, unix.ENOSPC, unix.EROFS} {
			d, dev := formatted(t, 0)
			good := nvmetest.NewBlock(1, 1, 64<<10)
			h, err := nvmetest.Write(ctx, d, 0, 0, good)
			if err != nil {
				t.Fatal(err)
			}
			good.Header = h
			dev.Inject(func(is nvmetest.Op, _ int64, _ int) error {
				if is == op {
					return errno
				}
				return nil
			})
			var errs []error
			for range 3 {
				_, err := nvmetest.Write(ctx, d, 0, 1, nvmetest.NewBlock(2, 1, 64<<10))
				errs = append(errs, err)
			}
			_, err = nvmetest.Read(ctx, d, 0, 0, good.Header)
			if op == nvmetest.OpRead {
				errs = []error{err}
				if _, err := nvmetest.Write(ctx, d, 0, 2, nvmetest.NewBlock(3, 1, 64<<10)); err != nil {
					t.Errorf("%s: write: %v", op, err)
				}
				d.Clear(0, 1)
				d.Clear(0, 2)
			} else if err != nil {
				t.Errorf("%s: read: %v", op, err)
			}
			for _, err := range errs {
				if !errors.Is(err, nvme.ErrDevice) || !errors.Is(err, errno) {
					t.Errorf("%s, %v: %v", op, errno, err)
				}
			}
			s := d.Stats()
			if s.ReadErrors+s.WriteErrors == 0 {
				t.Errorf("%s: no error is counted", op)
			}
			dev.Inject(nil)
			if err := d.Flush(ctx); err != nil {
				t.Errorf("%s: the probe: %v", op, err)
			}
			if s := d.Stats(); s.Pending != 0 {
				t.Errorf("%s: %d changes pending", op, s.Pending)
			}
			dev.Crash()
			after, keep, err := nvme.OpenDevice(modelConfig, dev.Restart(3))
			if err != nil || len(keep) != 1 || keep[0].Header != good.Header {
				t.Fatalf("%s: %+v, %v", op, keep, err)
			}
			if _, err := nvmetest.Read(ctx, after, 0, 0, good.Header); err != nil {
				t.Errorf("%s: %v", op, err)
			}
		}
	}
}

// TestOpenTrouble: a device that fails while it is opened is an error, and is closed.
func TestOpenTrouble(t *testing.T) {
	for _, op := range []nvmetest.Op{nvmetest.OpReadMeta, nvmetest.OpWriteMeta, nvmetest.OpSync} {
		d, dev := formatted(t, 0)
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
		dev = dev.Restart(0)
		dev.Inject(func(is nvmetest.Op, _ int64, _ int) error {
			if is == op {
				return unix.EIO
			}
			return nil
		})
		if _, _, err := nvme.OpenDevice(modelConfig, dev); !errors.Is(err, nvme.ErrDevice) || !errors.Is(err, unix.EIO) {
			t.Errorf("%s: %v", op, err)
		}
		if dev.Close() == nil {
			t.Errorf("%s: the device was left open", op)
		}
	}
}

// TestFlips turns over a bit in every byte that says something of a drive that is closed, one after the other: as a daemon leaves it, with all headers in the
// log, and with all headers in place and the log gone.
func TestFlips(t *testing.T) {
	ctx := context.Background()
	d, dev := formatted(t, 0)
	d.FormatSlab(1, 4096)
	want := map[spot]nvmetest.Block{}
	var places, logged, tables []int64
	for at := range int64(64) {
		places = append(places, at, 4096+at, 8192+at, 12288+at, 2<<20+at, 4<<20+at, 6<<20+at)
	}
	for _, at := range []spot{{0, 0}, {0, 1}, {0, 7}, {1, 3}, {1, 4}} {
		b := nvmetest.NewBlock(uint64(at[0]*10+at[1]), 1, 4000)
		var err error
		if b.Header, err = nvmetest.Write(ctx, d, at[0], at[1], b); err != nil {
			t.Fatal(err)
		}
		for k := range int64(64 + pool.HeaderBytes) {
			logged = append(logged, 64<<10+int64(len(want))*4096+k)
		}
		want[at] = b
		for k := range int64(pool.HeaderBytes) {
			tables = append(tables, int64(d.HeaderOffset(at[0], at[1]))+k)
		}
		for k := int64(0); k < 4000; k += 57 {
			places = append(places, int64(d.SlotOffset(at[0], at[1]))+k)
		}
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	flips(t, dev, append(logged, places...), want, 5*pool.HeaderBytes)
	dev = dev.Restart(0)
	if d, _, err := nvme.OpenDevice(modelConfig, dev); err != nil || d.Close() != nil { // brings them in place
		t.Fatal(err)
	}
	flips(t, dev, tables, want, 0) // the log still has them
	dev.Poke(make([]byte, 2<<20-64<<10), 64<<10)
	flips(t, dev, append(tables, places...), want, 5*pool.HeaderBytes)
}

// flips tries each place; at least so many blocks must have been lost.
func flips(t *testing.T, dev *nvmetest.Device, places []int64, want map[spot]nvmetest.Block, atLeast int) {
	t.Helper()
	lost, corrupt := 0, 0
	for i, at := range places {
		if i%slower > 0 {
			continue
		}
		flipped := dev.Restart(0)
		flipped.Flip(at, uint(i*5))
		d, keep, err := nvme.OpenDevice(modelConfig, flipped)
		if err != nil {
			t.Fatalf("byte %d: %v", at, err)
		}
		lost += len(want) - len(keep)
		for _, r := range keep {
			w, ok := want[spot{r.Slab, r.Slot}]
			if !ok || r.Header != w.Header {
				t.Fatalf("byte %d: slab %d, slot %d is believed: %+v", at, r.Slab, r.Slot, r.Header)
			}
			got, err := nvmetest.Read(context.Background(), d, r.Slab, r.Slot, r.Header)
			if errors.Is(err, nvme.ErrCorrupt) {
				corrupt++
			} else if err != nil || string(got) != string(w.Payload) {
				t.Fatalf("byte %d: slab %d, slot %d: %v, or wrong bytes", at, r.Slab, r.Slot, err)
			}
		}
		d.FormatSlab(2, 4096)
		if g := d.Fill(2, 20); g <= want[spot{1, 4}].Header.Generation {
			t.Fatalf("byte %d: generation %d is given out again", at, g)
		}
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d bytes: %d slots lost, %d corrupt", len(places), lost, corrupt)
	if lost < atLeast/slower/2 || atLeast > 0 && corrupt < 300/slower/2 {
		t.Error("a flip was not noticed")
	}
}

// TestSuperblock: one copy of the superblock that is lost costs nothing, and is written again.
func TestSuperblock(t *testing.T) {
	ctx := context.Background()
	d, whole := formatted(t, 0)
	b := nvmetest.NewBlock(7, 1, 4000)
	var err error
	if b.Header, err = nvmetest.Write(ctx, d, 0, 0, b); err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	whole = whole.Restart(0)
	super, other := make([]byte, 64), make([]byte, 64)
	whole.Peek(super, 0)
	if whole.Peek(other, 12288); !bytes.Equal(super, other) {
		t.Fatalf("copies are %x and %x", super, other)
	}
	newer := bytes.Clone(super)
	newer[8]++
	binary.LittleEndian.PutUint32(newer[60:], crc32.Checksum(newer[:60], crc32.MakeTable(crc32.Castagnoli)))
	unreadable := func(places ...int64) func(*nvmetest.Device) {
		return func(dev *nvmetest.Device) {
			dev.Inject(func(op nvmetest.Op, off int64, _ int) error {
				if op == nvmetest.OpReadMeta && slices.Contains(places, off) {
					return unix.EIO
				}
				return nil
			})
		}
	}
	poke := func(b []byte, places ...int64) func(*nvmetest.Device) {
		return func(dev *nvmetest.Device) {
			for _, at := range places {
				dev.Poke(b, at)
			}
		}
	}
	for _, c := range []struct {
		name  string
		spoil func(dev *nvmetest.Device)
		want  error
		none  bool // nothing is found
	}{
		{"nothing", func(*nvmetest.Device) {}, nil, false},
		{"first zero", poke(make([]byte, 4096), 0), nil, false},
		{"second zero", poke(make([]byte, 4096), 12288), nil, false}, // of a daemon that had one
		{"second garbage", poke([]byte("something that is no superblock"), 12288), nil, false},
		{"first damaged", poke([]byte{1, 2, 3, 4}, 20), nil, false},
		{"first unreadable", unreadable(0), nil, false},
		{"second unreadable", unreadable(12288), nil, false},
		{"both zero", poke(make([]byte, 4096), 0, 12288), nil, true}, // a device of zeros is a new drive; Open refuses such a file
		{"both damaged", poke([]byte{1, 2, 3, 4}, 20, 12308), nvme.ErrForeign, false},
		{"both unreadable", unreadable(0, 12288), nvme.ErrDevice, false},
		{"a stranger's", poke([]byte("KVFPOOL1"), 0), nvme.ErrForeign, false},
		{"a newer one's", poke(newer, 0), nvme.ErrForeign, false},
	} {
		dev := whole.Restart(0)
		c.spoil(dev)
		d, keep, err := nvme.OpenDevice(modelConfig, dev)
		if !errors.Is(err, c.want) || c.want == nil && err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if err != nil {
			continue
		}
		if found := len(keep) == 1 && keep[0].Header == b.Header; found == c.none {
			t.Errorf("%s: found %+v", c.name, keep)
		}
		if c.name != "nothing" && !c.none && !strings.Contains(strings.Join(d.Notes(), "; "), "superblock") {
			t.Errorf("%s: it is not said: %v", c.name, d.Notes())
		}
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
		dev = dev.Restart(0)
		if dev.Peek(other, 0); !c.none && !bytes.Equal(other, super) {
			t.Errorf("%s: the first copy is %x after it", c.name, other)
		}
		first := bytes.Clone(other)
		if dev.Peek(other, 12288); !bytes.Equal(other, first) {
			t.Errorf("%s: the second copy is %x after it", c.name, other)
		}
	}
}
