package handoff

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/counters"
	"github.com/kvferry/kvferry/daemon/health"
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
	p, err := f.known(t.Context(), "peer:1")
	if err != nil {
		t.Fatal(err)
	}
	if err := p.usable(); err != nil {
		t.Errorf("late look-ups have opened the circuit: %v", err)
	}
}

// A look-up that is not made takes nobody's turn to try a peer that was unreachable; one that is made and late says how it went.
func TestLookupsOfADegradedPeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &slowLookups{}
		f := NewFetcher(FetcherConfig{Control: l, Counters: new(counters.Set), Log: slog.New(slog.DiscardHandler), Peers: 4,
			Resolve: func(_ context.Context, address string) (string, error) { return address, nil }})
		defer f.Close()
		find := func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			f.Find(ctx, Wanted{Peers: []string{"peer:1"}, Find: FindRequest{Hashes: make([]byte, kvferry.HashSize), TP: 1, Lease: time.Second}})
		}
		p, err := f.known(t.Context(), "peer:1")
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			p.report(transport.ErrLink)
		}
		time.Sleep(time.Second) // simulated: it may be tried again
		find()
		if state, _, _ := p.health.View(); l.asked != 1 || state != health.Degraded {
			t.Errorf("asked %d times, then %v", l.asked, state)
		}
		for range 3 {
			p.lookups.Failure(time.Now(), "late") // no look-up is made for some time
		}
		p.health.Success()
		for range 3 {
			p.report(transport.ErrLink)
		}
		time.Sleep(600 * time.Millisecond)
		p.lookups.Failure(time.Now(), "late")
		find()
		if err := p.usable(); l.asked != 1 || err != nil {
			t.Errorf("asked %d times; a look-up that was not made took the turn: %v", l.asked, err)
		}
	})
}
