package tiers

import (
	"maps"
	"slices"
	"time"

	"github.com/kvferry/kvferry/tiers/policy"
)

// Down says what goes from DRAM to the drives, and when.
type Down struct {
	Idle time.Duration // what was not used for so long is copied; 0: nothing
	Move bool          // and leaves DRAM then
	High float64       // of the pool: when more is used,
	Low  float64       // blocks leave, in the policy's order, until this is
}

// handSlots bounds the slots that one PlanDown looks at for idle ones: about a millisecond.
const handSlots = 1 << 15

// leaveMax bounds the blocks that leave DRAM in one PlanDown, for the same reason.
const leaveMax = 4096

// walkedMax bounds the ancestors that are looked at before the next part.
const walkedMax = 1 << 18

// budget bounds what is written to the drives over time: a bucket that holds an hour's share. It begins with a minute's: daemons that die again and again must not begin with a full one each time.
type budget struct {
	rate   float64 // bytes/s; 0: no bound
	tokens float64
	last   time.Time
}

// SetWriteBudget bounds what PlanDown has written to the drives, in bytes a day; 0: no bound. When it gets short, only blocks that were used again or that several prompts share are admitted.
func (l *Ledger) SetWriteBudget(now time.Time, bytesPerDay uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	rate := float64(bytesPerDay) / (24 * 3600)
	l.budget = budget{rate: rate, tokens: rate * 60, last: now}
}

// admitLocked decides whether a block may be written.
func (l *Ledger) admitLocked(now time.Time, id recordID) bool {
	b := &l.budget
	if b.rate == 0 {
		return true
	}
	burst := b.rate * 3600
	if d := now.Sub(b.last); d > 0 {
		b.tokens = min(burst, b.tokens+d.Seconds()*b.rate)
	}
	b.last = now
	r := l.recs.at(id)
	return b.tokens > burst/2 || (b.tokens > 0 && (r.used || r.children > 1))
}

// plan collects moves.
type plan struct {
	l      *Ledger
	now    time.Time
	limit  int
	out    Moves
	held   bool // something was not planned because too much is being moved already
	left   int  // blocks that have left DRAM
	walked int  // ancestors that were looked at
	// victims are, for what is idle, the blocks that are to leave next on the drives, until something has: a look for one costs some microseconds.
	victims map[*class]recordID
	byHand  bool // somebody wants it down, whatever it is worth
}

// PlanDown makes room in DRAM where less than wanted is free, and plans up to limit copies to the drives: first what has to leave, then what is idle. What lies on a drive already just leaves.
func (l *Ledger) PlanDown(now time.Time, d Down, limit int) Moves {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.now = now.UnixNano()
	p := &plan{l: l, now: now, limit: min(limit, l.mayMoveLocked())}
	if !l.driveOpenLocked() {
		return p.out
	}
	classes := l.stores[poolStore].classes
	for _, slotBytes := range slices.Sorted(maps.Keys(classes)) { // in their order: what leaves does not hang on chance
		p.relieve(d, classes[slotBytes])
	}
	p.idle(d)
	return p.out
}

// movingShare is the part of the pool that may be pinned by moves, so that stores find room beside them.
const movingShare = 4

// mayMoveLocked is how many more shards may be moved now: of a pool of three slots one, too.
func (l *Ledger) mayMoveLocked() int { return max(l.poolSlotsLocked()/movingShare, 1) - l.moving }

func (l *Ledger) poolSlotsLocked() (n int) {
	st := l.stores[poolStore]
	for _, c := range st.classes {
		n += c.slots
	}
	return n + st.freeSlabs*movingShare // about: how many slots a free slab will have is not known
}

func (l *Ledger) driveOpenLocked() bool {
	for _, st := range l.stores[1:] {
		if !st.closed {
			return true
		}
	}
	return false
}

