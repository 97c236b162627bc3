package sim

import (
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/session"
)

// proc is a process of an engine: a worker with memory, or a scheduler.
type proc struct {
	w      *world
	node   *node
	engine string // instance
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
	busy   map[uint32]bool // blocks that an operation uses
	// matched are the requests for which a scheduler asked what is here, each of which may have a lease.
	matched map[string]bool
	late    []*simOp // loads that have ended, and whose answers a slow worker still holds
}

// enginesOfNode bounds what runs on one.
const enginesOfNode = 3

// openEngine starts the processes of an instance: a scheduler and one or two workers.
func (w *world) openEngine(n *node) {
	if n.daemon == nil || n.isFrozen() {
		return
	}
	for _, p := range n.procs { // those whose daemon went attach again first
		if !p.dead && p.s == nil {
			p.attach()
		}
	}
	alive := map[string]bool{}
	for _, p := range n.procs {
		alive[p.engine] = true
	}
	if len(alive) >= enginesOfNode {
		return
	}
	n.engines++
	name, ranks := fmt.Sprintf("%s%d", n.name, n.engines), uint32(1+w.r.IntN(2))
	n.procs = append(n.procs, w.newProc(n, name, session.Scheduler, 0, ranks))
	for rank := range ranks {
		n.procs = append(n.procs, w.newProc(n, name, session.Worker, rank, ranks))
	}
}

func (w *world) newProc(n *node, engine string, role session.Role, rank, ranks uint32) *proc {
	p := &proc{w: w, node: n, engine: engine, role: role, rank: rank, ranks: ranks, space: space(ranks).ID(), ops: map[uint64]*simOp{}, busy: map[uint32]bool{}, matched: map[string]bool{}}
	p.name = fmt.Sprintf("%s.%d", engine, rank)
	if role == session.Scheduler {
		p.name = engine + ".scheduler"
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
	h := session.Hello{WireVersion: 1, Role: p.role, Instance: p.engine, Rank: p.rank, Ranks: p.ranks, Space: space(p.ranks)}
	cred := session.Credentials{PID: int32(os.Getpid()), UID: uint32(os.Getuid())}
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		w.fatalf("pidfd: %v", err)
	}
	pidfd := os.NewFile(uintptr(fd), "pidfd")
	entries, fds := []uint32{0xffffffff}, []*os.File{pidfd}
	if p.role == session.Worker {
		entries, fds = append(entries, 1), append(fds, p.file)
		spec := session.RegionSpec{ID: 1, Kind: session.SharedHost, Bytes: blocksOfWorker * shardBytes, Blocks: blocksOfWorker}
		for i := range uint64(planes) {
			spec.Planes = append(spec.Planes, kvferry.Plane{Base: i * blocksOfWorker * planeBytes, Stride: planeBytes, Bytes: planeBytes})
		}
		h.Regions = []session.RegionSpec{spec}
	}
	if p.s, err = d.sessions.Open(h, cred); err != nil {
		w.fatalf("open session: %v", err)
	}
	got, err := d.sessions.Attach(p.s.Token(), cred, entries, fds)
	if err != nil {
		w.fatalf("attach: %v", err)
	}
	p.unmap(&p.pool)
	p.pool = w.mmap(got.Files[0], len(d.memory.Bytes), unix.PROT_READ)
	p.words = w.mmap(got.Files[1], session.WordsPerSession*64, unix.PROT_READ|unix.PROT_WRITE)
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
	if p.s != nil {
		go p.s.Close(reason) // a real stream's handler does this
		p.w.apartFromNext()
	}
	p.unmap(&p.memory)
	p.unmap(&p.words)
	p.unmap(&p.pool)
	if p.file != nil {
		_ = p.file.Close()
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
	p.unmap(&p.words)
	p.s = nil
}

// kill ends a process at once, or a whole engine.
func (w *world) kill(n *node) {
	if len(n.procs) == 0 {
		return
	}
	victim := n.procs[w.r.IntN(len(n.procs))]
	whole := w.r.IntN(2) == 0
	n.procs = slices.DeleteFunc(n.procs, func(p *proc) bool {
		if p != victim && (!whole || p.engine != victim.engine) {
			return false
		}
		p.die(session.ErrProcessGone)
		return true
	})
}

// pick is an attached process of a node.
func (w *world) pick(n *node, role session.Role) *proc {
	var fit []*proc
	for _, p := range n.procs {
		if p.s != nil && p.role == role {
			fit = append(fit, p)
		}
	}
	if len(fit) == 0 {
		return nil
	}
	return fit[w.r.IntN(len(fit))]
}

// workers are the attached ones of an instance.
func (n *node) workers(engine string) (out []*proc) {
	for _, p := range n.procs {
		if p.s != nil && p.role == session.Worker && p.engine == engine {
			out = append(out, p)
		}
	}
	return out
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
		p.busy[b] = true
	}
	atomic.StoreUint64(p.wordAt(o.word), p.number<<8|uint64(session.WordPending))
	return p.number
}

// free are blocks that no operation uses.
func (p *proc) free(n int) (out []uint32) {
	for b := uint32(0); b < blocksOfWorker && len(out) < n; b++ {
		if !p.busy[b] {
			out = append(out, b)
		}
	}
	return out
}

func (p *proc) giveBack(o *simOp) {
	if o.given {
		return
	}
	o.given = true
	for _, b := range o.blocks {
		delete(p.busy, b)
	}
}
