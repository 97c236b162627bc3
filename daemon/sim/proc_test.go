package sim

import (
	"fmt"
	"os"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/session"
)

// proc is a process of an engine: a worker with memory, or a scheduler.
type proc struct {
	w      *world
	node   *node
	engine *engine
	name   string
	role   session.Role
	rank   uint32
	ranks  uint32
	space  kvferry.SpaceID
	file   *os.File // of memory
	memory []byte
	dead   bool

	s      *session.Session // nil: not attached
	words  []byte
	pool   []byte
	number uint64
	ops    map[uint64]*simOp
	busy   map[uint32]int // blocks that operations use, or that are kept for an offer
	next   uint32         // block to be looked at first for something new
	kept   map[[16]byte]keptBlocks
	served map[[16]byte]bool
	views  map[uint64]*lentView // of other workers' memory, by handle
	cred   session.Credentials
	target *target // of this session
	// matched are the requests for which a scheduler asked what is here, each of which may have a lease.
	matched map[string]bool
	late    []*simOp // loads that have ended, and whose answers a slow worker still holds
}

// keptBlocks are not used again before nobody reads them for an offer, or the engine's patience is over.
type keptBlocks struct {
	blocks []uint32
	until  time.Time
}

func (w *world) newProc(n *node, e *engine, role session.Role, rank uint32) *proc {
	p := &proc{w: w, node: n, engine: e, role: role, rank: rank, ranks: e.ranks, space: space(e.ranks).ID(), ops: map[uint64]*simOp{}, busy: map[uint32]int{}, kept: map[[16]byte]keptBlocks{},
		served: map[[16]byte]bool{}, views: map[uint64]*lentView{}, matched: map[string]bool{}, cred: session.Credentials{PID: int32(os.Getpid()), UID: uint32(os.Getuid())}}
	p.name = fmt.Sprintf("%s.%d", e.name, rank)
	if role == session.Scheduler {
		p.name = e.name + ".scheduler"
	} else {
		p.file = memfd(w, blocksOfWorker*shardBytes)
		p.memory = w.mmap(p.file, blocksOfWorker*shardBytes, unix.PROT_READ|unix.PROT_WRITE)
	}
	p.attach()
	return p
}

// attach opens a session with the daemon of this moment.
func (p *proc) attach() {
	w, d := p.w, p.node.daemon
	h := session.Hello{WireVersion: 1, Role: p.role, Instance: p.engine.name, Rank: p.rank, Ranks: p.ranks, Space: space(p.ranks)}
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		w.fatalf("pidfd: %v", err)
	}
	pidfd := os.NewFile(uintptr(fd), "pidfd")
	entries, fds := []uint32{0xffffffff}, []*os.File{pidfd}
	if p.role == session.Scheduler {
		h.Generations = blocksOfWorker
		entries, fds = append(entries, 0xfffffffc), append(fds, p.engine.file)
	} else {
		h.ReadsLent = true
		entries, fds = append(entries, 1), append(fds, p.file)
		spec := session.RegionSpec{ID: 1, Kind: session.SharedHost, Bytes: blocksOfWorker * shardBytes, Blocks: blocksOfWorker, Writable: true}
		for i := range uint64(planes) {
			spec.Planes = append(spec.Planes, kvferry.Plane{Base: i * blocksOfWorker * planeBytes, Stride: planeBytes, Bytes: planeBytes})
		}
		h.Regions = []session.RegionSpec{spec}
	}
	if p.s, err = d.sessions.Open(h, p.cred); err != nil {
		w.fatalf("open session: %v", err)
	}
	p.target = &target{w: w, name: p.name, lent: map[uint32]uint64{}, word: map[uint64]uint32{}, writers: map[uint32]int{}}
	d.attaching = p.target
	got, err := d.sessions.Attach(p.s.Token(), p.cred, entries, fds)
	if err != nil {
		w.fatalf("attach: %v", err)
	}
	p.unmap(&p.pool)
	p.pool = w.mmap(got.Files[0], len(d.memory.Bytes), unix.PROT_READ)
	p.words = w.mmap(got.Files[1], session.WordsPerSession*64, unix.PROT_READ|unix.PROT_WRITE)
	p.target.words = p.words
	got.Close()
	_ = pidfd.Close()
}

