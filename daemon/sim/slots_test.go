package sim

import (
	"sync"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers/pool"
	"github.com/kvferry/kvferry/transport"
)

// slots is a pool whose slots know who writes into them: what is given back before its last writer has ended is found out at that moment, whoever uses it next.
type slots struct {
	*pool.Pool
	w *world

	mu       sync.Mutex
	closed   bool            // the pool is; whoever still reads for the other node gives back what is gone
	reserved map[uint64]bool // by offset of the payload: from Fill until Publish or Clear
	resident map[uint64]bool // since Publish
	writers  map[uint64]int  // copies that have not returned
	flipped  *flips          // of the node: they outlive a daemon
}

// Fill is tiers.Slots.
func (s *slots) Fill(slab, slot int) kvferry.Generation {
	s.change(slab, slot, "used again", true)
	s.flipped.forget(s.SlotOffset(slab, slot))
	return s.Pool.Fill(slab, slot)
}

// Publish is tiers.Slots.
func (s *slots) Publish(slab, slot int, h pool.Header) {
	s.change(slab, slot, "published", false)
	s.mu.Lock()
	s.resident[s.SlotOffset(slab, slot)] = true
	s.mu.Unlock()
	s.Pool.Publish(slab, slot, h)
}

// Clear is tiers.Slots.
func (s *slots) Clear(slab, slot int) {
	s.mu.Lock()
	closed := s.closed
	s.mu.Unlock()
	if closed {
		return
	}
	s.change(slab, slot, "given back", false)
	s.Pool.Clear(slab, slot)
}

func (s *slots) change(slab, slot int, what string, reserved bool) {
	at := s.SlotOffset(slab, slot)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.writers[at] > 0 {
		s.w.breaks("a slot was %s while a copy still writes into it", what)
	}
	s.reserved[at] = reserved
	delete(s.resident, at)
}

// beginAt and endAt are begin and end of what a disk writes.
func (s *slots) beginAt(at []uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, at := range at {
		s.writers[at]++
		if !s.reserved[at] || s.writers[at] > 1 {
			s.w.breaks("a disk was given a slot that is not reserved for it alone")
		}
	}
}

func (s *slots) endAt(at []uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, at := range at {
		s.writers[at]--
	}
}

// begin says that a copy may write into these slots from now on, until end.
func (s *slots) begin(batch []transport.Copy) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range batch {
		at := batch[i].Dst[0].Offset
		s.writers[at]++
		if !s.reserved[at] || s.writers[at] > 1 {
			s.w.breaks("a copy was given a slot that is not reserved for it alone")
		}
	}
}

func (s *slots) end(batch []transport.Copy) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range batch {
		s.writers[batch[i].Dst[0].Offset]--
	}
}

// busy tells whether something is being copied.
func (s *slots) busy() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.writers {
		if n > 0 {
			return true
		}
	}
	return false
}

// flips are the slots in whose payload memory has flipped a bit, by offset, until they are used again.
type flips struct {
	mu sync.Mutex
	at map[uint64]bool
}

func (f *flips) has(offset uint64) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.at[offset]
}

func (f *flips) forget(offset uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.at, offset)
}

// flip has a bit of a resident block of the node's pool flip.
func (n *node) flip() {
	if n.daemon == nil {
		return
	}
	s := n.daemon.slots
	s.mu.Lock()
	all := sorted(s.resident)
	s.mu.Unlock()
	if len(all) == 0 {
		return
	}
	at := all[n.w.r.IntN(len(all))]
	n.daemon.memory.Bytes[at+uint64(n.w.r.IntN(shardBytes))] ^= 1 << n.w.r.IntN(8)
	s.flipped.mu.Lock()
	s.flipped.at[at] = true
	s.flipped.mu.Unlock()
	n.w.saw("pool flips", 1)
}

// checkDropped: what workers have found broken is found no more.
func (n *node) checkDropped() {
	s := n.daemon.slots
	for _, at := range n.broken {
		s.mu.Lock()
		here := s.resident[at]
		s.mu.Unlock()
		if here && s.flipped.has(at) {
			n.w.fatalf("%s: a block that a worker has found broken is still served", n.name)
		}
		n.w.saw("broken blocks dropped", 1)
	}
	n.broken = nil
}
