package nvme

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// Stats is what a drive has done since it was opened.
type Stats struct {
	Info
	SizeBytes               uint64
	Reads, ReadBytes        uint64        // slots that were read and right
	Writes, WrittenBytes    uint64        // slots that are durable
	ReadErrors, WriteErrors uint64        // slots that failed, by the device's fault
	Corrupt                 uint64        // slots whose checksum did not hold
	ReadP50, ReadP99        time.Duration // from the call to the slot's end, within a factor of 1.2
	WriteP50, WriteP99      time.Duration
	InFlight                int    // I/Os that were handed to the device and have not ended
	LifetimeWritten         uint64 // payload bytes written in the file's life; a crash may lose the last ones
	Syncs, SyncErrors       uint64
	Pending                 int // changes that are noted and not durable
	Dropped, Duplicates     int // slots of the adopted file that were torn or damaged; that held what another slot holds too
}

type counters struct {
	reads, readBytes, writes, writtenBytes atomic.Uint64
	readErrors, writeErrors, corrupt       atomic.Uint64
	syncs, syncErrors, lifetime            atomic.Uint64
	inFlight                               atomic.Int64
	readTimes, writeTimes                  histogram
}

func (c *counters) read(n uint64, took time.Duration) {
	c.reads.Add(1)
	c.readBytes.Add(n)
	c.readTimes.add(took)
}

func (c *counters) write(n uint64, took time.Duration) {
	c.writes.Add(1)
	c.writtenBytes.Add(n)
	c.writeTimes.add(took)
}

func (c *counters) stats() Stats {
	return Stats{
		Reads: c.reads.Load(), ReadBytes: c.readBytes.Load(), Writes: c.writes.Load(), WrittenBytes: c.writtenBytes.Load(),
		ReadErrors: c.readErrors.Load(), WriteErrors: c.writeErrors.Load(), Corrupt: c.corrupt.Load(),
		ReadP50: c.readTimes.quantile(0.50), ReadP99: c.readTimes.quantile(0.99), WriteP50: c.writeTimes.quantile(0.50), WriteP99: c.writeTimes.quantile(0.99),
		InFlight: int(c.inFlight.Load()), LifetimeWritten: c.lifetime.Load(), Syncs: c.syncs.Load(), SyncErrors: c.syncErrors.Load(),
	}
}

// histogram counts durations in buckets of a quarter of a power of two each.
type histogram struct{ buckets [64 * 4]atomic.Uint64 }

func (h *histogram) add(d time.Duration) {
	n := uint64(max(d, 4))
	top := bits.Len64(n) - 1
	h.buckets[top*4+int(n>>(top-2)&3)].Add(1)
}

// quantile is the middle of the bucket that the q-th of all durations is in; 0 when there are none.
func (h *histogram) quantile(q float64) time.Duration {
	var total uint64
	for i := range h.buckets {
		total += h.buckets[i].Load()
	}
	if total == 0 {
		return 0
	}
	rank, seen := uint64(q*float64(total-1))+1, uint64(0)
	for i := range h.buckets {
		if seen += h.buckets[i].Load(); seen >= rank {
			low := uint64(4+i%4) << (i/4 - 2)
			return time.Duration(low + uint64(1)<<(i/4-2)/2)
		}
	}
	return 0
}