func (w *world) mmap(f *os.File, n, prot int) []byte {
	b, err := unix.Mmap(int(f.Fd()), 0, n, prot, unix.MAP_SHARED)
	if err != nil {
		w.fatalf("map: %v", err)
	}
	return b
}

func (p *proc) unmap(b *[]byte) {
	if *b != nil {
		_ = unix.Munmap(*b)
	}
	*b = nil
}

func memfd(w *world, bytes int64) *os.File {
	fd, err := unix.MemfdCreate("kvferry-sim", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err == nil {
		err = unix.Ftruncate(fd, bytes)
	}
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK)
	}
	if err == nil {
		err = unix.Fchmod(fd, 0o444)
	}
	if err != nil {
		w.fatalf("memfd: %v", err)
	}
	return os.NewFile(uintptr(fd), "kvferry-sim")
}

// die is a process's end: whatever it had mapped is gone for it, and the daemon hears of it.
func (p *proc) die(reason error) {
	if p.dead {
		return
	}
	p.dead = true
	p.target.end()
	if p.s != nil {
		go p.s.Close(reason) // a real stream's handler does this
		p.w.apartFromNext()
	}
	p.unmap(&p.memory)
	p.unmap(&p.words)
	p.unmap(&p.pool)
	for h := range p.views {
		p.forget(h)
	}
	if p.file != nil {
		_ = p.file.Close()
	} else {
		p.engine.die()
	}
}

// lost: the daemon is gone, and every operation with it. What a worker was told of the pool it may still read, as late as it likes.
func (p *proc) lost() {
	if p.dead {
		return
	}
	for _, n := range sorted(p.ops) {
		o := p.ops[n]
		p.giveBack(o)
		p.keepLate(o)
	}
	p.ops = map[uint64]*simOp{}
	for id := range p.kept {
		p.unkeep(id)
	}
	for h := range p.views {
		p.forget(h)
	}
	p.target.end()
	p.unmap(&p.words)
	p.s = nil
}

// tell sends the daemon a message. A frozen one reads it when it goes on.
func (p *proc) tell(f func(s *session.Session)) {
	s := p.s
	do := func() {
		s.Do(func() { f(s) })
		p.w.apartFromNext()
	}
	if p.node.isFrozen() {
		p.node.backlog = append(p.node.backlog, do)
		return
	}
	do()
}

// plane is where a plane of a block lies in the process's memory.
func (p *proc) plane(block uint32, plane int) []byte {
	at := (plane*blocksOfWorker + int(block)) * planeBytes
	return p.memory[at : at+planeBytes]
}

func (p *proc) write(block uint32, b []byte) {
	for i := range planes {
		copy(p.plane(block, i), b[i*planeBytes:])
	}
}

func (p *proc) read(block uint32) (out []byte) {
	for i := range planes {
		out = append(out, p.plane(block, i)...)
	}
	return out
}

func (p *proc) wordAt(i uint32) *uint64 { return (*uint64)(unsafe.Pointer(&p.words[i*64])) }

// begin takes a word and a number.
func (p *proc) begin(o *simOp) uint64 {
	p.number++
	used := map[uint32]bool{}
	for _, other := range p.ops {
		used[other.word] = true
	}
	for used[o.word] {
		o.word++
	}
	p.ops[p.number] = o
	for _, b := range o.blocks {
		p.busy[b]++
	}
	atomic.StoreUint64(p.wordAt(o.word), p.number<<8|uint64(session.WordPending))
	return p.number
}

func (p *proc) giveBack(o *simOp) {
	if o.given {
		return
	}
	o.given = true
	p.free(o.blocks)
}

func (p *proc) free(blocks []uint32) {
	for _, b := range blocks {
		if p.busy[b]--; p.busy[b] == 0 {
			delete(p.busy, b)
		}
	}
}

// keep holds blocks for an offer.
func (p *proc) keep(offer [16]byte, blocks []uint32) {
	for _, b := range blocks {
		p.busy[b]++
	}
	p.kept[offer] = keptBlocks{blocks, time.Now().Add(5 * time.Second)}
}

func (p *proc) unkeep(offer [16]byte) {
	p.free(p.kept[offer].blocks)
	delete(p.kept, offer)
}
