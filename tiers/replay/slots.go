package replay

import (
	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers/pool"
)

// slots is a store of exactly so many slots, with nothing in them.
type slots struct {
	slabs [][]kvferry.Generation
	inUse []uint64 // slot length of a slab; 0: free
	per   int      // slots of a slab
	count int
}

const slabSlotsMax = pool.SlotsPerSlabMax - 1

func newSlots(count int) *slots {
	slabs := (count + slabSlotsMax - 1) / slabSlotsMax
	per := (count + slabs - 1) / slabs
	slabs = (count + per - 1) / per // rounding up may have filled one less
	return &slots{slabs: make([][]kvferry.Generation, slabs), inUse: make([]uint64, slabs), per: per, count: count}
}

// Slabs is tiers.Slots.
func (s *slots) Slabs() int { return len(s.slabs) }

// SlabBytes is tiers.Slots.
func (s *slots) SlabBytes() uint64 { return uint64(s.per) * slotBytes }

// SlotsPerSlab is tiers.Slots.
func (s *slots) SlotsPerSlab(uint64) int { return s.per }

// SlabInUse is tiers.Slots.
func (s *slots) SlabInUse(i int) (uint64, int) { return s.inUse[i], len(s.slabs[i]) }

// FormatSlab is tiers.Slots. The last slab may be a shorter one.
func (s *slots) FormatSlab(i int, bytes uint64) int {
	s.inUse[i] = bytes
	s.slabs[i] = make([]kvferry.Generation, min(s.per, s.count-i*s.per))
	return len(s.slabs[i])
}

// FreeSlab is tiers.Slots.
func (s *slots) FreeSlab(i int) { s.slabs[i], s.inUse[i] = nil, 0 }

// HeaderOffset is tiers.Slots.
func (s *slots) HeaderOffset(i, k int) uint64 { return uint64(i*s.per + k) }

// SlotOffset is tiers.Slots.
func (s *slots) SlotOffset(i, k int) uint64 { return uint64(i*s.per+k) * slotBytes }

// Fill is tiers.Slots.
func (s *slots) Fill(i, k int) kvferry.Generation {
	s.slabs[i][k] += 2
	return s.slabs[i][k]
}

// Publish is tiers.Slots.
func (s *slots) Publish(int, int, pool.Header) {}

// Clear is tiers.Slots.
func (s *slots) Clear(int, int) {}
