package mover

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/transport"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestTransferTransitions(t *testing.T) {
	legal := map[State]map[event]State{
		Queued:  {evStart: Running, evEnd: Ended},
		Running: {evEnd: Ended},
		Ended:   {evQuiet: Quiet},
		Quiet:   {},
	}
	for s := range numStates {
		for e := range numEvents {
			want, ok := legal[s][e]
			if !ok {
				want = s
			}
			if got, gotOK := s.next(e); got != want || gotOK != ok {
				t.Errorf("%v + %v: %v %v, want %v %v", s, e, got, gotOK, want, ok)
			}
		}
	}
}

// gate is a Copier that waits to be let through, and notes what it was asked for.
type gate struct {
	mu   sync.Mutex
	seen []uint64
	open chan struct{} // nil: open
	err  error
	deaf bool // does not look at its context: a copy that cannot be stopped
}

func (g *gate) Copy(ctx context.Context, batch []transport.Copy) error {
	g.mu.Lock()
	for i := range batch {
		g.seen = append(g.seen, batch[i].Src[0].Offset)
	}
	open := g.open
	g.mu.Unlock()
	if open == nil {
		return g.err
	}
	done := ctx.Done()
	if g.deaf {
		done = nil
	}
	select {
	case <-open:
		return g.err
	case <-done:
		return ctx.Err()
	}
}

func (g *gate) Close() error { return nil }

// log is what a transfer told.
type log struct {
	mu     sync.Mutex
	events []string
}

func (l *log) add(s string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events = append(l.events, s)
}

func (l *log) is(t *testing.T, want ...string) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.events) != len(want) {
		t.Fatalf("told %v, want %v", l.events, want)
	}
	for i := range want {
		if l.events[i] != want[i] {
			t.Fatalf("told %v, want %v", l.events, want)
		}
	}
}

func newTransfer(c transport.Copier, class kvferry.Class, l *log, offsets ...uint64) *Transfer {
	t := &Transfer{Class: class, Copier: c}
	for _, o := range offsets {
		seg := []kvferry.Segment{{Offset: o, Length: pieceBytes}}
		t.Batch = append(t.Batch, transport.Copy{Src: seg, Dst: seg})
	}
	t.Decide = func(o Outcome) Outcome { l.add("decide " + o.String()); return o }
	t.Quiet = func(o Outcome) { l.add("quiet " + o.String()) }
	return t
}

func submit(t *testing.T, l *Link, tr *Transfer) {
	t.Helper()
	if err := l.Submit(tr); err != nil {
		t.Fatal(err)
	}
}

func TestCommit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLink("test", 1, 4)
		var told log
		submit(t, l, newTransfer(&gate{}, kvferry.ClassStore, &told, 1, 2))
		synctest.Wait()
		told.is(t, "decide committed", "quiet committed")
		l.Close()
	})
}

// A deadline decides the outcome at once; the memory is given back when the copy, which cannot be stopped, has returned.
func TestDeadlineEndsBeforeQuiet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLink("test", 1, 4)
		g := &gate{open: make(chan struct{}), deaf: true}
		var told log
		tr := newTransfer(g, kvferry.ClassStore, &told, 1)
		tr.Deadline = time.Now().Add(time.Second)
		submit(t, l, tr)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		told.is(t, "decide expired")
		if tr.State() != Ended {
			t.Fatalf("state %v", tr.State())
		}
		close(g.open)
		synctest.Wait()
		told.is(t, "decide expired", "quiet expired")
		l.Close()
	})
}

func TestDeadlineWhileQueued(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLink("test", 1, 4)
		g := &gate{open: make(chan struct{})}
		var first, told log
		submit(t, l, newTransfer(g, kvferry.ClassStore, &first, 1))
		tr := newTransfer(g, kvferry.ClassStore, &told, 2)
		tr.Deadline = time.Now().Add(time.Second)
		submit(t, l, tr)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		told.is(t, "decide expired", "quiet expired")
		if !errors.Is(tr.Batch[0].Err, ErrNotCopied) {
			t.Errorf("copy says %v", tr.Batch[0].Err)
		}
		close(g.open)
		synctest.Wait()
		l.Close()
		first.is(t, "decide committed", "quiet committed")
	})
}

// A worker's revoke and the commit race in Decide: whoever it answers holds.
func TestRevokeWins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLink("test", 1, 4)
		var told log
		tr := newTransfer(&gate{}, kvferry.ClassStore, &told, 1)
		tr.Decide = func(Outcome) Outcome { return Revoked }
		submit(t, l, tr)
		synctest.Wait()
		told.is(t, "quiet revoked")
		l.Close()
	})
}

// A session may end while its transfer is being submitted.
func TestEndBeforeSubmit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLink("test", 1, 4)
		var told log
		tr := newTransfer(&gate{}, kvferry.ClassStore, &told, 1)
		tr.End(Cancelled)
		told.is(t, "decide cancelled")
		submit(t, l, tr)
		told.is(t, "decide cancelled", "quiet cancelled")
		l.Close()
	})
}

func TestCopyFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLink("test", 1, 4)
		var told log
		submit(t, l, newTransfer(&gate{err: transport.ErrLink}, kvferry.ClassHandoff, &told, 1))
		synctest.Wait()
		told.is(t, "decide failed", "quiet failed")
		l.Close()
	})
}

// Foreground goes between the pieces of a background transfer that is under way.
func TestForegroundGoesFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLink("test", 1, 4)
		g := &gate{open: make(chan struct{})}
		var a, b log
		submit(t, l, newTransfer(g, kvferry.ClassStore, &a, 1, 2, 3))
		synctest.Wait()
		submit(t, l, newTransfer(g, kvferry.ClassLoad, &b, 10))
		close(g.open)
		synctest.Wait()
		l.Close()
		g.mu.Lock()
		defer g.mu.Unlock()
		want := []uint64{1, 10, 2, 3}
		for i := range want {
			if g.seen[i] != want[i] {
				t.Fatalf("copied %v, want %v", g.seen, want)
			}
		}
	})
}

func TestQueueIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLink("test", 1, 2)
		g := &gate{open: make(chan struct{})}
		var told log
		for i := range 3 { // one at work, two waiting
			submit(t, l, newTransfer(g, kvferry.ClassStore, &told, uint64(i)))
			synctest.Wait()
		}
		if err := l.Submit(newTransfer(g, kvferry.ClassStore, &told, 9)); !errors.Is(err, ErrBusy) {
			t.Fatalf("submit over the limit: %v", err)
		}
		submit(t, l, newTransfer(g, kvferry.ClassLoad, &told, 10)) // its own queue
		close(g.open)
		synctest.Wait()
		l.Close()
		if err := l.Submit(newTransfer(g, kvferry.ClassStore, &told, 9)); !errors.Is(err, ErrClosed) {
			t.Fatalf("submit after close: %v", err)
		}
	})
}

func TestCloseCancels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLink("test", 2, 8)
		g := &gate{open: make(chan struct{})}
		var told log
		for i := range 4 {
			submit(t, l, newTransfer(g, kvferry.ClassStore, &told, uint64(i)))
		}
		synctest.Wait()
		l.Close()
		told.mu.Lock()
		defer told.mu.Unlock()
		n := map[string]int{}
		for _, e := range told.events {
			n[e]++
		}
		if n["decide cancelled"] != 4 || n["quiet cancelled"] != 4 {
			t.Fatalf("told %v", told.events)
		}
	})
}
