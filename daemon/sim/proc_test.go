package sim

import (
	"errors"
	"os"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/handoff"
	"github.com/kvferry/kvferry/daemon/session"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/tierstest"
	"github.com/kvferry/kvferry/transport"
)

// proc is a process of an engine: a worker with memory, or a scheduler.
type proc struct {
	w      *world
	s      *session.Session
	rank   uint32
	ranks  uint32
	space  kvferry.SpaceID
	memory []byte
	words  []byte
	pool   []byte
	number uint64
	ops    map[uint64]*simOp
	busy   map[uint32]bool // blocks that an operation reads
	late   []*simOp        // loads that have ended, and whose answers a slow worker still holds
	dead   bool
}

type simOp struct {
	load     bool
	word     uint32
	blocks   []uint32
	hashes   []tiers.Block
	deadline time.Time
	result   *session.LoadResult
	revoked  bool
	ended    bool
}

func (w *world) open() {
	if len(w.procs) >= 5 {
		return
	}
	ranks := uint32(1 + w.r.IntN(2))
	p := &proc{w: w, rank: uint32(w.r.IntN(int(ranks))), ranks: ranks, space: space(ranks).ID(), ops: map[uint64]*simOp{}, busy: map[uint32]bool{}}
	h := session.Hello{WireVersion: 1, Role: session.Worker, Instance: "sim", Rank: p.rank, Ranks: ranks, Space: space(ranks)}
	cred := session.Credentials{PID: int32(os.Getpid()), UID: uint32(os.Getuid())}
	pidfd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		w.fatalf("pidfd: %v", err)
	}
	entries, fds := []uint32{0xffffffff}, []*os.File{os.NewFile(uintptr(pidfd), "pidfd")}
	if w.r.IntN(4) == 0 {
		h.Role, h.Rank = session.Scheduler, 0
	} else {
		f := memfd(w.t, blocksOfWorker*shardBytes)
		p.memory = w.mmap(f, blocksOfWorker*shardBytes, unix.PROT_READ|unix.PROT_WRITE)
		entries, fds = append(entries, 1), append(fds, f)
		spec := session.RegionSpec{ID: 1, Kind: session.SharedHost, Bytes: blocksOfWorker * shardBytes, Blocks: blocksOfWorker}
		for i := range uint64(planes) {
			spec.Planes = append(spec.Planes, kvferry.Plane{Base: i * blocksOfWorker * planeBytes, Stride: planeBytes, Bytes: planeBytes})
		}
		h.Regions = []session.RegionSpec{spec}
	}
	if p.s, err = w.sessions.Open(h, cred); err != nil {
		w.fatalf("open session: %v", err)
	}
	got, err := w.sessions.Attach(p.s.Token(), cred, entries, fds)
	if err != nil {
		w.fatalf("attach: %v", err)
	}
	p.pool = w.mmap(got.Files[0], len(w.pool.Bytes()), unix.PROT_READ)
	p.words = w.mmap(got.Files[1], session.WordsPerSession*64, unix.PROT_READ|unix.PROT_WRITE)
	got.Close()
	for _, f := range fds {
		_ = f.Close()
	}
	w.procs = append(w.procs, p)
}

func (w *world) mmap(f *os.File, n, prot int) []byte {
	b, err := unix.Mmap(int(f.Fd()), 0, n, prot, unix.MAP_SHARED)
	if err != nil {
		w.fatalf("map: %v", err)
	}
	return b
}

// die is a process's end: whatever it had mapped is gone for it, and the daemon hears of it.
func (p *proc) die(reason error) {
	if p.dead {
		return
	}
	p.dead = true
	go p.s.Close(reason) // a real stream's handler does this
	for _, b := range [][]byte{p.memory, p.words, p.pool} {
		if b != nil {
			_ = unix.Munmap(b)
		}
	}
}

