package tcp

import (
	"fmt"

	"github.com/kvferry/kvferry/csrc/copyshim"
	"github.com/kvferry/kvferry/transport"
)

// job is one Copy on its way. It belongs to one lane at a time, so that its bytes come in order.
type job struct {
	copy      *transport.Copy
	src, dst  cursor
	remaining uint64 // not asked for yet
	open      int    // requests under way
	crc       uint32
	alone     bool // shares no request with others: it is large, or a request that it shared was refused
	refused   bool
}

// cursor is a place in a list of segments.
type cursor struct {
	index  int
	offset uint64
}

func newJob(c *transport.Copy, length uint64) job {
	return job{copy: c, remaining: length, alone: len(c.Src) > rangesMax/2}
}

// again puts j back to its beginning.
func (j *job) again() {
	alone := j.alone
	*j = newJob(j.copy, j.copy.Length())
	j.alone = alone
}

func (j *job) asked() bool { return j.remaining == 0 }

// next adds the part of Src that the next request asks for to spans.
func (j *job) next(spans []span) ([]span, uint64) {
	var total uint64
	for j.remaining > 0 && total < payloadMax && len(spans) < rangesMax {
		s := j.copy.Src[j.src.index]
		take := min(s.Length-j.src.offset, payloadMax-total)
		if take > 0 {
			spans = append(spans, span{s.Offset + j.src.offset, take})
		}
		j.src.offset += take
		if j.src.offset == s.Length {
			j.src = cursor{index: j.src.index + 1}
		}
		total += take
		j.remaining -= take
	}
	return spans, total
}

// arrived continues the CRC over b, which is where the cursor stands.
func (j *job) arrived(b []byte) {
	for j.dst.offset == j.copy.Dst[j.dst.index].Length {
		j.dst = cursor{index: j.dst.index + 1}
	}
	j.crc = copyshim.Checksum(j.crc, b)
	j.dst.offset += uint64(len(b))
}

func (j *job) refuse(s status) {
	j.refused, j.remaining = true, 0
	sentinel := transport.ErrRefused
	if s == statusDown || s == statusExhausted {
		sentinel = transport.ErrLink
	}
	j.copy.Err = fmt.Errorf("%w: %v", sentinel, s)
}

// closed is called for every part that has come.
func (j *job) closed() {
	j.open--
	if j.open == 0 && j.asked() && !j.refused {
		j.copy.CRC32C, j.copy.Err = j.crc, nil
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
		c, left := part.job.dst, part.left
		for left > 0 {
			s := part.job.copy.Dst[c.index]
			n := min(left, s.Length-c.offset, chunkSize-total)
			if n > 0 {
				at := s.Offset + c.offset
				list = append(list, dst.Bytes[at:at+n])
				total += n
			}
			if total == chunkSize || len(list) == roomsMax-1 {
				return list, int(total)
			}
			left -= n
			c = cursor{index: c.index + 1}
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
