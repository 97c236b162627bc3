package tiers

import (
	"slices"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers/policy"
)

// MatchResult says how much of a chain is resident.
type MatchResult struct {
	Blocks int // longest prefix
	DRAM   int // of these, the ones that are in DRAM
	NVMe   int // the others
	First  int // blocks before the first that is not in DRAM
	Leased bool
}

// Match counts how many of these blocks, from the first on, are resident, and leases the last of them for the key until the deadline: its ancestors cannot leave before it.
// Repeating it for a key replaces the lease. hashes is packed.
func (l *Ledger) Match(now time.Time, owner Owner, key string, space SpaceRef, hashes []byte, until time.Time) MatchResult {
	l.mu.Lock()
	defer l.mu.Unlock()
	res := l.prefixLocked(now, owner, key, space, hashes, until)
	n := len(hashes) / kvferry.HashSize
	l.countLocked(n, res)
	return res
}

// Count accounts a look-up of so many blocks that Prefix has answered.
func (l *Ledger) Count(asked int, res MatchResult) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.countLocked(asked, res)
}

func (l *Ledger) countLocked(asked int, res MatchResult) {
	l.counts.Asked += uint64(asked)
	l.counts.DRAM += uint64(res.DRAM)
	l.counts.NVMe += uint64(res.NVMe)
	l.counts.Missed += uint64(asked - res.Blocks)
}

// Prefix is Match for a look-up that is counted elsewhere.
func (l *Ledger) Prefix(now time.Time, owner Owner, key string, space SpaceRef, hashes []byte, until time.Time) MatchResult {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.prefixLocked(now, owner, key, space, hashes, until)
}

// AtPeer counts blocks that a Match has missed and that another node has.
func (l *Ledger) AtPeer(blocks int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counts.Peer += uint64(blocks)
	l.counts.Missed -= uint64(blocks)
}

func (l *Ledger) prefixLocked(now time.Time, owner Owner, key string, space SpaceRef, hashes []byte, until time.Time) MatchResult {
	n := len(hashes) / kvferry.HashSize
	const step = 256 // a miss ends the search: do not look the whole of a long prompt up before
	stamp := now.UnixNano()
	res := MatchResult{First: -1}
	found := l.found[:0]
search:
	for base := 0; base < n; base += step {
		k := min(step, n-base)
		found = slices.Grow(found, k)[:base+k]
		after := recordID(0)
		if base > 0 {
			after = found[base-1]
		}
		l.index.findBatch(space, after, hashes[base*kvferry.HashSize:], found[base:])
		for i, id := range found[base:] {
			if id == 0 || !l.isComplete(l.recs.at(id)) {
				found = found[:base+i]
				break search
			}
			r := l.recs.at(id)
			if l.isIn(r, policy.DRAM) {
				res.DRAM++
			} else if l.isOpenLocked(id) {
				if res.First < 0 {
					res.First = base + i
				}
				res.NVMe++
			} else {
				found = found[:base+i]
				break search
			}
			r.stamp, r.used = max(r.stamp, stamp), true
		}
	}
	l.found = found
	res.Blocks = len(found)
	if res.First < 0 {
		res.First = res.Blocks
	}
	if h := l.holds.byID[l.holds.byKey[holdKey{owner, key}]]; key == "" || h == nil || res.Blocks == 0 || h.block != found[res.Blocks-1] { // else a request only asks again
		l.policy.Hit(stamp, l, found, hashes[res.Blocks*kvferry.HashSize:])
	}
	if res.Blocks == 0 || key == "" {
		if id, ok := l.holds.byKey[holdKey{owner, key}]; ok {
			l.removeHoldLocked(l.holds.byID[id])
		}
		return res
	}
	res.Leased = l.leaseLocked(owner, key, found[res.Blocks-1], until) == nil
	return res
}

// isOpenLocked tells whether what a block has on a drive may be read.
func (l *Ledger) isOpenLocked(id recordID) bool {
	k, _ := l.storeInLocked(id, policy.NVMe)
	return !l.stores[k].closed
}

// OnDrive are the indexes of blocks whose shard is on a drive that may be read, and not in DRAM, or still on its way there.
func (l *Ledger) OnDrive(space SpaceRef, shard uint16, hashes []byte) (at []int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.stores) == 1 {
		return nil
	}
	ids := make([]recordID, len(hashes)/kvferry.HashSize)
	l.index.findBatch(space, 0, hashes, ids)
	for i, id := range ids {
		if id == 0 || l.recs.at(id).in[policy.NVMe] == 0 {
			continue
		}
		if s := l.shardSlotLocked(id, shard, policy.DRAM); s != 0 && l.slot(s).state == SlotResident {
			continue
		}
		if s := l.shardSlotLocked(id, shard, policy.NVMe); s != 0 && l.slot(s).state == SlotResident && !l.storeOf(s).closed {
			at = append(at, i)
		}
	}
	return at
}

// ShardBytes is the length of a space's shards.
func (l *Ledger) ShardBytes(space SpaceRef) uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.spaces[space].shape.ShardBytes
}

// Missed accounts a lookup in a space that the ledger does not know: all of it is missed.
func (l *Ledger) Missed(blocks int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counts.Asked += uint64(blocks)
	l.counts.Missed += uint64(blocks)
}

// Await tells, for a shard of each block, whether it is resident or being filled, and gives a channel that is closed when the next fill of any block ends.
func (l *Ledger) Await(space SpaceRef, shard uint16, hashes []byte) (states []SlotState, changed <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	states = make([]SlotState, len(hashes)/kvferry.HashSize)
	for i := range states {
		if id := l.index.find(space, (*kvferry.Hash)(hashes[i*kvferry.HashSize:])); id != 0 {
			if s := l.shardSlotLocked(id, shard, policy.DRAM); s != 0 {
				states[i] = l.slot(s).state
			}
		}
	}
	if l.changed == nil {
		l.changed = make(chan struct{})
	}
	return states, l.changed
}

// Parents is the packed list of what comes before each of these blocks in its chain; zero where nothing does or it is not known.
func (l *Ledger) Parents(space SpaceRef, hashes []byte) []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]byte, len(hashes))
	for i := 0; i < len(hashes); i += kvferry.HashSize {
		if id := l.index.find(space, (*kvferry.Hash)(hashes[i:])); id != 0 {
			if p := l.recs.at(id).parent; p != 0 {
				copy(out[i:], l.recs.at(p).hash[:])
			}
		}
	}
	return out
}
