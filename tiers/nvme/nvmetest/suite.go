package nvmetest

import (
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers/nvme"
	"github.com/kvferry/kvferry/tiers/pool"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Opener opens the same place again and again; the first time it is empty.
type Opener func(cfg nvme.Config) (*nvme.Drive, []pool.Resident, error)

// Config is what the suite opens: eight slabs of 2 MiB. Path is the opener's.
var Config = nvme.Config{Bytes: 18 << 20, SlabBytes: 2 << 20, Depth: 8}

// Block is content for a slot: whose it is decides every byte.
type Block struct {
	Header  pool.Header
	Payload []byte
}

// NewBlock makes block n of so many bytes. Different versions of it have the same name and different bytes.
func NewBlock(n, version uint64, length int) Block {
	b := Block{Payload: Aligned(length)}
	random := rand.New(rand.NewPCG(n, version))
	for i := 0; i+8 <= length; i += 8 {
		binary.LittleEndian.PutUint64(b.Payload[i:], random.Uint64())
	}
	b.Header = pool.Header{Length: uint64(length), CRC32C: crc32.Checksum(b.Payload, castagnoli), Shard: uint16(n % 3), Shards: 3, StoredMs: version}
	binary.LittleEndian.PutUint64(b.Header.Hash[:], n*0x9e3779b97f4a7c15)
	binary.LittleEndian.PutUint64(b.Header.Hash[8:], n)
	b.Header.Space = kvferry.SpaceID{1, 2, 3}
	return b
}

// Aligned is memory that a device can reach without a copy.
func Aligned(n int) []byte {
	b := make([]byte, n+nvme.Align)
	at := 0
	for address(b[at:])%nvme.Align != 0 {
		at++
	}
	return b[at : at+n : at+n]
}

// Write writes one block and answers its header as it is now.
func Write(ctx context.Context, d *nvme.Drive, slab, slot int, b Block) (pool.Header, error) {
	b.Header.Generation = d.Fill(slab, slot)
	batch := []nvme.WriteOp{{Slab: slab, Slot: slot, Header: b.Header, Payload: b.Payload}}
	d.Write(ctx, batch)
	b.Header.State = pool.StateResident
	return b.Header, batch[0].Err
}

// Read reads one slot.
func Read(ctx context.Context, d *nvme.Drive, slab, slot int, h pool.Header) ([]byte, error) {
	batch := []nvme.ReadOp{{Slab: slab, Slot: slot, Into: Aligned(int(h.Length)), CRC32C: h.CRC32C}}
	d.Read(ctx, batch)
	return batch[0].Into, batch[0].Err
}

// Suite is what every engine must pass. open is asked for a new place for each test.
func Suite(t *testing.T, open func(t *testing.T) Opener) {
	for name, test := range map[string]func(*testing.T, Opener){
		"RoundTrip": roundTrip, "Clear": clears, "Reformat": reformats, "Duplicates": duplicates, "Cancelled": cancelled, "Refused": refused,
		"Concurrent": concurrent, "Resize": resizes, "Generations": generations, "Closed": closed,
	} {
		t.Run(name, func(t *testing.T) { test(t, open(t)) })
	}
}

func must(t *testing.T, open Opener, cfg nvme.Config) (*nvme.Drive, []pool.Resident) {
	t.Helper()
	d, keep, err := open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return d, keep
}

func shut(t *testing.T, d *nvme.Drive) {
	t.Helper()
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
}

// expect compares what was adopted with the headers by slot, and reads all of it.
func expect(t *testing.T, d *nvme.Drive, keep []pool.Resident, want map[[2]int]Block) {
	t.Helper()
	if len(keep) != len(want) {
		t.Errorf("%d slots are adopted, want %d", len(keep), len(want))
	}
	for _, r := range keep {
		w, ok := want[[2]int{r.Slab, r.Slot}]
		if !ok || r.Header != w.Header {
			t.Errorf("slab %d, slot %d: %+v, want %+v", r.Slab, r.Slot, r.Header, w.Header)
			continue
		}
		got, err := Read(context.Background(), d, r.Slab, r.Slot, r.Header)
		if err != nil || string(got) != string(w.Payload) {
			t.Errorf("slab %d, slot %d: %v, or wrong bytes", r.Slab, r.Slot, err)
		}
	}
}

func roundTrip(t *testing.T, open Opener) {
	d, keep := must(t, open, Config)
	if len(keep) != 0 || d.Slabs() != 8 || d.SlabBytes() != 2<<20 {
		t.Fatalf("a new drive has %d slabs of %d, %d of its slots in use", d.Slabs(), d.SlabBytes(), len(keep))
	}
	want := map[[2]int]Block{}
	for slab, slotBytes := range []uint64{4096, 64 << 10, 1 << 20, 12288} {
		n := d.FormatSlab(slab, slotBytes)
		if bytes, slots := d.SlabInUse(slab); bytes != slotBytes || slots != n || n != d.SlotsPerSlab(slotBytes) {
			t.Fatalf("slab %d: %d slots of %d, want %d of %d", slab, slots, bytes, n, slotBytes)
		}
		var batch []nvme.WriteOp
		for slot := 0; slot < n; slot += 1 + n/16 {
			length := int(slotBytes) - slot*7%4096 // odd ones too
			b := NewBlock(uint64(slab*1000+slot), 1, length)
			if slot%2 == 1 { // and where the device cannot reach them
				b.Payload = append(make([]byte, 1, 1+length), b.Payload...)[1:]
			}
			b.Header.Generation = d.Fill(slab, slot)
			b.Header.State = pool.StateResident
			want[[2]int{slab, slot}] = b
			batch = append(batch, nvme.WriteOp{Slab: slab, Slot: slot, Header: b.Header, Payload: b.Payload})
		}
		d.Write(context.Background(), batch)
		for _, op := range batch {
			if op.Err != nil {
				t.Fatal(op.Err)
			}
		}
	}
	var reads []nvme.ReadOp
	for at, b := range want {
		into := Aligned(len(b.Payload) + 1)
		reads = append(reads, nvme.ReadOp{Slab: at[0], Slot: at[1], Into: into[at[1]%2 : at[1]%2+len(b.Payload)], CRC32C: b.Header.CRC32C})
	}
	d.Read(context.Background(), reads)
	for _, op := range reads {
		if op.Err != nil || string(op.Into) != string(want[[2]int{op.Slab, op.Slot}].Payload) {
			t.Errorf("slab %d, slot %d: %v, or wrong bytes", op.Slab, op.Slot, op.Err)
		}
	}
	s := d.Stats()
	if s.Writes != uint64(len(want)) || s.Reads != s.Writes || s.ReadBytes != s.WrittenBytes || s.LifetimeWritten != s.WrittenBytes || s.InFlight != 0 || s.Pending != 0 ||
		s.ReadP99 < s.ReadP50 || s.WriteP50 == 0 || s.Syncs == 0 || s.Engine == "" {
		t.Errorf("%+v", s)
	}
	shut(t, d)
	d, keep = must(t, open, Config)
	expect(t, d, keep, want)
	if after := d.Stats(); after.LifetimeWritten != s.LifetimeWritten || !d.Adopted() {
		t.Errorf("%+v, adopted: %v", after, d.Adopted())
	}
	shut(t, d)
}

func clears(t *testing.T, open Opener) {
	d, _ := must(t, open, Config)
	n := d.FormatSlab(3, 64<<10)
	want := map[[2]int]Block{}
	for slot := range n {
		b := NewBlock(uint64(slot), 1, 64<<10)
		h, err := Write(context.Background(), d, 3, slot, b)
		if err != nil {
			t.Fatal(err)
		}
		b.Header = h
		want[[2]int{3, slot}] = b
	}
	for _, slot := range []int{0, 5, 6, 7, n - 1} {
		d.Clear(3, slot)
		d.Clear(3, slot) // nothing more to do
		delete(want, [2]int{3, slot})
	}
	if s := d.Stats(); s.Pending != 5 {
		t.Errorf("%d changes are pending, want 5", s.Pending)
	}
	if err := d.Flush(context.Background()); err != nil {
		t.Fatal(err)
	}
	if s := d.Stats(); s.Pending != 0 {
		t.Errorf("%d changes are pending", s.Pending)
	}
	shut(t, d)
	d, keep := must(t, open, Config)
	expect(t, d, keep, want)
	shut(t, d)
}

func reformats(t *testing.T, open Opener) {
	d, _ := must(t, open, Config)
	for slot := range d.FormatSlab(1, 16<<10) {
		if _, err := Write(context.Background(), d, 1, slot, NewBlock(uint64(slot), 1, 16<<10)); err != nil {
			t.Fatal(err)
		}
		d.Clear(1, slot) // some are durable, some are noted when the slab goes
	}
	d.FreeSlab(1)
	d.FormatSlab(1, 128<<10)
	b := NewBlock(7, 2, 128<<10)
	var err error
	if b.Header, err = Write(context.Background(), d, 1, 2, b); err != nil {
		t.Fatal(err)
	}
	d.FormatSlab(2, 4096)
	d.FreeSlab(2)
	shut(t, d)
	d, keep := must(t, open, Config)
	expect(t, d, keep, map[[2]int]Block{{1, 2}: b})
	if bytes, _ := d.SlabInUse(1); bytes != 128<<10 {
		t.Errorf("slots of %d", bytes)
	}
	if bytes, _ := d.SlabInUse(2); bytes != 0 {
		t.Errorf("slots of %d in a free slab", bytes)
	}
	shut(t, d)
}

func duplicates(t *testing.T, open Opener) {
	d, _ := must(t, open, Config)
	d.FormatSlab(0, 64<<10)
	var last Block
	for slot := range 4 {
		last = NewBlock(9, uint64(slot), 64<<10)
		var err error
		if last.Header, err = Write(context.Background(), d, 0, slot, last); err != nil {
			t.Fatal(err)
		}
	}
	shut(t, d)
	for range 2 {
		d, keep := must(t, open, Config)
		expect(t, d, keep, map[[2]int]Block{{0, 3}: last})
		if err := d.Flush(context.Background()); err != nil {
			t.Fatal(err)
		}
		shut(t, d)
	}
}

func cancelled(t *testing.T, open Opener) {
	d, _ := must(t, open, Config)
	d.FormatSlab(0, 64<<10)
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(cause)
	if _, err := Write(ctx, d, 0, 0, NewBlock(1, 1, 64<<10)); !errors.Is(err, cause) {
		t.Errorf("write: %v", err)
	}
	h, err := Write(context.Background(), d, 0, 1, NewBlock(2, 1, 64<<10))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Read(ctx, d, 0, 1, h); !errors.Is(err, cause) {
		t.Errorf("read: %v", err)
	}
	if err := d.Flush(ctx); !errors.Is(err, cause) {
		t.Errorf("flush: %v", err)
	}
	shut(t, d)
	d, keep := must(t, open, Config)
	if len(keep) != 1 || keep[0].Slot != 1 {
		t.Errorf("%+v", keep)
	}
	shut(t, d)
}

func refused(t *testing.T, open Opener) {
	d, _ := must(t, open, Config)
	ctx := context.Background()
	d.FormatSlab(0, 64<<10)
	good := NewBlock(1, 1, 64<<10)
	good.Header.Generation = d.Fill(0, 0)
	for name, change := range map[string]func(*nvme.WriteOp){
		"no such slab":           func(op *nvme.WriteOp) { op.Slab = 99 },
		"a free slab":            func(op *nvme.WriteOp) { op.Slab = 1 },
		"no such slot":           func(op *nvme.WriteOp) { op.Slot = 31 },
		"negative":               func(op *nvme.WriteOp) { op.Slot = -1 },
		"too long":               func(op *nvme.WriteOp) { op.Payload = make([]byte, 64<<10+1) },
		"empty":                  func(op *nvme.WriteOp) { op.Payload = nil },
		"another length":         func(op *nvme.WriteOp) { op.Header.Length-- },
		"odd generation":         func(op *nvme.WriteOp) { op.Header.Generation-- },
		"a generation of before": func(op *nvme.WriteOp) { op.Header.Generation -= 2 },
		"a generation to come":   func(op *nvme.WriteOp) { op.Header.Generation += 2 },
	} {
		batch := []nvme.WriteOp{{Header: good.Header, Payload: good.Payload}}
		change(&batch[0])
		if d.Write(ctx, batch); !errors.Is(batch[0].Err, nvme.ErrArgument) {
			t.Errorf("%s: %v", name, batch[0].Err)
		}
	}
	twice := []nvme.WriteOp{{Header: good.Header, Payload: good.Payload}, {Header: good.Header, Payload: good.Payload}}
	if d.Write(ctx, twice); twice[0].Err != nil || !errors.Is(twice[1].Err, nvme.ErrArgument) {
		t.Errorf("the same slot twice: %v, %v", twice[0].Err, twice[1].Err)
	}
	bad := good.Header
	bad.CRC32C++
	if _, err := Read(ctx, d, 0, 0, bad); !errors.Is(err, nvme.ErrCorrupt) {
		t.Errorf("another checksum: %v", err)
	}
	if _, err := Read(ctx, d, 0, 31, good.Header); !errors.Is(err, nvme.ErrArgument) {
		t.Errorf("no such slot: %v", err)
	}
	d.Write(ctx, nil)
	d.Read(ctx, nil)
	shut(t, d)
}

func concurrent(t *testing.T, open Opener) {
	d, _ := must(t, open, Config)
	var mu sync.Mutex
	want := map[[2]int]Block{}
	var wg sync.WaitGroup
	for slab := range 6 {
		d.FormatSlab(slab, 32<<10)
		wg.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(slab)))
			for round := range 12 {
				var batch []nvme.WriteOp
				for slot := range 8 {
					at := [2]int{slab, (slot*5 + round) % 40}
					mu.Lock()
					_, used := want[at]
					delete(want, at)
					mu.Unlock()
					if used {
						d.Clear(at[0], at[1])
						if random.IntN(4) == 0 {
							continue
						}
					}
					b := NewBlock(uint64(at[0]*100+at[1]), uint64(round), 32<<10)
					b.Header.Generation = d.Fill(at[0], at[1])
					batch = append(batch, nvme.WriteOp{Slab: at[0], Slot: at[1], Header: b.Header, Payload: b.Payload})
				}
				d.Write(context.Background(), batch)
				for _, op := range batch {
					if op.Err != nil {
						t.Error(op.Err)
						continue
					}
					op.Header.State = pool.StateResident
					mu.Lock()
					want[[2]int{op.Slab, op.Slot}] = Block{op.Header, op.Payload}
					mu.Unlock()
					got, err := Read(context.Background(), d, op.Slab, op.Slot, op.Header)
					if err != nil || string(got) != string(op.Payload) {
						t.Errorf("slab %d, slot %d: %v, or wrong bytes", op.Slab, op.Slot, err)
					}
				}
			}
		})
	}
	wg.Wait()
	shut(t, d)
	d, keep := must(t, open, Config)
	expect(t, d, keep, want)
	shut(t, d)
}

