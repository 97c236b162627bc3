package process

import (
	"context"
	"fmt"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/standin"
)

// Attach is Service.Attach in the worker; so are the others.
func (w *Worker) Attach(ctx context.Context, a AttachArgs) error {
	_, err := call[AttachArgs, struct{}](ctx, w, "Attach", a)
	return err
}

// Write computes blocks.
func (w *Worker) Write(ctx context.Context, blocks []uint32, hashes []kvferry.Hash) error {
	_, err := call[BlocksArgs, struct{}](ctx, w, "Write", BlocksArgs{blocks, hashes})
	return err
}

// Scribble overwrites blocks.
func (w *Worker) Scribble(ctx context.Context, blocks []uint32) error {
	_, err := call[BlocksArgs, struct{}](ctx, w, "Scribble", BlocksArgs{Blocks: blocks})
	return err
}

// Check counts wrong bytes.
func (w *Worker) Check(ctx context.Context, blocks []uint32, hashes []kvferry.Hash) (uint64, error) {
	return call[BlocksArgs, uint64](ctx, w, "Check", BlocksArgs{blocks, hashes})
}

// Written counts bytes that were written since Scribble.
func (w *Worker) Written(ctx context.Context, blocks []uint32) (uint64, error) {
	return call[[]uint32, uint64](ctx, w, "Written", blocks)
}

// Store stores batches that are under way together.
func (w *Worker) Store(ctx context.Context, batches ...standin.StoreRequest) (StoreReply, error) {
	return call[StoreArgs, StoreReply](ctx, w, "Store", StoreArgs{batches})
}

// Load loads or accepts. Where it fails, the reply has what came before.
func (w *Worker) Load(ctx context.Context, r standin.LoadRequest) (LoadReply, error) {
	reply, err := call[standin.LoadRequest, LoadReply](ctx, w, "Load", r)
	if err == nil && reply.Error != "" {
		err = fmt.Errorf("worker %s: %s", w.Name, reply.Error)
	}
	return reply, err
}

// Match matches.
func (w *Worker) Match(ctx context.Context, a MatchArgs) (MatchReply, error) {
	return call[MatchArgs, MatchReply](ctx, w, "Match", a)
}

// ReleaseLease gives leases back.
func (w *Worker) ReleaseLease(ctx context.Context, requestID string) error {
	_, err := call[string, struct{}](ctx, w, "ReleaseLease", requestID)
	return err
}

// Offer offers and returns the ticket.
func (w *Worker) Offer(ctx context.Context, r standin.OfferRequest) ([]byte, error) {
	return call[standin.OfferRequest, []byte](ctx, w, "Offer", r)
}

// Complete completes an open-ended offer.
func (w *Worker) Complete(ctx context.Context, a CompleteArgs) error {
	_, err := call[CompleteArgs, struct{}](ctx, w, "Complete", a)
	return err
}

// EndOffer takes an offer back.
func (w *Worker) EndOffer(ctx context.Context, offer [16]byte) error {
	_, err := call[[16]byte, struct{}](ctx, w, "EndOffer", offer)
	return err
}

// Served waits until an offer's blocks may be used again.
func (w *Worker) Served(ctx context.Context, offer [16]byte) (string, error) {
	return call[[16]byte, string](ctx, w, "Served", offer)
}

// Bump raises the generations of blocks.
func (w *Worker) Bump(ctx context.Context, blocks []uint32) error {
	_, err := call[[]uint32, struct{}](ctx, w, "Bump", blocks)
	return err
}
