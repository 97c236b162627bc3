package sim

import (
	"os"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/session"
	"github.com/kvferry/kvferry/transport"
)

// engine is an instance: a scheduler with a block generation table, and one or two ranks.
type engine struct {
	name  string
	ranks uint32
	file  *os.File // of table
	table []byte
	dead  bool            // its scheduler is: no block is used for anything new
	found map[string]bool // requests of which a peer has blocks
}

func (w *world) newEngine(name string, ranks uint32) *engine {
	e := &engine{name: name, ranks: ranks, found: map[string]bool{}, file: memfd(w, 8*blocksOfWorker)}
	e.table = w.mmap(e.file, 8*blocksOfWorker, unix.PROT_READ|unix.PROT_WRITE)
	if _, err := unix.FcntlInt(e.file.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_FUTURE_WRITE); err != nil {
		w.fatalf("seal the table: %v", err)
	}
	return e
}

// die ends what lives as long as the scheduler.
func (e *engine) die() {
	e.dead = true
	_ = unix.Munmap(e.table)
	_ = e.file.Close()
	e.table = nil
}

func generation(table []byte, block uint32) *uint64 {
	return (*uint64)(unsafe.Pointer(&table[8*block]))
}

// bump tells whoever reads these blocks that they are about to be something else. They are the same on every rank.
func (e *engine) bump(blocks []uint32) {
	for _, b := range blocks {
		atomic.AddUint64(generation(e.table, b), 1)
	}
}

func (e *engine) generations(blocks []uint32) (out []uint64) {
	for _, b := range blocks {
		out = append(out, atomic.LoadUint64(generation(e.table, b)))
	}
	return out
}

// target is a worker's memory, in one session, into which its daemon writes, and knows when it may.
type target struct {
	w    *world
	name string

	mu      sync.Mutex
	words   []byte            // nil: the process or its daemon is gone
	lent    map[uint32]uint64 // block → operation, until OperationEnd
	word    map[uint64]uint32 // operation → word
	writers map[uint32]int    // copies that have not returned
}

// blockAt is the block that a segment of the memory belongs to.
func blockAt(s kvferry.Segment) uint32 { return uint32(s.Offset / planeBytes % blocksOfWorker) }

// lend allows writing into blocks for an operation.
func (t *target) lend(operation uint64, word uint32, blocks []uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.word[operation] = word
	for _, b := range blocks {
		t.lent[b] = operation
	}
}

// takeBack is called when the daemon has said that the operation is quiet.
func (t *target) takeBack(operation uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.word, operation)
	for b, o := range t.lent {
		if o == operation {
			if t.writers[b] > 0 && t.words != nil {
				t.w.breaks("%s: operation %d is said to be quiet, and is being written", t.name, operation)
			}
			delete(t.lent, b)
		}
	}
}

// end: nobody uses the memory any more, or its daemon is dead and does not write.
func (t *target) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.words = nil
}

// count counts a copy that may write into these blocks from now on, or no longer.
func (t *target) count(batch []transport.Copy, by int) {
	for i := range batch {
		if by > 0 {
			t.check(batch[i].Dst[0])
		}
		t.mu.Lock()
		t.writers[blockAt(batch[i].Dst[0])] += by
		t.mu.Unlock()
	}
}

// check is called before something is written. It answers false where nobody is left to see it.
func (t *target) check(s kvferry.Segment) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	o, ok := t.lent[blockAt(s)]
	switch {
	case t.words == nil:
		return false
	case !ok:
		t.w.breaks("%s: a block is written that is not lent", t.name)
	case atomic.LoadUint64((*uint64)(unsafe.Pointer(&t.words[64*t.word[o]+16]))) == o:
		t.w.breaks("%s: a block of operation %d is written after its quiet word", t.name, o)
	}
	return true
}

// lentView is another worker's memory as a process has mapped it.
type lentView struct{ memory, table []byte }

// view maps what a result's blocks are lent in, once for each handle; nil: its owner is gone.
func (p *proc) view(v *session.LentView) *lentView {
	if have := p.views[v.Handle]; have != nil {
		return have
	}
	got, err := p.node.daemon.sessions.LentDescriptors(v.Token, p.cred)
	if err != nil {
		p.w.saw("lenders gone", 1)
		return nil
	}
	defer got.Close()
	have := &lentView{p.w.mmap(got.Files[0], int(v.Bytes), unix.PROT_READ), p.w.mmap(got.Files[1], 8*int(v.Generations), unix.PROT_READ)}
	p.views[v.Handle] = have
	return have
}

// forget unmaps lent memory: its owner is gone, or this process.
func (p *proc) forget(handle uint64) {
	if v := p.views[handle]; v != nil {
		p.unmap(&v.memory)
		p.unmap(&v.table)
		delete(p.views, handle)
	}
}

// copyLent copies planes of a block that another worker lends. It answers false when the block is no longer what was offered.
func (p *proc) copyLent(o *simOp, r *session.LoadResult, i int, v *lentView, from, to int) bool {
	b := uint32(r.Offsets[i])
	if v.table == nil {
		return false
	}
	holds := func() bool {
		return p.w.mutation == noGenerations || atomic.LoadUint64(generation(v.table, b)) == r.Generations[i]
	}
	if !holds() {
		return false
	}
	for k := from; k < to; k++ {
		copy(p.plane(o.blocks[int(r.First)+i], k), v.memory[(k*blocksOfWorker+int(b))*planeBytes:][:planeBytes])
	}
	return holds()
}
