package tiering

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/counters"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/policy"
	"github.com/kvferry/kvferry/transport"
)

// Errors of what is asked for by hand.
var (
	// ErrNoDrives is returned for what needs drives where there are none. A retry is useless.
	ErrNoDrives = errors.New("tiering: this node has no drives (nvme.drives)")
	// ErrNotDurable is returned when blocks are evicted, but a drive may bring them back after a crash. Whatever is evicted or written there next makes it durable.
	ErrNotDurable = errors.New("tiering: not durable")
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
	running   sync.WaitGroup // what may go on when a call has returned
}

// Cursor is where to go on; 0: at the beginning, and at the end.
type Cursor uint64

// A Cursor's lower 32 bits are the ledger's. Above them stands how much has been moved, in parts of what the tier holds that it goes to, and how often a Demote began with the same block; at the top, whether that
// has copied all and blocks only have to leave DRAM.
const (
	cursorMoved   = 32
	movedWhole    = 1 << 18
	cursorAgain   = cursorMoved + 19
	againMax      = 1 << 11
	cursorRelease = 1 << 63
)

func newCursor(at tiers.Cursor, moved, again uint64) Cursor {
	if at == 0 {
		return 0
	}
	return Cursor(at) | Cursor(min(moved, movedWhole)<<cursorMoved) | Cursor(again<<cursorAgain)
}

func (c Cursor) ledger() tiers.Cursor { return tiers.Cursor(c & (1<<cursorMoved - 1)) }

func (c Cursor) moved() uint64 { return uint64(c) >> cursorMoved & (movedWhole<<1 - 1) }

func (c Cursor) again() uint64 { return uint64(c&^cursorRelease) >> cursorAgain }

// room bounds what a Demote or a Prefetch moves by what the tier holds: more would only drive out what has just come.
type room struct{ whole, left uint64 }

func newRoom(whole uint64, c Cursor) room {
	return room{whole, uint64(float64(whole) * (1 - float64(min(c.moved(), movedWhole))/movedWhole))}
}

func (r *room) take(bytes uint64) { r.left -= min(r.left, bytes) }

func (r *room) moved() uint64 {
	if r.left == 0 {
		return movedWhole
	}
	return uint64(math.Ceil((1 - float64(r.left)/float64(r.whole)) * movedWhole))
}

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
	if m.Tiering == nil || blocks == 0 || tier == policy.DRAM {
		return blocks, next, nil
	}
	if err := m.flush(ctx); err != nil {
		return blocks, next, fmt.Errorf("%w: %d blocks are evicted, and may come back: %w", ErrNotDurable, blocks, err)
	}
	return blocks, next, nil
}

// flush makes durable what was removed from the drives. It goes on where the caller does not wait for it.
func (m *Manual) flush(ctx context.Context) error {
	done := make(chan error, 1)
	m.running.Go(func() { done <- m.Tiering.Flush(context.WithoutCancel(ctx)) })
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Demotion is what became of a Demote. Shards, but for NoRoom and Left.
type Demotion struct {
	Copied, Failed, Present int
	NoRoom                  int // blocks
	Left                    int // blocks that are out of DRAM by it
	UnderWay                int // when ctx ended
}

// Demote copies chosen blocks to the drives, and their ancestors before them; with move they leave DRAM then, where nothing needs them there. It copies no more than the drives hold.
func (m *Manual) Demote(ctx context.Context, sel tiers.Selection, move bool, from Cursor) (out Demotion, next Cursor, err error) {
	if m.Tiering == nil {
		return out, 0, ErrNoDrives
	}
	var capacity uint64
	for _, d := range m.Ledger.Stats().Drives {
		capacity += d.CapacityBytes
	}
	over, room := working(ctx), newRoom(capacity, from)
	for next = from; next&cursorRelease == 0; {
		part := m.Ledger.PlanDemote(time.Now(), sel, next.ledger(), min(manualBytes, room.left))
		out.Present, out.NoRoom = out.Present+part.Present, out.NoRoom+part.NoDrive
		for i := range part.List {
			room.take(part.List[i].From.Length)
		}
		done := m.Tiering.wait(ctx, part.Moves, kvferry.ClassDemote, time.Now().Add(downDeadline), nil)
		out.Copied, out.Failed, out.UnderWay = out.Copied+done.ok, out.Failed+done.failed, out.UnderWay+done.underWay
		if part.Busy && len(part.List) == 0 {
			pause(ctx, busyWait)
		}
		var gaveUp bool
		if next, gaveUp = next.after(part.Next, room.moved()); gaveUp {
			out.NoRoom++
		}
		if next == 0 {
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

// after is where a Demote goes on. With the same block it does so for long chains, and while others move as much as may be; not for ever: then it gives that block up.
func (c Cursor) after(at tiers.Cursor, moved uint64) (next Cursor, gaveUp bool) {
	if at == 0 || at != c.ledger() {
		return newCursor(at, moved, 0), false
	}
	if again := c.again() + 1; again < againMax {
		return newCursor(at, moved, again), false
	}
	return newCursor(at+1, moved, 0), true
}

// Prefetched is what became of a Prefetch, in shards.
type Prefetched struct{ Came, Failed, NoRoom, UnderWay int }

// Prefetch brings chosen blocks up from the drives. It brings no more than the pool holds.
func (m *Manual) Prefetch(ctx context.Context, sel tiers.Selection, from Cursor) (out Prefetched, next Cursor, err error) {
	if m.Tiering == nil {
		return out, 0, ErrNoDrives
	}
	over, room := working(ctx), newRoom(m.Ledger.Stats().CapacityBytes, from)
	for next = from; ; {
		ups, at := m.Ledger.PlanUp(sel, next.ledger(), manualBytes)
		for _, u := range ups {
			shards := len(u.Hashes) / kvferry.HashSize
			fit := int(min(room.left/u.Space.ShardBytes, uint64(shards)))
			out.NoRoom += shards - fit
			if u.Hashes = u.Hashes[:fit*kvferry.HashSize]; fit == 0 {
				continue
			}
			room.take(uint64(fit) * u.Space.ShardBytes)
			if err := m.bring(ctx, u, &out); err != nil {
				return out, next, err
			}
		}
		if next = newCursor(at, room.moved(), 0); next == 0 || over() {
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
