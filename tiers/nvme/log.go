package nvme

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"slices"

	"github.com/kvferry/kvferry/tiers/pool"
)

// The log makes headers and tombstones durable with one write at one place. Where they belong, in the tables beside the slots, each would be a write of 4 KiB
// somewhere else; there they come when half of the log is full, in order of their places.
//
//	half 0: round 6, complete: being brought in place, or there already     half 1: round 7, being written
//
// A round's blocks go to half (round mod 2), one after the other, each written once. A half is used again only when all that it says is in place durably, and
// the state block says so: a crash may leave a part of it beside nothing of what overwrote the rest, and records without those that came after them say what is
// not so any more. So at any crash the tables with the records of the older half and then of the newer one over them, in their order, are what was last said of
// each slot. Blocks are believed or not each for itself: after a failed sync there may be holes, even a round that is nothing but a hole, and what was lost in
// them is said again, or failed.
const (
	logAt       = 64 << 10
	logHalf     = 960 << 10
	logBlock    = 4096
	logBlocks   = logHalf / logBlock // of a half
	logUsed     = 64                 // of a block, before its records
	logMagic    = 0x31474f4c4e46564b // "KVFNLOG1"
	logHeaders  = 1                  // kind of block: slot headers
	logTombs    = 2                  // kind of block: tombstones
	tombBytes   = 16
	headersEach = (logBlock - logUsed) / pool.HeaderBytes
	tombsEach   = (logBlock - logUsed) / tombBytes
)

// record is what the log says of a slot.
type record struct {
	slab, slot int
	generation uint64 // of a tombstone: the drive's when it was noted
	header     []byte // encoded; nil for a tombstone
}

// bookLog is the log as the running daemon knows it. Writing it takes Drive.order; mu is needed for the halves, and to change settled.
type bookLog struct {
	round   uint64
	next    int    // block of the round's half
	blocks  int    // of a half that are used
	settled uint64 // up to this round, the state block says durably, all is in place
	halves  [2]logHalfState
}

func newBookLog() bookLog { return bookLog{round: 2, blocks: logBlocks, settled: 1} } // 0 is none

// logHalfState is one half.
type logHalfState struct {
	records []record // that are not in place durably
	inPlace uint64   // number of the writing with which they were brought in place; 0: they were not
}

// appendLog appends records: tombstones and headers each in blocks of their own. The caller holds order.
func (d *Drive) appendLog(list []record) error {
	for len(list) > 0 {
		if d.book.next >= d.book.blocks {
			if err := d.turn(); err != nil {
				return err
			}
		}
		first, buf := d.book.next, []byte(nil)
		for len(list) > 0 && d.book.next < d.book.blocks {
			var n int
			buf, n = d.encodeBlock(buf, list)
			d.mu.Lock()
			h := &d.book.halves[d.book.round%2]
			h.records = append(h.records, list[:n]...)
			d.mu.Unlock()
			list = list[n:]
			d.book.next++
		}
		if err := d.dev.WriteAt(buf, logOffset(d.book.round, first)); err != nil {
			return fmt.Errorf("%w: write the log: %w", ErrDevice, err)
		}
	}
	return nil
}

func logOffset(round uint64, block int) int64 {
	return logAt + int64(round%2)*logHalf + int64(block)*logBlock
}

// encodeBlock appends the next block to buf, and answers how many of the records are in it.
func (d *Drive) encodeBlock(buf []byte, list []record) ([]byte, int) {
	buf = append(buf, make([]byte, logBlock)...)
	b := buf[len(buf)-logBlock:]
	kind, most := uint16(logTombs), tombsEach
	if list[0].header != nil {
		kind, most = logHeaders, headersEach
	}
	n := 0
	for ; n < len(list) && n < most && (list[n].header != nil) == (kind == logHeaders); n++ {
		r := &list[n]
		if kind == logHeaders {
			copy(b[logUsed+n*pool.HeaderBytes:], r.header)
			continue
		}
		at := b[logUsed+n*tombBytes:]
		binary.LittleEndian.PutUint32(at, uint32(r.slab))
		binary.LittleEndian.PutUint32(at[4:], uint32(r.slot))
		binary.LittleEndian.PutUint64(at[8:], r.generation)
	}
	binary.LittleEndian.PutUint64(b[0:], logMagic)
	binary.LittleEndian.PutUint64(b[8:], d.book.round)
	binary.LittleEndian.PutUint32(b[16:], uint32(d.book.next))
	binary.LittleEndian.PutUint16(b[20:], kind)
	binary.LittleEndian.PutUint16(b[22:], uint16(n))
	copy(b[24:40], d.id[:])
	binary.LittleEndian.PutUint32(b[60:], blockCRC(b))
	return buf, n
}

