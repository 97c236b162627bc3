package handoff

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/counters"
	"github.com/kvferry/kvferry/transport"
)

// slowLookups is a peer whose answers come later than an engine waits for them.
type slowLookups struct {
	Control
	asked int
}

func (l *slowLookups) Fetch(ctx context.Context, _ string, _ FindRequest) (FindAnswer, error) {
	l.asked++
	<-ctx.Done()
	return FindAnswer{}, fmt.Errorf("%w: %v", transport.ErrLink, ctx.Err())
}

// A look-up has little time: that it fails says nothing of the way for transfers. But nobody asks again and again.
func TestLateLookups(t *testing.T) {
	l := &slowLookups{}
	f := NewFetcher(FetcherConfig{Control: l, Counters: new(counters.Set), Log: slog.New(slog.DiscardHandler), Peers: 4,
		Resolve: func(_ context.Context, address string) (string, error) { return address, nil }})
	defer f.Close()
	for range 5 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		f.Find(ctx, Wanted{Peers: []string{"peer:1"}, Find: FindRequest{Hashes: make([]byte, kvferry.HashSize), TP: 1, Lease: time.Second}})
		cancel()
	}
	if l.asked != 3 {
		t.Errorf("the peer was asked %d times in a row", l.asked)
	}
	if _, err := f.usable(t.Context(), "peer:1"); err != nil {
		t.Errorf("late look-ups have opened the circuit: %v", err)
	}
}
