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
	return s.MatchPeers(ctx, requestID, hashes, leaseMs, nil, 0)
}

// MatchPeers is Match that asks other nodes too, where a Load with this request's id fetches what they have if computing it, which takes so long a block, is slower.
func (s *Session) MatchPeers(ctx context.Context, requestID string, hashes []kvferry.Hash, leaseMs uint32, peers []string, computeUs uint32) (*kvferryv1.MatchResponse, error) {
	r, err := s.engine.Match(ctx, &kvferryv1.MatchRequest{SessionId: s.Welcome.SessionId, RequestId: requestID, SpaceId: s.Space[:], Hashes: pack(hashes), LeaseMs: leaseMs, Peers: peers,
		ComputeUs: computeUs})
	if err != nil {
		return nil, fmt.Errorf("match: %w", err)
	}
	return r, nil
}

// ReleaseLease gives back what Match leased.
func (s *Session) ReleaseLease(requestIDs ...string) error {
	return s.send(&kvferryv1.SessionRequest{Message: &kvferryv1.SessionRequest_ReleaseLease{ReleaseLease: &kvferryv1.ReleaseLease{RequestIds: requestIDs}}})
}

// OfferRequest is a prompt to be taken by another worker.
type OfferRequest struct {
	RequestID  string
	Hashes     []kvferry.Hash
	Blocks     []uint32 // that are lent; nil: none are
	Tokens     uint32
	LifetimeMs uint32
	// OpenEnded: the prompt is still being computed, and the router chose id and secret; see Complete.
	OpenEnded bool
}

// Offer registers a prompt's blocks and returns the ticket with which another worker takes them.
func (s *Session) Offer(r OfferRequest) ([]byte, error) {
	id, secret := make([]byte, 16), make([]byte, 16)
	_, _ = rand.Read(id) // never fails
	_, _ = rand.Read(secret)
	offer := &kvferryv1.Offer{
		OfferId: id, Secret: secret, SpaceId: s.Space[:], RequestId: r.RequestID, Hashes: pack(r.Hashes), Tokens: r.Tokens, LifetimeMs: r.LifetimeMs, OpenEnded: r.OpenEnded,
	}
	if r.Blocks != nil {
		offer.Region, offer.BlockIds, offer.Generations = regionID, r.Blocks, s.config.Table.Generations(r.Blocks)
	}
	if err := s.send(&kvferryv1.SessionRequest{Message: &kvferryv1.SessionRequest_Offer{Offer: offer}}); err != nil {
		return nil, fmt.Errorf("offer: %w", err)
	}
	ticket := &kvferryv1.Ticket{WireVersion: 1, Addresses: []string{s.Welcome.PeerAddress}, OfferId: id, Secret: secret, Epoch: s.Welcome.Epoch,
		SpaceId: s.Space[:], Blocks: uint32(len(r.Hashes)), Tokens: r.Tokens, LifetimeMs: r.LifetimeMs, Instance: s.config.Instance}
	if r.OpenEnded {
		ticket.Epoch = make([]byte, 16)
	}
	if len(r.Hashes) > 0 {
		ticket.TailHash = r.Hashes[len(r.Hashes)-1][:]
	}
	return proto.Marshal(ticket)
}

// OfferID is the offer that a ticket names.
func OfferID(ticket []byte) (id [16]byte, err error) {
	var t kvferryv1.Ticket
	if err := proto.Unmarshal(ticket, &t); err != nil {
		return id, fmt.Errorf("read ticket: %w", err)
	}
	copy(id[:], t.OfferId)
	return id, nil
}

// Complete tells that the prompt of an open-ended offer is computed, and lends its blocks.
func (s *Session) Complete(id [16]byte, blocks []uint32) error {
	m := &kvferryv1.CompleteOffer{OfferId: id[:]}
	if blocks != nil {
		m.Region, m.BlockIds, m.Generations = regionID, blocks, s.config.Table.Generations(blocks)
	}
	return s.send(&kvferryv1.SessionRequest{Message: &kvferryv1.SessionRequest_CompleteOffer{CompleteOffer: m}})
}

// EndOffer takes an offer back.
func (s *Session) EndOffer(id [16]byte, reason string) error {
	return s.send(&kvferryv1.SessionRequest{Message: &kvferryv1.SessionRequest_EndOffer{EndOffer: &kvferryv1.EndOffer{OfferId: id[:], Reason: reason}}})
}

func (s *Session) offerServed(m *kvferryv1.OfferServed) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id := [16]byte(m.OfferId)
	if _, twice := s.served[id]; twice {
		s.served[id] = "twice"
	} else {
		s.served[id] = m.Reason
	}
	close(s.servedMore)
	s.servedMore = make(chan struct{})
}

// Served waits until this worker was told that nobody reads its blocks for an offer any more, and answers why; "twice" if it was told more than once.
func (s *Session) Served(ctx context.Context, id [16]byte) (reason string, err error) {
	for {
		s.mu.Lock()
		reason, ok := s.served[id]
		more := s.servedMore
		s.mu.Unlock()
		if ok {
			return reason, nil
		}
		select {
		case <-more:
		case <-ctx.Done():
			return "", context.Cause(ctx)
		case <-s.done:
			return "", s.cause
		}
	}
}
