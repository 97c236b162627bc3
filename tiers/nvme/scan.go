package nvme

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers/pool"
)

// scanners read header tables at the same time: each slab costs two reads that the drive can overlap with others.
const scanners = 8

// scanned is what one slab's table says.
type scanned struct {
	header  slabHeader
	keep    []pool.Resident
	doubt   []int // slots whose header is ours and damaged
	highest uint64
}

// scan rebuilds the slabs from their tables and answers what is worth keeping. Anything may stand in the file: what is not wholly right is a free slot.
// settled is the state block's. The caller owns d alone.
func (d *Drive) scan(settled uint64) ([]pool.Resident, error) {
	found := make([]scanned, len(d.slabs))
	if err := d.eachSlab(func(i int, buf *[]byte) error { return d.scanSlabHeader(i, &found[i], buf) }); err != nil {
		return nil, err
	}
	for i := range found {
		d.cutLocked(i, found[i].header)
	}
	if err := d.replay(settled); err != nil {
		return nil, err
	}
	if err := d.eachSlab(func(i int, buf *[]byte) error { return d.scanTable(i, &found[i], buf) }); err != nil {
		return nil, err
	}
	n := 0
	for i := range found {
		n += len(found[i].keep)
	}
	keep := make([]pool.Resident, 0, n)
	for i := range found {
		f := &found[i]
		d.generation = max(d.generation, f.highest)
		for _, r := range f.keep {
			d.slabs[i].live[r.Slot/64] |= 1 << (r.Slot % 64)
		}
		for _, slot := range f.doubt {
			d.slabs[i].live[slot/64] |= 1 << (slot % 64)
			d.killLocked(i, slot)
		}
		d.dropped += len(f.doubt)
		keep = append(keep, f.keep...)
		found[i] = scanned{}
	}
	return d.dropDuplicates(keep), nil
}

// eachSlab does something for every slab, for several at the same time, and answers the first error. Each of them has a buffer that grows.
func (d *Drive) eachSlab(do func(i int, buf *[]byte) error) error {
	errs := make([]error, len(d.slabs))
	var at atomic.Int64
	var wg sync.WaitGroup
	for range min(scanners, len(errs)) {
		wg.Go(func() {
			var buf []byte
			for i := int(at.Add(1)) - 1; i < len(errs); i = int(at.Add(1)) - 1 {
				errs[i] = do(i, &buf)
			}
		})
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			return fmt.Errorf("%w: read the headers of slab %d: %w", ErrDevice, i, err)
		}
	}
	return nil
}

// scanSlabHeader reads how a slab is cut.
func (d *Drive) scanSlabHeader(i int, f *scanned, buf *[]byte) error {
	b := grown(buf, slabUsed)
	if err := d.dev.ReadAt(b, int64(slabsAt+uint64(i)*d.cfg.SlabBytes)); err != nil {
		return err
	}
	h, ok := parseSlab(b, d.id, i)
	f.highest = h.floor
	if !ok || h.slotBytes == 0 || h.slots == 0 || h.slots != uint64(d.SlotsPerSlab(h.slotBytes)) {
		h = slabHeader{floor: h.floor}
	}
	f.header = h
	return nil
}

// scanTable reads a slab's slot headers.
func (d *Drive) scanTable(i int, f *scanned, buf *[]byte) error {
	h := f.header
	if h.slots == 0 {
		return nil
	}
	table := grown(buf, int(h.slots)*pool.HeaderBytes)
	if err := d.dev.ReadAt(table, int64(d.slabs[i].headersAt)); err != nil {
		return err
	}
	for slot := range int(h.slots) {
		b := table[slot*pool.HeaderBytes:][:pool.HeaderBytes]
		hd, ours, ok := parseHeader(b, d.id, i, slot)
		if !ok {
			if ours {
				f.doubt = append(f.doubt, slot)
			}
			continue
		}
		f.highest = max(f.highest, uint64(hd.Generation))
		if uint64(hd.Generation) <= h.floor && d.mutate&noFloor == 0 || hd.State == pool.StateFree {
			continue
		}
		if hd.State == pool.StateResident && !hd.Generation.Filling() && hd.Length > 0 && hd.Length <= h.slotBytes {
			f.keep = append(f.keep, pool.Resident{Slab: i, Slot: slot, Header: hd})
		} else {
			f.doubt = append(f.doubt, slot)
		}
	}
	return nil
}

func grown(buf *[]byte, n int) []byte {
	if cap(*buf) < n {
		*buf = make([]byte, n)
	}
	return (*buf)[:n]
}

// shardKey names what a slot holds.
type shardKey struct {
	space kvferry.SpaceID
	hash  kvferry.Hash
	shard uint16
}

func keyOf(h *pool.Header) shardKey { return shardKey{h.Space, h.Hash, h.Shard} }

// dropDuplicates keeps of those that hold the same the one with the highest generation, and notes tombstones for the others.
func (d *Drive) dropDuplicates(keep []pool.Resident) []pool.Resident {
	first := make(map[uint64]int32, len(keep)) // by a part of the key, to keep it small; what shares it with another is found beside it
	lost := make(map[int]bool)
	for i := range keep {
		key := keyOf(&keep[i].Header)
		for short := key.short(); ; short++ {
			k, taken := first[short]
			if !taken {
				first[short] = int32(i)
				break
			}
			if keyOf(&keep[k].Header) != key {
				continue
			}
			loser := i
			if keep[i].Header.Generation > keep[k].Header.Generation {
				first[short], loser = int32(i), int(k)
			}
			lost[loser] = true
			break
		}
	}
	if len(lost) == 0 {
		return keep
	}
	d.doubles = len(lost)
	kept := keep[:0]
	for i, r := range keep {
		if lost[i] {
			d.killLocked(r.Slab, r.Slot)
		} else {
			kept = append(kept, r)
		}
	}
	return kept
}

func (k *shardKey) short() uint64 {
	word := func(b []byte) (v uint64) {
		for _, c := range b[:8] {
			v = v<<8 | uint64(c)
		}
		return v
	}
	return word(k.hash[:]) ^ word(k.space[:])*0x9e3779b97f4a7c15 ^ uint64(k.shard)*0xd6e8feb86659fd93
}
