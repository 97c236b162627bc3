package nvme_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers/nvme"
	"github.com/kvferry/kvferry/tiers/nvme/nvmetest"
	"github.com/kvferry/kvferry/tiers/pool"
)

var (
	seeds = flag.Int("seeds", 200, "seeds of the crash tests")
	seed  = flag.Uint64("seed", 0, "only this seed")
)

// TestCrash runs seeded operations with crashes and faults against a plain map of what must be, and what may be, on the drive.
func TestCrash(t *testing.T) {
	first, last := uint64(1), max(1, uint64(*seeds)/slower)
	if *seed != 0 {
		first, last = *seed, *seed
	}
	var total tally
	for n := first; n <= last; n++ {
		if err := runModel(n, 0, &total); err != nil {
			t.Fatalf("seed %d: %v", n, err)
		}
	}
	t.Logf("%+v", total)
	if *seed == 0 && *seeds/slower >= 100 && (total.crashes < 100 || total.failed < 50 || total.back < 10 || total.reused < 100 || total.gone < 5) {
		t.Errorf("too little has happened: %+v", total)
	}
}

// TestMutations proves that the model bites.
func TestMutations(t *testing.T) {
	for name, m := range map[string]nvme.Mutation{
		"no checksum": nvme.NoChecksum, "header before payload": nvme.HeaderFirst, "no tombstone": nvme.NoTombstone, "no sync of payloads": nvme.NoPayloadSync,
		"headers from before a slab was cut": nvme.NoFloor, "no tombstone before reuse": nvme.NoPending,
		"half of the log used too early": nvme.ReuseEarly, "parts of a half that was used again": nvme.NoSettled,
	} {
		t.Run(name, func(t *testing.T) {
			for n := uint64(1); n <= 400; n++ {
				if err := runModel(n, m, &tally{}); err != nil {
					t.Logf("seed %d: %v", n, err)
					return
				}
			}
			t.Error("400 seeds did not notice it")
		})
	}
}

// tally is what happened.
type tally struct{ lives, crashes, failed, acked, reused, back, gone, corrupt, doubles int }

type spot = [2]int // slab, slot

// model is a drive and what is known of it.
type model struct {
	random  *rand.Rand
	dev     *nvmetest.Device
	d       *nvme.Drive
	m       nvme.Mutation
	small   nvme.Mutation                         // the log of most is small, so that it turns
	blocks  map[kvferry.Generation]nvmetest.Block // all that were ever given to Write
	must    map[spot]kvferry.Generation           // acknowledged and not cleared
	may     map[kvferry.Generation]spot           // might come back at a crash
	flipped map[kvferry.Generation]bool
	next    uint64
	highest kvferry.Generation
	tally   *tally
}

var modelConfig = nvme.Config{Bytes: 12 << 20, SlabBytes: 2 << 20}

func runModel(seed uint64, m nvme.Mutation, total *tally) (err error) {
	w := &model{
		random: rand.New(rand.NewPCG(seed, 0)), dev: nvmetest.New(int64(modelConfig.Bytes)), m: m, blocks: map[kvferry.Generation]nvmetest.Block{},
		must: map[spot]kvferry.Generation{}, may: map[kvferry.Generation]spot{}, flipped: map[kvferry.Generation]bool{}, tally: total,
	}
	if seed%4 != 0 {
		w.small = nvme.SmallLog
	}
	for life := range 5 {
		w.tally.lives++
		if err := w.live(); err != nil {
			return fmt.Errorf("life %d: %w", life, err)
		}
		w.dev = w.dev.Restart(w.random.Uint64())
	}
	return nil
}

