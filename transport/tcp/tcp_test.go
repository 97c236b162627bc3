package tcp

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/transport"
	"github.com/kvferry/kvferry/transport/transporttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	testEpoch = kvferry.Epoch{1, 2, 3}
	testKey   = [16]byte{4, 5, 6}
	patient   = Options{Stall: 20 * time.Second} // where the machine's pace is not what is tested
)

// grants covers all of its memory for testKey, and counts what is held.
type grants struct {
	memory []byte
	err    error
	held   atomic.Int64
	total  atomic.Int64
}

func (g *grants) Acquire(epoch kvferry.Epoch, key [16]byte) (Grant, error) {
	if g.err != nil {
		return nil, g.err
	}
	if epoch != testEpoch || key != testKey {
		return nil, errors.New("unknown key")
	}
	g.held.Add(1)
	g.total.Add(1)
	return g, nil
}

func (g *grants) Append(parts [][]byte, off, n uint64) ([][]byte, error) {
	b, err := transport.Memory{Bytes: g.memory}.Slice(kvferry.Segment{Offset: off, Length: n})
	if err == nil && n > 1 { // in two pieces, as lent blocks are
		parts, b = append(parts, b[:n/2]), b[n/2:]
	}
	return append(parts, b), err
}

func (g *grants) Release() { g.held.Add(-1) }

// serve runs s on a loopback port until the test ends or stop is called, and checks that nothing is held then.
func serve(t testing.TB, s *Server) (address string, stop func()) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l.Addr().String(), serveOn(t, s, l)
}

func serveOn(t testing.TB, s *Server, l net.Listener) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	stop = func() {
		cancel()
		if err, ok := <-done; ok && err != nil {
			t.Error("serve:", err)
		} else if ok {
			close(done)
		}
		if g, ok := s.Grants.(*grants); ok && g.held.Load() != 0 {
			t.Errorf("%d grants held after the server ended", g.held.Load())
		}
	}
	t.Cleanup(stop)
	return stop
}

func TestConformance(t *testing.T) {
	transporttest.Run(t, func(t *testing.T, dst, src transport.Memory) transport.Copier {
		address, _ := serve(t, &Server{Grants: &grants{memory: src.Bytes}})
		link := NewLink(address, testEpoch, patient)
		t.Cleanup(func() { _ = link.Close() })
		return link.Copier(testKey, src.Region(), dst)
	})
}
