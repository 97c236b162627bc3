package handoff

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/kvferry/kvferry/daemon/counters"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/tierstest"
)

// bench is a registry with one offer of one rank, of blocks that are not here and will not come.
func bench(t *testing.T) (*Registry, ClaimRequest) {
	t.Helper()
	ledger := tiers.New(tiers.Config{Pool: tierstest.NewSlots(2, 2<<20), Limits: tiers.DefaultLimits})
	if _, err := ledger.Space(tiers.SpaceShape{ID: [32]byte{1}, Shards: 1, ShardBytes: 4096}); err != nil {
		t.Fatal(err)
	}
	owner := tiers.Owner(100)
	r := NewRegistry(Config{Ledger: ledger, Limits: DefaultLimits, Counters: new(counters.Set), Log: slog.New(slog.DiscardHandler), Owners: func() tiers.Owner { owner++; return owner }})
	o := Offer{ID: [16]byte{2}, Secret: [16]byte{3}, Space: [32]byte{1}, Instance: "prefill", TP: 1, Hashes: tierstest.Pack(tierstest.Chain(1, 3)), Lifetime: time.Minute}
	if err := r.Register(1, o); err != nil {
		t.Fatal(err)
	}
	return r, ClaimRequest{OfferID: o.ID, Secret: o.Secret, Instance: "decode", TP: 1, Space: o.Space, Hashes: o.Hashes}
}

func claimOf(t *testing.T, r *Registry, q ClaimRequest, id uint64) [16]byte {
	t.Helper()
	q.ClaimID = id
	a, err := r.Claim(context.Background(), q)
	if err != nil {
		t.Fatal(err)
	}
	return a.Key
}

// TestLastClaimEnds: an offer whose ranks have all been served ends with its last claim, whichever that is and however it ended.
func TestLastClaimEnds(t *testing.T) {
	for name, last := range map[string]func(r *Registry, key [16]byte){
		"failed":      func(r *Registry, key [16]byte) { r.EndClaim(key, "link failed") },
		"not renewed": func(r *Registry, _ [16]byte) { r.Expire(time.Now().Add(DefaultLimits.ClaimLease + time.Second)) },
		"done":        func(r *Registry, key [16]byte) { r.EndClaim(key, "") },
	} {
		t.Run(name, func(t *testing.T) {
			r, q := bench(t)
			first, second := claimOf(t, r, q, 1), claimOf(t, r, q, 2)
			r.EndClaim(second, "")
			if r.OpenOffers() != 1 {
				t.Fatal("the offer ended while a claim of it was alive")
			}
			last(r, first)
			if r.OpenOffers() != 0 || r.ActiveClaims() != 0 {
				t.Errorf("%d offers and %d claims are left", r.OpenOffers(), r.ActiveClaims())
			}
			if _, err := r.Claim(context.Background(), q); !errors.Is(err, ErrUnknown) {
				t.Errorf("claim of an offer that is done: %v", err)
			}
		})
	}
}

// TestFailedClaimLeavesOffer: a claim that failed may be tried again.
func TestFailedClaimLeavesOffer(t *testing.T) {
	r, q := bench(t)
	r.EndClaim(claimOf(t, r, q, 1), "link failed")
	if r.OpenOffers() != 1 {
		t.Error("the offer ended with a claim that failed")
	}
}
