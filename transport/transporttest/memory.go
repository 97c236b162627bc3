// Package transporttest holds what every Copier is tested with: one conformance suite, a fault wrapper, and memory as regions have it.
//
// The suite knows nothing of how a Copier moves bytes. It is for tests only; nothing in it is safe for concurrent use unless it says so.
package transporttest

import (
	"math/rand/v2"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/transport"
)

// NewMemory maps a zeroed region outside of Go's heap, as all regions are, until the test ends.
func NewMemory(t testing.TB, id kvferry.RegionID, size int) transport.Memory {
	t.Helper()
	b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_SHARED)
	if err != nil {
		t.Fatal("map memory:", err)
	}
	t.Cleanup(func() { _ = unix.Munmap(b) })
	return transport.Memory{ID: id, Bytes: b}
}

// Fill writes bytes that differ from place to place and from seed to seed.
func Fill(b []byte, seed uint64) {
	var key [32]byte
	key[0], key[1] = byte(seed), byte(seed>>8)
	_, _ = rand.NewChaCha8(key).Read(b)
}
