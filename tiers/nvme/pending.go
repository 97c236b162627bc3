package nvme

import (
	"fmt"
	"math/bits"
	"slices"
	"sync"
)

// limitStep is how far the durable limit of generations is ahead of those that are given out: one write of the state block each 8 M slots.
const limitStep = 1 << 24

// noted is what has to be changed on the drive and was not yet. It is a set and not a list: all of it becomes durable with one sync, before any slot is
// written again, and until then every order in which it may reach the drive is as good: a slab's header kills all headers of the slots from before by its
// floor, a tombstone kills one, and nothing that is noted makes anything believed. So it is bounded by the number of slots.
type noted struct {
	notedSlabs []int // slabs with a header or tombstones noted
	tombstones int
	state      bool      // the state block is to be written
	unsynced   []written // written since the last good sync
	writes     uint64    // number of the last of these
	failures   uint64    // syncs that failed: the epoch
}

// written is what one writing of noted changes was. After a failed sync it is noted again.
type written struct {
	number uint64
	slabs  []writtenSlab
	state  bool
	limit  uint64
}

type writtenSlab struct {
	slab       int
	floor      uint64
	header     bool
	at         uint64
	bytes      []byte // of the header
	dead       []uint64
	generation uint64 // of the tombstones
}

func (d *Drive) noteSlabLocked(i int) {
	if !d.slabs[i].noted {
		d.slabs[i].noted = true
		d.notedSlabs = append(d.notedSlabs, i)
	}
}

// pendingLocked is how many changes are not durable.
func (d *Drive) pendingLocked() int {
	n := d.tombstones
	for _, i := range d.notedSlabs {
		if d.slabs[i].header {
			n++
		}
	}
	for _, w := range d.unsynced {
		for _, s := range w.slabs {
			n += ones(s.dead)
			if s.header {
				n++
			}
		}
	}
	return n
}

func ones(set []uint64) (n int) {
	for _, w := range set {
		n += bits.OnesCount64(w)
	}
	return n
}

// cleanLocked tells whether all that was noted is durable.
func (d *Drive) cleanLocked() bool { return len(d.notedSlabs) == 0 && !d.state && len(d.unsynced) == 0 }

// epoch is asked for before something is written whose sync is to be believed.
func (d *Drive) epoch() uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.failures
}

// settled makes everything durable that was noted before the call.
func (d *Drive) settled() error {
	d.mu.Lock()
	clean, since := d.cleanLocked(), d.failures
	d.mu.Unlock()
	if clean {
		return nil
	}
	return d.commit(since)
}

// commit writes what is noted and syncs. What the caller has written in this epoch is durable when it answers nil.
func (d *Drive) commit(since uint64) error {
	number, err := d.writeNoted()
	if err != nil {
		return err
	}
	if err := d.syncs.sync(d); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.failures != since && d.mutate&noEpoch == 0 {
		return fmt.Errorf("%w: a sync failed meanwhile", ErrDevice)
	}
	if d.failures == since {
		d.settleLocked(number)
	}
	return nil
}

// settleLocked forgets what is durable now.
func (d *Drive) settleLocked(number uint64) {
	d.unsynced = slices.DeleteFunc(d.unsynced, func(w written) bool {
		if w.number > number {
			return false
		}
		d.limit = max(d.limit, w.limit)
		return true
	})
	for i := range d.book.halves {
		if h := &d.book.halves[i]; h.inPlace > 0 && h.inPlace <= number {
			*h = logHalfState{}
		}
	}
}

// failedLocked begins a new epoch: what was written since the last good sync is noted again.
func (d *Drive) failedLocked() {
	d.failures++
	for i := range d.book.halves {
		d.book.halves[i].inPlace = 0
	}
	for _, w := range d.unsynced {
		d.state = d.state || w.state
		for _, ws := range w.slabs {
			s := &d.slabs[ws.slab]
			if s.floor != ws.floor {
				continue // cut anew since: its header is noted, or in a later one of these
			}
			s.header = s.header || ws.header
			for k, word := range ws.dead[:min(len(ws.dead), len(s.dead))] {
				d.tombstones += bits.OnesCount64(word &^ s.dead[k])
				s.dead[k] |= word
			}
			d.noteSlabLocked(ws.slab)
		}
	}
	d.unsynced = nil
}