// live is one daemon's: it opens the drive, compares, works, and ends in one way or another.
func (w *model) live() error {
	w.dev.Inject(nil)
	if w.random.IntN(3) > 0 {
		w.dev.CrashIn(1+w.random.IntN(120), w.random.Uint64())
	}
	d, keep, err := nvme.OpenMutated(modelConfig, w.dev, w.m|w.small)
	if w.dev.Crashed() {
		w.tally.crashes++
		return nil
	}
	if err != nil {
		return err
	}
	w.d = d
	if err := w.compare(keep); err != nil {
		return err
	}
	for range 10 + w.random.IntN(40) {
		if err := w.act(); err != nil {
			return err
		}
		if w.dev.Crashed() {
			w.tally.crashes++
			return nil
		}
	}
	w.dev.Inject(nil)
	if w.random.IntN(2) == 0 {
		w.dev.Crash()
		w.tally.crashes++
		return nil
	}
	if err := w.d.Close(); err != nil {
		if w.dev.Crashed() {
			return nil
		}
		return err
	}
	clear(w.may)
	return nil
}

// compare holds what was adopted against what is known, and reads all of it.
func (w *model) compare(keep []pool.Resident) error {
	found := map[spot]pool.Header{}
	byName := map[string]kvferry.Generation{}
	for _, r := range keep {
		at := spot{r.Slab, r.Slot}
		found[at] = r.Header
		byName[nameOf(r.Header)] = r.Header.Generation
		g := r.Header.Generation
		if w.must[at] != g {
			if back, ok := w.may[g]; !ok || back != at {
				return fmt.Errorf("slab %d, slot %d: generation %d comes back, which was cleared or is of elsewhere", at[0], at[1], g)
			}
			w.tally.back++
		}
		if want := w.blocks[g].Header; r.Header != want {
			return fmt.Errorf("slab %d, slot %d: header %+v, want %+v", at[0], at[1], r.Header, want)
		}
	}
	for at, g := range w.must {
		h := w.blocks[g].Header
		if _, ok := found[at]; ok {
			continue
		}
		if byName[nameOf(h)] <= g {
			return fmt.Errorf("slab %d, slot %d: generation %d was acknowledged and is gone", at[0], at[1], g)
		}
		w.tally.doubles++
		w.may[g] = at // a newer one of the same name: this one is to be killed
		delete(w.must, at)
	}
	w.tally.gone += len(w.may)
	for g := range w.may {
		// What did not come back may still stand on the drive only if it lost against a newer one of its name.
		if _, double := byName[nameOf(w.blocks[g].Header)]; !double {
			delete(w.may, g)
		}
	}
	for at, h := range found {
		w.must[at] = h.Generation // adopted is as good as acknowledged: Open has made it durable
		delete(w.may, h.Generation)
		if err := w.read(at); err != nil {
			return err
		}
	}
	return nil
}

func nameOf(h pool.Header) string { return fmt.Sprintf("%x/%x/%d", h.Space, h.Hash, h.Shard) }

// read reads a slot that must be there.
func (w *model) read(at spot) error {
	b := w.blocks[w.must[at]]
	got, err := nvmetest.Read(context.Background(), w.d, at[0], at[1], b.Header)
	switch {
	case err == nil && string(got) != string(b.Payload):
		return fmt.Errorf("slab %d, slot %d: wrong bytes", at[0], at[1])
	case err == nil || w.dev.Crashed():
		return nil
	case errors.Is(err, nvme.ErrCorrupt) && w.flipped[w.must[at]]:
		w.tally.corrupt++
		return nil
	case errors.Is(err, nvme.ErrDevice) && errors.Is(err, unix.EIO):
		return nil
	}
	return fmt.Errorf("slab %d, slot %d: %w", at[0], at[1], err)
}

// act does one thing.
func (w *model) act() error {
	switch p := w.random.IntN(100); {
	case p < 40:
		return w.write()
	case p < 60:
		for at := range w.some() {
			w.clear(at)
		}
	case p < 68:
		if w.random.IntN(4) > 0 {
			w.flush()
		}
	case p < 84:
		for at := range w.some() {
			return w.read(at)
		}
	case p < 90:
		w.cut()
	case p < 94:
		w.inject()
	case p < 97:
		w.dev.Inject(nil)
	default:
		for at := range w.some() {
			w.dev.Flip(int64(w.d.SlotOffset(at[0], at[1]))+int64(w.random.IntN(len(w.blocks[w.must[at]].Payload))), uint(w.random.IntN(8)))
			w.flipped[w.must[at]] = true
			return w.read(at)
		}
	}
	return nil
}