// relieve has blocks of a class leave DRAM until enough is free.
func (p *plan) relieve(d Down, c *class) {
	l := p.l
	if c.slots == 0 {
		return
	}
	spare := c.store.freeSlabs * c.store.slots.SlotsPerSlab(c.slotBytes)
	total := float64(c.slots + spare)
	used := float64(c.slots - len(c.free) - c.leaving)
	if used <= d.High*total && !c.relieving {
		return
	}
	c.relieving = false
	for excess := used - d.Low*total; excess > 0 && len(p.out.List) < p.limit; {
		if p.left >= leaveMax || p.walked >= walkedMax {
			p.out.More, c.relieving = true, true
			return
		}
		id, ok := c.leaves.Next(p.now.UnixNano())
		if !ok {
			return
		}
		r := l.recs.at(id)
		slots := float64(r.in[policy.DRAM])
		orphans := l.orphansLocked(id, policy.DRAM)
		switch {
		case l.isIn(r, policy.NVMe), !l.isIn(r, policy.DRAM):
			p.leave(id)
		case !orphans && !l.admitLocked(p.now, id):
			l.counts.NotAdmitted++
			p.leave(id)
		default:
			switch p.chain(id, true) {
			case full:
				return
			case notWorth:
				if orphans || l.Meta(id).Pos[policy.DRAM] < 0 {
					return
				}
				l.counts.NotWorth++
				p.leave(id)
			}
		}
		excess -= slots
	}
}

func (p *plan) leave(id recordID) {
	p.left++
	p.l.leaveLocked(id, policy.DRAM)
}

// idle goes on with looking for blocks that nobody has used for a while.
func (p *plan) idle(d Down) {
	l := p.l
	if d.Idle <= 0 {
		return
	}
	st := l.stores[poolStore]
	before := p.now.Add(-d.Idle).UnixNano()
	p.victims = map[*class]recordID{}
	for looked, turned := 0, 0; looked+p.walked < handSlots && turned <= st.slabs && len(p.out.List) < p.limit && p.left < leaveMax && !p.held; {
		if l.hand.slab >= st.slabs {
			l.hand = hand{}
		}
		s := &l.slabs[st.first+l.hand.slab]
		if l.hand.slot >= len(s.slots) {
			l.hand = hand{slab: l.hand.slab + 1}
			turned++
			continue
		}
		if m := &s.slots[l.hand.slot]; m.state == SlotResident {
			p.idleBlock(d, m.block, before)
		}
		l.hand.slot++
		looked++
	}
}

// hand is where the look for idle blocks goes on.
type hand struct{ slab, slot int }

func (p *plan) idleBlock(d Down, id recordID, before int64) {
	l := p.l
	r := l.recs.at(id)
	if r.stamp > before || !l.isIn(r, policy.DRAM) {
		return
	}
	if !l.isIn(r, policy.NVMe) {
		if r.filling[policy.NVMe] > 0 {
			return
		}
		if !l.admitLocked(p.now, id) {
			l.counts.NotAdmitted++
			return
		}
		if k, ok := l.driveForLocked(id); ok && p.worth(l.class(l.stores[k], l.spaces[r.space].slotBytes), id, !d.Move) { // else its ancestors need not be looked at
			p.chain(id, d.Move)
		}
		return
	}
	for d.Move && id != 0 && p.left < leaveMax { // what was copied while it had children leaves after them
		r := l.recs.at(id)
		parent := r.parent
		if r.stamp > before || l.Meta(id).Pos[policy.DRAM] < 0 || !l.isIn(r, policy.NVMe) || !l.isOpenLocked(id) { // or its drive is in trouble: idle is no reason to lose it
			return
		}
		p.leave(id)
		id = parent
	}
}

// worth tells whether a drive's class has room for a block, or something that is to leave before it. What stays in DRAM takes nobody's place that was used later, whatever the policy says: else what is idle in
// DRAM and what lies on a full drive would take each other's place for ever.
func (p *plan) worth(c *class, id recordID, stays bool) bool {
	l := p.l
	if p.byHand || len(c.free) > 0 || c.store.freeSlabs > 0 {
		return true
	}
	now := p.now.UnixNano()
	victim, ok := p.victims[c]
	if !ok {
		if victim, ok = c.leaves.Next(now); !ok {
			return true // allocateLocked says so
		}
		if p.victims != nil {
			p.victims[c] = victim
		}
	}
	switch {
	case stays:
		return l.Stamp(victim) < l.Stamp(id)
	}
	return l.policy.Before(now, l, victim, id)
}

