package sim

import (
	"context"
	"math/rand/v2"
	"regexp"
	"slices"
	"testing"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/handoff"
	"github.com/kvferry/kvferry/transport"
)

// mutation takes out one of the rules that keep wrong bytes away, to see that the simulation misses it.
type mutation string

const (
	intact        mutation = ""
	noGenerations mutation = "a worker does not compare generations"
	noRevoke      mutation = "an engine uses blocks again without revoking"
	notQuiet      mutation = "memory is given back at the deadline, quiet or not"
	noClaimID     mutation = "a repeated claim is a new one"
	noConfirm     mutation = "the peer is not asked whether lent blocks still were what was offered"
	writesOn      mutation = "a copier goes on writing into worker memory after it has returned"
	lyingDisk     mutation = "a disk says that it has written, and writes later"
	noChecksum    mutation = "the checksum is that of what was sent, not of what came"
)

// mutatedSeeds are the seeds of which one must fail.
const mutatedSeeds = 50

// TestMutations proves that the simulation bites.
func TestMutations(t *testing.T) {
	for m, found := range map[mutation]string{
		noGenerations: "generation did not|earlier epoch|wrong bytes",
		noRevoke:      "wrong bytes",
		notQuiet:      "while a copy still writes into it|not reserved",
		writesOn:      "quiet|not lent",
		noClaimID:     "made twice|claims, of which",
		noConfirm:     "wrong bytes",
		noChecksum:    "wrong bytes",
		lyingDisk:     "and not its bytes",
	} {
		t.Run(string(m), func(t *testing.T) {
			for n := uint64(1); n <= mutatedSeeds; n++ {
				_, err := run(t, n, m, counts{})
				if err == nil {
					continue
				}
				if !regexp.MustCompile(found).MatchString(err.Error()) {
					t.Fatalf("something else was found: %v", err)
				}
				t.Log(err)
				return
			}
			t.Errorf("%d seeds did not notice it", mutatedSeeds)
		})
	}
}

// control is the way to peers.
func (m mutation) control(c *control) handoff.Control {
	switch m {
	case noClaimID:
		return &newClaims{c}
	case noConfirm:
		return &believer{c}
	}
	return c
}

// newClaims has every request that arrives claim under a number of its own.
type newClaims struct{ *control }

// Claim is handoff.Control.
func (c *newClaims) Claim(ctx context.Context, address string, q handoff.ClaimRequest) (handoff.ClaimAnswer, error) {
	return call(ctx, c.d, address, "claim "+c.d.node.w.book.nameOf(q).String(), func(ctx context.Context, to *daemon) (handoff.ClaimAnswer, error) {
		another := q
		another.ClaimID = rand.Uint64()
		return to.claim(ctx, another, q)
	})
}

// believer takes what was lent for what was offered.
type believer struct{ *control }

// Confirm is handoff.Control.
func (c *believer) Confirm(ctx context.Context, address string, epoch kvferry.Epoch, key [16]byte, offsets []uint64) ([]bool, []uint32, error) {
	held, crcs, err := c.control.Confirm(ctx, address, epoch, key, offsets)
	for i := range held {
		held[i] = true
	}
	return held, crcs, err
}

// checksum is what a copier says it has computed.
func (m mutation) checksum(came, sent []byte) uint32 {
	if m == noChecksum && sent != nil {
		return crcOf(sent)
	}
	return crcOf(came)
}

// copyLoud is a copier that breaks its contract: it returns when it should stop, or its link breaks, and goes on writing.
func (c *peerCopier) copyLoud(ctx context.Context, batch []transport.Copy) error {
	own, done := slices.Clone(batch), make(chan error, 1)
	go func() { done <- c.copy(context.WithoutCancel(ctx), own) }()
	breaks := make(<-chan time.Time)
	if chance(c.link.d.node.w.roll("loud "+c.link.d.node.w.book.name(c.key)), 300) {
		breaks = time.After(2 * time.Millisecond)
	}
	err := transport.ErrLink
	select {
	case err := <-done:
		copy(batch, own)
		return err
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-breaks:
	}
	fail(batch, err)
	return err
}