// some yields one of the slots that must be there, if there is one.
func (w *model) some() func(yield func(spot) bool) {
	return func(yield func(spot) bool) {
		if len(w.must) == 0 {
			return
		}
		list := make([]spot, 0, len(w.must))
		for at := range w.must {
			list = append(list, at)
		}
		slices.SortFunc(list, func(a, b spot) int { return slices.Compare(a[:], b[:]) })
		yield(list[w.random.IntN(len(list))])
	}
}

func (w *model) clear(at spot) {
	w.d.Clear(at[0], at[1])
	w.may[w.must[at]] = at
	delete(w.must, at)
}

// inject has the device fail some of what comes.
func (w *model) inject() {
	random := rand.New(rand.NewPCG(w.random.Uint64(), 1))
	often := 2 + random.IntN(10)
	w.dev.Inject(func(op nvmetest.Op, off int64, n int) error {
		if random.IntN(often) == 0 {
			return unix.EIO
		}
		return nil
	})
}

func (w *model) flush() {
	before := w.maySnapshot()
	if w.d.Flush(context.Background()) == nil {
		w.settle(before)
	}
}

func (w *model) maySnapshot() (list []kvferry.Generation) {
	for g := range w.may {
		list = append(list, g)
	}
	return list
}

func (w *model) settle(before []kvferry.Generation) {
	for _, g := range before {
		delete(w.may, g)
	}
}

// slotsUsed bounds the slots of a slab that are used, so that they are used again soon.
const slotsUsed = 5

func (w *model) write() error {
	var free []spot
	for slab := range w.d.Slabs() {
		_, n := w.d.SlabInUse(slab)
		for slot := range min(n, slotsUsed) {
			if _, used := w.must[spot{slab, slot}]; !used {
				free = append(free, spot{slab, slot})
			}
		}
	}
	if len(free) == 0 {
		w.cut()
		return nil
	}
	w.random.Shuffle(len(free), func(i, j int) { free[i], free[j] = free[j], free[i] })
	before := w.maySnapshot()
	var batch []nvme.WriteOp
	for _, at := range free[:1+w.random.IntN(min(len(free), 5))] {
		slotBytes, _ := w.d.SlabInUse(at[0])
		w.next++
		name := w.next
		if w.random.IntN(12) == 0 {
			name = 1 + w.random.Uint64N(w.next) // of one that there may be already
		}
		b := nvmetest.NewBlock(name, w.next, int(slotBytes)-w.random.IntN(2)*w.random.IntN(4000))
		b.Header.Generation = w.d.Fill(at[0], at[1])
		if b.Header.Generation <= w.highest {
			return fmt.Errorf("generation %d is given out after %d", b.Header.Generation, w.highest)
		}
		w.highest = b.Header.Generation
		batch = append(batch, nvme.WriteOp{Slab: at[0], Slot: at[1], Header: b.Header, Payload: b.Payload})
		b.Header.State = pool.StateResident
		w.blocks[b.Header.Generation] = b
		for _, old := range w.may {
			if old == at {
				w.tally.reused++
			}
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if w.random.IntN(20) == 0 {
		cancel()
	}
	w.d.Write(ctx, batch)
	for _, op := range batch {
		g := op.Header.Generation
		if op.Err != nil {
			w.may[g] = spot{op.Slab, op.Slot}
			w.tally.failed++
			continue
		}
		w.settle(before)
		w.must[spot{op.Slab, op.Slot}] = g
		w.tally.acked++
	}
	return nil
}

// cut formats a free slab, or empties one and gives it back.
func (w *model) cut() {
	slab := w.random.IntN(w.d.Slabs())
	if bytes, n := w.d.SlabInUse(slab); bytes > 0 {
		for slot := range min(n, slotsUsed) {
			if _, used := w.must[spot{slab, slot}]; used {
				w.clear(spot{slab, slot})
			}
		}
		w.d.FreeSlab(slab)
		if w.random.IntN(2) == 0 {
			return
		}
	}
	w.d.FormatSlab(slab, []uint64{4096, 4096, 8192, 20480, 64 << 10}[w.random.IntN(5)])
}
