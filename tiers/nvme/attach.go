package nvme

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"math/bits"
	"time"

	"github.com/kvferry/kvferry/tiers/pool"
)

// lostStates is how far generations jump when neither copy of the state block can be read: further than any daemon can have gone beyond what is found.
const lostStates = 1 << 40

// OpenDevice opens a drive on a device that the caller made: for tests and the simulation. Zeros are a new drive. The device is the drive's from now on,
// also where this fails.
func OpenDevice(cfg Config, dev Device) (*Drive, []pool.Resident, error) {
	return attach(cfg, dev, place{}, 0)
}

// attach takes a device over, whose content is a drive, or zeros. It closes both on error.
func attach(cfg Config, dev Device, p place, m mutation) (*Drive, []pool.Resident, error) {
	cfg = cfg.withDefaults()
	d := &Drive{cfg: cfg, dev: dev, book: newBookLog(), lock: p.lock, notes: p.notes, inFlight: map[uint32]*inFlight{}, mutate: m}
	keep, err := d.adopt()
	if err != nil {
		return nil, nil, d.release(err)
	}
	d.adopted = d.adopted && !p.made
	return d, keep, nil
}

func (d *Drive) adopt() ([]pool.Resident, error) {
	if err := d.cfg.validateGeometry(); err != nil {
		return nil, err
	}
	// What is seen is what is there after a crash too: whatever a daemon before has left with the kernel is durable first.
	if err := d.dev.Sync(); err != nil {
		return nil, fmt.Errorf("%w: sync: %w", ErrDevice, err)
	}
	s, found, err := readSuper(d.dev)
	switch {
	case err != nil:
		return nil, err
	case found == 0:
		return nil, d.initialise()
	case s.version != Format:
		return nil, fmt.Errorf("%w: format %d, this daemon has %d", ErrForeign, s.version, Format)
	case s.slabBytes < slabBytesMin || s.slabBytes > slabBytesMax || s.slabBytes&(s.slabBytes-1) != 0:
		return nil, fmt.Errorf("%w: slabs of %d bytes", ErrForeign, s.slabBytes)
	}
	d.id, d.adopted = s.id, true
	if s.slabBytes != d.cfg.SlabBytes {
		d.notes = append(d.notes, fmt.Sprintf("the file has slabs of %d bytes and keeps them; nvme.slab says %d", s.slabBytes, d.cfg.SlabBytes))
		d.cfg.SlabBytes = s.slabBytes
	}
	n := slabsIn(min(d.cfg.Bytes, uint64(d.dev.Size())), d.cfg.SlabBytes)
	if n == 0 {
		return nil, fmt.Errorf("%w: nvme.size: no room for a slab of %d bytes", ErrNoSpace, d.cfg.SlabBytes)
	}
	if err := d.resize(s, n); err != nil {
		return nil, err
	}
	if found < len(supersAt) {
		d.notes = append(d.notes, "of the superblock one copy was missing or damaged, and is written anew")
		s.slabs = uint64(n)
		if err := d.writeSuper(s); err != nil {
			return nil, err
		}
	}
	old, known := d.readState()
	d.generation = old.limit
	d.sequence = old.sequence
	d.counters.lifetime.Store(old.written)
	d.wear = old.written
	d.slabs = make([]slab, n)
	keep, err := d.scan(old.settled)
	if err != nil {
		return nil, err
	}
	if !known {
		d.notes = append(d.notes, "neither copy of the state block could be read: the bytes written in the file's life are counted anew")
		d.generation += lostStates
	}
	d.generation = (d.generation + 3) &^ 1
	if err := d.noteSettled(d.book.round - 1); err != nil { // before anything is logged
		return nil, err
	}
	d.mu.Lock()
	d.state = true
	d.mu.Unlock()
	if err := d.commit(d.epoch()); err != nil {
		return nil, err
	}
	return keep, nil
}

