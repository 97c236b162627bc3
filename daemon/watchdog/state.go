package watchdog

import (
	"fmt"
	"strings"
	"time"
)

// state is how the child is.
//
//	             ready             stop
//	┌► starting ───────► serving ────────► stopping ─┐
//	│      │  stop          │                 │      │ over
//	│      ├─────────►      │ silent          │ late ▼
//	│      │ silent         ▼                 │    ended
//	│      └───────────► killed ◄─────────────┘      ▲
//	│ due                   │                        │
//	└───── waiting ◄────────┤ died                   │
//	          │             └────────── over ────────┤
//	          └──────────────── stop ────────────────┘
//
// A child that is starting or serving may die by itself too: then it waits for its restart, or all is over.
type state uint8

const (
	starting state = iota
	serving
	stopping
	killed // its end has not been seen
	waiting
	ended
	states
)

func (s state) String() string {
	return [...]string{"starting", "serving", "stopping", "killed", "waiting", "ended"}[min(s, ended)]
}

type event uint8

const (
	ready event = iota
	stop        // a signal, or the child said so
	silent
	late // with stopping, or a second signal
	died // and is to be started again
	over // it has ended for good
	due  // the backoff is over
	events
)

// next is the whole of the transitions. What is not in it changes nothing: messages and signals come when they come.
func next(s state, e event) (state, bool) {
	switch {
	case s == starting && e == ready:
		return serving, true
	case (s == starting || s == serving) && e == stop:
		return stopping, true
	case (s == starting || s == serving || s == stopping) && e == silent, s == stopping && e == late:
		return killed, true
	case (s == starting || s == serving || s == killed) && e == died:
		return waiting, true
	case s == waiting && e == due:
		return starting, true
	case s != ended && s != waiting && e == over, s == waiting && e == stop:
		return ended, true
	}
	return s, false
}

// action is what the supervisor has to do.
type action uint8

const (
	nothing action = iota
	pass           // the signal on
	kill
	start
	end
)

// Times of restarts. The first is at once: every second without a daemon is computed by the engines.
const (
	backoffMin = 500 * time.Millisecond
	backoffMax = 30 * time.Second
	steady     = time.Minute // who served so long did not fail because it was restarted
)

// watch decides. Time is passed in; not safe for concurrent use.
type watch struct {
	timeout, stopTimeout time.Duration
	jitter               func() float64 // [0, 1)

	state    state
	stop     bool // nothing is started any more
	signals  int
	served   bool // a child was ready once
	restarts int
	failures int       // since one was steady
	ready    time.Time // since when the child is; zero: not
	beat     time.Time // the child's last sign of life
	woke     time.Time // when the watch itself last ran
	stopped  time.Time
	due      time.Time
	delay    time.Duration
	reason   string // of the last kill
	code     int    // of the end
}

func (w *watch) event(e event) bool {
	to, ok := next(w.state, e)
	w.state = to
	return ok
}

// started tells that a child runs.
func (w *watch) started(now time.Time) {
	if w.event(due) {
		w.restarts++
	}
	w.ready, w.beat, w.woke = time.Time{}, now, now
}

// heard takes what the child says: lines of NAME=VALUE, of which others than these mean nothing here. It answers true when the child has become ready.
func (w *watch) heard(now time.Time, text string) (became bool) {
	for line := range strings.SplitSeq(text, "\n") {
		switch line {
		case "WATCHDOG=1":
			w.beat = now
		case "READY=1":
			w.beat = now
			if w.event(ready) {
				w.served, w.ready, became = true, now, true
			}
		case "STOPPING=1":
			w.beat = now
			w.stops(now)
		}
	}
	return became
}

func (w *watch) stops(now time.Time) {
	if !w.stop {
		w.stop, w.stopped = true, now
		w.event(stop)
	}
}

// signalled: the first one stops, a second one kills.
func (w *watch) signalled(now time.Time) action {
	w.stops(now)
	w.signals++
	switch {
	case w.state == ended:
		return end
	case w.signals > 1:
		return w.kill(late, "a second signal")
	case w.state == stopping:
		return pass
	}
	return nothing // it is dying already
}

func (w *watch) kill(e event, reason string) action {
	if !w.event(e) {
		return nothing
	}
	w.reason = reason
	return kill
}

// tick looks at the time.
func (w *watch) tick(now time.Time) action {
	// Silence proves nothing of a time when nobody listened: this process was stopped too, and the child may have been with it.
	if now.Sub(w.woke) > w.timeout/2 {
		w.beat = now
	}
	w.woke = now
	switch {
	case w.state == waiting && !now.Before(w.due):
		return start
	case w.state == waiting:
		return nothing
	case now.Sub(w.beat) >= w.timeout:
		return w.kill(silent, fmt.Sprintf("no sign of life for %v", w.timeout))
	case w.state == stopping && now.Sub(w.stopped) >= w.stopTimeout:
		return w.kill(late, fmt.Sprintf("did not stop within %v", w.stopTimeout))
	}
	return nothing
}

// sleep is how long nothing is due.
func (w *watch) sleep(now time.Time) time.Duration {
	until := now.Add(w.timeout / 4) // often enough to know whether this process was stopped
	for _, t := range []struct {
		counts bool
		at     time.Time
	}{
		{w.state == waiting, w.due},
		{w.state == starting || w.state == serving || w.state == stopping, w.beat.Add(w.timeout)},
		{w.state == stopping, w.stopped.Add(w.stopTimeout)},
	} {
		if t.counts && t.at.Before(until) {
			until = t.at
		}
	}
	return max(until.Sub(now), 0)
}

// gone tells that the child has ended, and its code.
func (w *watch) gone(now time.Time, code int) action {
	// One that dies before it was ever ready has an error that starting it again does not mend. One that was killed has told nothing.
	if code == 0 || w.stop || !w.served && w.state != killed {
		w.code = code
		w.event(over)
		return end
	}
	if !w.ready.IsZero() && now.Sub(w.ready) >= steady {
		w.failures = 0
	}
	w.event(died)
	w.wait(now)
	return nothing
}

// wait lets the next start be due after a backoff.
func (w *watch) wait(now time.Time) {
	w.delay = w.backoff()
	w.failures++
	w.due = now.Add(w.delay)
}

// backoff is none for the first failure, then doubled, and up to a half less, so that nodes that fail together do not start together.
func (w *watch) backoff() time.Duration {
	if w.failures == 0 {
		return 0
	}
	d := min(backoffMin<<min(w.failures-1, 10), backoffMax)
	return d - time.Duration(w.jitter()*float64(d)/2)
}
