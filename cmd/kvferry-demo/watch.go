package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvferry/kvferry/standin/process"
)

const (
	stillMax     = 20 * time.Second
	watchTick    = 250 * time.Millisecond
	answerWithin = 2 * time.Second // of a daemon, when nothing moves
	closeWithin  = time.Second / 2 // of workers, at the end
	stopWithin   = 2 * time.Second // of daemons, after the workers: with the rest less than five seconds, also on a busy machine
)

var errInterrupted = errors.New("interrupted")

// trouble is why the demo cannot go on, and the daemons whose logs may say more.
type trouble struct {
	text  string
	nodes []*process.Node
}

func (t *trouble) Error() string { return t.text }

func ended(n *process.Node) *trouble {
	return &trouble{fmt.Sprintf("kvferryd of %s %s", n.Name, n.Ended()), []*process.Node{n}}
}

// watch calls fail when a daemon has ended or nothing moves any more, until ctx ends.
func (s *stage) watch(ctx context.Context, fail context.CancelCauseFunc) {
	tick := time.NewTicker(watchTick)
	defer tick.Stop()
	var last steps
	still := 0 // ticks, not the clock: it goes on while this process is stopped (ctrl-Z)
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.nodeA.Dead():
			fail(ended(s.nodeA))
			return
		case <-s.nodeB.Dead():
			fail(ended(s.nodeB))
			return
		case <-tick.C:
		}
		if now := s.steps(); now != last {
			last, still = now, 0
			continue
		}
		if still++; time.Duration(still)*watchTick >= s.still {
			fail(s.stuck(ctx))
			return
		}
	}
}

// stuck tells which daemon does not answer.
func (s *stage) stuck(ctx context.Context) *trouble {
	t := &trouble{text: fmt.Sprintf("nothing has moved for %.0f s", s.still.Seconds())}
	for _, n := range []*process.Node{s.nodeA, s.nodeB} {
		asked, cancel := context.WithTimeout(ctx, answerWithin)
		_, err := n.Status(asked)
		cancel()
		if err != nil {
			t.text += fmt.Sprintf(": %s does not answer its Admin socket (kvferryd, pid %d)", n.Name, n.Pid())
			t.nodes = append(t.nodes, n)
		}
	}
	if len(t.nodes) == 0 {
		t.text += ", though both daemons answer their Admin sockets"
		t.nodes = []*process.Node{s.nodeA, s.nodeB}
	}
	return t
}

// steps is all that grows while the demo goes on.
type steps struct {
	attached                                  int64
	done, moved, computed, checked, here, hit int
}

func (s *stage) steps() steps {
	t := &s.tally
	n := steps{attached: s.attached.Load(), computed: t.computed.sums().blocks, checked: t.checked.sums().blocks}
	n.done, n.moved, _ = t.progress()
	t.add(func(t *tally) { n.here, n.hit = t.here+t.recomputed, t.asked })
	return n
}

// explain turns an error into what it comes from: a daemon that ended rather than a worker's session that broke. It adds what the daemons said last.
func (s *stage) explain(ctx context.Context, err error) error {
	select { // the watch may see it a moment later than the workers
	case <-ctx.Done():
	case <-time.After(2 * watchTick):
	}
	nodes := []*process.Node{s.nodeA, s.nodeB}
	var t *trouble
	if errors.As(context.Cause(ctx), &t) {
		err, nodes = t, t.nodes
	} else if errors.Is(ctx.Err(), context.Canceled) {
		return errInterrupted
	}
	for _, n := range nodes {
		err = fmt.Errorf("%w\n%s's log ends:\n%s", err, n.Name, n.LogTail())
	}
	return err
}

// linger waits for the end, and tells of daemons that do not.
func (s *stage) linger(ctx context.Context) {
	a, b := s.nodeA.Dead(), s.nodeB.Dead()
	for {
		select {
		case <-ctx.Done():
			return
		case <-a:
			a = nil
			fmt.Fprintln(s.out, ended(s.nodeA))
		case <-b:
			b = nil
			fmt.Fprintln(s.out, ended(s.nodeB))
		}
	}
}
