package main

import (
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/kvferry/kvferry/standin"
	"github.com/kvferry/kvferry/standin/process"
)

// streams measures what TCP does alone on this machine: from one large memory to another, on 1 to 4 connections.
type streams struct {
	from, to *standin.Memory
	in, out  []net.Conn
	at       int
}

func newStreams(network *process.Network) (s *streams, err error) {
	s = &streams{}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	shape := standin.Shape{Blocks: 4, Planes: 1, PlaneBytes: window}
	for _, m := range []**standin.Memory{&s.from, &s.to} {
		if *m, err = standin.NewMemory(shape); err != nil {
			return nil, err
		}
		for b := range shape.Blocks {
			(*m).Scribble(b)
		}
	}
	listen := func() (net.Listener, error) { return net.Listen("tcp", "127.0.0.2:0") }
	if network != nil {
		listen = network.Listen
	}
	l, err := listen()
	if err != nil {
		return nil, err
	}
	defer l.Close()
	for range 4 {
		out, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			return nil, err
		}
		s.out = append(s.out, out)
		in, err := l.Accept()
		if err != nil {
			return nil, err
		}
		s.in = append(s.in, in)
	}
	return s, nil
}

func (s *streams) close() {
	for _, c := range append(s.in, s.out...) {
		_ = c.Close()
	}
	for _, m := range []*standin.Memory{s.from, s.to} {
		if m != nil {
			_ = m.Close()
		}
	}
}

// measure moves a window over 1, 2, 3 and 4 streams, in another order each round.
func (s *streams) measure(to variants, round int) error {
	for i := range 4 {
		n := 1 + (i+round)%4
		src, dst := s.from.Plane(uint32(s.at), 0), s.to.Plane(uint32(s.at), 0)
		s.at = (s.at + 1) % 4
		share := window / n
		errs := make([]error, 2*n)
		start := time.Now()
		var wg sync.WaitGroup
		for k := range n {
			wg.Go(func() { _, errs[2*k] = s.out[k].Write(src[k*share:][:share]) })
			wg.Go(func() { _, errs[2*k+1] = io.ReadFull(s.in[k], dst[k*share:][:share]) })
		}
		wg.Wait()
		took := time.Since(start)
		for _, err := range errs {
			if err != nil {
				return fmt.Errorf("plain TCP: %w", err)
			}
		}
		name := fmt.Sprintf("%d streams", n)
		to[name] = append(to[name], took)
	}
	return nil
}
