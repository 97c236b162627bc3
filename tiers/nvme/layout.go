package nvme

import (
	"encoding/binary"
	"hash/crc32"

	"github.com/kvferry/kvferry/tiers/pool"
)

// Format is the version of the file's layout.
const Format = 1

const (
	superMagic = 0x31454d564e46564b // "KVFNVME1"
	slabMagic  = 0x31424c534e46564b // "KVFNSLB1"
	stateMagic = 0x314154534e46564b // "KVFNSTA1"

	superBytes = 64 // in one sector
	stateBytes = 64
	slabUsed   = 64 // of a slab's header

	slabsAt = 2 << 20

	// generationMax is never reached: what is above it was not written by us.
	generationMax = 1 << 63
)

// supersAt are the two copies of the superblock: one that is damaged costs nothing. Files of before the second have zeros there.
var supersAt = [2]int64{0, 12288}

// statesAt are the two copies of the state block. They are written in turn, so that a torn one leaves the other.
var statesAt = [2]int64{4096, 8192}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func crcOf(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

// seal puts the checksum of all before it into the last four bytes.
func seal(b []byte) {
	n := len(b) - 4
	binary.LittleEndian.PutUint32(b[n:], crcOf(b[:n]))
}

func sealed(b []byte) bool {
	n := len(b) - 4
	return binary.LittleEndian.Uint32(b[n:]) == crcOf(b[:n])
}

// driveID is random and in everything that is believed: what was written for another drive, or is the payload of a block, is no header here.
type driveID [16]byte

// super is the superblock.
type super struct {
	version   uint32
	slabBytes uint64
	slabs     uint64
	id        driveID
	madeMs    uint64
}

func (s super) encode() []byte {
	b := make([]byte, superBytes)
	binary.LittleEndian.PutUint64(b[0:], superMagic)
	binary.LittleEndian.PutUint32(b[8:], s.version)
	binary.LittleEndian.PutUint64(b[16:], s.slabBytes)
	binary.LittleEndian.PutUint64(b[24:], s.slabs)
	copy(b[32:48], s.id[:])
	binary.LittleEndian.PutUint64(b[48:], s.madeMs)
	seal(b)
	return b
}

func parseSuper(b []byte) (super, bool) {
	if len(b) < superBytes || binary.LittleEndian.Uint64(b) != superMagic || !sealed(b[:superBytes]) {
		return super{}, false
	}
	s := super{
		version:   binary.LittleEndian.Uint32(b[8:]),
		slabBytes: binary.LittleEndian.Uint64(b[16:]),
		slabs:     binary.LittleEndian.Uint64(b[24:]),
		madeMs:    binary.LittleEndian.Uint64(b[48:]),
	}
	copy(s.id[:], b[32:48])
	return s, true
}

// state is what changes while the file is in use and belongs to no slab.
type state struct {
	sequence uint64 // the copy with the higher one counts
	limit    uint64 // no generation above it is anywhere in the file
	written  uint64 // bytes written to the drive in its life, as far as it was noted
	settled  uint64 // what the log said up to this round is in place
}

func (s state) encode(id driveID) []byte {
	b := make([]byte, stateBytes)
	binary.LittleEndian.PutUint64(b[0:], stateMagic)
	binary.LittleEndian.PutUint64(b[8:], s.sequence)
	binary.LittleEndian.PutUint64(b[16:], s.limit)
	binary.LittleEndian.PutUint64(b[24:], s.written)
	copy(b[32:48], id[:])
	binary.LittleEndian.PutUint64(b[48:], s.settled)
	seal(b)
	return b
}

func parseState(b []byte, id driveID) (state, bool) {
	if len(b) < stateBytes || binary.LittleEndian.Uint64(b) != stateMagic || !sealed(b[:stateBytes]) || driveID(b[32:48]) != id {
		return state{}, false
	}
	s := state{sequence: binary.LittleEndian.Uint64(b[8:]), limit: binary.LittleEndian.Uint64(b[16:]), written: binary.LittleEndian.Uint64(b[24:]), settled: binary.LittleEndian.Uint64(b[48:])}
	return s, s.limit < generationMax && s.settled < generationMax
}

// slabHeader says how a slab is cut. A free one has slotBytes 0.
type slabHeader struct {
	slotBytes uint64
	slots     uint64
	// floor is the drive's generation when the slab was cut, or given back: a slot header with one that is not above it is of before.
	floor uint64
}

func (s slabHeader) encode(id driveID, slab int) []byte {
	b := make([]byte, slabUsed)
	binary.LittleEndian.PutUint64(b[0:], slabMagic)
	binary.LittleEndian.PutUint64(b[8:], s.slotBytes)
	binary.LittleEndian.PutUint64(b[16:], s.slots)
	binary.LittleEndian.PutUint64(b[24:], s.floor)
	copy(b[32:48], id[:])
	binary.LittleEndian.PutUint32(b[48:], uint32(slab))
	seal(b)
	return b
}

func parseSlab(b []byte, id driveID, slab int) (slabHeader, bool) {
	if len(b) < slabUsed || binary.LittleEndian.Uint64(b) != slabMagic || !sealed(b[:slabUsed]) || driveID(b[32:48]) != id ||
		binary.LittleEndian.Uint32(b[48:]) != uint32(slab) {
		return slabHeader{}, false
	}
	s := slabHeader{slotBytes: binary.LittleEndian.Uint64(b[8:]), slots: binary.LittleEndian.Uint64(b[16:]), floor: binary.LittleEndian.Uint64(b[24:])}
	if s.floor >= generationMax {
		return slabHeader{}, false
	}
	return s, true
}

// encodeHeader writes a slot's header: the pool's, and behind it whose it is, so that one that ended up in another place is not believed there.
func encodeHeader(b []byte, h pool.Header, id driveID, slab, slot int) {
	var tail [24]byte
	copy(tail[:16], id[:])
	binary.LittleEndian.PutUint32(tail[16:], uint32(slab))
	binary.LittleEndian.PutUint32(tail[20:], uint32(slot))
	pool.EncodeHeader(b, h, tail[:])
}

// parseHeader answers ours for what can only have been written as the header of this slot, whatever became of it, and ok if it is whole.
func parseHeader(b []byte, id driveID, slab, slot int) (h pool.Header, ours, ok bool) {
	tail := pool.HeaderTail(b)
	ours = driveID(tail[:16]) == id
	h, ok = pool.ParseHeader(b)
	ok = ok && ours && binary.LittleEndian.Uint32(tail[16:]) == uint32(slab) && binary.LittleEndian.Uint32(tail[20:]) == uint32(slot) &&
		h.Generation < generationMax
	h.FromDrive = false // of the pool's headers: here the drive's id is in its place
	return h, ours, ok
}
