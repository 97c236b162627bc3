package sim

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/kvferry/kvferry/transport"
)

// network carries what the daemons say to each other: late, twice, or not at all.
type network struct {
	w *world

	mu      sync.Mutex
	weather weather
	cut     [2][2]time.Time // until when nothing gets from one node to the other
	copies  int             // that are running
	lent    int             // of them, those that read lent memory at this moment
}

// weather is how bad a seed's network is: so many of a thousand.
type weather struct {
	lost, resets, twice, slow, flips, breaks, hangs int
	pace                                            int // of the data, in pieces' delays
}

func newNetwork(w *world) *network {
	n := &network{w: w}
	if bad := w.r.IntN(6) - 2; bad > 0 { // else only what the steps do to it
		n.weather = weather{lost: 12 * bad, resets: 8 * bad, twice: 60 * bad, slow: 8 * bad, flips: 4 * bad, breaks: 6 * bad, hangs: 2 * bad}
	}
	n.weather.pace = 1 + w.r.IntN(40)
	return n
}

// partition cuts one way or both for a while.
func (n *network) partition(r *rand.Rand) {
	until := time.Now().Add(time.Duration(r.Int64N(int64(2500 * time.Millisecond))))
	way := r.IntN(3)
	n.mu.Lock()
	defer n.mu.Unlock()
	if way != 0 {
		n.cut[0][1] = until
	}
	if way != 1 {
		n.cut[1][0] = until
	}
	n.w.saw("partitions", 1)
}

// heal ends all that is bad.
func (n *network) heal() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.weather, n.cut = weather{pace: 1}, [2][2]time.Time{}
}

// count counts a copy that begins or ends.
func (n *network) count(by int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.copies += by
}

// busy tells whether data is on its way.
func (n *network) busy() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.copies > 0
}

// countLent counts a read of lent memory that begins or ends.
func (n *network) countLent(by int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.lent += by
}

// readsLent tells whether lent memory is being read.
func (n *network) readsLent() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.lent > 0
}

// passes tells whether something gets from one node to another.
func (n *network) passes(from, to *node) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return !n.cut[from.index][to.index].After(time.Now())
}

// fate is what becomes of one request.
type fate struct {
	there, back, again      time.Duration
	lost, unanswered, reset bool
	twice                   bool
}

func (n *network) fate(r *rand.Rand) fate {
	n.mu.Lock()
	b := n.weather
	n.mu.Unlock()
	f := fate{there: n.delay(r), back: n.delay(r), again: n.delay(r) + time.Duration(r.Int64N(int64(time.Second)))}
	f.lost, f.unanswered, f.reset, f.twice = chance(r, b.lost), chance(r, b.lost), chance(r, 500), chance(r, b.twice)
	if chance(r, b.resets) {
		f.lost, f.reset = true, true
	}
	return f
}

// chance is true in so many of a thousand.
func chance(r *rand.Rand, ofThousand int) bool { return r.IntN(1000) < ofThousand }

// delay is to the nanosecond, so that no two things happen at once.
func (n *network) delay(r *rand.Rand) time.Duration {
	n.mu.Lock()
	slow := n.weather.slow
	n.mu.Unlock()
	d := 50*time.Microsecond + time.Duration(r.Int64N(int64(2*time.Millisecond)))
	if chance(r, slow) {
		d += time.Duration(r.Int64N(int64(700 * time.Millisecond)))
	}
	return d
}

// resetAfter is when a connection that is not acknowledged is given up (TCP_USER_TIMEOUT).
const resetAfter = time.Second

type answer[A any] struct {
	a   A
	err error
}

// call carries a request to another daemon and its answer back. execute runs there, once, twice or never. It returns with ctx at the latest, unless the caller is frozen.
func call[A any](ctx context.Context, from *daemon, address, event string, execute func(ctx context.Context, to *daemon) (A, error)) (A, error) {
	w := from.node.w
	n, f := w.net, w.net.fate(w.roll(event))
	to := w.nodeAt(address)
	answers := make(chan answer[A], 3)
	go n.carry(ctx, from, to, f.there, f, func(ctx context.Context, d *daemon) {
		a, err := execute(ctx, d)
		if err := n.answer(d, from.node, f); err != nil {
			if f.reset {
				answers <- answer[A]{err: err}
			}
			return
		}
		answers <- answer[A]{a, err}
	}, func(err error) { answers <- answer[A]{err: err} })
	if f.twice {
		w.saw("requests twice", 1)
		late := f
		late.lost = false
		// What is repeated has lost its caller: nobody cancels it.
		go n.carry(context.WithoutCancel(ctx), from, to, f.there+f.again, late, func(ctx context.Context, d *daemon) {
			a, err := execute(ctx, d)
			if n.answer(d, from.node, f) == nil {
				answers <- answer[A]{a, err} // where the first was lost, this is the one that counts
			}
		}, func(error) {})
	}
	var out answer[A]
	select {
	case out = <-answers:
	case <-ctx.Done():
		out.err = context.Cause(ctx)
		if errors.Is(out.err, context.DeadlineExceeded) { // as rpc translates it
			out.err = fmt.Errorf("%w: %v", transport.ErrLink, out.err)
		}
	case <-from.ctx.Done():
	}
	if !from.awake() {
		out.err = errDead
	}
	return out.a, out.err
}

// carry brings a request to where it is executed, after some time.
func (n *network) carry(ctx context.Context, from *daemon, to *node, after time.Duration, f fate, execute func(ctx context.Context, d *daemon), fail func(error)) {
	time.Sleep(after)
	if f.lost || !n.passes(from.node, to) {
		n.w.saw("requests lost", 1)
		if f.reset {
			time.Sleep(resetAfter)
			fail(fmt.Errorf("%w: request lost", transport.ErrLink))
		}
		return
	}
	d, frozen := to.now(), to.isFrozen()
	if d == nil || !d.awake() {
		fail(fmt.Errorf("%w: connection refused or reset", transport.ErrLink))
		return
	}
	if frozen {
		time.Sleep(f.back % time.Millisecond) // what has waited does not come at once
	}
	there, cancel := context.WithCancel(d.ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { // the caller hangs up, and the callee hears of it
		if n.passes(from.node, to) {
			cancel()
		}
	})
	defer stop()
	execute(there, d)
}

// answer lets an answer's time pass, and says why it does not come.
func (n *network) answer(d *daemon, to *node, f fate) error {
	if !d.awake() {
		return errDead
	}
	time.Sleep(f.back)
	if f.unanswered || !n.passes(d.node, to) {
		n.w.saw("answers lost", 1)
		time.Sleep(resetAfter)
		return fmt.Errorf("%w: answer lost", transport.ErrLink)
	}
	if d.ctx.Err() != nil {
		return errDead
	}
	return nil
}
