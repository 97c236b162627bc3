package handoff

import "testing"

func TestOfferTransitions(t *testing.T) {
	legal := map[OfferState]map[offerEvent]OfferState{
		Open:    {evClaim: Claimed, evEnd: Ended},
		Claimed: {evClaim: Claimed, evEnd: Ended},
		Ended:   {},
	}
	for s := range numOfferStates {
		for e := range numOfferEvents {
			want, ok := legal[s][e]
			if !ok {
				want = s
			}
			if got, gotOK := s.next(e); got != want || gotOK != ok {
				t.Errorf("%v + %v: %v %v, want %v %v", s, e, got, gotOK, want, ok)
			}
		}
	}
}

func TestOfferHas(t *testing.T) {
	list := func(names ...byte) (b []byte) {
		for _, n := range names {
			var h [32]byte
			h[0] = n
			b = append(b, h[:]...)
		}
		return b
	}
	o := &offer{Offer: Offer{Hashes: list(1, 2, 3, 4)}}
	for _, c := range []struct {
		ask     []byte
		missing int
		ok      bool
	}{
		{list(), 0, true}, {list(1, 2, 3, 4), 0, true}, {list(2, 4), 0, true}, {list(4), 0, true},
		{list(5), 0, false}, {list(1, 5), 1, false}, {list(3, 2), 1, false}, {list(1, 1), 1, false}, {list(1, 2, 3, 4, 4), 4, false},
	} {
		if _, missing, ok := o.find(c.ask); missing != c.missing || ok != c.ok {
			t.Errorf("%v: %d %v, want %d %v", c.ask, missing, ok, c.missing, c.ok)
		}
	}
}
