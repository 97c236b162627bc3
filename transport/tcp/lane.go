package tcp

import (
	"context"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/csrc/copyshim"
	"github.com/kvferry/kvferry/transport"
)

// How far a lane asks ahead. The requests that are under way must fit into the server's receive buffer: while it is blocked in writing
// a response it does not read, and a client that were blocked in writing requests would not read either.
const (
	aheadPayload  = 4 << 20
	aheadRequests = 24 << 10  // bytes of requests; one more may come on top
	chunkSize     = 256 << 10 // read and checksummed in one go, while it is in the cache
)

// lane is one connection. One Copy at a time uses it; only close may be called from elsewhere.
type lane struct {
	conn    *net.TCPConn
	scatter *scatter
	stall   time.Duration
	touched time.Time // when the deadline was last pushed forward
	usedAt  time.Time // when it was last given back
	reused  bool      // it has served a Copy before: its far end may be gone since
	greeted bool      // the server's answer to the preface was read
	heard   bool      // something came in this run

	nextID  uint64
	out     []byte // requests to be written
	spans   []span // scratch
	in      [responseSize]byte
	ahead   int    // bytes of the next response's header that are in n.in already
	jobs    []*job // begun and not finished, in order
	pieces  []piece
	payload uint64 // bytes that pieces still bring
	request int    // bytes of the requests of pieces
}

// piece is one request under way.
type piece struct {
	job     *job
	id      uint64
	length  uint64
	request int
}

func newLane(conn *net.TCPConn, epoch kvferry.Epoch, stall time.Duration) (*lane, error) {
	sc, err := newScatter(conn)
	if err != nil {
		return nil, err
	}
	return &lane{conn: conn, scatter: sc, stall: stall, out: appendPreface(nil, epoch)}, nil
}

func (n *lane) close() { _ = n.conn.Close() }

