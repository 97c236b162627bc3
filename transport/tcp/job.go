package tcp

import (
	"fmt"

	"github.com/kvferry/kvferry/csrc/copyshim"
	"github.com/kvferry/kvferry/transport"
)

// job is a part of a Copy on its way. It belongs to one lane at a time, so that its bytes come in order.
type job struct {
	*transport.Part
	src, dst  transport.Cursor
	remaining uint64 // not asked for yet
	open      int    // requests under way
	crc       uint32
	alone     bool // shares no request with others: it has many segments, or a request that it shared was refused
}

func newJob(p *transport.Part) job {
	p.Err = errUntried
	return job{Part: p, src: p.Src, dst: p.Dst, remaining: p.Length, alone: len(p.Copy.Src) > rangesMax/2}
}

// again puts j back to its beginning.
func (j *job) again() {
	alone := j.alone
	*j = newJob(j.Part)
	j.alone = alone
}

func (j *job) asked() bool { return j.remaining == 0 }

// next adds the spans that the next request asks for.
func (j *job) next(spans []span) ([]span, uint64) {
	var total uint64
	for j.remaining > 0 && len(spans) < rangesMax {
		list := j.Copy.Src
		take := min(j.src.Left(list), j.remaining)
		spans = append(spans, span{list[j.src.Index].Offset + j.src.Offset, take})
		j.src.Skip(list, take)
		total += take
		j.remaining -= take
	}
	return spans, total
}

// arrived continues the CRC over b, which is where the cursor stands.
func (j *job) arrived(b []byte) {
	j.crc = copyshim.Checksum(j.crc, b)
	j.dst.Skip(j.Copy.Dst, uint64(len(b)))
}

func (j *job) refuse(s status) {
	j.remaining = 0
	sentinel := transport.ErrRefused
	if s == statusDown || s == statusExhausted {
		sentinel = transport.ErrLink
	}
	j.Err = fmt.Errorf("%w: %v", sentinel, s)
}

// closed is called for every part that has come.
func (j *job) closed() {
	j.open--
	if j.open == 0 && j.asked() && j.Err == errUntried {
		j.CRC32C, j.Err = j.crc, nil
	}
}

// piece is one request under way: a part of one job, or several jobs whole.
type piece struct {
	id      uint64
	length  uint64
	request int // bytes of the request
	parts   []part
	at      int // the part whose bytes come next
}

type part struct {
	job  *job
	left uint64
}

// rooms adds memory for p's next bytes to list, chunkSize at most, and tells how many bytes that is.
func (p *piece) rooms(dst transport.Memory, list [][]byte) ([][]byte, int) {
	total := uint64(0)
	for _, part := range p.parts[p.at:] {
		segments, c := part.job.Copy.Dst, part.job.dst
		for left := part.left; left > 0; {
			n := min(left, c.Left(segments), chunkSize-total)
			at := segments[c.Index].Offset + c.Offset
			list = append(list, dst.Bytes[at:at+n])
			total += n
			if total == chunkSize || len(list) == roomsMax-1 {
				return list, int(total)
			}
			c.Skip(segments, n)
			left -= n
		}
	}
	return list, int(total)
}

// ends tells whether so many bytes are all that is left of p.
func (p *piece) ends(wanted int) bool {
	left := uint64(0)
	for _, part := range p.parts[p.at:] {
		left += part.left
	}
	return left == uint64(wanted)
}

// arrived takes note of got bytes in rooms.
func (p *piece) arrived(rooms [][]byte, got int) {
	for _, room := range rooms {
		n := min(got, len(room))
		if n == 0 {
			return
		}
		part := &p.parts[p.at]
		part.job.arrived(room[:n])
		part.left -= uint64(n)
		got -= n
		if part.left == 0 {
			part.job.closed()
			p.at++
		}
	}
}