func blockCRC(b []byte) uint32 { return crc32.Update(crcOf(b[:60]), castagnoli, b[logUsed:logBlock]) }

// parseBlock reads the block that lies at index of a half. ok is false for what is not one.
func (d *Drive) parseBlock(b []byte, index int) (round uint64, list []record, ok bool) {
	if binary.LittleEndian.Uint64(b) != logMagic || driveID(b[24:40]) != d.id || binary.LittleEndian.Uint32(b[60:]) != blockCRC(b) ||
		binary.LittleEndian.Uint32(b[16:]) != uint32(index) {
		return 0, nil, false
	}
	round = binary.LittleEndian.Uint64(b[8:])
	kind, n := binary.LittleEndian.Uint16(b[20:]), int(binary.LittleEndian.Uint16(b[22:]))
	switch {
	case kind == logHeaders && n <= headersEach:
		for k := range n {
			h := b[logUsed+k*pool.HeaderBytes:][:pool.HeaderBytes]
			tail := pool.HeaderTail(h)
			slab, slot := int(binary.LittleEndian.Uint32(tail[16:])), int(binary.LittleEndian.Uint32(tail[20:]))
			if hd, _, ok := parseHeader(h, d.id, slab, slot); ok {
				list = append(list, record{slab, slot, uint64(hd.Generation), slices.Clone(h)})
			}
		}
	case kind == logTombs && n <= tombsEach:
		for k := range n {
			at := b[logUsed+k*tombBytes:]
			list = append(list, record{int(binary.LittleEndian.Uint32(at)), int(binary.LittleEndian.Uint32(at[4:])), binary.LittleEndian.Uint64(at[8:]), nil})
		}
	}
	return round, list, true
}

// turn goes on to the other half, and brings what the full one says in place. The caller holds order. It waits for a sync, and for two where the other half has
// been filled faster than anybody has synced.
func (d *Drive) turn() error {
	d.mu.Lock()
	other := &d.book.halves[(d.book.round+1)%2]
	busy, applied := len(other.records) > 0, other.inPlace > 0
	since := d.failures
	d.mu.Unlock()
	if busy && d.mutate&reuseEarly == 0 {
		if !applied {
			if err := d.apply(other); err != nil {
				return err
			}
		}
		if err := d.syncs.sync(d); err != nil {
			return err
		}
		d.mu.Lock()
		if d.failures != since {
			d.mu.Unlock()
			return fmt.Errorf("%w: a sync failed meanwhile", ErrDevice)
		}
		*other = logHalfState{}
		d.mu.Unlock()
	}
	if err := d.noteSettled(d.book.round - 1); err != nil {
		return err
	}
	full := &d.book.halves[d.book.round%2]
	d.book.round++
	d.book.next = 0
	if err := d.apply(full); err != nil {
		d.counters.writeErrors.Add(1) // it is in the log, and is tried again before that is needed
	}
	return nil
}

// noteSettled has the state block say that all up to a round is in place, which it is. The caller holds order, or d is the caller's alone.
func (d *Drive) noteSettled(round uint64) error {
	if d.book.settled >= round || d.mutate&noSettled != 0 {
		return nil
	}
	d.mu.Lock()
	d.sequence++
	s, at, since := d.stateLocked(d.generation+limitStep), statesAt[d.sequence%2], d.failures
	s.settled = round
	d.mu.Unlock()
	if err := d.dev.WriteAt(s.encode(d.id), at); err != nil {
		return fmt.Errorf("%w: write the state block: %w", ErrDevice, err)
	}
	if err := d.syncs.sync(d); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.failures != since {
		return fmt.Errorf("%w: a sync failed meanwhile", ErrDevice)
	}
	d.book.settled, d.limit = round, max(d.limit, s.limit)
	return nil
}

