// Package session is what the daemon knows of the processes that attached: their credentials, the memory that they lend, their operations, leases and pins. A session's life is its
// process's life: when it ends, running copies are brought to quiet and then everything of it is reclaimed, in one place.
//
// The package owns the mappings of lent memory and of operation words. It plans with the ledger and copies with the mover; it does not speak gRPC. Safe for concurrent use;
// lock order: Manager.mu, Session.mu, then the ledger's.
package session

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/counters"
	"github.com/kvferry/kvferry/daemon/handoff"
	"github.com/kvferry/kvferry/daemon/mover"
	"github.com/kvferry/kvferry/daemon/tiering"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/transport"
)

// WireVersion is that of the Engine API.
const WireVersion = 1

// Limits bound what processes may ask for.
type Limits struct {
	Sessions       int
	StoreBlocks    int
	LoadBlocks     int
	MatchBlocks    int
	AttachTimeout  time.Duration
	StoreDeadline  time.Duration // default of a Store
	LoadDeadline   time.Duration // default of a Load
	DeadlineMax    time.Duration
	LeaseDefault   time.Duration
	LeaseMax       time.Duration
	OfferLifetime  time.Duration
	FindTimeout    time.Duration // of asking peers for blocks in a Match; engines wait for less
	EventsUnread   int           // events that a process may leave unread before its session is ended
	BytesUnread    int           // and bytes of them
	SpacesPerOwner int
}

// DefaultLimits are the daemon's.
var DefaultLimits = Limits{
	Sessions: 1024, StoreBlocks: 64, LoadBlocks: 8192, MatchBlocks: 65536, AttachTimeout: 5 * time.Second,
	StoreDeadline: 10 * time.Second, LoadDeadline: 10 * time.Second, DeadlineMax: time.Minute, LeaseDefault: 30 * time.Second, LeaseMax: 10 * time.Minute,
	OfferLifetime: 2 * time.Minute, FindTimeout: 50 * time.Millisecond, EventsUnread: 1 << 17, BytesUnread: 32 << 20, SpacesPerOwner: 16,
}

// Config is what a Manager works with. All fields are set before New and never modified after it.
type Config struct {
	Ledger   *tiers.Ledger
	Pool     transport.Memory
	PoolFile *os.File          // read-only; handed out
	Local    *mover.Link       // copies of this machine's memory
	Offers   *handoff.Registry // of this node
	Fetcher  *handoff.Fetcher
	Tiering  *tiering.Tiering // nil: there are no drives
	Limits   Limits
	Counters *counters.Set
	Log      *slog.Logger
	// Direct: blocks may be written straight into workers' memory, because a watchdog ends this process when it freezes.
	Direct bool
	// Allowed tells whether a uid may attach.
	Allowed func(uid uint32) bool
	// NewCopier makes the copier from lent memory into the pool. The simulation has its own.
	NewCopier func(dst, src transport.Memory) transport.Copier
	// Watch calls gone when the process of a pidfd is dead, until ctx ends; done when it no longer does. Nil: WatchProcess.
	Watch func(ctx context.Context, pidfd *os.File, gone, done func()) error
}

// Manager has all sessions.
type Manager struct {
	cfg    Config
	spaces spaceTable

	mu       sync.Mutex
	sessions map[uint64]*Session
	tokens   map[[16]byte]*Session
	last     uint64
	regions  kvferry.RegionID
	draining bool
	within   time.Duration // of draining
	lendings lendings
	finds    finds
	lookups  lookups
}

// New makes a manager without sessions.
func New(cfg Config) *Manager {
	if cfg.Watch == nil {
		cfg.Watch = WatchProcess
	}
	return &Manager{cfg: cfg, sessions: map[uint64]*Session{}, tokens: map[[16]byte]*Session{}, regions: cfg.Pool.ID,
		spaces: spaceTable{byID: map[kvferry.SpaceID]kvferry.Space{}}}
}

