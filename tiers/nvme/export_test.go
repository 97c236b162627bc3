package nvme

import (
	"github.com/kvferry/kvferry/csrc/uringshim"
	"github.com/kvferry/kvferry/tiers/pool"
)

// Mutation takes out rules; see mutation.
type Mutation = mutation

// The mutations.
const (
	NoChecksum    = noChecksum
	HeaderFirst   = headerFirst
	NoTombstone   = noTombstone
	NoPayloadSync = noPayloadSync
	NoEpoch       = noEpoch
	NoFloor       = noFloor
	NoPending     = noPending
	ReuseEarly    = reuseEarly
	NoSettled     = noSettled
	SmallLog      = smallLog
)

// OpenMutated is OpenDevice without some of the rules.
func OpenMutated(cfg Config, dev Device, m Mutation) (*Drive, []pool.Resident, error) {
	return attach(cfg, dev, place{}, m)
}

// Pinning has the test stand between m and the kernel: next pins a piece.
func (m *Memory) Pinning(pin func(next func() (bool, error)) (bool, error)) {
	m.pin = func(h *uringshim.Holder) (bool, error) { return pin(h.Pin) }
}

// Rings is how many rings a drive has, none of which is in use, and how many of them have taken the registered memory over.
func (d *Drive) Rings() (made, registered int) {
	u := d.dev.(*fileDevice).engine.(*uring)
	for made = range len(u.ready) {
		l := <-u.ready
		if l.registered {
			registered++
		}
		u.ready <- l
	}
	return made + 1, registered
}

// Occupy has the one ring that a drive has so far take other memory over, so that it can take no more.
func (d *Drive) Occupy(memory []byte) error {
	h, err := uringshim.Hold(memory)
	if err != nil {
		return err
	}
	defer h.Close()
	u := d.dev.(*fileDevice).engine.(*uring)
	l := <-u.ready
	defer func() { u.ready <- l }()
	return l.ring.Take(h)
}

// Stopping is closed when Close has been called.
func (m *Memory) Stopping() <-chan struct{} { return m.stop }
