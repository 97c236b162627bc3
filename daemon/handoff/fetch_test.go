package handoff

import (
	"context"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/counters"
	"github.com/kvferry/kvferry/daemon/health"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/tierstest"
	"github.com/kvferry/kvferry/transport"
)

// slowPrefill is a peer that can be reached, and whose blocks are never stored.
type slowPrefill struct {
	Control
	reasons chan string
}

func (s *slowPrefill) Claim(ctx context.Context, _ string, q ClaimRequest) (ClaimAnswer, error) {
	select {
	case <-time.After(q.Wait + time.Millisecond):
	case <-ctx.Done():
		return ClaimAnswer{}, transport.ErrLink
	}
	n := len(q.Hashes) / kvferry.HashSize
	return ClaimAnswer{Key: [16]byte{1}, Status: slices.Repeat([]ClaimStatus{Pending}, n), Offsets: make([]uint64, n), CRC32C: make([]uint32, n), ShardBytes: 4096, Lease: time.Second}, nil
}

func (s *slowPrefill) EndClaim(_ context.Context, _ string, _ kvferry.Epoch, _ [16]byte, _ uint32, reason string) error {
	s.reasons <- reason
	return nil
}

// TestPendingIsNoLinkFailure: a peer whose engine is slow stays a good peer, and its offer is not taken for served.
func TestPendingIsNoLinkFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		peer := &slowPrefill{reasons: make(chan string, 100)}
		f := NewFetcher(FetcherConfig{
			Epoch: kvferry.Epoch{1}, Ledger: tiers.New(tiers.Config{Pool: tierstest.NewSlots(2, 2<<20), Limits: tiers.DefaultLimits}), Control: peer, Counters: new(counters.Set), Log: slog.New(slog.DiscardHandler), Peers: 1,
			Resolve: func(_ context.Context, address string) (string, error) { return address, nil },
		})
		defer f.Close()
		for range 5 {
			ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
			var out FetchResult
			f.Fetch(ctx, FetchRequest{Ticket: Ticket{Addresses: []string{"peer"}, Epoch: kvferry.Epoch{2}}, TP: 1, Shape: tiers.SpaceShape{ShardBytes: 4096},
				Hashes: tierstest.Pack(tierstest.Chain(1, 2))}, &out)
			cancel()
			if !slices.Equal(out.Status, []FetchStatus{TooLate, TooLate}) {
				t.Fatalf("blocks that never came: %v", out.Status)
			}
			if reason := <-peer.reasons; reason == "" {
				t.Error("the claim ended as if it had been served")
			}
		}
		if p := f.Peers()[0]; p.State != health.OK {
			t.Errorf("peer is %v: %s", p.State, p.Reason)
		}
	})
}
