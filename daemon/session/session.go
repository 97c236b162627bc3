package session

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/transport"
)

// ErrProcessGone is why a session ends whose process is dead.
var ErrProcessGone = errors.New("session: process is gone")

// Session is one attached process.
//
//	          descriptors            stream or process ends          quiet
//	opened ────────────────► attached ────────────────────► closing ────────► closed
//	   └──────────── timeout, stream ends ────────────────────►
//
// From closing on, no operation is taken; closed is absorbing: nothing of it is left in the ledger.
type Session struct {
	ID       uint64
	m        *Manager
	hello    Hello            // never modified
	cred     Credentials      // never modified
	shape    tiers.SpaceShape // of hello.Space; never modified
	token    [16]byte         // never modified
	log      *slog.Logger
	ctx      context.Context // ends with the session
	cancel   context.CancelCauseFunc
	attached time.Time

	lost map[uint32]bool // of a scheduler: ranks whose workers' sessions have ended in its time; guarded by Manager.mu

	wordsMap *words
	expiry   *time.Timer
	wake     chan struct{}

	mu         sync.Mutex
	ready      bool // attached
	greeted    bool // and told so
	closing    bool
	regions    map[uint32]*region
	spaces     map[kvferry.SpaceID]tiers.SpaceRef // for a scheduler, the value is not used
	order      []kvferry.SpaceID                  // of spaces, oldest first
	retired    []tiers.SpaceRef                   // that are no longer in spaces, and not given back yet
	table      *lent                              // of a scheduler: its block generations; nil: it has none
	operations map[uint64]*operation
	words      map[uint32]uint64    // word → operation
	lentTo     map[lentBlock]uint64 // → operation that may write it
	lastOp     uint64
	events     []Event
	unread     int // bytes of events
	storedN    uint64
	loadedN    uint64

	quiet sync.WaitGroup // operations that are not quiet
}

// region is lent memory, mapped.
type region struct {
	spec   RegionSpec
	lent   *lent // for reading
	target *lent // for writing into blocks that an Accept lends; nil: never
	memory transport.Memory
	copier transport.Copier // from here into the pool, resolved once
}

// Hello is what the process said of itself.
func (s *Session) Hello() Hello { return s.hello }

// Credentials are the process's.
func (s *Session) Credentials() Credentials { return s.cred }

// Token is for the descriptor socket.
func (s *Session) Token() [16]byte { return s.token }

// SpaceID is that of Hello.Space.
func (s *Session) SpaceID() kvferry.SpaceID { return s.shape.ID }

// owner is the session in the ledger.
func (s *Session) owner() tiers.Owner { return tiers.Owner(s.ID) }

// shard is the number of the part of each block that this worker has.
func (s *Session) shard() uint16 {
	if s.hello.Space.ShardKind == kvferry.Replicated {
		return 0 // the only one of its block
	}
	return uint16(s.hello.Rank)
}

// useSpace adds a space to the session.
func (s *Session) useSpace(space kvferry.Space) error {
	id := space.ID()
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.spaces[id]; ok {
		return nil
	}
	if s.closing {
		return fieldErr(ErrState, "space", "the session is closing")
	}
	if err := s.retireSpaceLocked(); err != nil {
		return err
	}
	var ref tiers.SpaceRef
	if s.hello.Role == Worker {
		shape := s.shape
		shape.ID = id
		var err error
		if ref, err = s.m.cfg.Ledger.Space(shape); err != nil {
			if errors.Is(err, tiers.ErrLimit) {
				return fieldErr(ErrLimit, "space", "%v", err)
			}
			return invalid("hello.regions.planes", "%v", err)
		}
		if !s.m.cfg.Ledger.DrivesFit(ref) {
			s.log.Warn("blocks of this engine will not go to the drives: a shard does not fit into nvme.slab", "shard_bytes", shape.ShardBytes)
			s.m.cfg.Counters.Add("drives", "slab_too_small", 1)
		}
	}
	s.spaces[id] = ref
	s.order = append(s.order, id)
	s.m.spaces.add(space)
	return nil
}

