package tiers

import "testing"

// TestSlotTransitions goes through every pair of state and event: what is not a line of the diagram must be refused and change nothing.
func TestSlotTransitions(t *testing.T) {
	legal := map[SlotState]map[slotEvent]SlotState{
		SlotFree:     {slotFill: SlotFilling},
		SlotFilling:  {slotCommit: SlotResident, slotAbort: SlotLeaving},
		SlotResident: {slotEvict: SlotLeaving},
		SlotLeaving:  {slotQuiet: SlotFree},
	}
	for s := range numSlotStates {
		for e := range numSlotEvents {
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

func TestIllegalSlotEventPanics(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	l := &Ledger{}
	l.slotEventLocked(&slotInfo{state: SlotFree}, slotCommit)
}
