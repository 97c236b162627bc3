package standin

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry"
	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
)

// wordBytes is the distance of operation words.
const wordBytes = 64

// States of an operation word.
const (
	wordPending   = 1
	wordCommitted = 2
	wordRevoked   = 3
	quietOffset   = 16
)

// grace is how long after its deadline an operation that the daemon has not ended is given up.
const grace = 2 * time.Second

// ErrBusy is returned when all words of the session are in use. Waiting for an operation to end helps.
var ErrBusy = errors.New("standin: too many operations")

// Operation is a Store or Load under way.
type Operation struct {
	s        *Session
	number   uint64
	word     uint32
	deadline time.Time

	mu      sync.Mutex
	results []*kvferryv1.LoadResult // that nobody has taken yet
	more    chan struct{}           // has a value when results, end or err changed
	end     *kvferryv1.OperationEnd
	err     error
	ended   chan struct{}
}

// begin takes a word, marks it pending and sends the message, in this order.
func (s *Session) begin(deadlineMs uint32, message func(operation uint64, word uint32) *kvferryv1.SessionRequest) (*Operation, error) {
	s.sending.Lock()
	defer s.sending.Unlock()
	s.mu.Lock()
	if len(s.free) == 0 {
		s.mu.Unlock()
		return nil, ErrBusy
	}
	if deadlineMs == 0 {
		deadlineMs = 60_000
	}
	s.number++
	o := &Operation{s: s, number: s.number, word: s.free[len(s.free)-1], deadline: time.Now().Add(time.Duration(deadlineMs)*time.Millisecond + grace),
		more: make(chan struct{}, 1), ended: make(chan struct{})}
	s.free = s.free[:len(s.free)-1]
	s.operations[o.number] = o
	s.mu.Unlock()
	if !s.useWords(func() { atomic.StoreUint64(s.wordAt(o.word), o.number<<8|wordPending) }) {
		return nil, ErrEnded
	}
	if err := s.sendLocked(message(o.number, o.word)); err != nil {
		return nil, err
	}
	return o, nil
}

// useWords runs f while the mappings cannot go.
func (s *Session) useWords(f func()) bool {
	s.copies.RLock()
	defer s.copies.RUnlock()
	if s.closed {
		return false
	}
	f()
	return true
}

func (s *Session) wordAt(i uint32) *uint64 {
	return (*uint64)(unsafe.Pointer(&s.words[int(i)*wordBytes]))
}

// Committed looks into the operation's word: no message is needed for it.
func (o *Operation) Committed() (yes bool) {
	o.s.useWords(func() { yes = atomic.LoadUint64(o.s.wordAt(o.word)) == o.number<<8|wordCommitted })
	return yes
}

// Revoke takes the operation back, unless its outcome is decided. It answers true when it won: then the blocks may be written as soon as Wait has returned,
// or at once where whatever the daemon reads late does no harm.
func (o *Operation) Revoke() (won bool) {
	o.s.useWords(func() {
		won = atomic.CompareAndSwapUint64(o.s.wordAt(o.word), o.number<<8|wordPending, o.number<<8|wordRevoked)
	})
	if won {
		_ = o.s.send(&kvferryv1.SessionRequest{Message: &kvferryv1.SessionRequest_Revoke{Revoke: &kvferryv1.Revoke{Operations: []uint64{o.number}}}})
	}
	return won
}

// Wait returns how the operation ended. It gives up when ctx ends, the session ends, or the daemon lets the deadline pass by far.
func (o *Operation) Wait(ctx context.Context) (*kvferryv1.OperationEnd, error) {
	late := time.NewTimer(time.Until(o.deadline))
	defer late.Stop()
	select {
	case <-o.ended:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-late.C:
		return nil, fmt.Errorf("operation %d: the daemon let its deadline pass", o.number)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.end, o.err
}

// waitQuiet returns when the daemon cannot write into the operation's blocks any more: it says so, or it is dead. Nothing else proves it.
func (o *Operation) waitQuiet() {
	const look = 5 * time.Millisecond // where the session is lost, nobody tells
	t := time.NewTicker(look)
	defer t.Stop()
	for ; ; <-t.C {
		select {
		case <-o.ended:
			o.mu.Lock()
			told := o.end != nil
			o.mu.Unlock()
			if told {
				return
			}
		default:
		}
		quiet := true // the mappings go when nothing waits here any more
		o.s.useWords(func() {
			at := atomic.LoadUint64((*uint64)(unsafe.Pointer(&o.s.words[int(o.word)*wordBytes+quietOffset])))
			quiet = at == o.number || at == math.MaxUint64 || (o.s.daemon != nil && dead(o.s.daemon))
		})
		if quiet {
			return
		}
	}
}

// dead tells whether the process of a pidfd is.
func dead(pidfd *os.File) bool {
	p := []unix.PollFd{{Fd: int32(pidfd.Fd()), Events: unix.POLLIN}}
	n, err := unix.Poll(p, 0)
	return err == nil && n == 1
}

func (o *Operation) signal() {
	select {
	case o.more <- struct{}{}:
	default:
	}
}

func (o *Operation) result(r *kvferryv1.LoadResult) {
	o.mu.Lock()
	o.results = append(o.results, r)
	o.mu.Unlock()
	o.signal()
}

func (o *Operation) finish(end *kvferryv1.OperationEnd) {
	o.mu.Lock()
	o.end = end
	o.mu.Unlock()
	close(o.ended)
	o.signal()
}

func (o *Operation) fail(err error) {
	o.mu.Lock()
	o.err = err
	o.mu.Unlock()
	close(o.ended)
	o.signal()
}

// take returns the results that have come, waiting for one. Nothing and no error: the operation has ended.
func (o *Operation) take(ctx context.Context) ([]*kvferryv1.LoadResult, error) {
	late := time.NewTimer(time.Until(o.deadline))
	defer late.Stop()
	for {
		o.mu.Lock()
		results := o.results
		o.results = nil
		end, err := o.end, o.err
		o.mu.Unlock()
		if len(results) > 0 || end != nil || err != nil {
			return results, err
		}
		select {
		case <-o.more:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-late.C:
			return nil, fmt.Errorf("operation %d: the daemon let its deadline pass", o.number)
		}
	}
}

// StoreRequest names blocks of the memory and what they are.
type StoreRequest struct {
	RequestID  string
	Blocks     []uint32
	Hashes     []kvferry.Hash
	Parents    []kvferry.Hash
	DeadlineMs uint32
}

// Store begins to store blocks. They must not be written until Wait has returned, or Revoke was called.
func (s *Session) Store(r StoreRequest) (*Operation, error) {
	return s.begin(r.DeadlineMs, func(operation uint64, word uint32) *kvferryv1.SessionRequest {
		return &kvferryv1.SessionRequest{Message: &kvferryv1.SessionRequest_Store{Store: &kvferryv1.Store{
			Operation: operation, Word: word, SpaceId: s.Space[:], RequestId: r.RequestID, Region: regionID,
			BlockIds: r.Blocks, Hashes: pack(r.Hashes), Parents: pack(r.Parents), DeadlineMs: r.DeadlineMs,
		}}}
	})
}

func pack(hashes []kvferry.Hash) []byte {
	b := make([]byte, 0, len(hashes)*kvferry.HashSize)
	for i := range hashes {
		b = append(b, hashes[i][:]...)
	}
	return b
}