func (w *world) pick(role session.Role) *proc {
	var fit []*proc
	for _, p := range w.procs {
		if !p.dead && p.s.Hello().Role == role {
			fit = append(fit, p)
		}
	}
	if len(fit) == 0 {
		return nil
	}
	return fit[w.r.IntN(len(fit))]
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

func (w *world) store() {
	p := w.pick(session.Worker)
	if p == nil {
		return
	}
	blocks := chain(w.r)
	ids := p.free(len(blocks))
	blocks = blocks[:len(ids)]
	if len(blocks) == 0 {
		return
	}
	o := &simOp{blocks: ids, hashes: blocks, deadline: time.Now().Add(2 * time.Second)}
	var parents []byte
	for i, b := range blocks {
		p.write(ids[i], content(b.Hash, p.rank))
		p.busy[ids[i]] = true
		parents = append(parents, b.Parent[:]...)
	}
	n := p.begin(o)
	p.s.Store(session.Store{Operation: n, Word: o.word, Space: p.space, RequestID: "r", Region: 1, BlockIDs: ids, Hashes: tierstest.Pack(blocks), Parents: parents})
}

// revoke takes a store back, and overwrites its blocks at once if that won, as an engine does.
func (w *world) revoke() {
	p := w.pick(session.Worker)
	if p == nil {
		return
	}
	for n, o := range p.ops {
		if o.load || o.ended || o.revoked {
			continue
		}
		if atomic.CompareAndSwapUint64(p.wordAt(o.word), n<<8|uint64(session.WordPending), n<<8|uint64(session.WordRevoked)) {
			o.revoked = true
			for _, b := range o.blocks {
				p.write(b, make([]byte, shardBytes))
				delete(p.busy, b)
			}
			if w.r.IntN(2) == 0 {
				p.s.Revoke([]uint64{n})
			}
		}
		return
	}
}

func (w *world) load() {
	p := w.pick(session.Worker)
	if p == nil {
		return
	}
	blocks := chain(w.r)
	ids := p.free(len(blocks))
	blocks = blocks[:len(ids)]
	if len(blocks) == 0 {
		return
	}
	o := &simOp{load: true, blocks: ids, hashes: blocks, deadline: time.Now().Add(3 * time.Second)}
	for _, b := range ids {
		p.busy[b] = true
	}
	n := p.begin(o)
	l := session.Load{Operation: n, Word: o.word, Space: p.space, RequestID: "r", Hashes: tierstest.Pack(blocks)}
	if len(w.offers) > 0 && w.r.IntN(4) == 0 { // accept an offer of this node
		f := w.offers[w.r.IntN(len(w.offers))]
		if f.Space == p.space {
			l.Ticket = &handoff.Ticket{Addresses: []string{"-"}, OfferID: f.ID, Secret: f.Secret, Epoch: w.epoch, Space: f.Space}
			l.Hashes = f.Hashes[:min(len(f.Hashes), len(ids)*kvferry.HashSize)]
			o.hashes = nil
			for i := 0; i < len(l.Hashes); i += kvferry.HashSize {
				o.hashes = append(o.hashes, tiers.Block{Hash: kvferry.Hash(l.Hashes[i:])})
			}
		}
	}
	p.s.Load(l)
}

// copyLoaded does the worker's part of a Load, perhaps long after the answer: what the generation and the checksum let pass must be right.
func (w *world) copyLoaded() {
	p := w.pick(session.Worker)
	if p == nil {
		return
	}
	if n := len(p.late); n > 0 && w.r.IntN(2) == 0 {
		p.copyResult(p.late[w.r.IntN(n)])
		return
	}
	for n, o := range p.ops {
		if o.load && o.result != nil {
			p.copyResult(o)
			if w.r.IntN(3) > 0 { // else it is left to its deadline
				p.s.Release([]uint64{n}, 0)
			}
			return
		}
	}
}

func (p *proc) copyResult(o *simOp) {
	w, r := p.w, o.result
	for i := range r.Status {
		if session.BlockStatus(r.Status[i]) != session.Ready {
			continue
		}
		gen := (*uint64)(unsafe.Pointer(&p.pool[r.HeaderOffsets[i]]))
		if atomic.LoadUint64(gen) != r.Generations[i] {
			if !o.ended {
				w.fatalf("a pinned block changed")
			}
			w.seen["stale loads"]++
			continue
		}
		got := p.pool[r.Offsets[i]:][:r.ShardBytes]
		if crcOf(got) != r.CRC32C[i] {
			w.fatalf("a block's bytes changed and its generation did not")
		}
		if string(got) != string(content(o.hashes[int(r.First)+i].Hash, p.rank)) {
			w.fatalf("load of %v was served wrong bytes", o.hashes[i].Hash)
		}
		w.seen["loaded blocks"]++
	}
}

// receive takes what the daemon has told.
func (p *proc) receive() {
	if p.dead {
		return
	}
	for {
		events, ok := p.s.Poll()
		if !ok {
			return
		}
		for _, e := range events {
			switch e := e.(type) {
			case session.LoadResult:
				if o := p.ops[e.Operation]; o != nil {
					o.result = &e
				}
			case session.OperationEnd:
				p.end(e)
			}
		}
	}
}

func (p *proc) end(e session.OperationEnd) {
	o := p.ops[e.Operation]
	if o == nil || o.ended {
		p.w.fatalf("operation %d ended twice: %+v", e.Operation, e)
	}
	if e.Outcome == session.OutcomeRejected {
		p.w.fatalf("operation %d was rejected: %s", e.Operation, e.Reason)
	}
	if o.revoked && e.Outcome == session.OutcomeCommitted {
		p.w.fatalf("operation %d was revoked and committed", e.Operation)
	}
	state := session.WordState(atomic.LoadUint64(p.wordAt(o.word)))
	if !o.load && (state == session.WordCommitted) != (e.Outcome == session.OutcomeCommitted) {
		p.w.fatalf("operation %d ended %v with its word in state %d", e.Operation, e.Outcome, state)
	}
	if !o.revoked {
		for _, b := range o.blocks {
			delete(p.busy, b)
		}
	}
	o.ended = true
	delete(p.ops, e.Operation)
	if o.load && o.result != nil {
		p.late = append(p.late, o)
		if len(p.late) > 4 {
			p.late = p.late[1:]
		}
	}
}

// checkDeadlines: every outcome is decided by its deadline, quiet or not.
func (p *proc) checkDeadlines() {
	if p.dead {
		return
	}
	for n, o := range p.ops {
		if !o.ended && time.Now().After(o.deadline) && atomic.LoadUint64(p.wordAt(o.word)) == n<<8|uint64(session.WordPending) {
			p.w.fatalf("operation %d is not decided after its deadline", n)
		}
	}
}

func (w *world) match() {
	p := w.pick(session.Scheduler)
	if p == nil {
		return
	}
	blocks := chain(w.r)
	r, err := p.s.Match(w.t.Context(), session.Match{RequestID: string(rune('a' + w.r.IntN(5))), Space: p.space, Hashes: tierstest.Pack(blocks), Lease: time.Duration(1+w.r.IntN(5000)) * time.Millisecond})
	if err != nil || r.Blocks > len(blocks) {
		w.fatalf("match: %+v %v", r, err)
	}
}

func (w *world) offer() {
	p := w.pick(session.Scheduler)
	if p == nil {
		return
	}
	o := session.Offer{Space: p.space, RequestID: "r", Hashes: tierstest.Pack(chain(w.r)), Tokens: 100, Lifetime: time.Duration(1+w.r.IntN(8)) * time.Second}
	for i := range o.ID {
		o.ID[i], o.Secret[i] = byte(w.r.Uint32()), byte(w.r.Uint32())
	}
	p.s.Offer(o)
	w.offers = append(w.offers, o)
	if len(w.offers) > 8 {
		w.offers = w.offers[1:]
	}
}

// simClaim is a claim of another node's daemon.
type simClaim struct {
	answer handoff.ClaimAnswer
	hashes []byte
	rank   uint32
}

func (w *world) claim() {
	if len(w.offers) == 0 {
		return
	}
	o := w.offers[w.r.IntN(len(w.offers))]
	ranks := uint32(1)
	if o.Space == space(2).ID() {
		ranks = 2
	}
	q := handoff.ClaimRequest{Epoch: w.epoch, OfferID: o.ID, Secret: o.Secret, Instance: "decode", Rank: uint32(w.r.IntN(int(ranks))), TP: ranks, ClaimID: uint64(w.r.IntN(3)), Space: o.Space, Hashes: o.Hashes}
	wrong := w.r.IntN(6) == 0
	if wrong {
		q.Secret[0] ^= 1
	}
	a, err := w.registry.Claim(w.t.Context(), q)
	if err == nil && wrong {
		w.fatalf("a wrong secret was taken")
	}
	if err == nil {
		w.claims = append(w.claims, simClaim{a, o.Hashes, q.Rank})
	}
}

// readClaim reads what a claim covers, as the data server does, and sometimes ends it.
func (w *world) readClaim() {
	if len(w.claims) == 0 {
		return
	}
	i := w.r.IntN(len(w.claims))
	c := w.claims[i]
	g, err := w.registry.Acquire(w.epoch, c.answer.Key)
	if err != nil {
		if !errors.Is(err, transport.ErrRefused) {
			w.fatalf("acquire: %v", err)
		}
		w.claims = append(w.claims[:i], w.claims[i+1:]...) // not renewed in time
		return
	}
	for k, st := range c.answer.Status {
		if st != handoff.Stored {
			continue
		}
		parts, err := g.Append(nil, c.answer.Offsets[k], c.answer.ShardBytes)
		if err != nil {
			continue // a later claim of the same id has taken its place
		}
		b := parts[0]
		if crcOf(b) == c.answer.CRC32C[k] {
			if string(b) != string(content(kvferry.Hash(c.hashes[k*kvferry.HashSize:]), c.rank)) {
				w.fatalf("claim was served wrong bytes")
			}
			w.seen["claimed blocks"]++
		}
	}
	g.Release()
	if w.r.IntN(2) == 0 {
		w.registry.EndClaim(c.answer.Key, "")
		w.claims = append(w.claims[:i], w.claims[i+1:]...)
	}
}

// kill ends a process at once.
func (w *world) kill() {
	if len(w.procs) == 0 {
		return
	}
	i := w.r.IntN(len(w.procs))
	w.procs[i].die(session.ErrProcessGone)
	w.procs = append(w.procs[:i], w.procs[i+1:]...)
}
