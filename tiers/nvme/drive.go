package nvme

import (
	"fmt"
	"os"
	"sync"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers/pool"
)

// Drive is an open drive file.
type Drive struct {
	cfg      Config
	dev      Device
	lock     *os.File // nil where a test gave the device
	id       driveID
	adopted  bool
	notes    []string // what was found at Open
	dropped  int
	doubles  int
	counters counters
	mutate   mutation
	syncs    syncer

	// order is held while metadata is written, so that what is noted later is written later. It is taken before mu. turn waits for syncs with it; who syncs never takes it.
	order sync.Mutex

	mu         sync.Mutex
	closed     bool
	users      sync.WaitGroup
	generation uint64 // the highest that was given out; even
	limit      uint64 // none above it is in the file; durable
	sequence   uint64 // of the state block
	wear       uint64 // bytes written in the file's life, as that was noted last
	slabs      []slab
	inFlight   map[uint32]*inFlight // slots that are being written
	book       bookLog
	noted
}

// slab is a slab as it will be when all that is noted is durable.
type slab struct {
	slotBytes uint64 // 0: free
	headersAt uint64
	slotsAt   uint64
	floor     uint64
	slots     uint32
	writing   int32    // of its slots
	live      []uint64 // bit set: the drive may hold a header of this slot that a scan would believe, and no tombstone is noted
	dead      []uint64 // bit set: a tombstone is noted
	noted     bool     // in noted.slabs
	header    bool     // its header is noted
}

// inFlight is a slot that a Write is at.
type inFlight struct{ cleared bool }

func slotKey(slab, slot int) uint32 { return uint32(slab)*pool.SlotsPerSlabMax + uint32(slot) }

// Slabs is the number of slabs.
func (d *Drive) Slabs() int { return len(d.slabs) }

// SlabBytes is the length of a slab.
func (d *Drive) SlabBytes() uint64 { return d.cfg.SlabBytes }

// SlotsPerSlab is how many slots of slotBytes a slab holds; 0 where slotBytes is no slot length.
func (d *Drive) SlotsPerSlab(slotBytes uint64) int { return pool.SlotsIn(d.cfg.SlabBytes, slotBytes) }

// Adopted tells whether the file was there already.
func (d *Drive) Adopted() bool { return d.adopted }

// Notes are what is worth a line in the log about how the drive was opened.
func (d *Drive) Notes() []string { return d.notes }

// SlabInUse is the slot length and count of a slab, or zeros when it is free.
func (d *Drive) SlabInUse(i int) (slotBytes uint64, slots int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.slabs[i].slotBytes, int(d.slabs[i].slots)
}

// HeaderOffset is where in the file the header of a slot lies; a new one comes there by way of the log.
func (d *Drive) HeaderOffset(slab, slot int) uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.slabs[slab].headersAt + uint64(slot)*pool.HeaderBytes
}

// SlotOffset is where in the file a slot's payload lies.
func (d *Drive) SlotOffset(slab, slot int) uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := &d.slabs[slab]
	return s.slotsAt + uint64(slot)*s.slotBytes
}

// FormatSlab makes a free slab into one of slots of slotBytes, all free, and returns how many there are. Headers that lie there from before have
// generations that are not above the slab's floor: none of them has to be overwritten.
func (d *Drive) FormatSlab(i int, slotBytes uint64) int {
	n := d.SlotsPerSlab(slotBytes)
	d.mu.Lock()
	defer d.mu.Unlock()
	s := &d.slabs[i]
	if s.slotBytes != 0 || n == 0 {
		panic(fmt.Sprintf("nvme: format slab %d (slots of %d) with slots of %d", i, s.slotBytes, slotBytes))
	}
	d.cutLocked(i, slabHeader{slotBytes: slotBytes, slots: uint64(n), floor: d.generation})
	d.noteSlabLocked(i)
	s.header = true
	return n
}

// FreeSlab gives a slab back. None of its slots is in use.
func (d *Drive) FreeSlab(i int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.slabs[i].writing > 0 {
		panic(fmt.Sprintf("nvme: slab %d is given back while %d of its slots are written", i, d.slabs[i].writing))
	}
	d.cutLocked(i, slabHeader{floor: d.generation})
	d.noteSlabLocked(i)
	d.slabs[i].header = true
}

