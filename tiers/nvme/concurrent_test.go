package nvme_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/tiers/nvme"
	"github.com/kvferry/kvferry/tiers/nvme/nvmetest"
)

// TestConcurrentCrash has several movers at work when the device crashes, or a sync fails. What they do is seeded, the order in which they come is not.
func TestConcurrentCrash(t *testing.T) {
	rounds := uint64(*seeds) / 4 / (slower/2 + 1)
	for n := uint64(1); n <= rounds; n++ {
		if err := concurrently(n); err != nil {
			t.Fatalf("seed %d: %v", n, err)
		}
	}
}

// shared is what movers know together.
type shared struct {
	mu     sync.Mutex
	blocks map[uint64]nvmetest.Block // by generation
	known  map[spot]uint64           // acknowledged
	maybe  map[spot][]uint64         // might be found
}

func concurrently(seed uint64) error {
	random := rand.New(rand.NewPCG(seed, 9))
	dev := nvmetest.New(int64(modelConfig.Bytes))
	s := &shared{blocks: map[uint64]nvmetest.Block{}, known: map[spot]uint64{}}
	for range 3 {
		d, keep, err := nvme.OpenMutated(modelConfig, dev, nvme.SmallLog)
		if err != nil {
			return err
		}
		found := map[spot]uint64{}
		for _, r := range keep {
			at, g := spot{r.Slab, r.Slot}, uint64(r.Header.Generation)
			possible := false
			for _, m := range s.maybe[at] {
				possible = possible || m == g
			}
			if s.known[at] != g && !possible {
				return fmt.Errorf("slab %d, slot %d: generation %d is there, possible are %d and %d", at[0], at[1], g, s.known[at], s.maybe[at])
			}
			got, err := nvmetest.Read(context.Background(), d, at[0], at[1], r.Header)
			if err != nil || string(got) != string(s.blocks[g].Payload) {
				return fmt.Errorf("slab %d, slot %d: %v, or wrong bytes", at[0], at[1], err)
			}
			found[at] = g
		}
		for at, g := range s.known {
			if found[at] != g {
				return fmt.Errorf("slab %d, slot %d: generation %d was acknowledged and is gone", at[0], at[1], g)
			}
		}
		s.known, s.maybe = found, map[spot][]uint64{}
		dev.CrashIn(20+random.IntN(200), random.Uint64())
		if often := 5 + random.IntN(40); random.IntN(2) == 0 {
			faults := rand.New(rand.NewPCG(random.Uint64(), 1))
			dev.Inject(func(op nvmetest.Op, _ int64, _ int) error {
				if op != nvmetest.OpRead && faults.IntN(often) == 0 {
					return unix.EIO
				}
				return nil
			})
		}
		var wg sync.WaitGroup
		for slab := range d.Slabs() - 1 {
			own := rand.New(rand.NewPCG(random.Uint64(), 2))
			wg.Go(func() { s.move(d, dev, slab, own) })
		}
		wg.Wait()
		dev.Crash()
		dev = dev.Restart(random.Uint64())
	}
	return nil
}

// move writes, clears and reads slots of one slab until the device has crashed.
func (s *shared) move(d *nvme.Drive, dev *nvmetest.Device, slab int, random *rand.Rand) {
	if bytes, _ := d.SlabInUse(slab); bytes == 0 {
		d.FormatSlab(slab, 8192)
	}
	for !dev.Crashed() {
		slot := random.IntN(4)
		at := spot{slab, slot}
		s.mu.Lock()
		g, used := s.known[at]
		if used {
			delete(s.known, at)
			s.maybe[at] = append(s.maybe[at], g)
		}
		s.mu.Unlock()
		if used {
			d.Clear(slab, slot)
			if random.IntN(3) == 0 {
				if d.Flush(context.Background()) == nil {
					s.mu.Lock()
					delete(s.maybe, at)
					s.mu.Unlock()
				}
				continue
			}
		}
		b := nvmetest.NewBlock(random.Uint64(), 1, 8000)
		b.Header.Generation = d.Fill(slab, slot)
		s.mu.Lock()
		s.blocks[uint64(b.Header.Generation)] = b
		s.maybe[at] = append(s.maybe[at], uint64(b.Header.Generation))
		s.mu.Unlock()
		batch := []nvme.WriteOp{{Slab: slab, Slot: slot, Header: b.Header, Payload: b.Payload}}
		d.Write(context.Background(), batch)
		if batch[0].Err == nil {
			s.mu.Lock()
			s.known[at] = uint64(b.Header.Generation)
			delete(s.maybe, at)
			s.mu.Unlock()
		}
	}
}
