package kvferry

import (
	"encoding/hex"
	"fmt"
)

// Hash is an engine's chained block hash: it names the tokens of the block and of all blocks before it, but not the model.
type Hash [32]byte

// HashSize is the length of a Hash in bytes.
const HashSize = 32

// IsZero tells whether h is the parent of a chain's first block.
func (h Hash) IsZero() bool { return h == Hash{} }

func (h Hash) String() string { return hex.EncodeToString(h[:]) }

// SpaceID is the SHA-256 of a space's preimage. It is kept and compared whole.
type SpaceID [32]byte

func (id SpaceID) String() string { return hex.EncodeToString(id[:]) }

// Epoch is one incarnation of a daemon. It is in every ticket, remote key and event, so that nothing of an earlier one is followed.
type Epoch [16]byte

func (e Epoch) String() string { return hex.EncodeToString(e[:]) }

// Generation changes whenever the content of a slot may change. It is odd while the slot is being filled.
type Generation uint64

// Filling tells whether the slot's content is being written.
func (g Generation) Filling() bool { return g&1 == 1 }

// Tier is a kind of memory that holds blocks, fastest first.
type Tier uint8

// The tiers.
const (
	HBM Tier = iota + 1
	DRAM
	NVMe
)

func (t Tier) String() string {
	switch t {
	case HBM:
		return "hbm"
	case DRAM:
		return "dram"
	case NVMe:
		return "nvme"
	}
	return fmt.Sprintf("tier(%d)", uint8(t))
}

// RegionID names a Region inside one daemon. It is never used again in the same epoch.
type RegionID uint64

// Region is a range of memory that its owner lets another party read: a worker's KV memory, a staging buffer, the pool.
type Region struct {
	ID    RegionID
	Bytes uint64
}

// Segment is a range inside a region. All movement is: copy a list of segments to a list of segments.
type Segment struct {
	Region RegionID
	Offset uint64
	Length uint64
}

// Plane places one layer of every block of a region: block b has its bytes at Base + b*Stride. A shard is a block's planes in order.
type Plane struct{ Base, Stride, Bytes uint64 }

// Segment is where the plane of a block lies.
func (p Plane) Segment(region RegionID, block uint32) Segment {
	return Segment{Region: region, Offset: p.Base + uint64(block)*p.Stride, Length: p.Bytes}
}

// Class orders the transfers that wait for one link: a lower one goes first.
type Class uint8

// The classes. The first three are foreground: no new background segment is issued while one of them waits.
const (
	ClassHandoff Class = iota
	ClassLoad
	ClassPrefetch
	ClassStore
	ClassDemote
	NumClasses
)

func (c Class) String() string {
	switch c {
	case ClassHandoff:
		return "handoff"
	case ClassLoad:
		return "load"
	case ClassPrefetch:
		return "prefetch"
	case ClassStore:
		return "store"
	case ClassDemote:
		return "demote"
	}
	return fmt.Sprintf("class(%d)", uint8(c))
}
