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
