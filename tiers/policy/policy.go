// Package policy decides which of the blocks that may leave a tier leaves next. What may leave (no child here, no lease, no pin) and where it goes is the ledger's affair.
//
// A Policy is one node's: it sees every look-up and learns from it, whichever tier answered. A Set is the candidates of one tier's slots of one length. All calls are made under the ledger's mutex,
// must not block, and take their time from the caller. What a policy must remember of each block it keeps in the block's Meta.
package policy

import (
	"encoding/binary"
	"fmt"
)

// ID names a block in the ledger's table. It is used again after Gone.
type ID = uint32

// Tiers that have Sets.
const (
	DRAM = iota
	NVMe
	NumTiers
)

// Meta is what the ledger keeps with each block for the policy. 16 bytes, so that ten million blocks stay cheap.
type Meta struct {
	Pos   [NumTiers]int32 // place in the Set of each tier, written by the Set alone; -1: in none
	Used  uint32          // the policy's own clock at the last use
	Depth uint16          // blocks before it in its chain, at most 65535
	Class uint8           // the policy's own
	Uses  uint8           // the policy's own
}

// NewMeta is that of a block that was just made.
func NewMeta() Meta { return Meta{Pos: [NumTiers]int32{-1, -1}} }

// Retention is how long a request wants its blocks kept.
type Retention uint8

// The retention classes. Of several requests that store a block, the first decides.
const (
	Normal Retention = iota
	None             // gone as soon as room is wanted
	Short            // before normal ones
	Long             // after normal ones
	NumRetentions
)

func (r Retention) String() string {
	switch r {
	case Normal:
		return "normal"
	case None:
		return "none"
	case Short:
		return "short"
	case Long:
		return "long"
	}
	return fmt.Sprintf("retention(%d)", uint8(r))
}

// hashBytes is the length of a hash in a packed list. Of each, policies use the first 64 bits, as in Arrival.
const hashBytes = 32

// hashAt is the first 64 bits of a hash of a packed list.
func hashAt(packed []byte, i int) uint64 { return binary.LittleEndian.Uint64(packed[i*hashBytes:]) }

// Arrival is what is known of a block when it comes to the node.
type Arrival struct {
	Hash      uint64 // the low 64 bits: finds a block again that has left
	Partial   bool   // shorter than a block of its space: the tail of a prompt
	Retention Retention
}

// Table is the ledger's blocks as policies see them.
type Table interface {
	Meta(id ID) *Meta
	// Stamp is the block's last use in unix ns; 0: it lacks a shard, serves nobody and goes first.
	Stamp(id ID) int64
}

// Policy is told of every look-up and of blocks that come and go.
type Policy interface {
	Name() string
	// Hit tells of a look-up: the blocks that were found, from the chain's first on, and the packed hashes of the others. It keeps neither.
	Hit(now int64, t Table, found []ID, missed []byte)
	// New tells of a block that was not on the node in any tier. parent is nil where there is none or it is not known.
	New(now int64, m, parent *Meta, a Arrival)
	// Gone tells that the last copy of a block has left the node.
	Gone(now int64, m *Meta, hash uint64)
	// Before tells whether a is to leave before b: what would have to leave for a block decides whether it is worth a place.
	Before(now int64, t Table, a, b ID) bool
	// NewSet makes the candidates of a tier for slots of one length.
	NewSet(t Table, tier int) Set
}

// Set is the blocks that may leave.
type Set interface {
	Add(id ID) // it is not in any Set of this tier
	Remove(id ID)
	Len() int
	// Next is the block that is to leave next; it stays in the Set, and stays the next one until something comes, goes or is used.
	Next(now int64) (ID, bool)
}
