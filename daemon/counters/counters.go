// Package counters counts events by name and reason: the one place from which the metrics, the status page and the tests take their figures.
// Names and reasons come from the code, never from a client, so the table is bounded by what the code says. Safe for concurrent use.
package counters

import (
	"sort"
	"sync"
	"time"
)

// Key is what is counted.
type Key struct{ Name, Reason string }

// Set is a table of counters. Its zero value is ready.
type Set struct {
	mu   sync.Mutex
	m    map[Key]uint64
	last map[Key]time.Time
}

// Add counts n more.
func (s *Set) Add(name, reason string, n int) {
	if n == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.m == nil {
		s.m, s.last = map[Key]uint64{}, map[Key]time.Time{}
	}
	s.m[Key{name, reason}] += uint64(n)
	s.last[Key{name, reason}] = time.Now()
}

// Value is one counter.
func (s *Set) Value(name, reason string) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.m[Key{name, reason}]
}

// Last is when something was counted last; zero: never.
func (s *Set) Last(name, reason string) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last[Key{name, reason}]
}

// Count is a counter's key and value.
type Count struct {
	Key
	Value uint64
}

// All lists the counters by name and reason.
func (s *Set) All() []Count {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]Count, 0, len(s.m))
	for k, v := range s.m {
		out = append(out, Count{k, v})
	}
	sort.Slice(out, func(i, j int) bool {
		if out[i].Name != out[j].Name {
			return out[i].Name < out[j].Name
		}
		return out[i].Reason < out[j].Reason
	})
	return out
}
