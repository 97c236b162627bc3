package sim

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/handoff"
)

// book is what the simulation itself knows of offers and of claims that come from outside: plain maps beside the registries.
type book struct {
	mu     sync.Mutex
	offers map[[16]byte]*bookOffer
	claims map[[16]byte]*bookClaim // by key
	finds  int
	names  map[bookName][16]byte // of the claims that are alive, and of some that are not
}

type bookOffer struct {
	handoff.Ticket
	label   string // what the seed knows it by
	router  bool   // a ticket need not name the epoch
	ranks   uint32
	hashes  []byte
	claimer string          // the first instance that got it
	ended   map[uint32]bool // ranks whose claims ended well
}

// bookName is what a claim must be one by.
type bookName struct {
	epoch    kvferry.Epoch
	offer    [16]byte
	label    string // of the offer
	instance string
	rank     uint32
	id       uint64
}

func (n bookName) String() string {
	return fmt.Sprintf("%s %s %d %d", n.label, n.instance, n.rank, n.id)
}

type bookClaim struct {
	name  bookName
	until time.Time
	ended bool
	// ending: it is being ended at this moment, and whoever asks again may get it or another one.
	ending bool
	lies   map[uint64][]byte // what must lie at an offset as long as it is read under this claim
	lent   map[uint64][]byte // what lies at an offset unless its engine has used the block again
}

func newBook() *book {
	return &book{offers: map[[16]byte]*bookOffer{}, claims: map[[16]byte]*bookClaim{}, names: map[bookName][16]byte{}}
}

// nameOf is a claim's name. Of an offer that the router named, the epoch is the one that its node has now.
func (b *book) nameOf(q handoff.ClaimRequest) bookName {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.nameOfLocked(q)
}

func (b *book) nameOfLocked(q handoff.ClaimRequest) bookName {
	n := bookName{epoch: q.Epoch, offer: q.OfferID, instance: q.Instance, rank: q.Rank, id: q.ClaimID}
	if o := b.offers[q.OfferID]; o != nil {
		n.label, n.epoch = o.label, o.Epoch
	}
	return n
}

// claimed writes down an answer of a registry, and says whether it is one to a repeated claim and what is wrong with it.
func (b *book) claimed(d *daemon, q handoff.ClaimRequest, a handoff.ClaimAnswer) (again bool, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	o := b.offers[q.OfferID]
	switch {
	case o == nil || o.Epoch != d.epoch || q.Epoch != d.epoch && !(o.router && q.Epoch == kvferry.Epoch{}):
		return false, fmt.Errorf("a claim of an offer of another epoch was granted")
	case o.Secret != q.Secret || o.ranks != q.TP || o.Space != q.Space || !inOrder(q.Hashes, o.hashes):
		return false, fmt.Errorf("a claim was granted that does not fit its offer")
	case o.claimer != "" && o.claimer != q.Instance:
		return false, fmt.Errorf("offer %x was granted to %s and to %s", o.OfferID[:4], o.claimer, q.Instance)
	}
	o.claimer = q.Instance
	now, name := time.Now(), b.nameOfLocked(q)
	old := b.claims[b.names[name]]
	again = old != nil && !old.ended && !old.ending && old.until.After(now)
	if again && b.names[name] != a.Key {
		return false, fmt.Errorf("claim %v was made twice", name)
	}
	c := &bookClaim{name: name, until: now.Add(a.Lease), lies: map[uint64][]byte{}, lent: map[uint64][]byte{}}
	if again {
		maps.Copy(c.lent, old.lent)
	}
	for i, st := range a.Status {
		want := content(kvferry.Hash(q.Hashes[i*kvferry.HashSize:]), q.TP, q.Rank)
		if st == handoff.InLent {
			c.lent[a.Offsets[i]] = want
		}
		if st != handoff.Stored {
			continue
		}
		if string(d.memory.Bytes[a.Offsets[i]:][:a.ShardBytes]) != string(want) && !d.node.flipped.has(a.Offsets[i]) {
			return false, fmt.Errorf("claim %v points at wrong bytes", name)
		}
		c.lies[a.Offsets[i]] = want
	}
	b.claims[a.Key], b.names[name] = c, a.Key
	return again, nil
}

// inOrder tells whether some hashes are all in a longer list, in its order.
func inOrder(some, all []byte) bool {
	for len(some) > 0 && len(all) > 0 {
		if bytes.Equal(some[:kvferry.HashSize], all[:kvferry.HashSize]) {
			some = some[kvferry.HashSize:]
		}
		all = all[kvferry.HashSize:]
	}
	return len(some) == 0
}

// lent tells whether what was confirmed to be at an offset is what was offered there.
func (b *book) lent(key [16]byte, offset uint64, crc uint32) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.claims[key]
	return c != nil && crc == crcOf(c.lent[offset])
}

// found writes down an offer that a look-up made.
func (b *book) found(address string, q handoff.FindRequest, a handoff.FindAnswer) {
	b.mu.Lock()
	defer b.mu.Unlock()
	t := handoff.Ticket{Addresses: []string{address}, OfferID: a.OfferID, Secret: a.Secret, Epoch: a.Epoch, Space: q.Space}
	b.finds++
	b.offers[a.OfferID] = &bookOffer{Ticket: t, label: fmt.Sprintf("find %d", b.finds), ranks: q.TP, hashes: q.Hashes[:a.Blocks*kvferry.HashSize], claimer: q.Instance, ended: map[uint32]bool{}}
}

// renewed: a claim was renewed or read under.
func (b *book) renewed(key [16]byte) *bookClaim {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.claims[key]
	if c != nil && !c.ended {
		c.until = time.Now().Add(claimLease)
	}
	return c
}

// end has a registry end a claim.
func (b *book) end(d *daemon, key [16]byte, reason string) {
	b.mu.Lock()
	if c := b.claims[key]; c != nil {
		c.ending = true
	}
	b.mu.Unlock()
	d.registry.EndClaim(key, reason)
	b.ended(key, reason)
}

func (b *book) ended(key [16]byte, reason string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.claims[key]
	if c == nil || c.ended || !c.until.After(time.Now()) {
		return
	}
	c.ended = true
	if reason == "" {
		b.offers[c.name.offer].ended[c.name.rank] = true
	}
}

// done tells whether every rank's claim of an offer has ended well, and none is alive.
func (b *book) done(offer [16]byte, then time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range b.claims {
		if c.name.offer == offer && !c.ended && c.until.After(then) {
			return false
		}
	}
	o := b.offers[offer]
	return o != nil && len(o.ended) == int(o.ranks)
}

// alive is how many claims of an epoch had not ended at a time.
func (b *book) alive(epoch kvferry.Epoch, then time.Time) (n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range b.claims {
		if c.name.epoch == epoch && !c.ended && c.until.After(then) {
			n++
		}
	}
	return n
}

// name is what a claim's key stands for: keys are random, names are the seed's.
func (b *book) name(key [16]byte) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c := b.claims[key]; c != nil {
		return c.name.String()
	}
	return "nothing"
}

// sorted are a map's keys in their order: what a seed does must not hang on Go's.
func sorted[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }

// routed: the router has named an offer.
func (b *book) routed(offer [16]byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.offers[offer].router = true
}

func (b *book) offer(t handoff.Ticket, ranks uint32, hashes []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.offers[t.OfferID] = &bookOffer{Ticket: t, label: fmt.Sprintf("%x", t.OfferID[:4]), ranks: ranks, hashes: hashes, ended: map[uint32]bool{}}
}
