package standin

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/kvferry/kvferry"
	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/transport"
)

// LoadRequest names blocks to be read from the pool into blocks of the memory.
type LoadRequest struct {
	RequestID  string
	Blocks     []uint32
	Hashes     []kvferry.Hash
	Ticket     []byte // with it, this is an Accept
	Direct     bool   // of an Accept: Blocks are lent to the daemon, to write into
	DeadlineMs uint32
}

// LoadReport says what became of each block.
type LoadReport struct {
	Status []kvferryv1.BlockStatus // READY: it is in the memory, and was checked
	Loaded int
	Wrong  int // whose generation or checksum did not hold: MISS in Status
	// Of the loaded blocks, those copied from another worker's memory, and those that the daemon has written. The others were copied from the pool.
	Lent, Delivered int
	InPool          time.Duration // from the request to the last result: all blocks that can be had are in the pool
}

// Load reads blocks out of the pool into the memory. A block that is not READY in the report is to be computed; its memory may hold anything.
func (s *Session) Load(ctx context.Context, r LoadRequest) (*LoadReport, error) {
	start := time.Now()
	report := &LoadReport{Status: make([]kvferryv1.BlockStatus, len(r.Hashes))}
	if len(r.Blocks) != len(r.Hashes) {
		return report, errors.New("load: blocks and hashes differ in number")
	}
	s.writes.Add(1)
	defer s.writes.Done()
	o, err := s.begin(r.DeadlineMs, func(operation uint64, word uint32) *kvferryv1.SessionRequest {
		load := &kvferryv1.Load{Operation: operation, Word: word, SpaceId: s.Space[:], RequestId: r.RequestID, Hashes: pack(r.Hashes), DeadlineMs: r.DeadlineMs}
		if r.Ticket == nil {
			return &kvferryv1.SessionRequest{Message: &kvferryv1.SessionRequest_Load{Load: load}}
		}
		accept := &kvferryv1.Accept{Load: load, Ticket: r.Ticket}
		if r.Direct {
			accept.Region, accept.BlockIds = regionID, r.Blocks
		}
		return &kvferryv1.SessionRequest{Message: &kvferryv1.SessionRequest_Accept{Accept: accept}}
	})
	if err != nil {
		return report, fmt.Errorf("load: %w", err)
	}
	err = o.copyResults(ctx, r.Blocks, report, start)
	release := &kvferryv1.Release{Operations: []uint64{o.number}, WrongBlocks: uint32(report.Wrong)}
	if e := s.send(&kvferryv1.SessionRequest{Message: &kvferryv1.SessionRequest_Release{Release: release}}); err == nil {
		err = e
	}
	if r.Direct && s.Welcome.Direct && report.Delivered < len(r.Blocks) {
		o.waitQuiet() // whatever came of it: nobody may write there any more
	}
	if err != nil {
		return report, fmt.Errorf("load: %w", err)
	}
	return report, nil
}

// copyResults copies as results come, until the last one.
func (o *Operation) copyResults(ctx context.Context, blocks []uint32, report *LoadReport, start time.Time) error {
	for {
		results, err := o.take(ctx)
		if err != nil {
			return err
		}
		if len(results) == 0 {
			o.mu.Lock()
			defer o.mu.Unlock()
			return fmt.Errorf("ended: %v %s", o.end.Outcome, o.end.Reason)
		}
		last := false
		report.InPool = time.Since(start)
		for _, r := range results {
			if err := o.s.copyBlocks(ctx, r, blocks, report); err != nil {
				return err
			}
			last = last || r.Last
		}
		if last {
			return nil
		}
	}
}

// copyBlocks copies what one LoadResult says is ready: the generation is compared before and after the copy, and the checksum of what was copied.
func (s *Session) copyBlocks(ctx context.Context, r *kvferryv1.LoadResult, blocks []uint32, report *LoadReport) error {
	s.copies.RLock()
	defer s.copies.RUnlock()
	if s.closed {
		return ErrEnded
	}
	first, n := int(r.First), len(r.Status)
	if first+n > len(blocks) || len(r.Offsets) != n || len(r.HeaderOffsets) != n || len(r.Generations) != n || len(r.Crc32C) != n {
		return errors.New("load result: lists differ in length")
	}
	m := s.config.Memory
	if r.ShardBytes != m.ShardBytes() {
		return fmt.Errorf("load result: shards of %d bytes, want %d", r.ShardBytes, m.ShardBytes())
	}
	batch, at := make([]transport.Copy, 0, n), make([]int, 0, n)
	planes := make([]kvferry.Segment, 0, n*(m.Planes+1))
	miss := func(i int) { report.miss(first + i) }
	var lent []int
	for i := range n {
		report.Status[first+i] = kvferryv1.BlockStatus(r.Status[i])
		if report.Status[first+i] != kvferryv1.BlockStatus_BLOCK_STATUS_READY {
			continue
		}
		if len(r.Source) == n {
			switch kvferryv1.BlockSource(r.Source[i]) {
			case kvferryv1.BlockSource_BLOCK_SOURCE_DELIVERED:
				report.Loaded++
				report.Delivered++
				continue
			case kvferryv1.BlockSource_BLOCK_SOURCE_LENT:
				lent = append(lent, i)
				continue
			}
		}
		if !s.holds(r, i) || blocks[first+i] >= m.Blocks {
			miss(i)
			continue
		}
		from := len(planes)
		planes = append(planes, kvferry.Segment{Region: poolID, Offset: r.Offsets[i], Length: r.ShardBytes})
		planes = m.segments(planes, blocks[first+i])
		batch = append(batch, transport.Copy{Src: planes[from : from+1], Dst: planes[from+1:]})
		at = append(at, i)
	}
	s.copying(len(batch))
	if err := s.copier.Copy(ctx, batch); err != nil {
		return err
	}
	for k, i := range at {
		if batch[k].Err != nil || batch[k].CRC32C != r.Crc32C[i] || !s.holds(r, i) {
			miss(i)
			continue
		}
		report.Loaded++
	}
	return s.copyLent(ctx, r, blocks, lent, report)
}

// copying lets tests do something to blocks that are about to be copied.
func (s *Session) copying(blocks int) {
	if blocks > 0 && s.config.Copying != nil {
		s.config.Copying()
	}
}

// changed notes a block that another worker no longer lends.
func (r *LoadReport) changed(i int) { r.Status[i] = kvferryv1.BlockStatus_BLOCK_STATUS_MISS }

// miss notes a block of the pool whose generation or checksum did not hold.
func (r *LoadReport) miss(i int) {
	r.Status[i] = kvferryv1.BlockStatus_BLOCK_STATUS_MISS
	r.Wrong++
}

// holds tells whether slot i still has the generation that the daemon told.
func (s *Session) holds(r *kvferryv1.LoadResult, i int) bool {
	at := r.HeaderOffsets[i]
	return at%8 == 0 && at+8 <= uint64(len(s.pool)) && atomic.LoadUint64((*uint64)(unsafe.Pointer(&s.pool[at]))) == r.Generations[i]
}
