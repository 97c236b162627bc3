package standin

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry"
	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/transport"
)

const lentID = 3

// lentMemory is another worker's memory, mapped for reading.
type lentMemory struct {
	data, table []byte
	planes      []kvferry.Plane
	copier      transport.Copier
}

func (l *lentMemory) unmap() {
	for _, b := range [][]byte{l.data, l.table} {
		if b != nil {
			_ = unix.Munmap(b)
		}
	}
}

// lentBy maps what a result's blocks lie in, once for each handle. The caller read-holds copies.
func (s *Session) lentBy(ctx context.Context, v *kvferryv1.Lent) (*lentMemory, error) {
	s.lentMu.Lock()
	defer s.lentMu.Unlock()
	if l := s.lent[v.Handle]; l != nil {
		return l, nil
	}
	files, err := exchange(ctx, s.config.SocketsDir+"/descriptors.sock", v.Token, nil, nil)
	if err != nil {
		return nil, fmt.Errorf("fetch lent memory: %w", err)
	}
	defer files.close()
	if files.memory == nil || files.table == nil {
		return nil, errors.New("fetch lent memory: want the memory and its generation table")
	}
	l := &lentMemory{}
	for _, p := range v.Planes {
		l.planes = append(l.planes, kvferry.Plane{Base: p.Base, Stride: p.Stride, Bytes: p.Bytes})
	}
	if l.data, err = mapFile(files.memory, unix.PROT_READ); err != nil {
		return nil, fmt.Errorf("lent memory: %w", err)
	}
	if l.table, err = mapFile(files.table, unix.PROT_READ); err != nil {
		l.unmap()
		return nil, fmt.Errorf("generation table: %w", err)
	}
	l.copier = transport.NewLocal(transport.Memory{ID: regionID, Bytes: s.config.Memory.Data}, transport.Memory{ID: lentID, Bytes: l.data}, s.config.ThreadsMax)
	if s.lent == nil {
		s.lent = map[uint64]*lentMemory{}
	}
	s.lent[v.Handle] = l
	return l, nil
}

// lentGone unmaps memory whose lender is gone, when nothing copies.
func (s *Session) lentGone(handle uint64) {
	s.background.Go(func() {
		s.copies.Lock()
		defer s.copies.Unlock()
		s.lentMu.Lock()
		defer s.lentMu.Unlock()
		if l := s.lent[handle]; l != nil {
			delete(s.lent, handle)
			l.unmap()
		}
	})
}

// Mapped is how many other workers' memories are mapped.
func (s *Session) Mapped() int {
	s.lentMu.Lock()
	defer s.lentMu.Unlock()
	return len(s.lent)
}

// copyLent copies the blocks of a result that other workers lend. A block whose generation does not hold is a miss.
func (s *Session) copyLent(ctx context.Context, r *kvferryv1.LoadResult, blocks []uint32, at []int, report *LoadReport) error {
	if len(at) == 0 {
		return nil
	}
	m, first := s.config.Memory, int(r.First)
	if r.Lent == nil {
		return errors.New("load result: blocks are lent, and it is not said where")
	}
	l, err := s.lentBy(ctx, r.Lent)
	if err != nil { // its lender is gone since
		for _, i := range at {
			report.miss(first + i)
		}
		return nil
	}
	var batch []transport.Copy
	var copied []int
	holds := func(i int) bool {
		b := r.Offsets[i]
		return b < uint64(len(l.table)/8) && atomic.LoadUint64(generationAt(l.table, uint32(b))) == r.Generations[i]
	}
	for _, i := range at {
		if !holds(i) {
			report.changed(first + i)
			continue
		}
		var src []kvferry.Segment
		for _, p := range l.planes {
			src = append(src, p.Segment(lentID, uint32(r.Offsets[i])))
		}
		batch, copied = append(batch, transport.Copy{Src: src, Dst: m.segments(nil, blocks[first+i])}), append(copied, i)
	}
	s.copying(len(batch))
	if err := l.copier.Copy(ctx, batch); err != nil {
		return err
	}
	for k, i := range copied {
		if batch[k].Err != nil || !holds(i) {
			report.changed(first + i)
			continue
		}
		report.Loaded++
		report.Lent++
	}
	return nil
}
