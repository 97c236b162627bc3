package standin

import (
	"context"
	"crypto/rand"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/kvferry/kvferry"
	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
)

// Match asks how much of a prompt is resident, and leases it under the request's id.
func (s *Session) Match(ctx context.Context, requestID string, hashes []kvferry.Hash, leaseMs uint32) (*kvferryv1.MatchResponse, error) {
	r, err := s.engine.Match(ctx, &kvferryv1.MatchRequest{SessionId: s.Welcome.SessionId, RequestId: requestID, SpaceId: s.Space[:], Hashes: pack(hashes), LeaseMs: leaseMs})
	if err != nil {
		return nil, fmt.Errorf("match: %w", err)
	}
	return r, nil
}

// ReleaseLease gives back what Match leased.
func (s *Session) ReleaseLease(requestIDs ...string) error {
	return s.send(&kvferryv1.SessionRequest{Message: &kvferryv1.SessionRequest_ReleaseLease{ReleaseLease: &kvferryv1.ReleaseLease{RequestIds: requestIDs}}})
}

// Offer registers a prompt's blocks and returns the ticket with which another worker takes them.
func (s *Session) Offer(requestID string, hashes []kvferry.Hash, tokens, lifetimeMs uint32) ([]byte, error) {
	id, secret := make([]byte, 16), make([]byte, 16)
	_, _ = rand.Read(id) // never fails
	_, _ = rand.Read(secret)
	err := s.send(&kvferryv1.SessionRequest{Message: &kvferryv1.SessionRequest_Offer{Offer: &kvferryv1.Offer{
		OfferId: id, Secret: secret, SpaceId: s.Space[:], RequestId: requestID, Hashes: pack(hashes), Tokens: tokens, LifetimeMs: lifetimeMs,
	}}})
	if err != nil {
		return nil, fmt.Errorf("offer: %w", err)
	}
	ticket := &kvferryv1.Ticket{WireVersion: 1, Addresses: []string{s.Welcome.PeerAddress}, OfferId: id, Secret: secret, Epoch: s.Welcome.Epoch,
		SpaceId: s.Space[:], Blocks: uint32(len(hashes)), Tokens: tokens, LifetimeMs: lifetimeMs, Instance: s.config.Instance}
	if len(hashes) > 0 {
		ticket.TailHash = hashes[len(hashes)-1][:]
	}
	return proto.Marshal(ticket)
}
