package mover

import (
	"fmt"
	"sync"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/transport"
)

// State is where a transfer is in its life.
//
//	         start           end            quiet
//	queued ─────────► running ─────► ended ─────────► quiet
//	   │       end                     ▲
//	   └───────────────────────────────┘
//
// A transfer ends once, by its deadline at the latest: then its outcome is decided and told. It is quiet when nothing of it can read or write
// memory any more: then its memory is given back. Both happen exactly once, in this order.
type State uint8

// The states.
const (
	Queued State = iota
	Running
	Ended
	Quiet
	numStates
)

func (s State) String() string {
	switch s {
	case Queued:
		return "queued"
	case Running:
		return "running"
	case Ended:
		return "ended"
	case Quiet:
		return "quiet"
	}
	return fmt.Sprintf("transfer(%d)", uint8(s))
}

type event uint8

const (
	evStart event = iota
	evEnd
	evQuiet
	numEvents
)

func (e event) String() string { return [...]string{"start", "end", "quiet"}[e] }

// next is the one transition function of transfers. It answers false for a pair that must not happen.
func (s State) next(e event) (State, bool) {
	switch {
	case s == Queued && e == evStart:
		return Running, true
	case (s == Queued || s == Running) && e == evEnd:
		return Ended, true
	case s == Ended && e == evQuiet:
		return Quiet, true
	}
	return s, false
}

// Outcome is how a transfer ended.
type Outcome uint8

// The outcomes. Committed means that all copies succeeded and nobody had taken the transfer back before.
const (
	Committed Outcome = iota + 1
	Revoked           // by the one that asked for it
	Failed            // a copy failed
	Expired           // the deadline came first
	Cancelled         // its session or the daemon ended
)

func (o Outcome) String() string {
	switch o {
	case Committed:
		return "committed"
	case Revoked:
		return "revoked"
	case Failed:
		return "failed"
	case Expired:
		return "expired"
	case Cancelled:
		return "cancelled"
	}
	return fmt.Sprintf("outcome(%d)", uint8(o))
}

// Transfer is one batch of copies over one link. The fields are set before Submit and never modified after it.
type Transfer struct {
	Class    kvferry.Class
	Copier   transport.Copier
	Batch    []transport.Copy
	Deadline time.Time
	// Decide is called once, when the transfer ends, with the outcome as the mover sees it, and answers the one that holds: it is here that a commit
	// and a worker's revoke are decided against each other. Nil: the mover's holds. It must not block.
	Decide func(Outcome) Outcome
	// Quiet is called once, after Decide, when the memory may be given back. It must not block.
	Quiet func(Outcome)

	mu      sync.Mutex
	state   State
	outcome Outcome
	copied  int // copies of the batch that are done
	timer   *time.Timer
	link    *Link
	cancel  func() // stops the copy that is running
}

// State is that of this moment.
func (t *Transfer) State() State {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.state
}

// changeStateLocked is the only writer of state.
func (t *Transfer) changeStateLocked(e event) {
	next, ok := t.state.next(e)
	if !ok {
		panic(fmt.Sprintf("mover: %v of a transfer that is %v", e, t.state))
	}
	t.state = next
}

// end decides the outcome, if it is not decided yet.
func (t *Transfer) end(o Outcome) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.state >= Ended {
		return
	}
	if t.Decide != nil {
		o = t.Decide(o)
	}
	t.outcome = o
	t.changeStateLocked(evEnd)
	if t.timer != nil {
		t.timer.Stop()
	}
	if t.cancel != nil {
		t.cancel()
	}
}

// becomeQuiet tells that nothing of the transfer touches memory any more.
func (t *Transfer) becomeQuiet() {
	t.mu.Lock()
	t.changeStateLocked(evQuiet)
	o := t.outcome
	for i := t.copied; i < len(t.Batch); i++ {
		t.Batch[i].Err = ErrNotCopied
	}
	t.mu.Unlock()
	if t.Quiet != nil {
		t.Quiet(o)
	}
}

// End ends the transfer before its deadline. Quiet follows when the copy that may be running has returned.
func (t *Transfer) End(o Outcome) {
	t.end(o)
	t.mu.Lock()
	l := t.link
	t.mu.Unlock()
	if l != nil { // else it is not submitted yet, and Submit will find it ended
		l.sweep(t)
	}
}
