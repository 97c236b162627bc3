package tiering

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/counters"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/transport"
)

// Errors of what is asked for by hand.
var (
	// ErrNoDrives is returned for what needs drives where there are none. A retry is useless.
	ErrNoDrives = errors.New("tiering: this node has no drives (nvme.drives)")
	// ErrVerifying is returned while everything is being read back for somebody else. A retry may succeed later.
	ErrVerifying = errors.New("tiering: a verification is running already")
)

const (
	// manualBytes bounds what a part of a Demote or a Prefetch moves: it is waited for before the next.
	manualBytes = 64 << 20
	// manualFor is how long a call goes on with parts: the caller is told then how far it is.
	manualFor = time.Second
)

// Manual does what people ask of the tiers. It works where there are no drives, too. Safe for concurrent use.
//
// Evict, Demote and Prefetch work for about a second, and answer where to go on. When ctx ends before, nothing of what they have begun is taken back.
type Manual struct {
	Ledger   *tiers.Ledger
	Pool     transport.Memory
	Tiering  *Tiering // nil: there are no drives
	Counters *counters.Set
	Log      *slog.Logger

	verifying sync.Mutex
	readers   sync.WaitGroup // of verifications
}

// Cursor is where to go on; 0: at the beginning, and at the end.
type Cursor uint64

// A Cursor's lower 32 bits are the ledger's. Above them stands a number: of a Demote how often it began with the same block, of a Prefetch how much it has brought, in MiB; and at the top, whether a Demote has
// copied all and blocks only have to leave DRAM.
const (
	cursorNumber  = 32
	cursorRelease = 1 << 63
	againMax      = 1 << 12
)

func newCursor(number uint64, at tiers.Cursor) Cursor {
	if at == 0 {
		return 0
	}
	return Cursor(number<<cursorNumber) | Cursor(at)
}

func (c Cursor) ledger() tiers.Cursor { return tiers.Cursor(c & (1<<cursorNumber - 1)) }

func (c Cursor) number() uint64 { return uint64(c&^cursorRelease) >> cursorNumber }

// working answers whether a call that begins now has done enough.
func working(ctx context.Context) func() bool {
	end := time.Now().Add(manualFor)
	return func() bool { return ctx.Err() != nil || time.Now().After(end) }
}

// Evict removes chosen blocks from a tier or from all (policy.NumTiers). What it answers is durable on the drives.
func (m *Manual) Evict(ctx context.Context, sel tiers.Selection, tier int, from Cursor) (blocks int, next Cursor, err error) {
	over := working(ctx)
	for at := from.ledger(); ; {
		var n int
		n, at = m.Ledger.Evict(time.Now(), sel, tier, at)
		blocks += n
		if next = Cursor(at); next == 0 || over() {
			break
		}
	}
	if blocks > 0 {
		m.Log.Info("blocks were evicted by hand", "blocks", blocks)
	}
	if m.Tiering == nil || blocks == 0 {
		return blocks, next, nil
	}
	// Not under ctx: what is gone here must not come back after a crash because a caller had no patience.
	if err := m.Tiering.Flush(context.WithoutCancel(ctx)); err != nil {
		return blocks, next, fmt.Errorf("%d blocks are evicted, but not durably: %w", blocks, err)
	}
	return blocks, next, nil
}

// Demotion is what became of a Demote. Shards, but for NoRoom and Left.
type Demotion struct {
	Copied, Failed, Present int
	NoRoom                  int // blocks
	Left                    int // blocks that are out of DRAM by it
	UnderWay                int // when ctx ended
}

// Demote copies chosen blocks to the drives, and their ancestors before them; with move they leave DRAM then, where nothing needs them there.
func (m *Manual) Demote(ctx context.Context, sel tiers.Selection, move bool, from Cursor) (out Demotion, next Cursor, err error) {
	if m.Tiering == nil {
		return out, 0, ErrNoDrives
	}
	over := working(ctx)
	for next = from; next&cursorRelease == 0; {
		part := m.Ledger.PlanDemote(time.Now(), sel, next.ledger(), manualBytes)
		out.Present, out.NoRoom = out.Present+part.Present, out.NoRoom+part.NoDrive
		done := m.Tiering.wait(ctx, part.Moves, kvferry.ClassDemote, time.Time{}, nil)
		out.Copied, out.Failed, out.UnderWay = out.Copied+done.ok, out.Failed+done.failed, out.UnderWay+done.underWay
		if part.Busy && len(part.List) == 0 {
			pause(ctx, busyWait)
		}
		if next = next.after(part.Next); next == 0 {
			if !move {
				return out, 0, nil
			}
			next = cursorRelease
		}
		if over() {
			return out, next, nil
		}
	}
	for {
		left, at := m.Ledger.Release(time.Now(), sel, next.ledger())
		out.Left += left
		if at == 0 {
			return out, 0, nil
		}
		if next = cursorRelease | Cursor(at); over() {
			return out, next, nil
		}
	}
}

// pause waits, unless ctx ends.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// after is where a Demote goes on. With the same block it does so for long chains only, and not for ever: on a drive that is too small for one, its beginning leaves again for its end.
func (c Cursor) after(at tiers.Cursor) Cursor {
	if at == 0 || at != c.ledger() {
		return Cursor(at)
	}
	if again := c.number() + 1; again < againMax {
		return newCursor(again, at)
	}
	return Cursor(at + 1)
}

// Prefetched is what became of a Prefetch, in shards.
type Prefetched struct{ Came, Failed, NoRoom, UnderWay int }

// Prefetch brings chosen blocks up from the drives. It brings no more than the pool holds: more would only drive out what has just come.
func (m *Manual) Prefetch(ctx context.Context, sel tiers.Selection, from Cursor) (out Prefetched, next Cursor, err error) {
	if m.Tiering == nil {
		return out, 0, ErrNoDrives
	}
	over, room := working(ctx), m.Ledger.Stats().CapacityBytes
	for next, brought := from, from.number()<<20; ; {
		ups, at := m.Ledger.PlanUp(sel, next.ledger(), manualBytes)
		for _, u := range ups {
			bytes := uint64(len(u.Hashes)/kvferry.HashSize) * u.Space.ShardBytes
			if brought += bytes; brought > room {
				out.NoRoom += len(u.Hashes) / kvferry.HashSize
			} else if err := m.bring(ctx, u, &out); err != nil {
				return out, next, err
			}
		}
		if next = newCursor(min(brought>>20, 1<<31-1), at); next == 0 || over() {
			return out, next, nil
		}
	}
}

func (m *Manual) bring(ctx context.Context, u tiers.Up, out *Prefetched) error {
	ref, err := m.Ledger.Space(u.Space) // so that its number stays its own
	if err != nil {
		return err
	}
	defer m.Ledger.ReleaseSpace(ref)
	moves := m.Ledger.BeginPromote(time.Now(), ref, u.Shard, u.Hashes)
	out.NoRoom += moves.NoRoom
	done := m.Tiering.wait(ctx, moves, kvferry.ClassPrefetch, time.Now().Add(prefetchDeadline), nil)
	out.Came, out.Failed, out.UnderWay = out.Came+done.ok, out.Failed+done.failed, out.UnderWay+done.underWay
	return nil
}