// run moves what q gives until q is empty. After an error the lane is of no use, and n.jobs are the copies that were on it.
func (n *lane) run(ctx context.Context, key [16]byte, dst transport.Memory, q *queue) error {
	stop := context.AfterFunc(ctx, n.close)
	n.heard = false
	err := n.exchange(key, dst, q)
	if !stop() && err == nil && ctx.Err() != nil {
		return context.Cause(ctx) // all is in place, but the connection was closed
	}
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

func (n *lane) exchange(key [16]byte, dst transport.Memory, q *queue) error {
	for {
		if err := n.ask(key, q); err != nil {
			return fmt.Errorf("%w: write: %w", transport.ErrLink, err)
		}
		if len(n.pieces) == 0 {
			return nil
		}
		if err := n.receive(dst); err != nil {
			return err
		}
	}
}

// ask sends requests until enough is under way. It begins when half of that has come in, so that several go out in one write.
func (n *lane) ask(key [16]byte, q *queue) error {
	if len(n.pieces) > 1 && n.payload > aheadPayload/2 {
		return nil
	}
	for len(n.pieces) < 2 || (n.payload < aheadPayload && n.request < aheadRequests) {
		j := n.asking(q)
		if j == nil {
			break
		}
		n.spans = j.next(n.spans[:0])
		r := request{id: n.nextID, key: key, spans: n.spans}
		n.nextID++
		before := len(n.out)
		n.out = appendRequest(n.out, &r)
		p := piece{job: j, id: r.id, length: r.size(), request: len(n.out) - before}
		j.open++
		n.pieces = append(n.pieces, p)
		n.payload += p.length
		n.request += p.request
	}
	if len(n.pieces) == 0 || len(n.out) == 0 {
		return nil
	}
	n.touch(true)
	_, err := n.conn.Write(n.out)
	n.out = n.out[:0]
	return err
}

// asking is the job whose next part is to be asked for: the last one as long as it has parts, then a new one.
func (n *lane) asking(q *queue) *job {
	if len(n.jobs) > 0 {
		if j := n.jobs[len(n.jobs)-1]; !j.asked() {
			return j
		}
	}
	j := q.take()
	if j != nil {
		n.jobs = append(n.jobs, j)
	}
	return j
}

// receive reads the response to the oldest request.
func (n *lane) receive(dst transport.Memory) error {
	if !n.greeted {
		if err := n.greet(); err != nil {
			return err
		}
	}
	if err := n.fill(n.in[n.ahead:]); err != nil {
		return err
	}
	n.ahead = 0
	r, err := parseResponse(n.in[:])
	if err != nil {
		return fmt.Errorf("%w: %w", transport.ErrLink, err)
	}
	p := n.pieces[0]
	if r.id != p.id || (r.status == statusOK && r.length != p.length) {
		return fmt.Errorf("%w: response %d of %d bytes to request %d of %d", transport.ErrLink, r.id, r.length, p.id, p.length)
	}
	if r.status == statusOK {
		if err := n.payloadInto(dst, p); err != nil {
			return err
		}
	} else {
		p.job.refuse(r.status)
	}
	n.pieces = n.pieces[:copy(n.pieces, n.pieces[1:])]
	n.payload -= p.length
	n.request -= p.request
	p.job.open--
	if p.job.open == 0 && p.job.asked() {
		p.job.finish()
		n.jobs = n.jobs[:copy(n.jobs, n.jobs[1:])]
	}
	return nil
}

func (n *lane) greet() error {
	if err := n.fill(n.in[:answerSize]); err != nil {
		return err
	}
	s, err := parseAnswer(n.in[:answerSize])
	if err != nil {
		return fmt.Errorf("%w: %w", transport.ErrLink, err)
	}
	switch s {
	case statusOK:
		n.greeted = true
		return nil
	case statusVersion:
		return fmt.Errorf("%w: %v", transport.ErrNotSupported, s)
	}
	return fmt.Errorf("%w: peer answered: %v", transport.ErrLink, s)
}

// payloadInto reads p's bytes to where its job stands in dst. The segments were checked when the job was made.
// The last read takes the header of the next response with it, where one is due: for small copies this halves the number of system calls.
func (n *lane) payloadInto(dst transport.Memory, p piece) error {
	for left := p.length; left > 0; {
		room := p.job.room(dst, min(left, chunkSize))
		var next []byte
		if uint64(len(room)) == left && len(n.pieces) > 1 {
			next = n.in[:]
		}
		got, err := n.read(room, next)
		if err != nil {
			return err
		}
		n.ahead = max(0, got-len(room))
		got -= n.ahead
		p.job.arrived(room[:got])
		left -= uint64(got)
	}
	return nil
}

func (n *lane) fill(b []byte) error {
	for len(b) > 0 {
		got, err := n.read(b, nil)
		if err != nil {
			return err
		}
		b = b[got:]
	}
	return nil
}

// read reads at least one byte into b, and what comes after it into next.
func (n *lane) read(b, next []byte) (int, error) {
	n.touch(false)
	got, err := n.scatter.read(b, next)
	if got > 0 {
		n.heard = true
		return got, nil
	}
	if err == nil {
		err = io.EOF
	}
	return 0, fmt.Errorf("%w: read: %w", transport.ErrLink, err)
}

// touch gives the connection another stall to make progress. Setting a deadline costs as much as reading a few KiB, so it is done now and then.
func (n *lane) touch(now bool) {
	t := time.Now()
	if !now && t.Sub(n.touched) < n.stall/8 {
		return
	}
	n.touched = t
	_ = n.conn.SetDeadline(t.Add(n.stall)) // fails on a closed connection only, which the next read or write reports
}

// job is one Copy on its way. It belongs to one lane at a time, so that its bytes come in order.
type job struct {
	copy      *transport.Copy
	src, dst  cursor
	remaining uint64 // not asked for yet
	open      int    // requests under way
	crc       uint32
	refused   bool
}

// cursor is a place in a list of segments.
type cursor struct {
	index  int
	offset uint64
}

func newJob(c *transport.Copy) *job { return &job{copy: c, remaining: c.Length()} }

// again puts j back to its beginning, for another lane.
func (j *job) again() { *j = *newJob(j.copy) }

func (j *job) asked() bool { return j.remaining == 0 }

// next is the part of Src that the next request asks for.
func (j *job) next(spans []span) []span {
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
	return spans
}

// room is memory for the next bytes, at most limit and at least one.
func (j *job) room(dst transport.Memory, limit uint64) []byte {
	s := j.copy.Dst[j.dst.index]
	for s.Length == j.dst.offset {
		j.dst = cursor{index: j.dst.index + 1}
		s = j.copy.Dst[j.dst.index]
	}
	at := s.Offset + j.dst.offset
	return dst.Bytes[at : at+min(limit, s.Length-j.dst.offset)]
}

func (j *job) arrived(b []byte) {
	j.crc = copyshim.Checksum(j.crc, b)
	j.dst.offset += uint64(len(b))
}

func (j *job) refuse(s status) {
	j.refused, j.remaining = true, 0
	if j.copy.Err == nil {
		sentinel := transport.ErrRefused
		if s == statusDown || s == statusExhausted {
			sentinel = transport.ErrLink
		}
		j.copy.Err = fmt.Errorf("%w: %v", sentinel, s)
	}
}

func (j *job) finish() {
	if !j.refused {
		j.copy.CRC32C, j.copy.Err = j.crc, nil
	}
}
