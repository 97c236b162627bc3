package watchdog

import (
	"testing"
	"time"
)

func TestTransitions(t *testing.T) {
	type pair struct {
		s state
		e event
	}
	legal := map[pair]state{
		{starting, ready}: serving, {starting, stop}: stopping, {starting, silent}: killed, {starting, died}: waiting, {starting, over}: ended,
		{serving, stop}: stopping, {serving, silent}: killed, {serving, died}: waiting, {serving, over}: ended,
		{stopping, silent}: killed, {stopping, late}: killed, {stopping, over}: ended,
		{killed, died}: waiting, {killed, over}: ended,
		{waiting, due}: starting, {waiting, stop}: ended,
	}
	for s := range states {
		for e := range events {
			want, ok := legal[pair{s, e}]
			if !ok {
				want = s
			}
			if got, changed := next(s, e); got != want || changed != ok {
				t.Errorf("%v, event %d: %v, %v; want %v, %v", s, e, got, changed, want, ok)
			}
		}
	}
}

// clock drives a watch of 3 s as the supervisor does: it looks whenever the watch wants to.
type clock struct {
	t   *testing.T
	w   watch
	now time.Time
}

func newClock(t *testing.T) *clock {
	c := &clock{t: t, now: time.Unix(1000, 0), w: watch{timeout: 3 * time.Second, stopTimeout: 20 * time.Second, jitter: func() float64 { return 0 }}}
	c.w.started(c.now)
	return c
}

// pass lets time go by until something is to be done, or it is over.
func (c *clock) pass(d time.Duration) (action, time.Duration) {
	from := c.now
	for until := c.now.Add(d); ; {
		if do := c.w.tick(c.now); do != nothing {
			return do, c.now.Sub(from)
		}
		if !c.now.Before(until) {
			return nothing, d
		}
		c.now = c.now.Add(min(max(c.w.sleep(c.now), time.Millisecond), until.Sub(c.now)))
	}
}

func (c *clock) want(what string, got, want action) {
	c.t.Helper()
	if got != want {
		c.t.Fatalf("%s: action %d in state %v, want %d", what, got, c.w.state, want)
	}
}

func TestSilenceKills(t *testing.T) {
	c := newClock(t)
	c.w.heard(c.now, "READY=1\nSTATUS=serves")
	for range 20 {
		if do, _ := c.pass(time.Second); do != nothing {
			t.Fatal("a child that beats was killed")
		}
		c.w.heard(c.now, "WATCHDOG=1")
	}
	do, after := c.pass(time.Minute)
	c.want("silent", do, kill)
	if after != 3*time.Second {
		t.Errorf("killed after %v", after)
	}
	if do, _ := c.pass(time.Minute); do != nothing {
		t.Error("killed twice")
	}
	c.w.heard(c.now, "WATCHDOG=1") // was on its way
	c.want("dead", c.w.gone(c.now, 137), nothing)
	do, after = c.pass(time.Minute)
	c.want("dead", do, start)
	if after != 0 {
		t.Errorf("the first restart came after %v", after)
	}
}

// A child that is silent while it starts is killed, and started again: it has told no error.
func TestSilentStart(t *testing.T) {
	c := newClock(t)
	c.w.heard(c.now, "STATUS=WATCHDOG=1")
	do, after := c.pass(time.Minute)
	c.want("silent", do, kill)
	if after != 3*time.Second {
		t.Errorf("killed after %v", after)
	}
	c.want("dead", c.w.gone(c.now, 137), nothing)
	do, _ = c.pass(time.Minute)
	c.want("dead", do, start)
}

// Stopped itself, the watch has heard nothing, and the child may have been stopped with it.
func TestOwnPauseProvesNothing(t *testing.T) {
	c := newClock(t)
	c.w.heard(c.now, "READY=1")
	c.pass(time.Second)
	c.now = c.now.Add(time.Hour)
	do, after := c.pass(time.Minute)
	c.want("silent for another timeout", do, kill)
	if after != 3*time.Second {
		t.Errorf("killed after %v", after)
	}
}