// planned is what became of a block in a plan.
type planned uint8

const (
	done     planned = iota
	notWorth         // all that is on its drive is worth more
	full             // no drive takes more
)

// chain plans the copy of a block and, before it, of its ancestors that are not on a drive: a child without its parent is useless. Where that is more than there is room for in the plan, the first ones go first.
func (p *plan) chain(id recordID, leaves bool) planned {
	l := p.l
	path := []recordID{id}
	for a := l.recs.at(id).parent; a != 0 && len(path) < chainMax; a = l.recs.at(a).parent {
		if r := l.recs.at(a); l.isIn(r, policy.NVMe) || r.filling[policy.NVMe] > 0 || !l.isIn(r, policy.DRAM) {
			break
		}
		path = append(path, a)
	}
	p.walked += len(path)
	for i := len(path) - 1; i >= 0; i-- {
		if len(p.out.List) >= p.limit {
			break
		}
		if r := p.block(path[i], leaves && i == 0); r != done {
			return r
		}
	}
	return done
}

// block plans the copies of a block's shards that are not on a drive.
func (p *plan) block(id recordID, leaves bool) planned {
	l := p.l
	k, ok := l.driveForLocked(id)
	if !ok {
		return full
	}
	l.lastDrive = int(k) - 1
	r := l.recs.at(id)
	e := &l.spaces[r.space]
	c, memory := l.class(l.stores[k], e.slotBytes), l.classOfLocked(id, policy.DRAM)
	leaf := l.Meta(id).Pos[policy.DRAM] >= 0
	if leaf && memory.held >= memory.leaves.Len() { // what is moved cannot leave meanwhile: stores must find others that can
		p.held = true
		return full
	}
	if leaves {
		memory.leaving += int(r.in[policy.DRAM])
	}
	n, result := 0, full
	for s := r.slots; s != 0; s = l.slot(s).next {
		m := l.slot(s)
		if l.storeOf(s).tier != policy.DRAM || m.state != SlotResident || m.pins == pinsMax || l.shardSlotLocked(id, uint16(m.shard), policy.NVMe) != 0 {
			continue
		}
		l.pinMoveLocked(s) // before room is made: it must not be what leaves
		if !p.worth(c, id, !leaves) {
			l.unpinMoveLocked(s)
			result = notWorth
			break
		}
		d, ok := l.allocateLocked(p.now.UnixNano(), c)
		clear(p.victims)
		if !ok {
			l.unpinMoveLocked(s)
			break
		}
		move := Move{From: l.placeLocked(s, e.shape.ShardBytes), Leaves: leaves, leaf: leaf}
		if leaf {
			memory.held++
		}
		move.Fill = Fill{Block: l.blockLocked(id), Place: l.beginLocked(d, id, uint16(m.shard), e.shape.ShardBytes)}
		move.Header = l.headerLocked(p.now, l.slot(d))
		move.Header.CRC32C = m.crc
		l.driveOf(&move, d)
		p.out.List = append(p.out.List, move)
		l.budget.tokens -= float64(e.slotBytes)
		n++
	}
	if leaves { // those that were not planned do not leave by this
		memory.leaving -= int(r.in[policy.DRAM]) - n
	}
	if n > 0 {
		return done
	}
	return result
}

// driveForLocked is the drive that a block's shards go to: where others of its shards are, else the next one that has room, else the next one.
func (l *Ledger) driveForLocked(id recordID) (StoreID, bool) {
	if k, ok := l.storeInLocked(id, policy.NVMe); ok {
		return k, !l.stores[k].closed
	}
	slotBytes := l.spaces[l.recs.at(id).space].slotBytes
	drives := len(l.stores) - 1
	open := StoreID(0)
	for i := range drives {
		k := StoreID(1 + (l.lastDrive+1+i)%drives)
		st := l.stores[k]
		if st.closed || st.slots.SlotsPerSlab(slotBytes) < 1 {
			continue
		}
		if c := st.classes[slotBytes]; st.freeSlabs > 0 || (c != nil && len(c.free) > 0) {
			return k, true
		}
		if open == 0 {
			open = k
		}
	}
	return open, open != 0
}
