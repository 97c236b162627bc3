package tiers

import (
	"encoding/binary"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers/policy"
)

// mayLeaveLocked tells whether a block may leave a tier: nothing holds it, no child of it lies there, and, where this is its only copy, nothing descends from it at all. The only copy in DRAM of a block whose
// descendants are on a drive is among those that may leave too, since it may be moved there: see orphansLocked.
func (l *Ledger) mayLeaveLocked(id recordID, tier int) bool {
	r := l.recs.at(id)
	if r.leases > 0 || r.filling[tier] > 0 || l.recs.aside(id).children[tier] > 0 {
		return false
	}
	if l.orphansLocked(id, tier) && (tier == policy.NVMe || len(l.stores) == 1) {
		return false
	}
	some := false
	for s := r.slots; s != 0; s = l.slot(s).next {
		if l.storeOf(s).tier != tier {
			continue
		}
		if m := l.slot(s); m.pins > 0 || m.state != SlotResident {
			return false
		}
		some = true
	}
	return some
}

// orphansLocked tells whether descendants of a block could not be matched any more if it left a tier.
func (l *Ledger) orphansLocked(id recordID, tier int) bool {
	r := l.recs.at(id)
	return r.children > 0 && !l.isIn(r, policy.NVMe+policy.DRAM-tier)
}

// leafChangedLocked puts a block into the sets of those that may leave, or takes it out, after something that decides it has changed.
func (l *Ledger) leafChangedLocked(id recordID) {
	meta := l.Meta(id)
	for tier := range policy.NumTiers {
		may, is := l.mayLeaveLocked(id, tier), meta.Pos[tier] >= 0
		if may == is {
			continue
		}
		if c := l.classOfLocked(id, tier); may {
			c.leaves.Add(id)
		} else {
			c.leaves.Remove(id)
		}
	}
}

// classOfLocked is the class of a block's slots in a tier, where it has some.
func (l *Ledger) classOfLocked(id recordID, tier int) *class {
	k, _ := l.storeInLocked(id, tier)
	return l.class(l.stores[k], l.spaces[l.recs.at(id).space].slotBytes)
}

func hashLow(h *kvferry.Hash) uint64 { return binary.LittleEndian.Uint64(h[:]) }
