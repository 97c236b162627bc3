package handoff

import (
	"bytes"
	"crypto/subtle"
	"fmt"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers"
)

// OfferState is where an offer is in its life.
//
//	        claim             claims of all ranks are done, lifetime, session ended
//	open ──────────► claimed ───────────────────────────────────────────► ended(reason)
//	  └──────────────────────────────────────────────────────────────────►
//
// A claimed offer may be claimed again by the same instance: by its other ranks, or by a retry. When its last claim has failed, it lives for as long as that would have, and no longer: its engine
// may be keeping blocks for it, and who has failed has most likely computed them. Ended absorbs.
type OfferState uint8

// The states.
const (
	Open OfferState = iota
	Claimed
	Ended
	numOfferStates
)

func (s OfferState) String() string {
	switch s {
	case Open:
		return "open"
	case Claimed:
		return "claimed"
	case Ended:
		return "ended"
	}
	return fmt.Sprintf("offer(%d)", uint8(s))
}

type offerEvent uint8

const (
	evClaim offerEvent = iota
	evEnd
	numOfferEvents
)

func (e offerEvent) String() string { return [...]string{"claim", "end"}[e] }

// next is the one transition function of offers. It answers false for a pair that must not happen.
func (s OfferState) next(e offerEvent) (OfferState, bool) {
	switch {
	case (s == Open || s == Claimed) && e == evClaim:
		return Claimed, true
	case (s == Open || s == Claimed) && e == evEnd:
		return Ended, true
	}
	return s, false
}

// Offer is a prompt's KV as a scheduler registered it.
type Offer struct {
	ID        [16]byte
	Secret    [16]byte
	Space     kvferry.SpaceID
	RequestID string
	Instance  string
	TP        uint32
	Hashes    []byte // packed
	Tokens    uint32
	Lifetime  time.Duration
	OpenEnded bool // its prompt is still being computed
	Blocks    LentBlocks
}

// LentBlocks are the engine's blocks that hold an offer's KV, one a hash, and the generations that they had when it was made. They are the same on every rank.
type LentBlocks struct {
	Region      uint32
	Offered     time.Time // set by the registry
	IDs         []uint32  // nil: nothing is lent
	Generations []uint64
}

// offer is an Offer in the table. Registry.mu guards what changes.
type offer struct {
	Offer
	owner   tiers.Owner // session that registered it
	made    time.Time
	until   time.Time
	comes   time.Time // until then, blocks may still come; zero: as long as it is open-ended
	blocks  int
	state   OfferState
	reason  string
	ended   time.Time
	claimer string          // instance; set by the first claim
	claims  int             // alive
	reading map[uint32]int  // of them, by rank
	dropped bool            // its last claim has failed
	ranks   map[uint32]bool // that have been served whole
	told    map[uint32]bool // ranks whose workers know that nobody reads their blocks any more
	router  bool            // the router chose its id: it may be claimed without naming the epoch
	changed chan struct{}   // closed when what it offers changes, and when it ends
	path    string
	lent    bool
}

func (o *offer) changeState(e offerEvent) {
	next, ok := o.state.next(e)
	if !ok {
		panic(fmt.Sprintf("handoff: %v of an offer that is %v", e, o.state))
	}
	o.state = next
}

// drop shortens the life of an offer whose last claim has failed.
func (o *offer) drop(until time.Time) {
	if o.state == Claimed && o.claims == 0 && until.Before(o.until) {
		o.until, o.dropped = until, true
	}
}

// overAt tells whether its time is over.
func (o *offer) overAt(now time.Time) bool { return o.claims == 0 && !o.until.After(now) }

// lapse is why it ends then.
func (o *offer) lapse() string {
	if o.dropped {
		return "not claimed again"
	}
	return "expired"
}

func (o *offer) secretIs(s [16]byte) bool { return subtle.ConstantTimeCompare(o.Secret[:], s[:]) == 1 }

// find is where these hashes are in the offer, which has them in this order. It answers the index of the first that is not.
func (o *offer) find(hashes []byte) (at []int, missing int, ok bool) {
	at = make([]int, 0, len(hashes)/kvferry.HashSize)
	k := 0
	for i := 0; i < len(hashes); i += kvferry.HashSize {
		for k < len(o.Hashes) && !bytes.Equal(o.Hashes[k:k+kvferry.HashSize], hashes[i:i+kvferry.HashSize]) {
			k += kvferry.HashSize
		}
		if k == len(o.Hashes) {
			return nil, i / kvferry.HashSize, false
		}
		at = append(at, k/kvferry.HashSize)
		k += kvferry.HashSize
	}
	return at, 0, true
}

// wakeLocked tells those who wait for blocks of the offer.
func (o *offer) wakeLocked() {
	close(o.changed)
	o.changed = make(chan struct{})
}

// View is an offer as people see it.
type View struct {
	Offer          // without its hashes and secret
	Size      int  // blocks
	Lent      bool // its engine keeps blocks for it, or did
	State     OfferState
	Reason    string
	Age       time.Duration
	ExpiresIn time.Duration
	Claimer   string
	Path      string
}
