package session

import (
	"errors"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/handoff"
)

// Offer registers an offer of this engine.
func (s *Session) Offer(r Offer) {
	err := s.checkOffer(&r)
	if err == nil {
		err = s.register(r)
	}
	if err == nil {
		return
	}
	s.refuseOffer("offer.offer_id", err)
	if !errors.Is(err, handoff.ErrExists) {
		s.keepNothing(r.ID, r.Blocks, "refused")
	}
}

// keepNothing tells the workers of this engine that they need not keep blocks for what is no offer.
func (s *Session) keepNothing(id [16]byte, blocks handoff.LentBlocks, reason string) {
	for rank := range s.hello.Space.TP {
		if blocks.IDs != nil {
			s.m.Served(s.hello.Instance, rank, id, reason)
		}
	}
}

func (s *Session) register(r Offer) error {
	return s.m.cfg.Offers.Register(s.owner(), handoff.Offer{
		ID: r.ID, Secret: r.Secret, Space: r.Space, RequestID: r.RequestID, Instance: s.hello.Instance, TP: s.hello.Space.TP, Hashes: r.Hashes,
		Tokens: r.Tokens, Lifetime: r.Lifetime, OpenEnded: r.OpenEnded, Blocks: r.Blocks,
	})
}

// refuseOffer answers a message about an offer. What the registry refuses is about the offer that the field names.
func (s *Session) refuseOffer(field string, err error) {
	if fe := (*FieldError)(nil); !errors.As(err, &fe) {
		err = &FieldError{Field: field, Reason: err.Error(), kind: err}
	}
	s.send(Refused{err})
}

// CompleteOffer ends the computing of an open-ended offer's prompt.
func (s *Session) CompleteOffer(id [16]byte, blocks handoff.LentBlocks) {
	err := s.checkOfferBlocks("complete_offer", blocks, len(blocks.IDs))
	if err == nil {
		err = s.m.cfg.Offers.Complete(s.owner(), id, blocks)
	}
	if err != nil {
		s.refuseOffer("complete_offer.offer_id", err)
	}
	if errors.Is(err, handoff.ErrUnknown) {
		s.keepNothing(id, blocks, "not known")
	}
}

// EndOffer takes an offer back.
func (s *Session) EndOffer(id [16]byte, reason string) {
	err := ValidateText("end_offer.reason", reason, 0, 256)
	if err == nil {
		err = s.m.cfg.Offers.Withdraw(s.owner(), id, reason)
	}
	if err != nil {
		s.refuseOffer("end_offer.offer_id", err)
	}
}

// checkOfferBlocks checks the blocks that an engine keeps for an offer of n blocks.
func (s *Session) checkOfferBlocks(message string, b handoff.LentBlocks, n int) error {
	if b.IDs == nil && b.Generations == nil {
		return nil
	}
	if s.hello.Generations == 0 {
		return invalid(message+".block_ids", "this session has no generation table")
	}
	if len(b.IDs) != n || len(b.Generations) != n {
		return invalid(message+".block_ids", "%d ids and %d generations for %d hashes", len(b.IDs), len(b.Generations), n)
	}
	seen := make(map[uint32]bool, n)
	for _, id := range b.IDs {
		switch {
		case id >= s.hello.Generations:
			return invalid(message+".block_ids", "%d: the generation table has %d entries", id, s.hello.Generations)
		case seen[id]:
			return invalid(message+".block_ids", "%d stands twice", id)
		}
		seen[id] = true
	}
	return nil
}

func (s *Session) checkOffer(r *Offer) error {
	limits := s.m.cfg.Limits
	if s.hello.Role != Scheduler {
		return fieldErr(ErrState, "offer", "only a scheduler's session offers")
	}
	if s.m.isDraining() {
		return fieldErr(ErrLimit, "offer", "the daemon is draining")
	}
	if _, err := validateHashes("offer.hashes", r.Hashes, 1, limits.LoadBlocks); err != nil {
		return err
	}
	seen := make(map[kvferry.Hash]bool, len(r.Hashes)/kvferry.HashSize)
	for i := range len(r.Hashes) / kvferry.HashSize {
		if h := hashAt(r.Hashes, i); seen[h] {
			return invalid("offer.hashes", "hash %d stands twice", i)
		} else {
			seen[h] = true
		}
	}
	if err := ValidateText("offer.request_id", r.RequestID, 0, 256); err != nil {
		return err
	}
	if r.Tokens < 1 || r.Tokens >= 1<<31 {
		return invalid("offer.tokens", "%d: must be 1 to 2^31-1", r.Tokens)
	}
	if r.Lifetime == 0 {
		r.Lifetime = limits.OfferLifetime
	}
	if r.Lifetime < 0 || r.Lifetime > time.Hour {
		return invalid("offer.lifetime_ms", "%v: must be at most an hour", r.Lifetime)
	}
	if err := s.checkOfferBlocks("offer", r.Blocks, len(r.Hashes)/kvferry.HashSize); err != nil {
		return err
	}
	if r.OpenEnded && r.Blocks.IDs != nil {
		return invalid("offer.block_ids", "of an open-ended offer come with complete_offer")
	}
	_, err := s.spaceRef("offer.space_id", r.Space)
	return err
}
