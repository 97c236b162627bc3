package tiers

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/kvferry/kvferry"
)

func testHash(name, i uint64) (h kvferry.Hash) {
	binary.LittleEndian.PutUint64(h[:], name)
	binary.LittleEndian.PutUint64(h[8:], i)
	return h
}

// TestFindBatch compares it with one look-up after the other, on chains whose records lie together, in parts and scattered, with some gone and their numbers used again, and with hashes of two spaces.
func TestFindBatch(t *testing.T) {
	const chains, blocks = 6, 400
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 1))
		x := newIndex(&records{})
		live := map[recordID]bool{}
		add := func(space SpaceRef, h kvferry.Hash) {
			id := x.recs.add()
			r := x.recs.at(id)
			r.hash, r.space = h, space
			x.insert(id)
			live[id] = true
		}
		var done [chains]uint64
		for left := chains * blocks; left > 0; {
			c := rng.IntN(chains)
			for range min(1+rng.IntN(1<<rng.IntN(9)), blocks-int(done[c])) {
				done[c]++
				left--
				if rng.IntN(50) > 0 {
					add(SpaceRef(c&1), testHash(uint64(c/2), done[c]))
				}
				if rng.IntN(20) == 0 {
					for id := range live { // any
						x.remove(id)
						x.recs.remove(id)
						delete(live, id)
						break
					}
				}
			}
		}
		for c := range chains {
			var asked []byte
			for i := range uint64(blocks) {
				h := testHash(uint64(c/2), i+1)
				if rng.IntN(100) == 0 {
					h = kvferry.Hash{} // as free records have it
				}
				asked = append(asked, h[:]...)
			}
			space := SpaceRef(c & 1)
			for _, after := range []recordID{0, 1, x.recs.next - 1} {
				got := make([]recordID, blocks)
				x.findBatch(space, after, asked, got)
				for i, id := range got {
					if want := x.find(space, (*kvferry.Hash)(asked[i*kvferry.HashSize:])); id != want {
						t.Fatalf("seed %d, chain %d, block %d after %d: %d, want %d", seed, c, i, after, id, want)
					}
				}
			}
		}
	}
}

// A record that is free looks like one of a block whose hash is zero, and is none.
func TestFindBatchFreeRecord(t *testing.T) {
	x := newIndex(&records{})
	var ids [3]recordID
	for i := range ids {
		ids[i] = x.recs.add()
		x.recs.at(ids[i]).hash = testHash(1, uint64(i))
		x.insert(ids[i])
	}
	for _, id := range ids[1:] {
		x.remove(id)
		x.recs.remove(id)
	}
	asked := make([]byte, 4*kvferry.HashSize) // all but the first are zero, up to numbers that were never given
	h := testHash(1, 0)
	copy(asked, h[:])
	got := make([]recordID, 4)
	x.findBatch(0, 0, asked[:kvferry.HashSize], got[:1])
	x.findBatch(0, got[0], asked[kvferry.HashSize:], got[1:])
	if want := [4]recordID{ids[0]}; [4]recordID(got) != want {
		t.Errorf("%v, want %v", got, want)
	}
}
