package replay

import (
	"container/heap"
	"math"
)

// Unlimited is how many blocks a node that keeps all of them finds.
func Unlimited(t *Trace) (hits int) { return t.Asked - t.Unique() }

// Optimum is how many blocks a node of so many blocks finds that knows what comes (Belady's rule): what is used again last leaves first, and is not kept at all if that is the new block itself. A block's
// ancestors are used again no later than it, and of those that are used again together the deepest leaves first: so chains are never broken.
func Optimum(t *Trace, capacity int) (hits int) {
	if capacity <= 0 {
		return 0
	}
	next := make([]int32, t.Asked) // for each block asked for, the next request that does
	last := make([]int32, t.Unique())
	for i := range last {
		last[i] = never
	}
	at := t.Asked
	for i := len(t.Requests) - 1; i >= 0; i-- {
		for k := len(t.Requests[i].chain) - 1; k >= 0; k-- {
			at--
			b := t.Requests[i].chain[k]
			next[at], last[b] = last[b], int32(i)
		}
	}
	kept := farthest{place: make([]int32, t.Unique())}
	for i := range kept.place {
		kept.place[i] = -1
	}
	at = 0
	for i := range t.Requests {
		for depth, b := range t.Requests[i].chain {
			use := future{b, next[at], int32(depth)}
			at++
			if p := kept.place[b]; p >= 0 {
				hits++
				kept.list[p] = use
				heap.Fix(&kept, int(p))
				continue
			}
			if use.next == never {
				continue
			}
			heap.Push(&kept, use)
			if len(kept.list) > capacity {
				heap.Pop(&kept)
			}
		}
	}
	return hits
}

// never stands for the number of a request.
const never = math.MaxInt32

// future is when a block is used again.
type future struct {
	block       uint32
	next, depth int32 // request, blocks before it
}

// farthest is a heap with the block that is used again last on top.
type farthest struct {
	list  []future
	place []int32 // of a block; -1: it is not kept
}

func (f *farthest) Len() int { return len(f.list) }
func (f *farthest) Less(i, j int) bool {
	a, b := f.list[i], f.list[j]
	return a.next > b.next || a.next == b.next && a.depth > b.depth
}
func (f *farthest) Swap(i, j int) {
	f.list[i], f.list[j] = f.list[j], f.list[i]
	f.place[f.list[i].block], f.place[f.list[j].block] = int32(i), int32(j)
}

// Push is heap.Interface.
func (f *farthest) Push(x any) {
	u := x.(future)
	f.place[u.block] = int32(len(f.list))
	f.list = append(f.list, u)
}

// Pop is heap.Interface.
func (f *farthest) Pop() any {
	n := len(f.list) - 1
	u := f.list[n]
	f.list = f.list[:n]
	f.place[u.block] = -1
	return u
}
