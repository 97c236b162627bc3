package session

import (
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers"
)

const (
	// lookupsKept are remembered for people who ask why something was a hit or a miss.
	lookupsKept = 4096
	// followersMax may be told of look-ups at a time; each may be so much behind.
	followersMax      = 4
	followerLookups   = 4096
	followerHashesMax = 32 << 20
	reasonBytesMax    = 512 // of a peer's
)

// Lookup is what became of a Match.
type Lookup struct {
	At                  time.Time
	RequestID, Instance string
	Space               kvferry.SpaceID
	Asked               int // blocks; found are DRAM + NVMe + Peer
	DRAM, NVMe, Peer    int
	FirstMissed         kvferry.Hash // zero: none was
	Reason              string       // why it ended where it did
}

// Followed is a look-up as those see it who follow them.
type Followed struct {
	Lookup
	BlockTokens uint32 // 0: not known
	Hashes      []byte // all that were asked for, packed; never modified
	Dropped     uint64 // look-ups before this one that were not told, because the follower was too slow
}

// lookups remembers the last look-ups and tells followers. It has a mutex of its own: no look-up waits for who reads it.
type lookups struct {
	following atomic.Int32 // followers; read without the mutex

	mu        sync.Mutex
	ring      []Lookup
	next      int
	followers []*Follower
}

// Follower is told of all look-ups from now on.
type Follower struct {
	wake chan struct{}

	of      *lookups
	pending []Followed // guarded by of.mu, as the rest
	bytes   int
	dropped uint64
}

func (l *lookups) add(k Lookup, blockTokens func() uint32, hashes []byte) {
	follow := l.following.Load() > 0
	var f Followed
	if follow { // else nothing is copied
		f = Followed{Lookup: k, BlockTokens: blockTokens(), Hashes: slices.Clone(hashes)}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.ring) < lookupsKept {
		l.ring = append(l.ring, k)
	} else {
		l.ring[l.next] = k
		l.next = (l.next + 1) % lookupsKept
	}
	if follow {
		for _, o := range l.followers {
			o.tellLocked(f)
		}
	}
}

func (f *Follower) tellLocked(k Followed) {
	if len(f.pending) >= followerLookups || (len(f.pending) > 0 && f.bytes+len(k.Hashes) > followerHashesMax) {
		f.dropped++
		return
	}
	k.Dropped, f.dropped = f.dropped, 0
	f.pending = append(f.pending, k)
	f.bytes += len(k.Hashes)
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// Wake tells that Take has something.
func (f *Follower) Wake() <-chan struct{} { return f.wake }

// Take is what has come since the last.
func (f *Follower) Take() []Followed {
	f.of.mu.Lock()
	defer f.of.mu.Unlock()
	out := f.pending
	f.pending, f.bytes = nil, 0
	return out
}

// Close ends it.
func (f *Follower) Close() {
	f.of.mu.Lock()
	defer f.of.mu.Unlock()
	f.of.followers = slices.DeleteFunc(f.of.followers, func(o *Follower) bool { return o == f })
	f.of.following.Store(int32(len(f.of.followers)))
}

// Follow begins to tell of look-ups.
func (m *Manager) Follow() (*Follower, error) {
	l := &m.lookups
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.followers) >= followersMax {
		return nil, fieldErr(ErrLimit, "trace", "%d follow already", followersMax)
	}
	f := &Follower{wake: make(chan struct{}, 1), of: l}
	l.followers = append(l.followers, f)
	l.following.Store(int32(len(l.followers)))
	return f, nil
}

// Lookups are up to limit look-ups of a request, of the last ones, newest first.
func (m *Manager) Lookups(request string, limit int) (out []Lookup) {
	l := &m.lookups
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range l.ring {
		k := &l.ring[(l.next-1-i+2*len(l.ring))%len(l.ring)]
		if k.RequestID == request && len(out) < limit {
			out = append(out, *k)
		}
	}
	return out
}

// looked notes a look-up, with its result out; drive tells that what is on a drive was not worth reading.
func (s *Session) looked(at time.Time, r Match, out MatchResult, res tiers.MatchResult, known, slow bool) {
	k := Lookup{At: at, RequestID: r.RequestID, Instance: s.hello.Instance, Space: r.Space, Asked: len(r.Hashes) / kvferry.HashSize, DRAM: res.DRAM, NVMe: res.NVMe, Peer: out.Peer}
	switch {
	case k.Asked == out.Blocks:
		k.Reason = "all that was asked for was found"
	case !known:
		k.Reason = "nothing of this space is on the node"
	case slow:
		k.Reason = "the next block is on a drive, and computing it was estimated to be faster than reading"
	default:
		k.Reason = "the next block was in no tier of this node"
	}
	if k.Asked > out.Blocks {
		k.FirstMissed = hashAt(r.Hashes, out.Blocks)
	}
	if out.Reason != "" {
		k.Reason += "; of other nodes: " + strings.ToValidUTF8(out.Reason[:min(len(out.Reason), reasonBytesMax)], "")
	}
	s.m.lookups.add(k, func() uint32 {
		space, _ := s.m.spaces.find(r.Space)
		return space.BlockTokens
	}, r.Hashes)
}
