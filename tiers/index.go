package tiers

import (
	"encoding/binary"
	"math/rand/v2"

	"github.com/kvferry/kvferry"
)

// recordID names a record; 0 is none.
type recordID uint32

// record is one block that the ledger knows: it has a slot, or a known block names it as its parent. 64 bytes, so that a lookup costs one cache line.
type record struct {
	hash     kvferry.Hash
	stamp    int64    // last use, unix ns
	parent   recordID // 0: first of its chain; in a free record, the next free one
	slots    SlotRef  // first of the block's slots, one a shard
	children uint32   // records that name this one as their parent
	leases   uint32
	heapPos  int32 // in its class's heap of leaves, -1 when not there
	space    SpaceRef
	resident uint8 // shards that are resident
	filling  uint8 // shards that are being filled
}

const recordsPerChunk = 1 << 14

// records is a growing array that never moves what is in it.
type records struct {
	chunks [][]record
	free   recordID
	next   recordID
	live   int
}

func (r *records) at(id recordID) *record {
	return &r.chunks[id/recordsPerChunk][id%recordsPerChunk]
}

func (r *records) add() recordID {
	r.live++
	if id := r.free; id != 0 {
		r.free = r.at(id).parent
		*r.at(id) = record{heapPos: -1}
		return id
	}
	if r.next == 0 {
		r.next = 1
	}
	id := r.next
	if int(id/recordsPerChunk) == len(r.chunks) {
		r.chunks = append(r.chunks, make([]record, recordsPerChunk))
	}
	r.next++
	r.at(id).heapPos = -1
	return id
}

func (r *records) remove(id recordID) {
	*r.at(id) = record{parent: r.free, heapPos: -1}
	r.free = id
	r.live--
}

// index finds a record by space and hash: open addressing in 256 tables that grow one at a time, so that no lookup ever waits for a
// rehash of everything. Hashes come from clients, so their place is keyed with a secret.
type index struct {
	recs   *records
	seed   uint64
	tables [256]table
}

type table struct {
	slots []recordID
	live  int
}

func newIndex(recs *records) *index { return &index{recs: recs, seed: rand.Uint64()} }

func (x *index) place(space SpaceRef, h []byte) uint64 {
	v := binary.LittleEndian.Uint64(h) ^ x.seed
	v = (v ^ v>>32) * 0x9e3779b97f4a7c15
	v ^= uint64(space) * 0xc2b2ae3d27d4eb4f
	v = (v ^ v>>29) * 0xbf58476d1ce4e5b9
	return v ^ v>>32
}

func (x *index) find(space SpaceRef, h *kvferry.Hash) recordID {
	v := x.place(space, h[:])
	t := &x.tables[v>>56]
	if t.live == 0 {
		return 0
	}
	mask := uint64(len(t.slots) - 1)
	for i := v & mask; ; i = (i + 1) & mask {
		id := t.slots[i]
		if id == 0 {
			return 0
		}
		if r := x.recs.at(id); r.hash == *h && r.space == space {
			return id
		}
	}
}

// findBatch looks up to len(out) hashes up. The first loop touches the tables only, so that the processor has many cache misses in flight at once.
func (x *index) findBatch(space SpaceRef, hashes []byte, out []recordID) {
	const group = 32
	var at [group]uint64
	var first [group]recordID
	for base := 0; base < len(out); base += group {
		n := min(group, len(out)-base)
		for i := range n {
			v := x.place(space, hashes[(base+i)*kvferry.HashSize:])
			at[i] = v
			first[i] = 0
			if t := &x.tables[v>>56]; t.live > 0 {
				first[i] = t.slots[v&uint64(len(t.slots)-1)]
			}
		}
		var sink uint64
		for i := range n {
			if first[i] != 0 {
				sink += uint64(x.recs.at(first[i]).space)
			}
		}
		_ = sink
		for i := range n {
			h := (*kvferry.Hash)(hashes[(base+i)*kvferry.HashSize:])
			id := first[i]
			if id != 0 {
				if r := x.recs.at(id); r.hash != *h || r.space != space {
					id = x.find(space, h)
				}
			}
			out[base+i] = id
		}
	}
}

func (x *index) insert(id recordID) {
	r := x.recs.at(id)
	v := x.place(r.space, r.hash[:])
	t := &x.tables[v>>56]
	if (t.live+1)*4 > len(t.slots)*3 {
		x.grow(t)
	}
	t.live++
	t.put(v, id)
}

func (t *table) put(v uint64, id recordID) {
	mask := uint64(len(t.slots) - 1)
	i := v & mask
	for t.slots[i] != 0 {
		i = (i + 1) & mask
	}
	t.slots[i] = id
}

func (x *index) grow(t *table) {
	old := t.slots
	t.slots = make([]recordID, max(16, 2*len(old)))
	for _, id := range old {
		if id != 0 {
			r := x.recs.at(id)
			t.put(x.place(r.space, r.hash[:]), id)
		}
	}
}

// remove takes a record out, moving up those behind it that would no longer be found.
func (x *index) remove(id recordID) {
	r := x.recs.at(id)
	v := x.place(r.space, r.hash[:])
	t := &x.tables[v>>56]
	mask := uint64(len(t.slots) - 1)
	i := v & mask
	for t.slots[i] != id {
		i = (i + 1) & mask
	}
	t.live--
	for j := i; ; {
		t.slots[i] = 0
		for {
			j = (j + 1) & mask
			o := t.slots[j]
			if o == 0 {
				return
			}
			q := x.recs.at(o)
			home := x.place(q.space, q.hash[:]) & mask
			// o may move to i unless its home lies cyclically in (i, j].
			if (j-home)&mask >= (j-i)&mask {
				t.slots[i] = o
				i = j
				break
			}
		}
	}
}
