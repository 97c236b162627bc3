package tiering

import (
	"context"
	"slices"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers"
)

// Request asks for blocks that are on a drive.
type Request struct {
	Class  kvferry.Class // ClassLoad or ClassPrefetch
	Space  tiers.SpaceRef
	Shard  uint16
	Hashes []byte // packed
	// Arrived is called, from Promote's own goroutine, with the indexes of blocks that are in the pool now. May be nil.
	Arrived func(at []int)
}

// Promotion is what became of a Request.
type Promotion struct {
	Came, Failed, NoRoom int
	// Waiting is set where ctx ended before all was done. What is still under way goes on, and is in the pool when it has come.
	Waiting bool
}

// Promote brings blocks up into the pool. It returns when all that will come has come, or ctx ends. Blocks that are in the pool already, or nowhere, are none of its business; those that somebody else is
// bringing it waits for.
func (t *Tiering) Promote(ctx context.Context, q Request) Promotion {
	moves := t.cfg.Ledger.BeginPromote(time.Now(), q.Space, q.Shard, q.Hashes)
	deadline, _ := ctx.Deadline()
	done := t.wait(ctx, moves, q.Class, deadline, func(at []int) {
		for k, i := range at {
			at[k] = moves.At[i]
		}
		q.arrived(at)
	})
	out := Promotion{Came: done.ok, Failed: done.failed, NoRoom: moves.NoRoom, Waiting: done.underWay > 0}
	if !out.Waiting {
		t.elsewhere(ctx, q, moves.Elsewhere, &out)
	}
	return out
}

// waited is what became of moves, as far as it was waited for.
type waited struct{ ok, failed, underWay int }

// wait starts moves and waits until they are made or ctx ends. Those that are under way then go on. arrived is told of those that have come, by their indexes in the list, in a slice that it may keep; it may be nil.
func (t *Tiering) wait(ctx context.Context, moves tiers.Moves, class kvferry.Class, deadline time.Time, arrived func(at []int)) (out waited) {
	type part struct {
		at []int
		ok []bool
	}
	parts := make(chan part, len(moves.List)) // nobody who ends a transfer ever waits here
	left := t.start(moves, class, deadline, func(at []int, ok []bool) { parts <- part{at, ok} })
	for out.underWay = len(moves.List); left > 0; left-- {
		select {
		case p := <-parts:
			var come []int
			for k, i := range p.at {
				if p.ok[k] {
					come = append(come, i)
				}
			}
			out.underWay -= len(p.at)
			out.ok, out.failed = out.ok+len(come), out.failed+len(p.at)-len(come)
			if arrived != nil {
				arrived(come)
			}
		case <-ctx.Done():
			return out
		}
	}
	return out
}

func (q *Request) arrived(at []int) {
	if q.Arrived != nil && len(at) > 0 {
		slices.Sort(at)
		q.Arrived(at)
	}
}

// elsewhere waits for blocks that somebody else is bringing or storing.
func (t *Tiering) elsewhere(ctx context.Context, q Request, at []int, out *Promotion) {
	for len(at) > 0 {
		var hashes []byte
		for _, i := range at {
			hashes = append(hashes, q.Hashes[i*kvferry.HashSize:][:kvferry.HashSize]...)
		}
		states, changed := t.cfg.Ledger.Await(q.Space, q.Shard, hashes)
		var rest, come []int
		for k, s := range states {
			switch s {
			case tiers.SlotResident:
				come = append(come, at[k])
			case tiers.SlotFilling:
				rest = append(rest, at[k])
			default:
				out.Failed++
			}
		}
		out.Came += len(come)
		q.arrived(come)
		if at = rest; len(at) == 0 {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			out.Waiting = true
			return
		}
	}
}

// prefetchShare is the part of the pool that prefetches may be filling at a time: their slots are nobody else's until a drive that may be slow has answered, and stores find room beside them.
const prefetchShare = 4

// Prefetch brings blocks up in the background, the first of them where that is much; nobody waits for it.
func (t *Tiering) Prefetch(space tiers.SpaceRef, shard uint16, hashes []byte) {
	at, shardBytes := t.cfg.Ledger.OnDrive(space, shard, hashes), t.cfg.Ledger.ShardBytes(space)
	want := uint64(len(at)) * shardBytes
	if over := int64(t.up.Add(int64(want))) - int64(len(t.cfg.Pool.Bytes)/prefetchShare); over > 0 {
		drop := min((uint64(over)+shardBytes-1)/shardBytes, uint64(len(at)))
		at = at[:len(at)-int(drop)]
		t.up.Add(-int64(drop * shardBytes))
		t.cfg.Counters.Add("promote_blocks", "too_many", int(drop))
	}
	var first []byte
	for _, i := range at {
		first = append(first, hashes[i*kvferry.HashSize:][:kvferry.HashSize]...)
	}
	moves := t.cfg.Ledger.BeginPromote(time.Now(), space, shard, first)
	t.up.Add(-int64(uint64(len(at)-len(moves.List)) * shardBytes))
	t.start(moves, kvferry.ClassPrefetch, time.Now().Add(prefetchDeadline), func(at []int, _ []bool) { t.up.Add(-int64(uint64(len(at)) * shardBytes)) })
}

// Hint is Prefetch for what somebody says that he will ask for: of that no more comes than leaves the pool room for what is asked for now.
func (t *Tiering) Hint(space tiers.SpaceRef, shard uint16, hashes []byte) {
	t.start(t.cfg.Ledger.BeginPrefetch(time.Now(), space, shard, hashes), kvferry.ClassPrefetch, time.Now().Add(prefetchDeadline), nil)
}

// prefetchDeadline bounds how long a prefetch may wait for the drive.
const prefetchDeadline = 30 * time.Second

// Restore is about how long it takes to bring so many bytes up; 0 while that was not measured. The drives share the work.
func (t *Tiering) Restore(bytes uint64) time.Duration {
	var rate float64
	for _, d := range t.all() {
		rate += d.rate.now()
	}
	if rate == 0 {
		return 0
	}
	return time.Duration(float64(bytes) / rate * float64(time.Second))
}
