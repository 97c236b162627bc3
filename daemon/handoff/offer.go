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
//	        claim             last claim ended, lifetime, session ended
//	open ──────────► claimed ───────────────────────────────────────────► ended(reason)
//	  └──────────────────────────────────────────────────────────────────►
//
// A claimed offer may be claimed again by the same instance: by its other ranks, or by a retry. Ended absorbs.
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
}

// offer is an Offer in the table. Registry.mu guards what changes.
type offer struct {
	Offer
	owner   tiers.Owner // session that registered it
	made    time.Time
	until   time.Time
	blocks  int
	state   OfferState
	reason  string
	ended   time.Time
	claimer string          // instance; set by the first claim
	claims  int             // alive
	ranks   map[uint32]bool // that have been served whole
	path    string
}

func (o *offer) changeState(e offerEvent) {
	next, ok := o.state.next(e)
	if !ok {
		panic(fmt.Sprintf("handoff: %v of an offer that is %v", e, o.state))
	}
	o.state = next
}

func (o *offer) secretIs(s [16]byte) bool { return subtle.ConstantTimeCompare(o.Secret[:], s[:]) == 1 }

// has tells whether these hashes are some of the offer's, in its order. It answers the index of the first that is not.
func (o *offer) has(hashes []byte) (missing int, ok bool) {
	at := 0
	for i := 0; i < len(hashes); i += kvferry.HashSize {
		for at < len(o.Hashes) && !bytes.Equal(o.Hashes[at:at+kvferry.HashSize], hashes[i:i+kvferry.HashSize]) {
			at += kvferry.HashSize
		}
		if at == len(o.Hashes) {
			return i / kvferry.HashSize, false
		}
		at += kvferry.HashSize
	}
	return 0, true
}

// View is an offer as people see it.
type View struct {
	Offer     // without its hashes and secret
	Blocks    int
	State     OfferState
	Reason    string
	Age       time.Duration
	ExpiresIn time.Duration
	Claimer   string
	Path      string
}