// Open begins a session. The caller runs Session.Next until it fails, and then Close.
func (m *Manager) Open(h Hello, cred Credentials) (*Session, error) {
	if err := validateHello(h); err != nil {
		return nil, err
	}
	shape := tiers.SpaceShape{ID: h.Space.ID(), Shards: 1, ShardBytes: shardBytes(h.Regions)}
	if h.Space.ShardKind == kvferry.Sharded {
		shape.Shards = uint16(h.Ranks)
	}
	s := &Session{
		m: m, hello: h, cred: cred, shape: shape, attached: time.Now(), operations: map[uint64]*operation{}, words: map[uint32]uint64{}, lentTo: map[lentBlock]uint64{},
		regions: map[uint32]*region{}, spaces: map[kvferry.SpaceID]tiers.SpaceRef{}, wake: make(chan struct{}, 1),
		log: m.cfg.Log.With("instance", h.Instance, "rank", h.Rank, "pid", cred.PID),
	}
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	if _, err := rand.Read(s.token[:]); err != nil {
		return nil, fmt.Errorf("make token: %w", err)
	}
	var err error
	if s.wordsMap, err = newWords(); err != nil {
		return nil, err
	}
	if err := m.add(s); err != nil {
		s.wordsMap.close()
		return nil, err
	}
	if err := s.useSpace(h.Space); err != nil {
		s.Close(err)
		return nil, err
	}
	s.log = s.log.With("session", s.ID)
	s.expiry = time.AfterFunc(m.cfg.Limits.AttachTimeout, s.attachExpired)
	s.log.Info("session opened", "role", h.Role, "engine", h.Engine, "space", shape.ID)
	return s, nil
}

func (m *Manager) add(s *Session) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.draining {
		return fmt.Errorf("%w: the daemon is draining", ErrLimit)
	}
	if len(m.sessions) >= m.cfg.Limits.Sessions {
		return fmt.Errorf("%w: %d sessions", ErrLimit, len(m.sessions))
	}
	m.last++
	s.ID = m.last
	m.sessions[s.ID] = s
	m.tokens[s.token] = s
	return nil
}

func (m *Manager) remove(s *Session) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.sessions, s.ID)
	delete(m.tokens, s.token)
	if s.hello.Role != Worker {
		return
	}
	for _, o := range m.sessions {
		if o.hello.Role == Scheduler && o.hello.Instance == s.hello.Instance {
			if o.lost == nil {
				o.lost = map[uint32]bool{}
			}
			o.lost[s.hello.Rank] = true
		}
	}
}

// takeToken finds the session that a token was given to, once.
func (m *Manager) takeToken(token [16]byte) *Session {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := m.tokens[token]
	delete(m.tokens, token)
	return s
}

func (m *Manager) newRegionID() kvferry.RegionID {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.regions++
	return m.regions
}

// Find is the session with this number.
func (m *Manager) Find(id uint64) (*Session, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if s := m.sessions[id]; s != nil {
		return s, nil
	}
	return nil, fieldErr(ErrNotFound, "session_id", "%d is not open", id)
}

// All lists the sessions.
func (m *Manager) All() []*Session {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]*Session, 0, len(m.sessions))
	for _, s := range m.sessions {
		out = append(out, s)
	}
	return out
}

// Space is what is known of a space by its id; false where no process of this epoch has named it.
func (m *Manager) Space(id kvferry.SpaceID) (kvferry.Space, bool) { return m.spaces.find(id) }

// Served is what handoff.Config.Served calls.
func (m *Manager) Served(instance string, rank uint32, offer [16]byte, reason string) {
	for _, s := range m.All() {
		if s.hello.Role == Worker && s.hello.Instance == instance && s.hello.Rank == rank {
			s.tell(OfferServed{offer, reason})
		}
	}
}

// Drain tells every process that the daemon will stop and refuses new sessions and operations from now on.
func (m *Manager) Drain(within time.Duration) {
	m.mu.Lock()
	m.draining, m.within = true, within
	m.mu.Unlock()
	for _, s := range m.All() {
		s.tell(Draining{within})
	}
}

// Busy tells how many operations have not ended.
func (m *Manager) Busy() int {
	n := 0
	for _, s := range m.All() {
		s.mu.Lock()
		n += len(s.operations)
		s.mu.Unlock()
	}
	return n
}

func (m *Manager) isDraining() bool {
	_, yes := m.drains()
	return yes
}

// drains tells whether and within what time the daemon will stop.
func (m *Manager) drains() (within time.Duration, yes bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.within, m.draining
}

// CloseAll ends every session and returns when all of it is reclaimed.
func (m *Manager) CloseAll(reason error) {
	for _, s := range m.All() {
		s.Close(reason)
	}
}

// spaceTable keeps what spaces mean, for people. It is bounded: what had to go is known by its id alone.
type spaceTable struct {
	mu   sync.Mutex
	byID map[kvferry.SpaceID]kvferry.Space
}

const spacesKept = 8192

func (t *spaceTable) add(s kvferry.Space) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.byID) >= spacesKept {
		for id := range t.byID { // any: it is for people to look at
			delete(t.byID, id)
			break
		}
	}
	t.byID[s.ID()] = s
}

func (t *spaceTable) find(id kvferry.SpaceID) (kvferry.Space, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s, ok := t.byID[id]
	return s, ok
}
