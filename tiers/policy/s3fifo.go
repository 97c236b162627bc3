package policy

import "container/heap"

// smallPart is the part of the blocks that may wait for a second use before others leave.
const smallPart = 10

// mainTurn is after how many blocks that left from the small queue one of the main queue has its turn, else what nobody uses any more would stay there while nothing new is used.
const mainTurn = 16

// S3FIFO keeps new blocks in a small queue that they leave unless they are used again; the others, and those that come back soon after they have left, are in a main queue that gives each block
// another round for each use. It is known from caches of objects; here a block with children cannot leave when its turn has come, and keeps its place until it may.
type S3FIFO struct {
	clock    uint32 // blocks that came to the end of a queue
	left     uint32 // blocks that left
	resident int
	small    int // of these, in the small queue
	ghosts   ghosts
}

// NewS3FIFO makes one for a node of so many blocks.
func NewS3FIFO(blocks int) *S3FIFO {
	p := &S3FIFO{}
	p.ghosts.init(max(blocks, 1))
	return p
}

// Meta.Class of this policy: the queue. Meta.Uses: uses that are not used up in bits 0-1, retention in 6-7. Meta.Used: when the block came to its queue's end.
const (
	queueSmall = iota
	queueMain
)

const usesMax = 3

// Name is Policy.
func (p *S3FIFO) Name() string { return "s3fifo" }

// Hit is Policy.
func (p *S3FIFO) Hit(_ int64, t Table, found []ID, _ []byte) {
	for _, id := range found {
		m := t.Meta(id)
		if m.Uses&usesMax < usesMax {
			m.Uses++
		}
		if m.Class == queueSmall && m.Pos == [NumTiers]int32{-1, -1} { // its turn to leave does not come while it may not
			p.promote(m)
		}
	}
}

// promote moves a block that was used to the end of the main queue.
func (p *S3FIFO) promote(m *Meta) {
	p.clock++
	p.small--
	m.Class, m.Used, m.Uses = queueMain, p.clock, m.Uses-1
}

// New is Policy.
func (p *S3FIFO) New(_ int64, m, _ *Meta, a Arrival) {
	p.resident++
	p.clock++
	m.Class, m.Used, m.Uses = queueSmall, p.clock, 0
	g, was := p.ghosts.take(a.Hash)
	if was && p.left-g.since <= uint32(p.resident) {
		m.Class = queueMain
	} else {
		p.small++
	}
	if a.Retention == Long {
		m.Uses = usesMax
	}
	m.Uses = withRetention(m.Uses, a.Retention)
}

// Gone is Policy.
func (p *S3FIFO) Gone(_ int64, m *Meta, hash uint64) {
	p.resident--
	p.left++
	if m.Class == queueSmall {
		p.small--
		p.ghosts.put(hash, ghost{since: p.left}, p.left)
	}
}

// Before is Policy.
func (p *S3FIFO) Before(_ int64, t Table, a, b ID) bool {
	x, y := t.Meta(a), t.Meta(b)
	p1, k1 := queueOf(t, a)
	p2, k2 := queueOf(t, b)
	if first1, first2 := p1 == queueFirst, p2 == queueFirst; first1 || first2 {
		return first1 && (!first2 || k1 < k2)
	}
	if p1 != p2 {
		return p1 == queueSmall
	}
	if u, v := x.Uses&usesMax, y.Uses&usesMax; u != v {
		return u < v
	}
	return k1 < k2
}

// queueOf is where a block waits, and its place there.
func queueOf(t Table, id ID) (queue int, key uint64) {
	m := t.Meta(id)
	key = uint64(m.Used)
	switch r := retentionOf(m); {
	case t.Stamp(id) == 0:
		return queueFirst, key
	case r == None:
		return queueFirst, key | 1<<32
	case r == Short:
		return queueFirst, key | 2<<32
	}
	return int(m.Class), key
}

// NewSet is Policy.
func (p *S3FIFO) NewSet(t Table, tier int) Set {
	s := &fifoSet{p: p}
	for i := range s.queues {
		s.queues[i] = fifo{t: t, tier: tier, number: i}
	}
	return s
}

// queueFirst is before the two queues: what is incomplete or not to be kept.
const (
	queueFirst = queueMain + 1
	numQueues  = queueFirst + 1
)

// fifoSet is the queues' blocks that may leave. They are heaps by when a block came, since blocks come and go in between.
type fifoSet struct {
	p      *S3FIFO
	queues [numQueues]fifo
}

// Len is Set.
func (s *fifoSet) Len() int {
	n := 0
	for i := range s.queues {
		n += s.queues[i].Len()
	}
	return n
}

// Add is Set.
func (s *fifoSet) Add(id ID) {
	q, key := queueOf(s.queues[0].t, id)
	heap.Push(&s.queues[q], fifoEntry{key, id})
}

// Remove is Set.
func (s *fifoSet) Remove(id ID) {
	m := s.queues[0].t.Meta(id)
	q, place := splitPos(m.Pos[s.queues[0].tier])
	heap.Remove(&s.queues[q], place)
}

// Next is Set.
func (s *fifoSet) Next(int64) (ID, bool) {
	first, small, main := &s.queues[queueFirst], &s.queues[queueSmall], &s.queues[queueMain]
	if first.Len() > 0 {
		return first.entries[0].id, true
	}
	for small.Len()+main.Len() > 0 {
		q := main
		if small.Len() > 0 && (main.Len() == 0 || s.p.small*smallPart > s.p.resident && s.p.left%mainTurn != mainTurn-1) {
			q = small
		}
		id := q.entries[0].id
		m := q.t.Meta(id)
		if m.Uses&usesMax == 0 || q.t.Stamp(id) == 0 {
			return id, true
		}
		heap.Pop(q)
		if q == small {
			s.p.promote(m)
		} else {
			s.p.clock++
			m.Used, m.Uses = s.p.clock, m.Uses-1
		}
		heap.Push(main, fifoEntry{uint64(m.Used), id})
	}
	return 0, false
}

type fifoEntry struct {
	key uint64
	id  ID
}

type fifo struct {
	t       Table
	tier    int
	number  int
	entries []fifoEntry
}

func (q *fifo) place(i int)        { q.t.Meta(q.entries[i].id).Pos[q.tier] = makePos(q.number, i) }
func (q *fifo) Len() int           { return len(q.entries) }
func (q *fifo) Less(i, j int) bool { return q.entries[i].key < q.entries[j].key }
func (q *fifo) Swap(i, j int) {
	q.entries[i], q.entries[j] = q.entries[j], q.entries[i]
	q.place(i)
	q.place(j)
}

// Push is heap.Interface.
func (q *fifo) Push(x any) {
	q.entries = append(q.entries, x.(fifoEntry))
	q.place(len(q.entries) - 1)
}

// Pop is heap.Interface.
func (q *fifo) Pop() any {
	n := len(q.entries) - 1
	e := q.entries[n]
	q.entries = q.entries[:n]
	q.t.Meta(e.id).Pos[q.tier] = -1
	return e
}
