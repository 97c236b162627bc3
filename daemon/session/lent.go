package session

import (
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/kvferry/kvferry/daemon/handoff"
	"github.com/kvferry/kvferry/gpu"
	"github.com/kvferry/kvferry/tiers"
)

// lent is mapped memory of a process. It outlives its session while somebody reads or writes it: a dead process's memory changes no more.
type lent struct {
	mapping *gpu.Mapping
	file    *os.File // to be handed out for reading; nil: whoever got it could open it for writing

	mu     sync.Mutex
	users  int
	closed bool
}

func openLent(field string, fd *os.File, bytes uint64, access gpu.Access) (*lent, error) {
	m, err := gpu.OpenHost(fd, bytes, access)
	if err != nil {
		kind := ErrInvalid
		if errors.Is(err, gpu.ErrNotSupported) {
			kind = ErrUnsupported
		}
		return nil, &FieldError{Field: field, Reason: err.Error(), kind: kind}
	}
	l := &lent{mapping: m}
	if access == gpu.Read && (gpu.WriteProtected(fd) || gpu.SealedForOthers(fd)) {
		if l.file, err = gpu.ReadOnly(fd); err != nil {
			_ = m.Close()
			return nil, &FieldError{Field: field, Reason: err.Error(), kind: ErrInvalid}
		}
	}
	return l, nil
}

// acquire keeps the memory mapped until release. It answers false when it is closed.
func (l *lent) acquire() bool {
	if l == nil {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	l.users++
	return true
}

func (l *lent) release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.users--
	l.unmapLocked()
}

// close ends the lending; a nil one was never lent.
func (l *lent) close() {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	l.closed = true
	if l.file != nil {
		_ = l.file.Close()
	}
	l.unmapLocked()
}

func (l *lent) unmapLocked() {
	if l.closed && l.users == 0 {
		_ = l.mapping.Close() // fails for an address that was never mapped only
	}
}

// descriptor is one more descriptor of the memory, for reading.
func (l *lent) descriptor() (*os.File, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, fieldErr(ErrNotFound, "token", "the memory is no longer lent")
	}
	return dup(l.file)
}

// openTable maps a scheduler's block generations.
func (s *Session) openTable(fd *os.File) (*lent, error) {
	if s.hello.Generations == 0 {
		return nil, nil
	}
	if fd == nil {
		return nil, invalid("entries", "no descriptor for the generation table")
	}
	if !gpu.SealedForOthers(fd) {
		return nil, invalid("generations", "not sealed with F_SEAL_FUTURE_WRITE")
	}
	return openLent("generations", fd, 8*uint64(s.hello.Generations), gpu.Read)
}

const lentTokenLife = 5 * time.Second

// lendings are the handles and tokens under which workers map each other's memory. Manager.mu guards them.
type lendings struct {
	pairs  map[lentPair]*lending
	tokens map[[16]byte]lentToken
	given  map[lentReader][16]byte // the one token of a reader that is not used yet
}

type lentReader struct{ session, handle uint64 }

// lentPair is a worker's region and the table that tells of its blocks.
type lentPair struct{ memory, table *lent }

type lending struct {
	handle            uint64
	worker, scheduler *Session
	region            *region
	table             *lent
}

type lentToken struct {
	of    *lending
	to    lentReader
	uid   uint32
	until time.Time
}

// Lend is handoff.Lend.
func (m *Manager) Lend(scheduler tiers.Owner, instance string, rank, regionID uint32, offered time.Time) (*handoff.Lent, error) {
	m.mu.Lock()
	sched := m.sessions[uint64(scheduler)]
	var worker *Session
	other := sched != nil && sched.lost[rank]
	for _, s := range m.sessions {
		if s.hello.Role == Worker && s.hello.Instance == instance && s.hello.Rank == rank {
			worker, other = s, other || worker != nil
		}
	}
	m.mu.Unlock()
	if sched == nil || worker == nil {
		return nil, fmt.Errorf("lend: %w: the engine of %q, rank %d, is not attached", ErrNotFound, instance, rank)
	}
	if other {
		return nil, fmt.Errorf("lend: %w: rank %d of %q is not the worker that it was: the generations may be those of the other one's memory", ErrState, rank, instance)
	}
	if !sameEngine(sched, worker) {
		return nil, fmt.Errorf("lend: %w: rank %d of %q is of another engine than the scheduler that offers", ErrState, rank, instance)
	}
	if worker.attached.After(offered) {
		return nil, fmt.Errorf("lend: %w: rank %d of %q has attached after the offer", ErrState, rank, instance)
	}
	table := sched.lentTable()
	r := worker.region(regionID)
	if r != nil && r.lent.file == nil {
		return nil, fmt.Errorf("lend: %w: memory of %q, rank %d, may be opened for writing by whoever gets it: its owner must set its mode to 0444", ErrUnsupported, instance, rank)
	}
	if table == nil || r == nil || r.spec.Kind != SharedHost || r.spec.Blocks > sched.hello.Generations {
		return nil, fmt.Errorf("lend: %w: rank %d of %q lends no memory with generations", ErrUnsupported, rank, instance)
	}
	if !r.lent.acquire() {
		return nil, fmt.Errorf("lend: %w: the worker's session is closing", ErrState)
	}
	if !table.acquire() {
		r.lent.release()
		return nil, fmt.Errorf("lend: %w: the scheduler's session is closing", ErrState)
	}
	handle, ok := m.handle(&lending{worker: worker, scheduler: sched, region: r, table: table})
	if !ok {
		r.lent.release()
		table.release()
		return nil, fmt.Errorf("lend: %w: the engine's sessions are closing", ErrState)
	}
	return &handoff.Lent{
		Handle: handle, Memory: r.memory, Planes: r.spec.Planes, Blocks: r.spec.Blocks,
		Table: table.mapping.Bytes()[:8*uint64(sched.hello.Generations)], ShardBytes: regionShardBytes(r.spec),
		Release: func() {
			r.lent.release()
			table.release()
		},
	}, nil
}