// writeNoted writes all that is noted and answers with the number up to which everything noted was written.
func (d *Drive) writeNoted() (uint64, error) {
	d.order.Lock()
	defer d.order.Unlock()
	d.mu.Lock()
	if len(d.notedSlabs) == 0 && !d.state {
		defer d.mu.Unlock()
		return d.writes, nil
	}
	d.writes++
	w := d.takeLocked()
	var state []byte
	var stateAt int64
	if w.state {
		d.sequence++
		state, stateAt = d.stateLocked(w.limit).encode(d.id), statesAt[d.sequence%2]
	}
	d.unsynced = append(d.unsynced, w)
	d.mu.Unlock()
	err := d.writeAll(w, state, stateAt)
	if err != nil {
		d.mu.Lock()
		d.failedLocked()
		d.mu.Unlock()
		d.counters.writeErrors.Add(1)
		return 0, fmt.Errorf("%w: write metadata: %w", ErrDevice, err)
	}
	return d.writes, nil // with what went from the log to its place meanwhile; all of it is written: order is held
}

func (d *Drive) stateLocked(limit uint64) state {
	return state{sequence: d.sequence, limit: limit, written: d.counters.lifetime.Load(), settled: d.book.settled}
}

// takeLocked moves what is noted into one writing.
func (d *Drive) takeLocked() written {
	w := written{number: d.writes, state: d.state}
	if w.state {
		w.limit = d.generation + limitStep
	}
	slices.Sort(d.notedSlabs)
	for _, i := range d.notedSlabs {
		s := &d.slabs[i]
		ws := writtenSlab{slab: i, floor: s.floor, header: s.header, at: slabsAt + uint64(i)*d.cfg.SlabBytes, generation: d.generation}
		if s.header {
			ws.bytes = slabHeader{slotBytes: s.slotBytes, slots: uint64(s.slots), floor: s.floor}.encode(d.id, i)
		}
		if n := ones(s.dead); n > 0 {
			ws.dead = slices.Clone(s.dead)
			clear(s.dead)
		}
		s.noted, s.header = false, false
		w.slabs = append(w.slabs, ws)
	}
	d.notedSlabs, d.state, d.tombstones = nil, false, 0
	return w
}

// writeAll writes one writing: slab headers in place, tombstones to the log, and the state. The caller holds order.
func (d *Drive) writeAll(w written, state []byte, stateAt int64) error {
	var tombs []record
	for _, s := range w.slabs {
		if s.header {
			if err := d.dev.WriteAt(s.bytes, int64(s.at)); err != nil {
				return err
			}
		}
		for slot := next(s.dead, 0); slot >= 0; slot = next(s.dead, slot+1) {
			tombs = append(tombs, record{s.slab, slot, s.generation, nil})
		}
	}
	if err := d.appendLog(tombs); err != nil || !w.state {
		return err
	}
	return d.dev.WriteAt(state, stateAt) // the last: the log may have written and synced the other copy
}

// next is the first bit of set that is not below from; -1 when there is none.
func next(set []uint64, from int) int {
	for w := from / 64; w < len(set); w++ {
		word := set[w]
		if w == from/64 {
			word &= ^uint64(0) << (from % 64)
		}
		if word != 0 {
			return w*64 + bits.TrailingZeros64(word)
		}
	}
	return -1
}

// syncer shares syncs among those who wait for one: whoever comes while one runs is served by the next, which one of them leads.
type syncer struct {
	mu            sync.Mutex
	running, next *syncRound
}

type syncRound struct {
	done chan struct{}
	err  error
}

// sync returns when a sync that began after the call has ended.
func (s *syncer) sync(d *Drive) error {
	s.mu.Lock()
	r, before, lead := s.next, s.running, false
	if r == nil {
		r, lead = &syncRound{done: make(chan struct{})}, true
		s.next = r
	}
	s.mu.Unlock()
	if !lead {
		<-r.done
		return r.err
	}
	if before != nil {
		<-before.done
	}
	s.mu.Lock()
	s.running, s.next = r, nil // from now on others wait for the next one
	s.mu.Unlock()
	if err := d.dev.Sync(); err != nil {
		r.err = fmt.Errorf("%w: sync: %w", ErrDevice, err)
		d.counters.syncErrors.Add(1)
		d.mu.Lock()
		d.failedLocked() // before anybody can begin to write and believe in what this sync has lost
		d.mu.Unlock()
	}
	d.counters.syncs.Add(1)
	s.mu.Lock()
	if s.running == r {
		s.running = nil
	}
	s.mu.Unlock()
	close(r.done)
	return r.err
}
