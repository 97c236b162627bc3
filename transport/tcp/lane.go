package tcp

import (
	"context"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/transport"
)

const (
	// aheadRequests bounds the bytes of requests under way; one more may come on top. They must fit into the server's receive buffer: while it is
	// blocked in writing a response it does not read, and a client that were blocked in writing requests would not read either.
	aheadRequests = 24 << 10
	chunkSize     = 256 << 10 // read with one system call, and checksummed while it is in the cache
	roomsMax      = 8         // places that one system call reads into
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
	ahead   int // bytes of the next response's header that are in n.in already
	rooms   [][]byte
	current *job   // the last of which a part was asked for, if more of it is to be asked for
	redo    []*job // to be asked for again, alone
	pieces  []piece
	payload uint64 // bytes that pieces still bring
	request int    // bytes of the requests of pieces
}

func newLane(conn *net.TCPConn, epoch kvferry.Epoch, stall time.Duration) (*lane, error) {
	sc, err := newScatter(conn)
	if err != nil {
		return nil, err
	}
	return &lane{conn: conn, scatter: sc, stall: stall, out: appendPreface(nil, epoch)}, nil
}

func (n *lane) close() { _ = n.conn.Close() }

// run moves what q gives until q is empty. After an error the lane is of no use, and left tells which copies were on it.
func (n *lane) run(ctx context.Context, key [16]byte, dst transport.Memory, q *queue) error {
	stop := context.AfterFunc(ctx, n.close)
	n.heard = false
	err := n.exchange(key, dst, q)
	if !stop() && ctx.Err() != nil {
		return context.Cause(ctx) // perhaps all is in place, but the connection is closed
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

// left is what was begun and not finished.
func (n *lane) left() []*job {
	var jobs []*job
	add := func(j *job) {
		if j != nil && (len(jobs) == 0 || jobs[len(jobs)-1] != j) {
			jobs = append(jobs, j)
		}
	}
	for _, p := range n.pieces {
		for _, part := range p.parts {
			add(part.job)
		}
	}
	add(n.current)
	for _, j := range n.redo {
		add(j)
	}
	return jobs
}

// ask sends requests until enough is under way. It begins when half of that has come in, so that several go out in one write.
func (n *lane) ask(key [16]byte, q *queue) error {
	ahead := q.ahead()
	if len(n.pieces) > 1 && n.payload > ahead/2 {
		return nil
	}
	for len(n.pieces) < 2 || (n.payload < ahead && n.request < aheadRequests) {
		p := n.compose(q, min(togetherMost, ahead/2))
		if len(p.parts) == 0 {
			break
		}
		p.id = n.nextID
		n.nextID++
		before := len(n.out)
		n.out = appendRequest(n.out, &request{id: p.id, key: key, spans: n.spans})
		p.request = len(n.out) - before
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

// compose makes the next request: of one large job a part, or several small jobs whole, together bytes of them. Its spans are in n.spans.
func (n *lane) compose(q *queue, together uint64) (p piece) {
	n.spans = n.spans[:0]
	for {
		if n.current == nil {
			n.current = n.begin(q)
		}
		j := n.current
		if j == nil || (len(p.parts) > 0 && (j.alone || p.length+j.remaining > together || len(n.spans)+len(j.Copy.Src) > rangesMax)) {
			return p
		}
		var length uint64
		n.spans, length = j.next(n.spans)
		j.open++
		p.parts = append(p.parts, part{j, length})
		p.length += length
		if j.asked() {
			n.current = nil
		}
		if j.alone {
			return p
		}
	}
}

func (n *lane) begin(q *queue) *job {
	if len(n.redo) > 0 {
		j := n.redo[0]
		n.redo = n.redo[1:]
		return j
	}
	return q.take()
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
	p := &n.pieces[0]
	if r.id != p.id || (r.status == statusOK && r.length != p.length) {
		return fmt.Errorf("%w: response %d of %d bytes to request %d of %d", transport.ErrLink, r.id, r.length, p.id, p.length)
	}
	switch {
	case r.status == statusOK:
		if err := n.bytes(dst, p); err != nil {
			return err
		}
	case len(p.parts) > 1: // one of them is to blame
		for _, part := range p.parts {
			part.job.again()
			part.job.alone = true
			n.redo = append(n.redo, part.job)
		}
	default:
		p.parts[0].job.refuse(r.status)
		if n.current == p.parts[0].job {
			n.current = nil
		}
	}
	n.payload -= p.length
	n.request -= p.request
	n.pieces = n.pieces[:copy(n.pieces, n.pieces[1:])]
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

// bytes reads p's bytes to where its jobs stand in dst. The segments were checked when the jobs were made. The last read takes the header of the next
// response with it, where one is due.
func (n *lane) bytes(dst transport.Memory, p *piece) error {
	for p.at < len(p.parts) {
		var wanted int
		n.rooms, wanted = p.rooms(dst, n.rooms[:0])
		rooms := n.rooms
		if p.ends(wanted) && len(n.pieces) > 1 {
			n.rooms = append(n.rooms, n.in[:])
		}
		got, err := n.read(n.rooms)
		if err != nil {
			return err
		}
		n.ahead = max(0, got-wanted)
		p.arrived(rooms, got-n.ahead)
	}
	return nil
}

func (n *lane) fill(b []byte) error {
	for len(b) > 0 {
		n.rooms = append(n.rooms[:0], b)
		got, err := n.read(n.rooms)
		if err != nil {
			return err
		}
		b = b[got:]
	}
	return nil
}

// read reads at least one byte into rooms.
func (n *lane) read(rooms [][]byte) (int, error) {
	n.touch(false)
	got, err := n.scatter.read(rooms)
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