// sameEngine tells whether two processes are of one start of one engine, as far as they say and the kernel knows.
func sameEngine(a, b *Session) bool {
	x, y := a.hello.Space, b.hello.Space
	x.WeightsGeneration, y.WeightsGeneration = "", ""
	return a.hello.EngineStart == b.hello.EngineStart && a.cred.UID == b.cred.UID && x == y
}

func (s *Session) lentTable() *lent {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.table
}

func (s *Session) region(id uint32) *region {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.regions[id]
}

// handle names a pair, the same each time. It answers false when one of its sessions is ending: nobody would tell when the memory is gone.
func (m *Manager) handle(l *lending) (uint64, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.sessions[l.worker.ID] != l.worker || m.sessions[l.scheduler.ID] != l.scheduler {
		return 0, false
	}
	pair := lentPair{l.region.lent, l.table}
	if old := m.lendings.pairs[pair]; old != nil {
		return old.handle, true
	}
	if m.lendings.pairs == nil {
		m.lendings = lendings{pairs: map[lentPair]*lending{}, tokens: map[[16]byte]lentToken{}, given: map[lentReader][16]byte{}}
	}
	m.regions++
	l.handle = uint64(m.regions)
	m.lendings.pairs[pair] = l
	return l.handle, true
}

// lentView lets a session's process map lent memory.
func (m *Manager) lentView(s *Session, mem *handoff.Lent) (*LentView, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range m.lendings.pairs {
		if l.handle != mem.Handle {
			continue
		}
		spec := l.region.spec
		v := &LentView{Handle: l.handle, Bytes: spec.Bytes, Blocks: spec.Blocks, Planes: spec.Planes, Generations: l.scheduler.hello.Generations}
		reader, now := lentReader{s.ID, l.handle}, time.Now()
		if t, ok := m.lendings.given[reader]; ok {
			m.lendings.tokens[t] = lentToken{l, reader, s.cred.UID, now.Add(lentTokenLife)}
			v.Token = t
			return v, nil
		}
		if _, err := rand.Read(v.Token[:]); err != nil {
			return nil, fmt.Errorf("make token: %w", err)
		}
		m.lendings.tokens[v.Token], m.lendings.given[reader] = lentToken{l, reader, s.cred.UID, now.Add(lentTokenLife)}, v.Token
		return v, nil
	}
	return nil, fmt.Errorf("lent memory %d: %w", mem.Handle, ErrNotFound)
}

// LentDescriptors are those of lent memory and its table, for the process that got the token.
func (m *Manager) LentDescriptors(token [16]byte, cred Credentials) (d Descriptors, err error) {
	m.mu.Lock()
	t, ok := m.lendings.tokens[token]
	if ok {
		m.lendings.dropLocked(token)
	}
	m.mu.Unlock()
	if !ok || !t.until.After(time.Now()) {
		return d, fieldErr(ErrNotFound, "token", "unknown, used or expired")
	}
	if t.uid != cred.UID {
		return d, fieldErr(ErrDenied, "uid", "%d is not that of the process that got the token", cred.UID)
	}
	err = d.add(entryLent, t.of.region.lent.descriptor)
	if err == nil {
		err = d.add(entryGenerations, t.of.table.descriptor)
	}
	return d, err
}

// dropLocked forgets a token.
func (l *lendings) dropLocked(token [16]byte) {
	delete(l.given, l.tokens[token].to)
	delete(l.tokens, token)
}

// unlend tells everybody who may have mapped memory of a session that ends.
func (m *Manager) unlend(s *Session) {
	m.mu.Lock()
	var gone []uint64
	for p, l := range m.lendings.pairs {
		if l.worker == s || l.scheduler == s {
			gone = append(gone, l.handle)
			delete(m.lendings.pairs, p)
		}
	}
	for t, of := range m.lendings.tokens { // of this session's memory, and those that it was given
		if of.to.session == s.ID || of.of.worker == s || of.of.scheduler == s {
			m.lendings.dropLocked(t)
		}
	}
	var readers []*Session
	for _, o := range m.sessions {
		if len(gone) > 0 && o.hello.ReadsLent {
			readers = append(readers, o)
		}
	}
	m.mu.Unlock()
	for _, o := range readers {
		for _, h := range gone {
			o.tell(LentGone{h})
		}
	}
}