func resizes(t *testing.T, open Opener) {
	d, _ := must(t, open, Config)
	want := map[[2]int]Block{}
	for slab := range 8 {
		d.FormatSlab(slab, 256<<10)
		b := NewBlock(uint64(slab), 1, 256<<10)
		var err error
		if b.Header, err = Write(context.Background(), d, slab, slab%7, b); err != nil {
			t.Fatal(err)
		}
		want[[2]int{slab, slab % 7}] = b
	}
	shut(t, d)
	cfg := Config
	cfg.Bytes = 12<<20 + 12345 // five slabs
	d, keep := must(t, open, cfg)
	for slab := 5; slab < 8; slab++ {
		delete(want, [2]int{slab, slab % 7})
	}
	if d.Slabs() != 5 || len(d.Notes()) == 0 {
		t.Errorf("%d slabs, notes %q", d.Slabs(), d.Notes())
	}
	expect(t, d, keep, want)
	shut(t, d)
	d, keep = must(t, open, Config)
	expect(t, d, keep, want) // what was cut off does not come back
	if bytes, _ := d.SlabInUse(7); d.Slabs() != 8 || bytes != 0 {
		t.Errorf("%d slabs, the last of slots of %d", d.Slabs(), bytes)
	}
	shut(t, d)
	cfg = Config
	cfg.SlabBytes = 4 << 20
	d, keep = must(t, open, cfg)
	if d.SlabBytes() != 2<<20 || len(d.Notes()) == 0 {
		t.Errorf("slabs of %d, notes %q", d.SlabBytes(), d.Notes())
	}
	expect(t, d, keep, want)
	shut(t, d)
}

