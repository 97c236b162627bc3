package tcp

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/kvferry/kvferry"
)

const (
	groupPayload = 1 << 20 // requests that have come are answered together up to this
	writeSize    = 1 << 20 // that is written under one deadline
)

// connection is the server's end of a lane, used by one goroutine.
type connection struct {
	server *Server
	conn   net.Conn
	in     *bufio.Reader
	epoch  kvferry.Epoch

	request request
	head    []byte      // response headers of a group
	parts   [][]byte    // the group: headers and pool memory in turn
	out     net.Buffers // what one write is handed; consumed by it
	held    []Grant
	payload uint64
}

func (s *Server) serve(ctx context.Context, conn net.Conn) {
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	defer conn.Close()
	c := &connection{server: s, conn: conn, in: bufio.NewReaderSize(conn, 2*requestSizeMax)}
	err := c.run()
	if ctx.Err() == nil && !errors.Is(err, io.EOF) {
		s.Log.Info("data connection ended", "peer", conn.RemoteAddr(), "err", err)
	}
}

func (c *connection) run() error {
	if err := c.greet(); err != nil {
		return err
	}
	for {
		if err := c.group(); err != nil {
			return err
		}
	}
}

func (c *connection) greet() error {
	_ = c.conn.SetReadDeadline(time.Now().Add(c.server.Stall))
	b, err := c.in.Peek(prefaceSize)
	if err != nil {
		return fmt.Errorf("read preface: %w", err)
	}
	epoch, s, err := parsePreface(b)
	if err != nil {
		return err
	}
	_, _ = c.in.Discard(prefaceSize)
	c.epoch = epoch
	_ = c.conn.SetWriteDeadline(time.Now().Add(c.server.Stall))
	if _, err := c.conn.Write(appendAnswer(nil, s)); err != nil {
		return fmt.Errorf("answer preface: %w", err)
	}
	if s != statusOK {
		return errors.New("answer preface: " + s.String())
	}
	return nil
}

// group answers the next request, and those that lie behind it in the buffer already. The grants are held until all is written.
func (c *connection) group() error {
	defer c.release()
	if err := c.await(); err != nil {
		return err
	}
	for c.payload < groupPayload {
		b, _ := c.in.Peek(c.in.Buffered())
		n, err := parseRequest(b, &c.request)
		if errors.Is(err, errShort) {
			break
		}
		if err != nil {
			return err
		}
		_, _ = c.in.Discard(n)
		c.answer()
	}
	return c.write()
}

// await returns when one whole request is in the buffer.
func (c *connection) await() error {
	for {
		b, _ := c.in.Peek(c.in.Buffered())
		_, err := parseRequest(b, &c.request)
		if !errors.Is(err, errShort) {
			return err
		}
		patience := c.server.Stall
		if len(b) == 0 {
			patience = c.server.Idle
		}
		_ = c.conn.SetReadDeadline(time.Now().Add(patience))
		if _, err := c.in.Peek(len(b) + 1); err != nil {
			if len(b) > 0 && errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
	}
}

// answer puts the response to c.request into the group.
func (c *connection) answer() {
	at := len(c.parts)
	c.parts = append(c.parts, nil)
	r := response{id: c.request.id}
	r.status = c.gather()
	if r.status == statusOK {
		r.length = c.request.size()
	} else {
		c.parts = c.parts[:at+1]
	}
	c.head = appendResponse(c.head, r)
	c.payload += r.length + responseSize
}

// gather collects the memory that the request asks for.
func (c *connection) gather() status {
	grant, err := c.server.Grants.Acquire(c.epoch, c.request.key)
	if err != nil {
		return statusOf(err)
	}
	c.held = append(c.held, grant)
	for _, s := range c.request.spans {
		if s.length == 0 {
			continue
		}
		if c.parts, err = grant.Append(c.parts, s.offset, s.length); err != nil {
			return statusOutOfRange
		}
	}
	return statusOK
}

// write sends the group in pieces of writeSize, each of which has to be taken in time.
func (c *connection) write() error {
	head := c.head
	c.out = c.out[:0]
	all := c.out // keeps the array: a write consumes the slice header
	room := writeSize
	flush := func() error {
		if len(all) == 0 {
			return nil
		}
		c.out = all
		_ = c.conn.SetWriteDeadline(time.Now().Add(c.server.Stall))
		_, err := c.out.WriteTo(c.conn)
		clear(all)
		all, room = all[:0], writeSize
		return err
	}
	for _, part := range c.parts {
		if part == nil {
			part, head = head[:responseSize], head[responseSize:]
		}
		for len(part) > 0 {
			n := min(len(part), room)
			all = append(all, part[:n])
			part, room = part[n:], room-n
			if room == 0 {
				if err := flush(); err != nil {
					return fmt.Errorf("write response: %w", err)
				}
			}
		}
	}
	err := flush()
	c.out = all
	if err != nil {
		return fmt.Errorf("write response: %w", err)
	}
	return nil
}

// release lets the claims go after a group, whatever became of it.
func (c *connection) release() {
	for i, g := range c.held {
		g.Release()
		c.held[i] = nil
	}
	clear(c.parts)
	c.held, c.parts, c.head, c.payload = c.held[:0], c.parts[:0], c.head[:0], 0
}
