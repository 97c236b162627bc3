package tiers_test

import (
	"fmt"
	"maps"

	"github.com/kvferry/kvferry/tiers"
)

// folded is which blocks lie in which tier, made from the ledger's changes alone.
type folded struct {
	seq uint64
	set map[string]bool
}

func changeKey(c *tiers.Change) string { return fmt.Sprint(c.Tier, c.Space, c.Hash) }

// follow folds what has changed. A change that changes nothing is wrong: the stream tells each thing once.
func (f *folded) follow(l *tiers.Ledger) error {
	for {
		changes, _, ok := l.Changes(f.seq, 100, nil)
		if !ok {
			return fmt.Errorf("changes after %d are gone", f.seq)
		}
		if len(changes) == 0 {
			return nil
		}
		for i := range changes {
			c := &changes[i]
			if c.Seq != f.seq+1 {
				return fmt.Errorf("change %d follows %d", c.Seq, f.seq)
			}
			f.seq = c.Seq
			key := changeKey(c)
			if f.set[key] != (c.Kind == tiers.Removed) {
				return fmt.Errorf("change %d: %v %v (%v) of %v, which was there: %v", c.Seq, c.Tier, c.Kind, c.Reason, c.Hash, f.set[key])
			}
			if c.Kind == tiers.Stored {
				f.set[key] = true
			} else {
				delete(f.set, key)
			}
		}
	}
}

// compare holds what was folded against what the ledger has.
func (f *folded) compare(l *tiers.Ledger) error {
	now := map[string]bool{}
	l.Snapshot(func(part []tiers.Change) {
		for i := range part {
			now[changeKey(&part[i])] = true
		}
	})
	if !maps.Equal(now, f.set) {
		return fmt.Errorf("folded changes have %d blocks, the ledger has %d", len(f.set), len(now))
	}
	return nil
}
