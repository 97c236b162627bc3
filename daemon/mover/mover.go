// Package mover is the one path for every copy: transfers wait in the queue of their link by class, are copied in pieces, and end and become quiet exactly once.
//
// It owns its links' goroutines and queues. Pins and slots belong to whoever submits: the mover tells when they may be given back. All of it is safe for concurrent use.
package mover

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvferry/kvferry"
)

// Errors of Submit (the transfer was not taken; none of its functions is called) and of copies.
var (
	// ErrBusy is returned at once when the link's queue for this class is full. A retry may succeed.
	ErrBusy = errors.New("mover: queue is full")
	// ErrClosed is returned when the link is closed. A retry is useless.
	ErrClosed = errors.New("mover: link is closed")
	// ErrNotCopied is in the copies of a transfer that ended before their turn came.
	ErrNotCopied = errors.New("mover: not copied")
)

// pieceBytes is how much of a background transfer is copied before foreground ones get their turn: about a millisecond.
const pieceBytes = 8 << 20

// rateBytesMin is what a piece must have for its time to tell the link's rate and not the cost of starting.
const rateBytesMin = 256 << 10

// Link is one way that bytes take (this machine's memory, a peer), with a queue for each class and a fixed number of transfers at work.
type Link struct {
	name string
	max  int // queued transfers of a class

	mu      sync.Mutex
	ready   *sync.Cond
	queues  [kvferry.NumClasses][]*Transfer
	queued  int
	running int
	closed  bool
	wg      sync.WaitGroup
	bytes   [kvferry.NumClasses]uint64
	rate    float64 // bytes/s of one transfer, smoothed
	ctx     context.Context
	stop    context.CancelFunc
}

// NewLink starts a link with workers transfers at a time and at most queueMax waiting in each class.
func NewLink(name string, workers, queueMax int) *Link {
	l := &Link{name: name, max: queueMax}
	l.ready = sync.NewCond(&l.mu)
	l.ctx, l.stop = context.WithCancel(context.Background())
	for range workers {
		l.wg.Go(l.work)
	}
	return l
}

// Submit queues a transfer. It never waits. One that was ended before is quiet at once.
func (l *Link) Submit(t *Transfer) error {
	ended, err := l.enqueue(t)
	if ended {
		t.becomeQuiet()
	}
	return err
}

func (l *Link) enqueue(t *Transfer) (ended bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.state == Ended {
		return true, nil
	}
	if l.closed {
		return false, fmt.Errorf("submit to %s: %w", l.name, ErrClosed)
	}
	if len(l.queues[t.Class]) >= l.max {
		return false, fmt.Errorf("submit %v to %s: %w", t.Class, l.name, ErrBusy)
	}
	t.link = l
	if !t.Deadline.IsZero() {
		t.timer = time.AfterFunc(time.Until(t.Deadline), func() { t.End(Expired) })
	}
	l.queues[t.Class] = append(l.queues[t.Class], t)
	l.queued++
	l.ready.Signal()
	return false, nil
}

// Rate is about how fast a transfer copies here, in bytes/s; 0 while none was measured.
func (l *Link) Rate() float64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.rate
}

// Stats are the transfers of a link and the bytes that it has copied.
type Stats struct {
	Queued, Running int
	Bytes           [kvferry.NumClasses]uint64
}

// Stats is how it is at this moment.
func (l *Link) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Stats{l.queued, l.running, l.bytes}
}

// Close ends what waits or runs as cancelled and returns when all of it is quiet.
func (l *Link) Close() {
	l.mu.Lock()
	l.closed = true
	l.stop()
	l.ready.Broadcast()
	l.mu.Unlock()
	l.wg.Wait()
}

// next waits for the transfer whose turn it is: the lowest class, the oldest in it.
func (l *Link) next() *Transfer {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		for c := range l.queues {
			if q := l.queues[c]; len(q) > 0 {
				t := q[0]
				q[0] = nil
				if l.queues[c] = q[1:]; len(l.queues[c]) == 0 {
					l.queues[c] = nil
				}
				l.queued--
				l.running++
				return t
			}
		}
		if l.closed {
			return nil
		}
		l.ready.Wait()
	}
}

func (l *Link) work() {
	for t := l.next(); t != nil; t = l.next() {
		again := l.piece(t)
		l.mu.Lock()
		l.running--
		if again {
			l.queues[t.Class] = append([]*Transfer{t}, l.queues[t.Class]...)
			l.queued++
		}
		l.mu.Unlock()
		if !again {
			t.becomeQuiet()
		}
	}
}

// piece copies the next part of a transfer. It answers true when there is more to do.
func (l *Link) piece(t *Transfer) bool {
	t.mu.Lock()
	if t.state == Ended { // while it waited
		t.mu.Unlock()
		return false
	}
	if t.state == Queued {
		t.changeStateLocked(evStart)
	}
	ctx, cancel := context.WithCancel(l.ctx)
	t.cancel = cancel
	from, to := t.copied, l.pieceEnd(t)
	t.mu.Unlock()

	start := time.Now()
	err := t.Copier.Copy(ctx, t.Batch[from:to])
	took := time.Since(start)
	for i := from; i < to && err == nil; i++ {
		err = t.Batch[i].Err
	}
	stopped := l.ctx.Err() != nil
	cancel()

	t.mu.Lock()
	t.cancel = nil
	t.copied = to
	ended := t.state == Ended
	t.mu.Unlock()
	l.account(t, from, to, took)
	switch {
	case ended:
		return false
	case err != nil && stopped:
		t.end(Cancelled)
	case err != nil:
		t.end(Failed)
	case to == len(t.Batch):
		t.end(Committed)
	default:
		return true
	}
	return false
}

// pieceEnd is where the next piece ends. A foreground transfer is one piece: nothing goes before it.
func (l *Link) pieceEnd(t *Transfer) int {
	if t.Class < kvferry.ClassStore {
		return len(t.Batch)
	}
	var n uint64
	for i := t.copied; i < len(t.Batch); i++ {
		n += t.Batch[i].Length()
		if n >= pieceBytes {
			return i + 1
		}
	}
	return len(t.Batch)
}

func (l *Link) account(t *Transfer, from, to int, took time.Duration) {
	var n uint64
	for i := from; i < to; i++ {
		if t.Batch[i].Err == nil {
			n += t.Batch[i].Length()
		}
	}
	l.mu.Lock()
	l.bytes[t.Class] += n
	if n >= rateBytesMin && took > 0 {
		now := float64(n) / took.Seconds()
		if l.rate == 0 {
			l.rate = now
		}
		l.rate += (now - l.rate) / 8
	}
	l.mu.Unlock()
}

// sweep takes an ended transfer that only waits out of its queue, so that it is quiet at once.
func (l *Link) sweep(t *Transfer) {
	l.mu.Lock()
	q := l.queues[t.Class]
	found := false
	for i := range q {
		if q[i] == t {
			l.queues[t.Class] = append(append([]*Transfer{}, q[:i]...), q[i+1:]...)
			l.queued--
			found = true
			break
		}
	}
	l.mu.Unlock()
	if found {
		t.becomeQuiet()
	}
}