func TestErrorAtStartEnds(t *testing.T) {
	c := newClock(t)
	c.want("exit 1 before it was ready", c.w.gone(c.now, 1), end)
	if c.w.code != 1 {
		t.Error(c.w.code)
	}
	c = newClock(t)
	c.w.heard(c.now, "READY=1")
	c.want("exit 0", c.w.gone(c.now, 0), end)
	c = newClock(t)
	c.w.heard(c.now, "READY=1")
	c.want("exit 1 of one that was ready", c.w.gone(c.now, 1), nothing)
	c.w.started(c.now)
	c.want("exit 1 before the next was ready", c.w.gone(c.now, 1), nothing)
}

func TestBackoff(t *testing.T) {
	c := newClock(t)
	c.w.heard(c.now, "READY=1")
	var got []time.Duration
	for range 9 {
		c.want("died", c.w.gone(c.now, 1), nothing)
		do, after := c.pass(time.Hour)
		c.want("due", do, start)
		got = append(got, after)
		c.w.started(c.now)
	}
	for i, want := range []time.Duration{0, 500, 1000, 2000, 4000, 8000, 16000, 30000, 30000} {
		if got[i] != want*time.Millisecond {
			t.Errorf("restart %d after %v", i, got[i])
		}
	}
	c.w.jitter = func() float64 { return 0.5 }
	c.w.gone(c.now, 1)
	if _, after := c.pass(time.Hour); after != 22500*time.Millisecond {
		t.Error(after)
	}
	c.w.started(c.now)
	c.w.heard(c.now, "READY=1")
	c.now = c.now.Add(steady)
	c.w.gone(c.now, 1)
	if do, after := c.pass(time.Hour); do != start || after != 0 {
		t.Errorf("after a steady time: %v", after)
	}
	// One that could not be started at all waits too.
	c.w.wait(c.now)
	if do, after := c.pass(time.Hour); do != start || after != 375*time.Millisecond {
		t.Errorf("not started: %v", after)
	}
}

func TestSignals(t *testing.T) {
	c := newClock(t)
	c.w.heard(c.now, "READY=1")
	c.want("first", c.w.signalled(c.now), pass)
	c.w.heard(c.now, "STOPPING=1")
	c.want("second", c.w.signalled(c.now), kill)
	c.want("third", c.w.signalled(c.now), nothing)
	c.want("dead", c.w.gone(c.now, 137), end)

	c = newClock(t)
	c.w.heard(c.now, "READY=1")
	c.w.heard(c.now, "STOPPING=1") // somebody else has told it to
	c.want("first", c.w.signalled(c.now), pass)
	c.want("dead", c.w.gone(c.now, 0), end)

	c = newClock(t)
	c.w.heard(c.now, "READY=1")
	c.w.gone(c.now, 1)
	c.want("while it waits", c.w.signalled(c.now), end)
	if c.w.code != 0 {
		t.Error(c.w.code)
	}

	c = newClock(t)
	do, _ := c.pass(time.Minute)
	c.want("silent", do, kill)
	c.want("while it dies", c.w.signalled(c.now), nothing)
	c.want("dead", c.w.gone(c.now, 137), end)
}

func TestStopIsBounded(t *testing.T) {
	c := newClock(t)
	c.w.heard(c.now, "READY=1")
	c.want("first", c.w.signalled(c.now), pass)
	for i := range 20 {
		do, _ := c.pass(time.Second)
		if want := map[bool]action{true: kill}[i == 19]; do != want {
			t.Fatalf("after %d s: %d", i+1, do)
		}
		c.w.heard(c.now, "WATCHDOG=1")
	}
	c = newClock(t)
	c.want("first", c.w.signalled(c.now), pass)
	do, after := c.pass(time.Minute)
	c.want("frozen while it stops", do, kill)
	if after != 3*time.Second {
		t.Error(after)
	}
}
