package sim

import (
	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers"
)

// blockName is a block of a node.
type blockName struct {
	space kvferry.SpaceID
	hash  kvferry.Hash
}

// fold is which blocks lie where on a node, made from its ledger's stream of changes alone.
type fold struct {
	seq      uint64
	in       map[blockName]map[kvferry.Tier]bool
	parent   map[blockName]blockName
	children map[blockName]int
}

func newFold() *fold {
	return &fold{in: map[blockName]map[kvferry.Tier]bool{}, parent: map[blockName]blockName{}, children: map[blockName]int{}}
}

// follow folds what has changed since the last time, and looks at each change: it must change something, and no policy lets a block go before its children.
func (n *node) follow() {
	f := n.daemon.fold
	for {
		changes, _, ok := n.daemon.ledger.Changes(f.seq, 256, nil)
		if !ok {
			n.w.fatalf("%s: changes after %d are lost", n.name, f.seq)
		}
		if len(changes) == 0 {
			return
		}
		for i := range changes {
			n.foldOne(f, &changes[i])
		}
	}
}

func (n *node) foldOne(f *fold, c *tiers.Change) {
	f.seq = c.Seq
	b := blockName{c.Space, c.Hash}
	if f.in[b][c.Tier] != (c.Kind == tiers.Removed) {
		n.w.fatalf("%s: change %d changes nothing: %v %v of %v", n.name, c.Seq, c.Tier, c.Kind, c.Hash)
	}
	if c.Kind == tiers.Stored {
		if f.in[b] == nil {
			f.in[b] = map[kvferry.Tier]bool{}
			if !c.Parent.IsZero() {
				f.parent[b] = blockName{c.Space, c.Parent}
				f.children[f.parent[b]]++
			}
		}
		f.in[b][c.Tier] = true
		return
	}
	delete(f.in[b], c.Tier)
	if len(f.in[b]) > 0 {
		return
	}
	delete(f.in, b)
	if p, ok := f.parent[b]; ok {
		f.children[p]--
		delete(f.parent, b)
	}
	if c.Reason == tiers.Evicted && f.children[b] > 0 {
		n.w.fatalf("%s: block %v was evicted before %d children of it", n.name, c.Hash, f.children[b])
	}
	n.w.saw("removed: "+c.Reason.String(), 1)
}

// checkFold compares what was folded with the ledger.
func (n *node) checkFold() {
	if n.daemon == nil {
		return
	}
	n.follow()
	places, same := 0, true
	n.daemon.ledger.Snapshot(func(part []tiers.Change) {
		places += len(part)
		for i := range part {
			same = same && n.daemon.fold.in[blockName{part[i].Space, part[i].Hash}][part[i].Tier]
		}
	})
	folded := 0
	for _, in := range n.daemon.fold.in {
		folded += len(in)
	}
	if !same || folded != places {
		n.w.fatalf("%s: the folded changes have %d places, the ledger has %d", n.name, folded, places)
	}
}
