package main

import (
	"slices"
	"sync"
	"time"
)

// movement is one kind of work, summed up. Safe for concurrent use.
type movement struct {
	mu     sync.Mutex
	blocks int
	took   []time.Duration
	active int
	since  time.Time
	busy   time.Duration // with at least one under way
}

// begin is called before a piece of work; what it returns, after it, with the blocks that were moved and the time that the worker took.
func (m *movement) begin() (end func(blocks int, took time.Duration)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.active == 0 {
		m.since = time.Now()
	}
	m.active++
	return func(blocks int, took time.Duration) {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.active--
		if m.active == 0 {
			m.busy += time.Since(m.since)
		}
		m.blocks += blocks
		if blocks > 0 {
			m.took = append(m.took, took)
		}
	}
}

// sums is a movement at rest.
type sums struct {
	blocks, times int
	p50           time.Duration
	busy          time.Duration
}

func (m *movement) sums() sums {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := sums{blocks: m.blocks, times: len(m.took), busy: m.busy}
	if len(m.took) > 0 {
		sorted := slices.Sorted(slices.Values(m.took))
		s.p50 = sorted[len(sorted)/2]
	}
	return s
}

// tally is all that the demo counts.
type tally struct {
	computed, stored, loaded, handed, checked movement

	mu         sync.Mutex
	asked, hit int // blocks of prompts, on node a
	here       int // blocks that node b had already when it accepted
	recomputed int // blocks that node b did not get: it computes them, as an engine would
	refused    int // blocks whose store was refused or failed
	retried    int // requests that the killed worker had under way
	wrong      uint64
	done       int
}

func (t *tally) add(f func(t *tally)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f(t)
}

func (t *tally) progress() (done int, blocks int, wrong uint64) {
	moved := t.stored.sums().blocks + t.loaded.sums().blocks + t.handed.sums().blocks
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.done, moved, t.wrong
}