// cutLocked takes a slab's new shape over. What was noted of its slots has no object any more.
func (d *Drive) cutLocked(i int, h slabHeader) {
	s := &d.slabs[i]
	*s = slab{noted: s.noted, header: s.header, floor: h.floor}
	if h.slotBytes == 0 {
		return
	}
	s.slotBytes, s.slots = h.slotBytes, uint32(h.slots)
	s.headersAt = slabsAt + uint64(i)*d.cfg.SlabBytes + pool.SlabHeaderBytes
	s.slotsAt = s.headersAt + pool.TableBytes(h.slots)
	words := (h.slots + 63) / 64
	bits := make([]uint64, 2*words)
	s.live, s.dead = bits[:words:words], bits[words:]
}

// Fill is the generation that a slot will have when it is written: above all that the drive ever had.
func (d *Drive) Fill(slab, slot int) kvferry.Generation {
	d.mu.Lock()
	defer d.mu.Unlock()
	if slot >= int(d.slabs[slab].slots) {
		panic(fmt.Sprintf("nvme: slot %d of slab %d, which has %d", slot, slab, d.slabs[slab].slots))
	}
	d.generation += 2
	return kvferry.Generation(d.generation)
}

// Publish has nothing to do: a Write that has succeeded is durable with its header.
func (d *Drive) Publish(slab, slot int, h pool.Header) {}

// Clear notes that a slot is free. It is so after a crash once Flush, or a Write of the same or any other slot that began later, has succeeded.
func (d *Drive) Clear(slab, slot int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if w := d.inFlight[slotKey(slab, slot)]; w != nil {
		w.cleared = true
	}
	if slot < int(d.slabs[slab].slots) {
		d.killLocked(slab, slot)
	}
}

// killLocked notes a tombstone, if the drive may hold something to be killed.
func (d *Drive) killLocked(slab, slot int) {
	s := &d.slabs[slab]
	w, bit := slot/64, uint64(1)<<(slot%64)
	if s.live[w]&bit == 0 {
		return
	}
	s.live[w] &^= bit
	if d.mutate&noTombstone != 0 {
		return
	}
	s.dead[w] |= bit
	d.tombstones++
	d.noteSlabLocked(slab)
}

// Stats is what the drive has done since it was opened, and what drives it.
func (d *Drive) Stats() Stats {
	d.mu.Lock()
	pending, doubles, dropped := d.pendingLocked(), d.doubles, d.dropped
	d.mu.Unlock()
	s := d.counters.stats()
	s.Info, s.Pending, s.Duplicates, s.Dropped = d.dev.Info(), pending, doubles, dropped
	s.SizeBytes = fileBytes(len(d.slabs), d.cfg.SlabBytes)
	return s
}

// enter counts a user of the device, which Close waits for.
func (d *Drive) enter() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return ErrClosed
	}
	d.users.Add(1)
	return nil
}

// Close waits for what is under way, makes what is noted durable, and gives the file and its lock back.
func (d *Drive) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return ErrClosed
	}
	d.closed = true
	d.state = true // for the bytes written in its life
	d.mu.Unlock()
	d.users.Wait()
	err := d.commit(d.epoch())
	return d.release(err)
}

// release closes the device and the lock; err is the first error.
func (d *Drive) release(err error) error {
	if d.dev != nil {
		if e := d.dev.Close(); err == nil {
			err = e
		}
	}
	if d.lock != nil {
		if e := d.lock.Close(); err == nil {
			err = e
		}
	}
	return err
}

// mutation takes out rules that keep wrong bytes away, for the tests that must notice it. It is 0 otherwise.
type mutation uint32

const (
	noChecksum    mutation = 1 << iota // a Read does not compare the CRC
	headerFirst                        // headers are written before payloads
	noTombstone                        // Clear changes nothing on the drive
	noPayloadSync                      // payloads are not synced before headers
	noEpoch                            // a failed sync of somebody else's is none of a batch's business
	noFloor                            // headers from before a slab was cut are believed
	noPending                          // a Write does not wait for what was noted before it
	reuseEarly                         // half of the log is used again though what it says may not be in place
	noSettled                          // the state block does not say what of the log is in place
	smallLog                           // no rule: the log has few blocks, so that it turns often
)
