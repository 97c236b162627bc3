package nvme

import (
	"testing"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers/pool"
)

// What a header says does not hang on the drive's id, which is random and lies where a pool's header has a flag.
func TestHeaderWhateverTheID(t *testing.T) {
	want := pool.Header{State: pool.StateResident, Generation: 42, Hash: kvferry.Hash{7}, Space: kvferry.SpaceID{8}, Length: 4096, CRC32C: 9, Shards: 1}
	for first := range 256 {
		id, b := driveID{byte(first)}, make([]byte, pool.HeaderBytes)
		encodeHeader(b, want, id, 3, 4)
		if h, ours, ok := parseHeader(b, id, 3, 4); !ours || !ok || h != want {
			t.Fatalf("id %d: %v %v %+v", first, ours, ok, h)
		}
	}
}
