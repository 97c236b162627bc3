package standin

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvferry/kvferry"
	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/transport"
)

// ErrEnded is returned when the session ended: the daemon went away, or Close was called. A new session may work.
var ErrEnded = errors.New("standin: session ended")

// Regions, as this process numbers them.
const (
	regionID = 1 // the worker's memory
	poolID   = 2
)

// windowBytes lets a Match of 8,192 hashes go out without waiting for the receiver's window.
const windowBytes = 2 << 20

// Config says how to attach.
type Config struct {
	SocketsDir  string
	Role        kvferryv1.Role
	Instance    string
	Rank, Ranks uint32 // Ranks 0 is 1
	Space       *kvferryv1.Space
	Memory      *Memory                  // of a worker
	Table       *Table                   // of a scheduler: with it, offers lend blocks
	Kind        kvferryv1.RegionKind     // 0 is SHARED_HOST
	EngineStart string                   // names this start of the engine
	Pooled      bool                     // a worker that neither reads lent memory nor lends blocks to be written
	Refused     func(*kvferryv1.Refused) // called when the daemon refuses a message that has no operation; may be nil
	ThreadsMax  int                      // that copy one Load; 0 is 2
	Copying     func()                   // called after the first look at the generations of blocks, before they are copied; may be nil
}

// Session is one attachment.
type Session struct {
	Welcome *kvferryv1.Welcome
	Space   kvferry.SpaceID

	config Config
	conn   *grpc.ClientConn
	engine kvferryv1.EngineClient
	pool   []byte           // read-only
	copier transport.Copier // from the pool to the memory; nil in a scheduler
	words  []byte
	cancel context.CancelFunc
	done   chan struct{} // closed when the stream has ended
	cause  error         // valid when done is closed

	sending sync.Mutex // a stream takes one sender at a time; held before mu, never the other way
	stream  grpc.BidiStreamingClient[kvferryv1.SessionRequest, kvferryv1.SessionResponse]
	number  uint64 // of the last operation; guarded by sending: numbers must rise in the order of sending

	mu         sync.Mutex
	operations map[uint64]*Operation
	free       []uint32            // words
	served     map[[16]byte]string // offers that nobody reads any more, by reason
	servedMore chan struct{}       // closed at the next one
	lentMu     sync.Mutex          // guards lent; taken while copies is held
	lent       map[uint64]*lentMemory
	daemon     *os.File     // its pidfd; nil: it may not write here
	copies     sync.RWMutex // read-held while the mappings are used; Close takes it to unmap
	draining   atomic.Bool
	background sync.WaitGroup
	closed     bool           // guarded by copies
	writes     sync.WaitGroup // Loads whose blocks the daemon may still write
}

// Attach opens a session and waits until the daemon has mapped what this process lends. ctx bounds only the attaching.
func Attach(ctx context.Context, c Config) (*Session, error) {
	if c.Ranks == 0 {
		c.Ranks = 1
	}
	if c.Kind == 0 {
		c.Kind = kvferryv1.RegionKind_REGION_KIND_SHARED_HOST
	}
	if c.ThreadsMax == 0 {
		c.ThreadsMax = 2
	}
	conn, err := grpc.NewClient("unix:"+c.SocketsDir+"/engine.sock", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithInitialWindowSize(windowBytes), grpc.WithInitialConnWindowSize(2*windowBytes), grpc.WithNoProxy())
	if err != nil {
		return nil, fmt.Errorf("attach: %w", err)
	}
	life, cancel := context.WithCancel(context.Background())
	s := &Session{config: c, conn: conn, engine: kvferryv1.NewEngineClient(conn), cancel: cancel, done: make(chan struct{}), operations: map[uint64]*Operation{},
		served: map[[16]byte]string{}, servedMore: make(chan struct{})}
	stop := context.AfterFunc(ctx, cancel)
	err = s.attach(ctx, life)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		cancel()
		_ = conn.Close()
		s.unmap()
		return nil, fmt.Errorf("attach to %s: %w", c.SocketsDir, err)
	}
	go s.receive()
	if c.Memory != nil {
		s.background.Go(s.populate)
	}
	return s, nil
}

// populate has the pool's pages mapped before the first loads need them, in steps that let Close in between.
func (s *Session) populate() {
	const step = 16 << 20
	for at := 0; at < int(s.Welcome.PoolBytes); at += step {
		if !s.useWords(func() {
			_ = unix.Madvise(s.pool[min(at, len(s.pool)):min(at+step, len(s.pool))], unix.MADV_POPULATE_READ)
		}) {
			return // an old kernel does not know it: then the pages come when they are read
		}
	}
}