// retireSpaceLocked makes room for one more space: the oldest goes, which an engine that has changed its weights so often since does not use any more. Its number
// stays the session's while an operation may still use it.
func (s *Session) retireSpaceLocked() error {
	if len(s.operations) == 0 {
		for _, ref := range s.retired {
			s.m.cfg.Ledger.ReleaseSpace(ref)
		}
		s.retired = nil
	}
	if len(s.order) < s.m.cfg.Limits.SpacesPerOwner {
		return nil
	}
	if len(s.retired) >= s.m.cfg.Limits.SpacesPerOwner {
		return fieldErr(ErrLimit, "space", "%d spaces in use by operations of this session", len(s.order)+len(s.retired))
	}
	oldest := s.order[0]
	s.order = s.order[1:]
	if s.hello.Role == Worker {
		s.retired = append(s.retired, s.spaces[oldest])
	}
	delete(s.spaces, oldest)
	return nil
}

// UseSpace adds a space: the engine's weights were changed in place. It must differ from Hello's in that alone.
func (s *Session) UseSpace(sequence uint32, space kvferry.Space) {
	err := validateSpace("use_space.", space)
	if err == nil {
		same := space
		same.WeightsGeneration = s.hello.Space.WeightsGeneration
		if same != s.hello.Space {
			err = invalid("use_space.space", "may differ from hello.space in weights_generation alone")
		}
	}
	if err == nil {
		err = s.useSpace(space)
	}
	if err != nil {
		s.send(Refused{err})
		return
	}
	s.send(SpaceReady{sequence, space.ID()})
}

// spaceRef is the number of a space that this session uses.
func (s *Session) spaceRef(field string, id kvferry.SpaceID) (tiers.SpaceRef, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ref, ok := s.spaces[id]
	if !ok {
		return 0, invalid(field, "%v is not a space of this session", id)
	}
	return ref, nil
}

// send queues an event. A process that does not read for too long loses its session.
func (s *Session) send(e Event) {
	s.mu.Lock()
	if s.closing {
		s.mu.Unlock()
		return
	}
	over := len(s.events) >= s.m.cfg.Limits.EventsUnread || s.unread > s.m.cfg.Limits.BytesUnread
	if !over {
		if _, ok := e.(Attached); ok {
			s.greeted = true
		}
		s.events = append(s.events, e)
		s.unread += sizeOf(e)
	}
	s.mu.Unlock()
	if over {
		s.cancel(fmt.Errorf("%w: its process does not read its events", ErrLimit))
		return
	}
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// tell queues an event that the process has not asked for. Before Attached it expects none, and has nothing to lose by not knowing.
func (s *Session) tell(e Event) {
	s.mu.Lock()
	greeted := s.greeted
	s.mu.Unlock()
	if greeted {
		s.send(e)
	}
}

// sizeOf is about what an event takes in memory.
func sizeOf(e Event) int {
	if r, ok := e.(LoadResult); ok {
		return 128 + 29*len(r.Status)
	}
	return 128
}

// Poll takes the events that are there. It answers false when there are none.
func (s *Session) Poll() ([]Event, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := s.events
	s.events, s.unread = nil, 0
	return out, len(out) > 0
}

// Next waits for events. It fails when the session or ctx has ended.
func (s *Session) Next(ctx context.Context) ([]Event, error) {
	for {
		if out, ok := s.Poll(); ok {
			return out, nil
		}
		select {
		case <-s.wake:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-s.ctx.Done():
			return nil, context.Cause(s.ctx)
		}
	}
}

// Do runs what a message of the process asks for. The session is not reclaimed before it has returned; once it is closing, nothing runs any more.
func (s *Session) Do(f func()) {
	if !s.begin() {
		return
	}
	defer s.quiet.Done()
	f()
}

// begin counts something that must be quiet before the session is reclaimed, until quiet.Done. It answers false when the session is closing.
func (s *Session) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		return false
	}
	s.quiet.Add(1)
	return true
}

