package sim

import (
	"fmt"
	"slices"

	"github.com/kvferry/kvferry/daemon/session"
)

// enginesOfNode bounds what runs on one.
const enginesOfNode = 3

// openEngine starts the processes of an instance: a scheduler and one or two workers.
func (w *world) openEngine(n *node) {
	if n.daemon == nil || n.isFrozen() {
		return
	}
	for _, p := range n.procs { // those whose daemon went attach again first
		if !p.dead && p.s == nil {
			p.attach()
		}
	}
	n.procs = slices.DeleteFunc(n.procs, func(p *proc) bool { // ranks without a scheduler end sooner or later
		if !p.engine.dead || w.r.IntN(2) == 0 {
			return false
		}
		p.die(session.ErrProcessGone)
		return true
	})
	if n.replaceWorker() {
		return
	}
	alive := map[*engine]bool{}
	for _, p := range n.procs {
		alive[p.engine] = true
	}
	if len(alive) >= enginesOfNode {
		return
	}
	n.engines++
	e := w.newEngine(fmt.Sprintf("%s%d", n.name, n.engines), uint32(1+w.r.IntN(2)))
	n.procs = append(n.procs, w.newProc(n, e, session.Scheduler, 0))
	for rank := range e.ranks {
		n.procs = append(n.procs, w.newProc(n, e, session.Worker, rank))
	}
}

// replaceWorker starts a rank again that has died under its scheduler: its memory is another.
func (n *node) replaceWorker() bool {
	for _, s := range n.procs {
		if s.role != session.Scheduler || s.s == nil || s.dead {
			continue
		}
		have := map[uint32]bool{}
		for _, p := range n.procs {
			have[p.rank] = have[p.rank] || p.engine == s.engine && p.role == session.Worker
		}
		for rank := range s.ranks {
			if !have[rank] {
				n.procs = append(n.procs, n.w.newProc(n, s.engine, session.Worker, rank))
				n.w.saw("workers replaced", 1)
				return true
			}
		}
	}
	return false
}

// kill ends a process at once, or a whole engine.
func (w *world) kill(n *node) {
	if len(n.procs) == 0 {
		return
	}
	victim := n.procs[w.r.IntN(len(n.procs))]
	whole := w.r.IntN(2) == 0
	n.procs = slices.DeleteFunc(n.procs, func(p *proc) bool {
		if p != victim && (!whole || p.engine != victim.engine) {
			return false
		}
		p.die(session.ErrProcessGone)
		return true
	})
}

// pick is an attached process of a node whose engine lives.
func (w *world) pick(n *node, role session.Role) *proc {
	var fit []*proc
	for _, p := range n.procs {
		if p.s != nil && p.role == role && !p.engine.dead {
			fit = append(fit, p)
		}
	}
	if len(fit) == 0 {
		return nil
	}
	return fit[w.r.IntN(len(fit))]
}

// workers are the attached ones of an instance.
func (n *node) workers(engine *engine) (out []*proc) {
	for _, p := range n.procs {
		if p.s != nil && p.role == session.Worker && p.engine == engine {
			out = append(out, p)
		}
	}
	return out
}

// take finds blocks that nothing uses, and says that they are about to be something else.
func (p *proc) take(n int) []uint32 { return p.engine.take([]*proc{p}, n) }

// take finds blocks that nothing uses on any of these ranks.
func (e *engine) take(ranks []*proc, n int) (out []uint32) {
	first := ranks[0].next
	for i := uint32(0); i < blocksOfWorker && len(out) < n; i++ {
		b := (first + i) % blocksOfWorker
		used := 0
		for _, p := range ranks {
			used += p.busy[b]
		}
		if used == 0 {
			out = append(out, b)
			ranks[0].next = b + 1
		}
	}
	e.bump(out)
	return out
}