func (s *Session) attach(ctx, life context.Context) (err error) {
	if s.stream, err = s.engine.Session(life); err != nil {
		return err
	}
	hello := &kvferryv1.Hello{WireVersion: 1, Role: s.config.Role, Instance: s.config.Instance, Rank: s.config.Rank, Ranks: s.config.Ranks,
		Space: s.config.Space, Engine: "standin", EngineVersion: "1", EngineStart: s.config.EngineStart}
	files := map[uint32]*os.File{}
	if m := s.config.Memory; m != nil {
		hello.Regions = append(hello.Regions, m.Region(regionID, s.config.Kind))
		hello.Regions[0].Writable = !s.config.Pooled && s.config.Kind == kvferryv1.RegionKind_REGION_KIND_SHARED_HOST
		hello.ReadsLent = !s.config.Pooled
		files[regionID] = m.file
	}
	if t := s.config.Table; t != nil {
		hello.Generations = t.Blocks
		files[entryGenerations] = t.file
	}
	if err := s.stream.Send(&kvferryv1.SessionRequest{Message: &kvferryv1.SessionRequest_Hello{Hello: hello}}); err != nil {
		return s.streamErr(err)
	}
	r, err := s.stream.Recv()
	if err != nil {
		return err
	}
	if s.Welcome = r.GetWelcome(); s.Welcome == nil {
		return fmt.Errorf("answered %T to Hello", r.Message)
	}
	if len(s.Welcome.SpaceId) != len(s.Space) {
		return errors.New("welcome: space_id has a wrong length")
	}
	copy(s.Space[:], s.Welcome.SpaceId)
	pidfd, err := ownPidfd()
	if err != nil {
		return err
	}
	defer pidfd.Close()
	got, err := exchange(ctx, s.config.SocketsDir+"/descriptors.sock", s.Welcome.Token, pidfd, files)
	if err != nil {
		return err
	}
	defer got.close()
	if got.pool == nil || got.words == nil {
		return errors.New("descriptors: want the pool and the words")
	}
	s.daemon, got.daemon = got.daemon, nil
	if s.pool, err = mapFile(got.pool, unix.PROT_READ); err != nil {
		return fmt.Errorf("pool: %w", err)
	}
	if m := s.config.Memory; m != nil {
		s.copier = transport.NewLocal(transport.Memory{ID: regionID, Bytes: m.Data}, transport.Memory{ID: poolID, Bytes: s.pool}, s.config.ThreadsMax)
	}
	if s.words, err = mapFile(got.words, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		return fmt.Errorf("words: %w", err)
	}
	if uint64(len(s.words)) < uint64(s.Welcome.Words)*wordBytes {
		return errors.New("words: the mapping is too small")
	}
	for i := range s.Welcome.Words {
		s.free = append(s.free, s.Welcome.Words-1-i)
	}
	if r, err = s.stream.Recv(); err != nil {
		return err
	}
	if r.GetAttached() == nil {
		return fmt.Errorf("answered %T to the descriptors", r.Message)
	}
	return nil
}

// streamErr is why a Send failed: the stream tells it on the receiving side.
func (s *Session) streamErr(err error) error {
	if _, e := s.stream.Recv(); e != nil {
		return e
	}
	return err
}

// receive takes the daemon's messages until the stream ends.
func (s *Session) receive() {
	defer close(s.done)
	for {
		r, err := s.stream.Recv()
		if err != nil {
			s.end(err)
			return
		}
		switch m := r.Message.(type) {
		case *kvferryv1.SessionResponse_OperationEnd:
			s.operationEnd(m.OperationEnd)
		case *kvferryv1.SessionResponse_LoadResult:
			if o := s.operation(m.LoadResult.Operation); o != nil {
				o.result(m.LoadResult)
			}
		case *kvferryv1.SessionResponse_Refused:
			if s.config.Refused != nil {
				s.config.Refused(m.Refused)
			}
		case *kvferryv1.SessionResponse_OfferServed:
			s.offerServed(m.OfferServed)
		case *kvferryv1.SessionResponse_LentGone:
			s.lentGone(m.LentGone.Handle)
		case *kvferryv1.SessionResponse_Draining:
			s.draining.Store(true)
		}
	}
}

func (s *Session) end(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cause = fmt.Errorf("%w: %w", ErrEnded, err)
	for n, o := range s.operations {
		delete(s.operations, n)
		o.fail(s.cause)
	}
}

func (s *Session) operation(n uint64) *Operation {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.operations[n]
}

func (s *Session) operationEnd(m *kvferryv1.OperationEnd) {
	s.mu.Lock()
	o := s.operations[m.Operation]
	if o != nil {
		delete(s.operations, m.Operation)
		s.free = append(s.free, o.word)
	}
	s.mu.Unlock()
	if o != nil {
		o.finish(m)
	}
}

// Draining tells whether the daemon said that it is about to stop.
func (s *Session) Draining() bool { return s.draining.Load() }

// Done is closed when the session has ended.
func (s *Session) Done() <-chan struct{} { return s.done }

// Err is why the session ended; nil while it lives.
func (s *Session) Err() error {
	select {
	case <-s.done:
		return s.cause
	default:
		return nil
	}
}

func (s *Session) send(m *kvferryv1.SessionRequest) error {
	s.sending.Lock()
	defer s.sending.Unlock()
	return s.sendLocked(m)
}

func (s *Session) sendLocked(m *kvferryv1.SessionRequest) error {
	if err := s.Err(); err != nil {
		return err
	}
	if err := s.stream.Send(m); err != nil {
		return fmt.Errorf("%w: send: %w", ErrEnded, err)
	}
	return nil
}

// Close ends the session, waits until nothing of it runs any more and the daemon writes no more into blocks that were lent, and unmaps what came from it. The Memory stays its owner's.
func (s *Session) Close() error {
	s.sending.Lock()
	_ = s.stream.CloseSend()
	s.sending.Unlock()
	select { // the daemon closes its side when it has given everything back; a frozen one is not waited for
	case <-s.done:
	case <-time.After(time.Second):
	}
	s.cancel()
	<-s.done
	s.writes.Wait()
	err := s.conn.Close()
	s.unmap()
	s.background.Wait()
	return err
}

func (s *Session) unmap() {
	s.copies.Lock()
	defer s.copies.Unlock()
	for _, b := range []*[]byte{&s.pool, &s.words} {
		if *b != nil {
			_ = unix.Munmap(*b)
			*b = nil
		}
	}
	s.lentMu.Lock()
	defer s.lentMu.Unlock()
	for h, l := range s.lent {
		delete(s.lent, h)
		l.unmap()
	}
	if s.daemon != nil {
		_ = s.daemon.Close()
		s.daemon = nil
	}
	s.closed = true
}