// Done is closed when the session is to end.
func (s *Session) Done() <-chan struct{} { return s.ctx.Done() }

// Cause is why the session is to end; nil before.
func (s *Session) Cause() error { return context.Cause(s.ctx) }

// Close ends the session: what runs is stopped, and when all is quiet, everything of it is reclaimed. It returns then. It may be called again.
func (s *Session) Close(reason error) {
	s.cancel(reason)
	s.mu.Lock()
	if s.closing {
		s.mu.Unlock()
		s.quiet.Wait()
		return
	}
	s.closing = true
	running := make([]*operation, 0, len(s.operations))
	for _, o := range s.operations {
		running = append(running, o)
	}
	s.mu.Unlock()
	// The newest first: what waits for its turn is not to get it from one that was ended before it.
	slices.SortFunc(running, func(x, y *operation) int { return cmp.Compare(y.number, x.number) })
	s.m.remove(s)
	s.m.unlend(s)
	if s.expiry != nil {
		s.expiry.Stop()
	}
	for _, o := range running {
		o.cancel()
	}
	s.m.cfg.Offers.SessionEnded(s.owner())
	s.m.cfg.Ledger.ReleaseOwner(s.owner())
	s.quiet.Wait()
	// Once more: what was being set up may have offered or pinned after the first.
	s.m.cfg.Offers.SessionEnded(s.owner())
	s.m.cfg.Ledger.ReleaseOwner(s.owner())
	s.reclaim()
	s.log.Info("session closed", "reason", reason)
	s.m.cfg.Counters.Add("sessions_closed", closeReason(reason), 1)
}

func closeReason(err error) string {
	switch {
	case err == nil, errors.Is(err, context.Canceled), errors.Is(err, io.EOF):
		return "stream_ended"
	case errors.Is(err, ErrProcessGone):
		return "process_gone"
	case errors.Is(err, ErrLimit):
		return "limit"
	}
	return "other"
}

// reclaim unmaps what the process lent. Nothing copies any more.
func (s *Session) reclaim() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.regions {
		_ = r.copier.Close()
		r.lent.close()
		r.target.close()
	}
	s.table.close()
	s.regions, s.table = nil, nil
	if s.hello.Role == Worker {
		for _, ref := range s.spaces {
			s.m.cfg.Ledger.ReleaseSpace(ref)
		}
		for _, ref := range s.retired {
			s.m.cfg.Ledger.ReleaseSpace(ref)
		}
	}
	s.spaces, s.retired = nil, nil
	s.wordsMap.allQuiet()
	s.wordsMap.close()
}

// View is a session as people see it.
type View struct {
	Hello          Hello
	Credentials    Credentials
	Space          kvferry.SpaceID
	Attached       time.Time
	Ready          bool
	LentBytes      uint64
	Mode           string
	Operations     int
	Leases, Pins   int
	Stored, Loaded uint64
}

// View takes it.
func (s *Session) View() View {
	v := View{Hello: s.hello, Credentials: s.cred, Space: s.shape.ID, Attached: s.attached, Mode: "none"}
	s.mu.Lock()
	for _, r := range s.regions {
		v.LentBytes += r.spec.Bytes
		if r.spec.Kind == SharedHost {
			v.Mode = "shared-host"
		} else if v.Mode == "none" {
			v.Mode = "staging"
		}
	}
	v.Ready, v.Operations, v.Stored, v.Loaded = s.ready, len(s.operations), s.storedN, s.loadedN
	s.mu.Unlock()
	v.Leases, v.Pins = s.m.cfg.Ledger.OwnerStats(s.owner())
	return v
}
