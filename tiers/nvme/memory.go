package nvme

import (
	"errors"
	"sync"
	"sync/atomic"

	"github.com/kvferry/kvferry/csrc/uringshim"
)

// Memory is where most payloads lie: the pool. It is registered with the kernel once for all rings of all drives, by one goroutine that nobody waits for; until that has ended, and where it is
// refused, rings read and write it like any other memory. Safe for concurrent use.
//
// Where the kernel cannot share a registration between rings (before Linux 6.12), nothing is registered. Each ring for itself would pin the whole pool, in seconds and many times over, and as rings are
// made by transfers that need one, under their deadlines; what it saves is looking up 256 pages for each I/O of 1 MiB.
type Memory struct {
	bytes []byte
	after <-chan struct{}                                // what is waited for before anything is registered
	pin   func(*uringshim.Holder) (more bool, err error) // a piece; the tests' own

	begin   sync.Once
	end     sync.Once
	stop    chan struct{}
	settled chan struct{}
	ready   atomic.Bool // rings may take it over

	mu     sync.Mutex        // a holder has one user at a time. Guards the next two
	holder *uringshim.Holder // set while ready
	err    error             // why it is not ready
}

// errUnderWay is why memory is not registered that will be.
var errUnderWay = errors.New("it is being registered")

// NewMemory is for drives to be opened with, before any of them needs it. Registering begins when the first ring is made, after a channel is closed: that all of it is mapped, as else registering has to do
// that, while whoever changes the process's address space waits.
func NewMemory(bytes []byte, after <-chan struct{}) *Memory {
	return &Memory{bytes: bytes, after: after, pin: (*uringshim.Holder).Pin, stop: make(chan struct{}), settled: make(chan struct{}), err: errUnderWay}
}

// Settled is closed when the memory is registered, or will not be: then Err tells why. Without any ring it is closed by Close.
func (m *Memory) Settled() <-chan struct{} { return m.settled }

// Err is why the memory is not registered; nil when it is.
func (m *Memory) Err() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.err
}

// Close may be called twice. It ends registering after the piece that it is at, and gives the registration back: the memory may be unmapped when it returns. Rings that have taken it over keep the pages, not the addresses, until they are
// closed; others go on without.
func (m *Memory) Close() {
	m.begin.Do(func() { close(m.settled) }) // nothing has begun, and nothing will
	m.end.Do(func() { close(m.stop) })
	<-m.settled
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ready.Store(false)
	m.err = ErrClosed
	if m.holder != nil {
		m.holder.Close()
		m.holder = nil
	}
}

// start begins registering, the first time.
func (m *Memory) start() { m.begin.Do(func() { go m.register() }) }

func (m *Memory) register() {
	defer close(m.settled)
	select {
	case <-m.after:
	case <-m.stop:
		return
	}
	h, err := uringshim.Hold(m.bytes)
	for more := true; err == nil && more; {
		select {
		case <-m.stop:
			h.Close()
			return
		default:
			more, err = m.pin(h)
		}
	}
	if err != nil && h != nil {
		h.Close()
		h = nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.holder, m.err = h, err
	m.ready.Store(err == nil)
}

// lend has a ring use the registration.
func (m *Memory) lend(r *uringshim.Ring) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err != nil {
		return m.err
	}
	return r.Take(m.holder)
}
