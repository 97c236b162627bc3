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
	reserved map[uint64]bool // by offset of the payload: from Fill until Publish or Clear
	writers  map[uint64]int  // copies that have not returned
}

// Fill is tiers.Slots.
func (s *slots) Fill(slab, slot int) kvferry.Generation {
	s.change(slab, slot, "used again", true)
	return s.Pool.Fill(slab, slot)
}

// Publish is tiers.Slots.
func (s *slots) Publish(slab, slot int, h pool.Header) {
	s.change(slab, slot, "published", false)
	s.Pool.Publish(slab, slot, h)
}

// Clear is tiers.Slots.
func (s *slots) Clear(slab, slot int) {
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
