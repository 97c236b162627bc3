package tiers

import (
	"encoding/binary"
	"math/rand/v2"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers/policy"
)

// recordID names a record; 0 is none.
type recordID = policy.ID

// record is one block that the ledger knows: it has a slot, or a known block names it as its parent. 64 bytes, so that a lookup costs one cache line.
type record struct {
	hash     kvferry.Hash
	stamp    int64    // last use, unix ns
	parent   recordID // 0: first of its chain; in a free record, the next free one
	slots    SlotRef  // first of the block's slots, one a shard
	children uint32   // records that name this one as their parent
	leases   uint32
	space    SpaceRef
	resident uint8                  // distinct shards that are resident in some tier
	in       [policy.NumTiers]uint8 // shards that are resident in a tier
	filling  [policy.NumTiers]uint8 // shards that are being filled
	used     bool                   // found by a look-up since it came
}

// aside is what is known of a block and seldom looked at. 24 bytes, beside the records so that those stay on one cache line.
type aside struct {
	meta     policy.Meta
	children [policy.NumTiers]uint32 // of those, the ones that have a slot in a tier
}

const recordsPerChunk = 1 << 14

// records is a growing array that never moves what is in it.
type records struct {
	chunks [][]record
	asides [][]aside
	free   recordID
	next   recordID
	live   int
}

func (r *records) at(id recordID) *record {
	return &r.chunks[id/recordsPerChunk][id%recordsPerChunk]
}

func (r *records) aside(id recordID) *aside {
	return &r.asides[id/recordsPerChunk][id%recordsPerChunk]
}

func (r *records) grow() {
	r.chunks, r.asides = append(r.chunks, make([]record, recordsPerChunk)), append(r.asides, make([]aside, recordsPerChunk))
}

func (r *records) add() recordID {
	r.live++
	if id := r.free; id != 0 {
		r.free = r.at(id).parent
		*r.at(id), *r.aside(id) = record{}, aside{meta: policy.NewMeta()}
		return id
	}
	if r.next == 0 {
		r.grow() // record 0 is none, and may be looked at
		r.next = 1
	}
	id := r.next
	if int(id/recordsPerChunk) == len(r.chunks) {
		r.grow()
	}
	r.next++
	r.aside(id).meta = policy.NewMeta()
	return id
}

func (r *records) remove(id recordID) {
	*r.at(id) = record{parent: r.free}
	r.free = id
	r.live--
}

// index finds a record by space and hash: open addressing in 256 tables that grow one at a time, so that no lookup ever waits for a
// rehash of everything. Hashes come from clients, so their place is keyed with a secret.
type index struct {
	recs   *records
	seed   uint64
	tables [256]table
	sink   uint64 // keeps the loads of findBatch that only warm the cache
}

// entry is a record's number, and above it 32 bits of its hash's place: a search looks at a record only where these agree.
type entry uint64

const tagMask = 0xffffffff << 32

func newEntry(place uint64, id recordID) entry { return entry(place<<8&tagMask | uint64(id)) }

func (e entry) id() recordID { return recordID(e) }

type table struct {
	slots []entry
	live  int
}

func newIndex(recs *records) *index { return &index{recs: recs, seed: rand.Uint64()} }

// place is where a hash belongs: bits 56.. choose the table, 24..55 are the tag, the lower ones the slot.
func (x *index) place(space SpaceRef, h []byte) uint64 {
	v := binary.LittleEndian.Uint64(h) ^ x.seed
	v = (v ^ v>>32) * 0x9e3779b97f4a7c15
	v ^= uint64(space) * 0xc2b2ae3d27d4eb4f
	v = (v ^ v>>29) * 0xbf58476d1ce4e5b9
	return v ^ v>>32
}

// candidate is the next entry from slot i on that has the place's tag; 0 when there is none.
func (t *table) candidate(place uint64, i uint64) (entry, uint64) {
	mask := uint64(len(t.slots) - 1)
	tag := entry(place << 8 & tagMask)
	for ; ; i++ {
		e := t.slots[i&mask]
		if e == 0 || e&tagMask == tag {
			return e, i
		}
	}
}

