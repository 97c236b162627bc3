package tcp

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/transport"
)

// Grants says who may read what. It is asked once for every request, by many goroutines.
type Grants interface {
	// Acquire takes hold of the claim named by key, so that what it covers stays in place until Release. An error that wraps transport.ErrLink
	// (we are stopping, say) tells the peer that it may try again; any other, that this epoch does not know the key.
	Acquire(epoch kvferry.Epoch, key [16]byte) (Grant, error)
}

// Grant is a claim that is held.
type Grant interface {
	// Append adds the memory of [off, off+length), which may lie in several pieces, or fails where the claim does not cover all of it. It is read until Release.
	Append(parts [][]byte, off, length uint64) ([][]byte, error)
	Release()
}

// Server answers the data protocol. Its zero fields take defaults; none is changed after Serve.
type Server struct {
	Grants         Grants
	Log            *slog.Logger
	ConnectionsMax int           // more are told so and closed; default 256. Each works on one group of requests at a time: that bounds the requests too
	Idle           time.Duration // a connection that asks for nothing is closed; default 60 s
	Stall          time.Duration // the other side must take 1 MiB, or finish a request that it began, in this time; default 5 s
}

func (s *Server) defaults() Server {
	d := *s
	if d.Log == nil {
		d.Log = slog.New(slog.DiscardHandler)
	}
	if d.ConnectionsMax <= 0 {
		d.ConnectionsMax = 256
	}
	if d.Idle <= 0 {
		d.Idle = time.Minute
	}
	if d.Stall <= 0 {
		d.Stall = 5 * time.Second
	}
	return d
}

// Serve accepts connections until ctx ends or the listener fails; then it closes the listener and all connections, and returns when no goroutine of it
// reads the pool any more. It returns nil when ctx ended.
func (s *Server) Serve(ctx context.Context, listener net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = listener.Close() })
	defer stop()
	d := s.defaults()
	places := make(chan struct{}, d.ConnectionsMax)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for pause := time.Duration(0); ; {
		conn, err := listener.Accept()
		if ctx.Err() != nil {
			if err == nil {
				_ = conn.Close()
			}
			return nil
		}
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return err
			}
			// Out of descriptors, most likely: others will give some back.
			pause = min(max(2*pause, 5*time.Millisecond), time.Second)
			d.Log.Warn("accept data connection", "err", err, "retry_in", pause)
			if !sleep(ctx, pause) {
				return nil
			}
			continue
		}
		pause = 0
		select {
		case places <- struct{}{}:
			wg.Go(func() {
				d.serve(ctx, conn)
				<-places
			})
		default:
			turnAway(conn)
		}
	}
}

// turnAway answers without reading: whoever is over the limit gets no goroutine.
func turnAway(conn net.Conn) {
	_ = conn.SetWriteDeadline(time.Now().Add(10 * time.Millisecond))
	_, _ = conn.Write(appendAnswer(nil, statusExhausted))
	_ = conn.Close()
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

func statusOf(err error) status {
	switch {
	case err == nil:
		return statusOK
	case errors.Is(err, transport.ErrLink):
		return statusDown
	}
	return statusNotFound
}
