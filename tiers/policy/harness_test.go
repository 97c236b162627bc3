package policy

import (
	"bufio"
	"compress/gzip"
	"encoding/binary"
	"encoding/json"
	"flag"
	"os"
	"testing"
)

var traceFile = flag.String("requests", "", "a gzipped trace; what needs one is left out without")

// request is a look-up of a chain, and the store of what was missing.
type request struct {
	at      int64 // ns
	chain   []uint64
	partial bool // the last block
}

// node is one tier of blocks that leave by a policy, leaves first: what the ledger does, without slots.
type node struct {
	p         Policy
	set       Set
	capacity  int
	byHash    map[uint64]ID
	blocks    []nodeBlock
	metas     []Meta
	free      []ID
	resident  int
	asked     int
	retention Retention
	hits      int
}

type nodeBlock struct {
	hash     uint64
	stamp    int64
	parent   ID
	children int
	held     bool
}

func (n *node) Meta(id ID) *Meta  { return &n.metas[id] }
func (n *node) Stamp(id ID) int64 { return n.blocks[id].stamp }

func newNode(p Policy, capacity int) *node {
	n := &node{p: p, capacity: capacity, byHash: map[uint64]ID{}, blocks: make([]nodeBlock, 1), metas: make([]Meta, 1)}
	n.set = p.NewSet(n, DRAM)
	return n
}

func (n *node) leaf(id ID) {
	if id == 0 {
		return
	}
	b := &n.blocks[id]
	may := b.children == 0 && !b.held
	if in := n.metas[id].Pos[DRAM] >= 0; may && !in {
		n.set.Add(id)
	} else if !may && in {
		n.set.Remove(id)
	}
}

func (n *node) run(r request) {
	var found []ID
	for _, h := range r.chain {
		id, ok := n.byHash[h]
		if !ok {
			break
		}
		n.blocks[id].stamp = r.at
		found = append(found, id)
	}
	n.asked += len(r.chain)
	n.hits += len(found)
	n.p.Hit(r.at, n, found, pack(r.chain[len(found):]))
	last := ID(0)
	if len(found) > 0 {
		last = found[len(found)-1]
		n.blocks[last].held = true
		n.leaf(last)
	}
	for i := len(found); i < len(r.chain); i++ {
		for n.resident >= n.capacity {
			id, ok := n.set.Next(r.at)
			if !ok {
				break
			}
			n.evict(r.at, id)
		}
		if n.resident >= n.capacity {
			break
		}
		id := n.add(r.chain[i])
		b := &n.blocks[id]
		b.parent, b.stamp, b.held = last, r.at, true
		var parent *Meta
		if last != 0 {
			parent = &n.metas[last]
			n.blocks[last].children++
			n.blocks[last].held = false
		}
		n.p.New(r.at, &n.metas[id], parent, Arrival{Hash: r.chain[i], Partial: r.partial && i == len(r.chain)-1, Retention: n.retention})
		last = id
	}
	if last != 0 {
		n.blocks[last].held = false
		n.leaf(last)
	}
}

func (n *node) add(hash uint64) ID {
	var id ID
	if k := len(n.free); k > 0 {
		id, n.free = n.free[k-1], n.free[:k-1]
	} else {
		id = ID(len(n.blocks))
		n.blocks, n.metas = append(n.blocks, nodeBlock{}), append(n.metas, Meta{})
	}
	n.blocks[id] = nodeBlock{hash: hash}
	n.metas[id] = NewMeta()
	n.byHash[hash] = id
	n.resident++
	return id
}

func (n *node) evict(now int64, id ID) {
	b := n.blocks[id]
	n.set.Remove(id)
	n.p.Gone(now, &n.metas[id], b.hash)
	delete(n.byHash, b.hash)
	n.free = append(n.free, id)
	n.resident--
	if b.parent != 0 {
		n.blocks[b.parent].children--
		n.leaf(b.parent)
	}
}

// hitRatio replays requests; blocks is what the policy is told the node holds.
func hitRatio(p Policy, capacity int, requests []request) float64 {
	n := newNode(p, capacity)
	for _, r := range requests {
		n.run(r)
	}
	return float64(n.hits) / float64(n.asked)
}

func unique(requests []request) int {
	seen := map[uint64]bool{}
	for _, r := range requests {
		for _, h := range r.chain {
			seen[h] = true
		}
	}
	return len(seen)
}

// mix is a hash of two words.
func mix(a, b uint64) uint64 {
	x := (a ^ b*0x9e3779b97f4a7c15) * 0xbf58476d1ce4e5b9
	x ^= x >> 29
	x *= 0x94d049bb133111eb
	return x ^ x>>32
}

func readTrace(t testing.TB, path string) []request {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var out []request
	s := bufio.NewScanner(z)
	s.Buffer(nil, 1<<24)
	for s.Scan() {
		var l struct {
			Timestamp int64    `json:"timestamp"`
			Input     int      `json:"input_length"`
			IDs       []uint64 `json:"hash_ids"`
		}
		if err := json.Unmarshal(s.Bytes(), &l); err != nil {
			t.Fatal(err)
		}
		r := request{at: (l.Timestamp + 1) * 1e6, partial: l.Input%512 != 0}
		h := uint64(0)
		for _, id := range l.IDs {
			h = mix(h, id+1)
			r.chain = append(r.chain, h)
		}
		out = append(out, r)
	}
	return out
}

func pack(hashes []uint64) []byte {
	out := make([]byte, len(hashes)*hashBytes)
	for i, h := range hashes {
		binary.LittleEndian.PutUint64(out[i*hashBytes:], h)
	}
	return out
}
