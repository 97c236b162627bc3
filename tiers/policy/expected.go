package policy

// expectedMax is how many requests may be under way: from a look-up to the store of the first block that it missed.
const expectedMax = 4096

// expected are the first blocks that look-ups have missed, with the class of the request: blocks come one by one, and nothing else says what they came with. A new one takes the place of another one.
type expected [expectedMax]struct {
	hash  uint64
	class uint8
}

func (e *expected) put(hash uint64, class uint8) {
	s := &e[hash*0x9e3779b97f4a7c15>>52]
	s.hash, s.class = hash, class
}

func (e *expected) find(hash uint64) (class uint8, ok bool) {
	s := &e[hash*0x9e3779b97f4a7c15>>52]
	return s.class, s.hash == hash && hash != 0
}
