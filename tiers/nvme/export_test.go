package nvme

import "github.com/kvferry/kvferry/tiers/pool"

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
