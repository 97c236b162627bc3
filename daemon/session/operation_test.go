package session

import (
	"log/slog"
	"testing"

	"github.com/kvferry/kvferry/daemon/counters"
)

// A transfer that becomes quiet while its operation's end is under way must not finish it: the session could be gone before the end has told the word.
func TestEndOfALoadFinishesLast(t *testing.T) {
	w, err := newWords()
	if err != nil {
		t.Fatal(err)
	}
	defer w.close()
	s := &Session{m: &Manager{cfg: Config{Counters: &counters.Set{}, Limits: DefaultLimits}}, operations: map[uint64]*operation{1: nil}, words: map[uint32]uint64{}, wordsMap: w,
		wake: make(chan struct{}, 1), log: slog.New(slog.DiscardHandler)}
	s.quiet.Add(1)
	o := &operation{s: s, number: 1, kind: "accept", writes: 1}
	finished := func() bool { return len(s.operations) == 0 }
	o.reads = func(string) { // runs in the middle of the end
		o.endWrite()
		if finished() {
			t.Error("the operation is finished before its end")
		}
	}
	o.endLoad(OutcomeExpired, "not released by its deadline")
	if !finished() {
		t.Error("the operation is not finished")
	}
}
