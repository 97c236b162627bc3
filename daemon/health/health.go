// Package health keeps one ok/degraded/probing state with a reason and a time, for whatever may fail and come back: peers, drives, lanes.
//
// Degraded means: not used until the backoff is over. Then one user at a time probes; its success makes it ok, its failure degraded for twice as long. Time is passed in.
package health

import (
	"sync"
	"time"
)

// State is how something is.
//
//	      failures in a row            backoff over
//	ok ─────────────────────► degraded ───────────► probing
//	 ▲                           ▲        failure      │
//	 │                           └─────────────────────┤
//	 └────────────────────────────────── success ──────┘
type State uint8

// The states.
const (
	OK State = iota
	Degraded
	Probing
)

func (s State) String() string { return [...]string{"ok", "degraded", "probing"}[min(s, 2)] }

const (
	failuresMax = 3 // in a row
	backoffMin  = 500 * time.Millisecond
	backoffMax  = 30 * time.Second
)

// Tracker follows one thing. Its zero value is ok.
type Tracker struct {
	mu       sync.Mutex
	state    State
	failures int
	backoff  time.Duration
	retry    time.Time
	since    time.Time
	reason   string
}

// Allow tells whether it may be used now. In the state probing only one caller gets a yes, and must report with Success or Failure.
func (t *Tracker) Allow(now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch t.state {
	case OK:
		return true
	case Degraded:
		if now.Before(t.retry) {
			return false
		}
	case Probing:
		if now.Before(t.retry) { // somebody else is at it; who never reports is given up after the backoff
			return false
		}
	}
	t.state, t.retry = Probing, now.Add(t.backoff)
	return true
}

// Success reports that it worked. It answers true when it was not ok before.
func (t *Tracker) Success() (recovered bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	recovered = t.state != OK
	t.state, t.failures, t.backoff, t.reason, t.since = OK, 0, 0, "", time.Time{}
	return recovered
}

// Failure reports that it did not work. It answers true when it has become degraded by that.
func (t *Tracker) Failure(now time.Time, reason string) (degraded bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.failures++
	t.reason = reason
	if t.state == OK && t.failures < failuresMax {
		return false
	}
	return t.degradeLocked(now)
}

// Break reports a failure that makes it degraded alone.
func (t *Tracker) Break(now time.Time, reason string) (degraded bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.failures++
	t.reason = reason
	return t.degradeLocked(now)
}

func (t *Tracker) degradeLocked(now time.Time) (degraded bool) {
	degraded = t.state == OK
	if degraded {
		t.since = now
	}
	t.state = Degraded
	t.backoff = min(max(2*t.backoff, backoffMin), backoffMax)
	t.retry = now.Add(t.backoff)
	return degraded
}

// View is the state, and since when and why it is not ok.
func (t *Tracker) View() (State, string, time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.state, t.reason, t.since
}
