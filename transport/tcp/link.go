// Package tcp carries the data protocol of WIRE.md between two daemons: a Link reads from a peer's pool, a Server lets peers read from ours.
//
// A Link belongs to one address and one epoch of a peer, and owns a bounded set of connections (lanes). A lane is used by one Copy at a time, and every request
// on it names its claim by key: so lanes are shared by all claims, a new claim costs no connection, and the end of one Copy's context closes only lanes that
// this Copy holds. The goroutine that called Copy reads the socket straight into the destination, which is what makes Copy quiet when it returns.
//
// Sockets keep Go's default of no Nagle delay and the kernel's automatic buffer sizes: a size that is set ends the tuning, and is cut to
// net.core.rmem_max, which is smaller than what tuning reaches.
//
// The package checks no payload: it computes each copy's CRC32C, and the caller compares. It does not retry and does not back off: the next Copy dials again.
package tcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/transport"
)

// Options tune a Link. Zero fields take the defaults.
type Options struct {
	Lanes    int           // that one large batch is spread over; default 2
	LanesMax int           // that the link has at most; a Copy that finds none free waits; default 8
	Stall    time.Duration // a lane from which nothing comes for so long is broken; default 1 s
	Idle     time.Duration // a lane that was unused for so long is not used again; default 20 s, below the server's
}

func (o Options) withDefaults() Options {
	if o.Lanes <= 0 {
		o.Lanes = lanesDefault
	}
	if o.LanesMax <= 0 {
		o.LanesMax = lanesMaxDefault
	}
	o.LanesMax = max(o.LanesMax, o.Lanes)
	if o.Stall <= 0 {
		o.Stall = time.Second
	}
	if o.Idle <= 0 {
		o.Idle = 20 * time.Second
	}
	return o
}

const (
	lanesDefault    = 2
	lanesMaxDefault = 8
)

// errNoLane is what a Copy's further lanes end with when others have all: the first lane does the work. It never leaves the package.
var errNoLane = errors.New("no lane free")

// errClosed is what a Copy on a closed link or copier ends with.
var errClosed = fmt.Errorf("%w: closed", transport.ErrLink)

// Link is the way to one epoch of one peer. It is safe for concurrent use.
type Link struct {
	address string
	epoch   kvferry.Epoch
	options Options
	free    chan struct{} // one token for every lane that may still be taken; immutable

	mu     sync.Mutex
	closed bool
	idle   []*lane            // last used last
	busy   map[*lane]struct{} // held by a Copy
}

// NewLink makes a link; it dials when there is something to copy.
func NewLink(address string, epoch kvferry.Epoch, o Options) *Link {
	o = o.withDefaults()
	l := &Link{address: address, epoch: epoch, options: o, free: make(chan struct{}, o.LanesMax), busy: map[*lane]struct{}{}}
	for range o.LanesMax {
		l.free <- struct{}{}
	}
	return l
}

// Copier copies from the peer's pool, as far as the claim named by key covers it, into dst. It costs nothing to make: one for each claim.
// Src segments have src.ID as their region; src.Bytes bounds them (math.MaxUint64 where the pool's size is not known: then the peer refuses).
func (l *Link) Copier(key [16]byte, src kvferry.Region, dst transport.Memory) transport.Copier {
	return &copier{link: l, key: key, src: src, dst: dst}
}

// Close breaks all lanes. Copies that run end with ErrLink.
func (l *Link) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for _, n := range l.idle {
		n.close()
	}
	l.idle = nil
	for n := range l.busy {
		n.close()
	}
	return nil
}

// take waits for the right to use a lane; when wait is false it only looks.
func (l *Link) take(ctx context.Context, wait bool) error {
	select {
	case <-l.free:
		return nil
	default:
	}
	if !wait {
		return errNoLane
	}
	select {
	case <-l.free:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// lane is an idle lane, or a new one when there is none or fresh is asked for. The caller holds a token of take and ends with put.
func (l *Link) lane(ctx context.Context, fresh bool) (*lane, error) {
	if n, err := l.idleLane(fresh); n != nil || err != nil {
		return n, err
	}
	dialer := net.Dialer{Timeout: l.options.Stall}
	conn, err := dialer.DialContext(ctx, "tcp", l.address)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", transport.ErrLink, err)
	}
	n, err := newLane(conn.(*net.TCPConn), l.epoch, l.options.Stall)
	if err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("%w: %w", transport.ErrLink, err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		n.close()
		return nil, errClosed
	}
	l.busy[n] = struct{}{}
	return n, nil
}

func (l *Link) idleLane(fresh bool) (*lane, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, errClosed
	}
	for len(l.idle) > 0 {
		n := l.idle[len(l.idle)-1]
		l.idle = l.idle[:len(l.idle)-1]
		if fresh || time.Since(n.usedAt) > l.options.Idle {
			n.close()
			continue
		}
		l.busy[n] = struct{}{}
		return n, nil
	}
	return nil, nil
}

// put takes a lane back: to be used again, or to be closed when it is broken. The token stays with the caller.
func (l *Link) put(n *lane, broken bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.busy, n)
	if broken || l.closed {
		n.close()
		return
	}
	n.usedAt = time.Now()
	n.reused = true
	l.idle = append(l.idle, n)
}
