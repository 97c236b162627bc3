package tcp

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/transport"
	"github.com/kvferry/kvferry/transport/transporttest"
)

func copies(n int, each uint64) []transport.Copy {
	batch := make([]transport.Copy, n)
	for i := range batch {
		at := uint64(i) * each
		batch[i] = transport.Copy{Dst: []kvferry.Segment{{Region: 1, Offset: at, Length: each}}, Src: []kvferry.Segment{{Region: 2, Offset: at, Length: each}}}
	}
	return batch
}

func memories(t *testing.T, size int) (dst, src transport.Memory) {
	dst, src = transporttest.NewMemory(t, 1, size), transporttest.NewMemory(t, 2, size)
	transporttest.Fill(src.Bytes, 8)
	return dst, src
}

// A server that went away and came back, while lanes were idle, costs nothing: the lanes are dialled again within the Copy.
func TestLinkSurvivesRestart(t *testing.T) {
	dst, src := memories(t, 16<<20)
	// An address that no other test uses: on 127.0.0.1 anybody's outgoing connection may take the port while nobody listens.
	listener, err := net.Listen("tcp", "127.66.7.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	stop := serveOn(t, &Server{Grants: &grants{memory: src.Bytes}}, listener)
	link := NewLink(address, testEpoch, patient)
	defer link.Close()
	c := link.Copier(testKey, src.Region(), dst)
	for round := range 3 {
		batch := copies(16, 1<<20)
		if err := c.Copy(t.Context(), batch); err != nil {
			t.Fatal(round, err)
		}
		stop()
		if round == 1 { // nobody listens
			batch := copies(16, 1<<20)
			if err := c.Copy(t.Context(), batch); !errors.Is(err, transport.ErrLink) || !errors.Is(batch[3].Err, transport.ErrLink) {
				t.Fatal("nobody listens:", err)
			}
		}
		if listener, err = net.Listen("tcp", address); err != nil {
			t.Fatal(err)
		}
		stop = serveOn(t, &Server{Grants: &grants{memory: src.Bytes}}, listener)
	}
}

// puppet is a server that does as the test says.
func puppet(t *testing.T, play func(conn net.Conn, number int)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for number := 0; ; number++ {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
				play(conn, number)
			}()
		}
	}()
	t.Cleanup(func() { _ = l.Close(); <-done })
	return l.Addr().String()
}

func readRequest(conn net.Conn, first bool) {
	if first {
		_, _ = io.ReadFull(conn, make([]byte, prefaceSize))
		_, _ = conn.Write(appendAnswer(nil, statusOK))
	}
	_, _ = io.ReadFull(conn, make([]byte, requestFixed+rangeSize))
}

func TestLinkNoticesBadServers(t *testing.T) {
	dst, src := memories(t, 1<<20)
	for name, play := range map[string]func(conn net.Conn, number int){
		"says nothing": func(conn net.Conn, _ int) { _, _ = io.Copy(io.Discard, conn) },
		"hangs up":     func(net.Conn, int) {},
		"turns away":   func(conn net.Conn, _ int) { _, _ = conn.Write(appendAnswer(nil, statusExhausted)) },
		"speaks http": func(conn net.Conn, _ int) {
			_, _ = conn.Write(append([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"), make([]byte, 99)...))
		},
		"other request": func(conn net.Conn, _ int) {
			readRequest(conn, true)
			_, _ = conn.Write(appendResponse(nil, response{id: 4711, length: 1000}))
		},
		"other length": func(conn net.Conn, _ int) {
			readRequest(conn, true)
			_, _ = conn.Write(appendResponse(nil, response{length: 999}))
		},
		"half a payload": func(conn net.Conn, _ int) {
			readRequest(conn, true)
			_, _ = conn.Write(appendResponse(make([]byte, 0), response{length: 1000}))
			_, _ = conn.Write(make([]byte, 500))
		},
	} {
		t.Run(name, func(t *testing.T) {
			link := NewLink(puppet(t, play), testEpoch, Options{Stall: 100 * time.Millisecond})
			defer link.Close()
			batch := copies(1, 1000)
			if err := link.Copier(testKey, src.Region(), dst).Copy(t.Context(), batch); !errors.Is(err, transport.ErrLink) || !errors.Is(batch[0].Err, transport.ErrLink) {
				t.Errorf("%v; %v", err, batch[0].Err)
			}
			if len(link.idle) != 0 || len(link.busy) != 0 {
				t.Error("the lane is kept")
			}
		})
	}
}

// A lane that dies takes only what was on it: the other lane does the rest.
func TestLaneDiesAlone(t *testing.T) {
	dst, src := memories(t, 32<<20)
	real, _ := serve(t, &Server{Grants: &grants{memory: src.Bytes}})
	address := puppet(t, func(conn net.Conn, number int) {
		if number == 1 {
			readRequest(conn, true)
			return
		}
		up, err := net.Dial("tcp", real)
		if err != nil {
			return
		}
		defer up.Close()
		go func() { _, _ = io.Copy(up, conn); _ = up.(*net.TCPConn).CloseWrite() }()
		_, _ = io.Copy(conn, up)
	})
	link := NewLink(address, testEpoch, patient)
	defer link.Close()
	batch := copies(512, 64<<10)
	if err := link.Copier(testKey, src.Region(), dst).Copy(t.Context(), batch); err != nil {
		t.Error("one lane was good:", err)
	}
	failed := 0
	for i, c := range batch {
		if c.Err != nil {
			failed++
			if !errors.Is(c.Err, transport.ErrLink) {
				t.Error(c.Err)
			}
		} else if string(dst.Bytes[i<<16:(i+1)<<16]) != string(src.Bytes[i<<16:(i+1)<<16]) {
			t.Errorf("copy %d: wrong bytes", i)
		}
	}
	if failed > 2*aheadMax/(64<<10) {
		t.Errorf("%d copies failed with one lane", failed)
	}
}

// A deadline ends a Copy on a server that hangs, well before the stall does.
func TestCopyKeepsDeadline(t *testing.T) {
	dst, src := memories(t, 1<<20)
	link := NewLink(puppet(t, func(conn net.Conn, _ int) { _, _ = io.Copy(io.Discard, conn) }), testEpoch, Options{Stall: time.Minute})
	defer link.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	batch := copies(4, 1000)
	if err := link.Copier(testKey, src.Region(), dst).Copy(ctx, batch); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(batch[3].Err, context.DeadlineExceeded) {
		t.Errorf("%v; %v", err, batch[3].Err)
	}
}

// No more lanes than allowed: who finds none waits for one, or for its context.
func TestLanesAreBounded(t *testing.T) {
	dst, src := memories(t, 1<<20)
	arrived := make(chan struct{}, 10)
	link := NewLink(puppet(t, func(conn net.Conn, _ int) {
		arrived <- struct{}{}
		_, _ = io.Copy(io.Discard, conn)
	}), testEpoch, Options{Lanes: 1, LanesMax: 1, Stall: time.Minute})
	c := link.Copier(testKey, src.Region(), dst)
	first := make(chan error, 1)
	go func() { first <- c.Copy(t.Context(), copies(1, 1000)) }()
	<-arrived
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := c.Copy(ctx, copies(1, 1000)); !errors.Is(err, context.DeadlineExceeded) {
		t.Error("second copy:", err)
	}
	_ = link.Close()
	if err := <-first; !errors.Is(err, transport.ErrLink) {
		t.Error("first copy:", err)
	}
	if len(arrived) != 0 {
		t.Error("a second lane was opened")
	}
}
