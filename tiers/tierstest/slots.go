// Package tierstest has slots without memory behind them, for tests and benchmarks of the ledger that no machine's memory would hold, and chains of hashes to fill them with.
package tierstest

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/pool"
)

// Slots keeps headers only. It checks that each call is one that a pool allows.
type Slots struct {
	slabBytes uint64
	slabs     []slab
	next      uint64
}

type slab struct {
	slotBytes uint64
	gens      []uint64
	headers   []pool.Header
}

// NewSlots makes slabs that are all free.
func NewSlots(slabs int, slabBytes uint64) *Slots {
	return &Slots{slabBytes: slabBytes, slabs: make([]slab, slabs), next: 2}
}

// Slabs is tiers.Slots.
func (s *Slots) Slabs() int { return len(s.slabs) }

// SlabBytes is tiers.Slots.
func (s *Slots) SlabBytes() uint64 { return s.slabBytes }

// SlotsPerSlab is tiers.Slots.
func (s *Slots) SlotsPerSlab(slotBytes uint64) int {
	return int(min(s.slabBytes/slotBytes, pool.SlotsPerSlabMax-1))
}

// SlabInUse is tiers.Slots.
func (s *Slots) SlabInUse(i int) (uint64, int) { return s.slabs[i].slotBytes, len(s.slabs[i].gens) }

// FormatSlab is tiers.Slots.
func (s *Slots) FormatSlab(i int, slotBytes uint64) int {
	if s.slabs[i].slotBytes != 0 {
		panic("format of a slab in use")
	}
	n := s.SlotsPerSlab(slotBytes)
	s.slabs[i] = slab{slotBytes, make([]uint64, n), make([]pool.Header, n)}
	for k := range s.slabs[i].gens {
		s.slabs[i].gens[k] = s.next
	}
	return n
}

// FreeSlab is tiers.Slots.
func (s *Slots) FreeSlab(i int) { s.slabs[i] = slab{} }

// HeaderOffset is tiers.Slots.
func (s *Slots) HeaderOffset(i, k int) uint64 { return uint64(i)*s.slabBytes + uint64(k) }

// SlotOffset is tiers.Slots.
func (s *Slots) SlotOffset(i, k int) uint64 {
	return uint64(i)*s.slabBytes + uint64(k)*s.slabs[i].slotBytes
}

// Fill is tiers.Slots.
func (s *Slots) Fill(i, k int) kvferry.Generation {
	g := &s.slabs[i].gens[k]
	if *g&1 == 0 {
		*g++
	}
	s.next = max(s.next, *g+1)
	return kvferry.Generation(*g + 1)
}

// Publish is tiers.Slots.
func (s *Slots) Publish(i, k int, h pool.Header) {
	if s.slabs[i].gens[k]+1 != uint64(h.Generation) {
		panic(fmt.Sprintf("publish generation %d over %d", h.Generation, s.slabs[i].gens[k]))
	}
	s.slabs[i].gens[k], s.slabs[i].headers[k] = uint64(h.Generation), h
}

// Clear is tiers.Slots.
func (s *Slots) Clear(i, k int) { s.slabs[i].headers[k] = pool.Header{} }

// Generation is tiers.Slots.
func (s *Slots) Generation(i, k int) kvferry.Generation {
	return kvferry.Generation(s.slabs[i].gens[k])
}

// Header is what the slot says of itself.
func (s *Slots) Header(i, k int) pool.Header { return s.slabs[i].headers[k] }

// Chain makes the blocks of a prompt: the first n of the chain of this name.
func Chain(name uint64, n int) []tiers.Block {
	out := make([]tiers.Block, n)
	var parent kvferry.Hash
	for i := range out {
		var b [48]byte
		copy(b[:], parent[:])
		binary.LittleEndian.PutUint64(b[32:], name)
		binary.LittleEndian.PutUint64(b[40:], uint64(i))
		out[i] = tiers.Block{Hash: sha256.Sum256(b[:]), Parent: parent}
		parent = out[i].Hash
	}
	return out
}

// CheapChain is a chain like Chain's, whose hashes look random and cost nothing: for millions of blocks.
func CheapChain(name uint64, n int) []tiers.Block {
	out := make([]tiers.Block, n)
	var parent kvferry.Hash
	for i := range out {
		var h kvferry.Hash
		binary.LittleEndian.PutUint64(h[:], (name*1_000_003+uint64(i)+1)*0x9e3779b97f4a7c15)
		binary.LittleEndian.PutUint64(h[8:], name)
		binary.LittleEndian.PutUint64(h[16:], uint64(i))
		out[i] = tiers.Block{Hash: h, Parent: parent}
		parent = h
	}
	return out
}

// Pack puts the hashes of blocks into one list.
func Pack(blocks []tiers.Block) []byte {
	out := make([]byte, 0, len(blocks)*kvferry.HashSize)
	for i := range blocks {
		out = append(out, blocks[i].Hash[:]...)
	}
	return out
}
