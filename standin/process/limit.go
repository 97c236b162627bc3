package process

import (
	"context"
	"sync"
	"time"

	"github.com/kvferry/kvferry/csrc/copyshim"
	"github.com/kvferry/kvferry/standin"
)

// LimitArgs asks how fast this machine copies blocks at best: between the worker's memory and memory of the same kind, laid out as the pool is, with the
// same segments, without a checksum and without a daemon.
type LimitArgs struct {
	Blocks      []uint32
	Slots       []uint32 // where they lie in the scratch memory; below ScratchSlots of the first call
	Scratch     uint32   // slots of scratch memory
	Load        bool     // from the scratch memory, as a Load copies; else to it, as a Store does
	NonTemporal bool
	Threads     int
}

// scratch is memory like the pool's: shared, of small pages.
type scratch struct {
	once   sync.Once
	memory *standin.Memory
	err    error
}

// Limit measures one copy.
func (s *Service) Limit(a LimitArgs, took *time.Duration) error {
	if _, _, _, err := s.parts(); err != nil {
		return err
	}
	s.scratch.once.Do(func() {
		shape := standin.Shape{Blocks: a.Scratch, Planes: 1, PlaneBytes: s.memory.ShardBytes()}
		if s.scratch.memory, s.scratch.err = standin.NewMemory(shape); s.scratch.err == nil {
			for b := range a.Scratch {
				s.scratch.memory.Scribble(b)
			}
		}
	})
	if s.scratch.err != nil {
		return s.scratch.err
	}
	var flags copyshim.Flags
	if a.NonTemporal {
		flags = copyshim.NonTemporal
	}
	start := time.Now()
	var wg sync.WaitGroup
	share := (len(a.Blocks) + a.Threads - 1) / a.Threads
	for t := range a.Threads {
		from, to := min(t*share, len(a.Blocks)), min((t+1)*share, len(a.Blocks))
		wg.Go(func() { copyshim.Plain(s.limitSegments(a, from, to), flags) })
	}
	wg.Wait()
	*took = time.Since(start)
	return nil
}

func (s *Service) limitSegments(a LimitArgs, from, to int) []copyshim.Segment {
	m := s.memory
	segments := make([]copyshim.Segment, 0, (to-from)*m.Planes)
	for i := from; i < to; i++ {
		slot := copyshim.Address(s.scratch.memory.Plane(a.Slots[i], 0))
		for p := range m.Planes {
			here, there := copyshim.Address(m.Plane(a.Blocks[i], p)), slot+uintptr(uint64(p)*m.PlaneBytes)
			if a.Load {
				here, there = there, here
			}
			segments = append(segments, copyshim.Segment{Dst: there, Src: here, Length: uintptr(m.PlaneBytes)})
		}
	}
	return segments
}

// Limit measures one copy in the worker.
func (w *Worker) Limit(ctx context.Context, a LimitArgs) (time.Duration, error) {
	return call[LimitArgs, time.Duration](ctx, w, "Limit", a)
}