func (x *index) find(space SpaceRef, h *kvferry.Hash) recordID {
	v := x.place(space, h[:])
	t := &x.tables[v>>56]
	if t.live == 0 {
		return 0
	}
	for e, i := t.candidate(v, v); e != 0; e, i = t.candidate(v, i+1) {
		if x.is(e.id(), space, h) {
			return e.id()
		}
	}
	return 0
}

func (x *index) is(id recordID, space SpaceRef, h *kvferry.Hash) bool {
	r := x.recs.at(id)
	return r.hash == *h && r.space == space
}

// findBatch looks len(out) hashes up, mostly those of a chain: of one that goes on after a record, where that is not 0. What was stored together was given numbers one after the other, so the block
// after one that was found is looked for in the next record first: that costs no random access at all. The others go over the tables, more at once where that does not help.
func (x *index) findBatch(space SpaceRef, after recordID, hashes []byte, out []recordID) {
	for at, n := 0, groupMin; at < len(out); {
		followed := x.follow(after, space, hashes[at*kvferry.HashSize:], out[at:])
		at += followed
		if followed >= groupMin {
			n = groupMin
		}
		n = min(n, len(out)-at)
		x.probe(space, hashes[at*kvferry.HashSize:], out[at:at+n])
		at += n
		after = out[at-1]
		n = min(2*n, group)
	}
}

// follow finds the first of these hashes in the records after one, as far as they lie there, and answers how many. A record that is free has no hash.
func (x *index) follow(id recordID, space SpaceRef, hashes []byte, out []recordID) int {
	if id == 0 {
		return 0
	}
	for i := range out {
		id++
		h := (*kvferry.Hash)(hashes[i*kvferry.HashSize:])
		if id >= x.recs.next || !x.is(id, space, h) || h.IsZero() {
			return i
		}
		out[i] = id
	}
	return len(out)
}

// group is how many look-ups wait for memory together at most, groupMin at first.
const (
	group    = 64
	groupMin = 8
)

// probe looks up to a group of hashes up in the tables, step by step, so that the processor waits for the cache misses of all at once and not for one after the other.
func (x *index) probe(space SpaceRef, hashes []byte, out []recordID) {
	var places [group]uint64
	var sink entry
	for i := range out {
		v := x.place(space, hashes[i*kvferry.HashSize:])
		places[i] = v
		if t := &x.tables[v>>56]; t.live > 0 {
			sink += t.slots[v&uint64(len(t.slots)-1)]
		}
	}
	for i := range out {
		out[i] = 0
		if t := &x.tables[places[i]>>56]; t.live > 0 {
			e, _ := t.candidate(places[i], places[i])
			out[i] = e.id()
			sink += entry(x.recs.at(out[i]).space)
		}
	}
	for i, id := range out {
		h := (*kvferry.Hash)(hashes[i*kvferry.HashSize:])
		if id != 0 && !x.is(id, space, h) {
			out[i] = x.find(space, h) // two hashes with one tag
		}
	}
	x.sink += uint64(sink)
}

func (x *index) insert(id recordID) {
	r := x.recs.at(id)
	v := x.place(r.space, r.hash[:])
	t := &x.tables[v>>56]
	if (t.live+1)*4 > len(t.slots)*3 {
		x.grow(t)
	}
	t.live++
	t.put(v, newEntry(v, id))
}

func (t *table) put(place uint64, e entry) {
	mask := uint64(len(t.slots) - 1)
	i := place & mask
	for t.slots[i] != 0 {
		i = (i + 1) & mask
	}
	t.slots[i] = e
}

func (x *index) grow(t *table) {
	old := t.slots
	t.slots = make([]entry, max(16, 2*len(old)))
	for _, e := range old {
		if e != 0 {
			r := x.recs.at(e.id())
			t.put(x.place(r.space, r.hash[:]), e)
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
	for t.slots[i].id() != id {
		i = (i + 1) & mask
	}
	t.live--
	for j := i; ; {
		t.slots[i] = 0
		for {
			j = (j + 1) & mask
			e := t.slots[j]
			if e == 0 {
				return
			}
			q := x.recs.at(e.id())
			home := x.place(q.space, q.hash[:]) & mask
			// e may move to i unless its home lies cyclically in (i, j].
			if (j-home)&mask >= (j-i)&mask {
				t.slots[i] = e
				i = j
				break
			}
		}
	}
}
