package tiers

import "fmt"

// SlotState is what a slot is to the ledger.
//
//	        fill            commit              evict
//	free ────────► filling ────────► resident ────────► leaving
//	 ▲                │ abort                              │
//	 │                └──────────────────────────────────► │
//	 └──────────────────────────── quiet ──────────────────┘
//
// A slot is leaving until nothing reads or writes it any more; only then it is free, and may be filled again.
type SlotState uint8

// The states, as they also stand in the slot's header (WIRE.md).
const (
	SlotFree SlotState = iota
	SlotFilling
	SlotResident
	SlotLeaving
	numSlotStates
)

func (s SlotState) String() string {
	switch s {
	case SlotFree:
		return "free"
	case SlotFilling:
		return "filling"
	case SlotResident:
		return "resident"
	case SlotLeaving:
		return "leaving"
	}
	return fmt.Sprintf("slot(%d)", uint8(s))
}

type slotEvent uint8

const (
	slotFill slotEvent = iota
	slotCommit
	slotAbort
	slotEvict
	slotQuiet
	numSlotEvents
)

func (e slotEvent) String() string {
	return [...]string{"fill", "commit", "abort", "evict", "quiet"}[e]
}

// next is the one transition function of slots. It answers false for a pair that must not happen.
func (s SlotState) next(e slotEvent) (SlotState, bool) {
	switch {
	case s == SlotFree && e == slotFill:
		return SlotFilling, true
	case s == SlotFilling && e == slotCommit:
		return SlotResident, true
	case s == SlotFilling && e == slotAbort, s == SlotResident && e == slotEvict:
		return SlotLeaving, true
	case s == SlotLeaving && e == slotQuiet:
		return SlotFree, true
	}
	return s, false
}