// initialise makes a drive of zeros.
func (d *Drive) initialise() error {
	d.book = newBookLog()
	_, _ = rand.Read(d.id[:]) // never fails: crypto/rand aborts the program instead
	n := slabsIn(min(d.cfg.Bytes, uint64(d.dev.Size())), d.cfg.SlabBytes)
	if n == 0 {
		return fmt.Errorf("%w: nvme.size: no room for a slab of %d bytes", ErrNoSpace, d.cfg.SlabBytes)
	}
	d.slabs = make([]slab, n)
	var b [8]byte
	_, _ = rand.Read(b[:])
	d.generation = binary.LittleEndian.Uint64(b[:])>>2&^1 | 1<<48 // random, so that a generation of another drive's is none here
	d.mu.Lock()
	d.state = true
	d.mu.Unlock()
	if err := d.commit(d.epoch()); err != nil {
		return err
	}
	return d.writeSuper(super{version: Format, slabBytes: d.cfg.SlabBytes, slabs: uint64(n), id: d.id, madeMs: uint64(time.Now().UnixMilli())})
}

// resize makes the file one of n slabs. Slabs that come in are free, whatever lies there: they may have been part of this file before.
func (d *Drive) resize(s super, n int) error {
	had := int(min(s.slabs, pool.SlabsMax))
	if had == n && s.slabs == uint64(n) {
		return nil
	}
	d.notes = append(d.notes, fmt.Sprintf("the file had %d slabs, has %d now", s.slabs, n))
	b := make([]byte, slabUsed)
	for i := had; i < n; i++ {
		at := int64(slabsAt + uint64(i)*d.cfg.SlabBytes)
		if err := d.dev.ReadAt(b, at); err != nil {
			return fmt.Errorf("%w: read slab %d: %w", ErrDevice, i, err)
		}
		if !zeros(b) {
			if err := d.dev.WriteAt(make([]byte, slabUsed), at); err != nil {
				return fmt.Errorf("%w: clear slab %d: %w", ErrDevice, i, err)
			}
		}
	}
	if err := d.dev.Sync(); err != nil {
		return fmt.Errorf("%w: sync: %w", ErrDevice, err)
	}
	s.slabs = uint64(n)
	return d.writeSuper(s)
}

func (d *Drive) writeSuper(s super) error {
	for _, at := range supersAt {
		if err := d.dev.WriteAt(s.encode(), at); err != nil {
			return fmt.Errorf("%w: write the superblock: %w", ErrDevice, err)
		}
	}
	if err := d.dev.Sync(); err != nil {
		return fmt.Errorf("%w: sync: %w", ErrDevice, err)
	}
	return nil
}

// readSuper is the first copy of the superblock that holds, and how many say the same. None, and no error: there has never been one. What begins with something else than a superblock, but for a flipped bit, is a
// stranger's, whatever lies behind that.
func readSuper(dev Device) (s super, found int, err error) {
	for i, at := range supersAt {
		b := make([]byte, superBytes)
		if e := dev.ReadAt(b, at); e != nil {
			err = fmt.Errorf("%w: read the superblock: %w", ErrDevice, e)
			continue
		}
		c, ok := parseSuper(b)
		switch {
		case ok && found == 0:
			s, found = c, 1
		case ok && c == s:
			found++
		case !ok && !zeros(b):
			err = fmt.Errorf("%w: wrong magic or checksum; remove the file if it may be overwritten", ErrForeign)
			if magic := binary.LittleEndian.Uint64(b); i == 0 && bits.OnesCount64(magic^superMagic) > 1 {
				return super{}, 0, err
			}
		}
	}
	if found > 0 {
		return s, found, nil
	}
	return s, 0, err
}

// readState is the newer copy of the state block.
func (d *Drive) readState() (newest state, known bool) {
	for _, at := range statesAt {
		b := make([]byte, stateBytes)
		if err := d.dev.ReadAt(b, at); err != nil {
			continue
		}
		if s, ok := parseState(b, d.id); ok && (!known || s.sequence > newest.sequence) {
			newest, known = s, true
		}
	}
	return newest, known
}

func zeros(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}