func generations(t *testing.T, open Opener) {
	last := kvferry.Generation(0)
	for range 3 {
		d, _ := must(t, open, Config)
		if bytes, _ := d.SlabInUse(0); bytes == 0 {
			d.FormatSlab(0, 4096)
		}
		for range 3 {
			g := d.Fill(0, 1)
			if g <= last || g.Filling() {
				t.Errorf("%d after %d", g, last)
			}
			last = g
		}
		b := NewBlock(1, 1, 4096)
		d.Clear(0, 1)
		h, err := Write(context.Background(), d, 0, 1, b)
		if err != nil {
			t.Fatal(err)
		}
		last = h.Generation
		d.FreeSlab(0) // no header tells of it any more
		shut(t, d)
	}
}

func closed(t *testing.T, open Opener) {
	d, _ := must(t, open, Config)
	d.FormatSlab(0, 4096)
	b := NewBlock(1, 1, 4096)
	b.Header.Generation = d.Fill(0, 0)
	shut(t, d)
	batch := []nvme.WriteOp{{Header: b.Header, Payload: b.Payload}}
	if d.Write(context.Background(), batch); !errors.Is(batch[0].Err, nvme.ErrClosed) {
		t.Error(batch[0].Err)
	}
	if _, err := Read(context.Background(), d, 0, 0, b.Header); !errors.Is(err, nvme.ErrClosed) {
		t.Error(err)
	}
	if err := d.Flush(context.Background()); !errors.Is(err, nvme.ErrClosed) {
		t.Error(err)
	}
	if err := d.Close(); !errors.Is(err, nvme.ErrClosed) {
		t.Error(err)
	}
}