// apply brings what a half says in place: the last record of each slot, unless the slab was cut anew since.
func (d *Drive) apply(h *logHalfState) error {
	d.mu.Lock()
	d.writes++
	number, epoch := d.writes, d.failures
	list := d.placesLocked(h.records)
	d.mu.Unlock()
	if err := d.writePlaced(list); err != nil {
		return fmt.Errorf("%w: write headers: %w", ErrDevice, err)
	}
	d.mu.Lock()
	if d.failures == epoch {
		h.inPlace = number
	}
	d.mu.Unlock()
	return nil
}

// placed is a header and where it belongs.
type placed struct {
	at     uint64
	record record
}

// placesLocked are the places of those records that still say something, in their order on the drive.
func (d *Drive) placesLocked(records []record) []placed {
	last := make(map[uint32]int, len(records))
	for i, r := range records {
		if r.slab < len(d.slabs) && r.slot < int(d.slabs[r.slab].slots) && r.generation > d.slabs[r.slab].floor {
			last[slotKey(r.slab, r.slot)] = i
		}
	}
	list := make([]placed, 0, len(last))
	for _, i := range last {
		r := records[i]
		list = append(list, placed{d.slabs[r.slab].headersAt + uint64(r.slot)*pool.HeaderBytes, r})
	}
	slices.SortFunc(list, func(a, b placed) int { return cmp.Compare(a.at, b.at) })
	return list
}

// writePlaced writes headers where they belong, those of neighbours in one piece.
func (d *Drive) writePlaced(list []placed) error {
	var buf []byte
	for first := 0; first < len(list); {
		n := 0
		for buf = buf[:0]; first+n < len(list) && list[first+n].at == list[first].at+uint64(n)*pool.HeaderBytes; n++ {
			r := list[first+n].record
			if r.header == nil {
				r.header = make([]byte, pool.HeaderBytes)
				encodeHeader(r.header, pool.Header{State: pool.StateFree}, d.id, r.slab, r.slot)
			}
			buf = append(buf, r.header...)
		}
		if err := d.dev.WriteAt(buf, int64(list[first].at)); err != nil {
			return err
		}
		first += n
	}
	return nil
}

// replay brings in place what a daemon before has left in the log, and the state block does not call settled. The slabs are known, and d is the caller's alone.
func (d *Drive) replay(settled uint64) error {
	var rounds [2]uint64
	var found [2][]record
	buf := make([]byte, 64<<10)
	for half := range found {
		for i := range logBlocks {
			b := buf[i*logBlock%len(buf):][:logBlock]
			if i*logBlock%len(buf) == 0 {
				if err := d.dev.ReadAt(buf, logAt+int64(half)*logHalf+int64(i)*logBlock); err != nil {
					return fmt.Errorf("%w: read the log: %w", ErrDevice, err)
				}
			}
			round, list, ok := d.parseBlock(b, i)
			if !ok || round%2 != uint64(half) || round <= settled || round < rounds[half] || round >= generationMax {
				continue
			}
			if round > rounds[half] { // what comes before is of the time before the half was used again
				rounds[half], found[half] = round, nil
			}
			found[half] = append(found[half], list...)
		}
	}
	older := 0
	if rounds[0] > rounds[1] {
		older = 1
	}
	// No round is written twice, also none of which nothing is seen: two torn writes of a block can make up what was in neither. A daemon has begun at most the
	// second round after what was settled, and what is seen is above that, or the state block was lost.
	d.book = bookLog{round: max(rounds[0], rounds[1], settled) + 3, blocks: logBlocks, settled: settled}
	if d.mutate&smallLog != 0 {
		d.book.blocks = 2
	}
	if settled == 0 && rounds[older]+1 != rounds[1-older] {
		found[older] = nil // what is settled is not known; the rounds of a daemon that ran follow each other, so this one is of before
	}
	list := d.placesLocked(append(found[older], found[1-older]...))
	if len(list) == 0 {
		return nil
	}
	if err := d.writePlaced(list); err != nil {
		return fmt.Errorf("%w: write headers: %w", ErrDevice, err)
	}
	if err := d.dev.Sync(); err != nil {
		return fmt.Errorf("%w: sync: %w", ErrDevice, err)
	}
	return nil
}
