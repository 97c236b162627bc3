package session

import (
	"strings"

	"github.com/kvferry/kvferry"
)

// Bounds of a Hello.
const (
	regionsMax     = 14
	planesMax      = 4096
	regionBytesMax = 1 << 46
	blocksMax      = 1 << 30
	planeBytesMax  = 1 << 30
	ranksMax       = 64
)

func validateHello(h Hello) error {
	if h.WireVersion != WireVersion {
		return fieldErr(ErrUnsupported, "hello.wire_version", "%d: this daemon speaks %d", h.WireVersion, WireVersion)
	}
	if h.Role != Worker && h.Role != Scheduler {
		return invalid("hello.role", "must be worker or scheduler")
	}
	for _, f := range []struct {
		name, value string
		min, max    int
	}{
		{"instance", h.Instance, 1, 128}, {"engine", h.Engine, 0, 64}, {"engine_version", h.EngineVersion, 0, 64},
		{"serving_address", h.ServingAddress, 0, 256}, {"tenant", h.Tenant, 0, 128},
		{"engine_start", h.EngineStart, 0, 128},
	} {
		if err := ValidateText("hello."+f.name, f.value, f.min, f.max); err != nil {
			return err
		}
	}
	if h.Ranks < 1 || h.Ranks > ranksMax {
		return invalid("hello.ranks", "%d: must be 1 to %d", h.Ranks, ranksMax)
	}
	if h.Rank >= h.Ranks {
		return invalid("hello.rank", "%d: must be below ranks (%d)", h.Rank, h.Ranks)
	}
	if err := validateSpace("hello.", h.Space); err != nil {
		return err
	}
	if h.Space.PP > 1 {
		return fieldErr(ErrUnsupported, "hello.space.pp", "pipeline parallel engines (pp=%d) are not supported yet", h.Space.PP)
	}
	if h.Generations > blocksMax {
		return invalid("hello.generations", "%d: must be at most 2^30", h.Generations)
	}
	if h.Role == Scheduler {
		if len(h.Regions) > 0 {
			return invalid("hello.regions", "a scheduler lends no memory")
		}
		return nil
	}
	if h.Generations > 0 {
		return invalid("hello.generations", "only a scheduler has a generation table")
	}
	if len(h.Regions) == 0 || len(h.Regions) > regionsMax {
		return invalid("hello.regions", "%d: must be 1 to %d", len(h.Regions), regionsMax)
	}
	seen := map[uint32]bool{}
	for _, r := range h.Regions {
		if seen[r.ID] || r.ID >= entryFirst {
			return invalid("hello.regions.id", "%d: not unique or reserved", r.ID)
		}
		seen[r.ID] = true
		if err := validateRegion(r); err != nil {
			return err
		}
		if regionShardBytes(r) != regionShardBytes(h.Regions[0]) {
			return invalid("hello.regions.planes", "region %d has shards of %d bytes, region %d of %d", r.ID, regionShardBytes(r), h.Regions[0].ID, regionShardBytes(h.Regions[0]))
		}
	}
	return nil
}

func validateSpace(prefix string, s kvferry.Space) error {
	if err := s.Validate(); err != nil {
		field, reason, _ := strings.Cut(err.Error(), ": ")
		return Invalid(prefix+field, reason)
	}
	return nil
}

func validateRegion(r RegionSpec) error {
	if r.Kind != SharedHost && r.Kind != Staging {
		return fieldErr(ErrUnsupported, "hello.regions.kind", "region %d: not a kind that this daemon can open", r.ID)
	}
	if r.Writable && r.Kind != SharedHost {
		return invalid("hello.regions.writable", "region %d: only the engine's own memory may be written", r.ID)
	}
	if r.Bytes < 1 || r.Bytes > regionBytesMax {
		return invalid("hello.regions.bytes", "region %d: %d: must be 1 to 2^46", r.ID, r.Bytes)
	}
	if r.Blocks < 1 || r.Blocks > blocksMax {
		return invalid("hello.regions.blocks", "region %d: %d: must be 1 to 2^30", r.ID, r.Blocks)
	}
	if len(r.Planes) < 1 || len(r.Planes) > planesMax {
		return invalid("hello.regions.planes", "region %d: %d planes: must be 1 to %d", r.ID, len(r.Planes), planesMax)
	}
	for i, p := range r.Planes {
		if p.Bytes < 1 || p.Bytes > planeBytesMax || p.Stride < p.Bytes || p.Stride > regionBytesMax {
			return invalid("hello.regions.planes", "region %d, plane %d: %d bytes every %d: 1 to 2^30, at least bytes", r.ID, i, p.Bytes, p.Stride)
		}
		// Neither product nor sum overflows: 2^30 blocks x 2^46 stride is checked by division.
		last := uint64(r.Blocks - 1)
		if p.Base > r.Bytes || p.Bytes > r.Bytes-p.Base || last > (r.Bytes-p.Base-p.Bytes)/p.Stride {
			return invalid("hello.regions.planes", "region %d, plane %d: its last block lies outside of the region", r.ID, i)
		}
	}
	return nil
}

func regionShardBytes(r RegionSpec) (n uint64) {
	for _, p := range r.Planes {
		n += p.Bytes
	}
	return n
}

// shardBytes is the length of the shards of a worker; 0 for a scheduler, which learns it from its workers.
func shardBytes(rs []RegionSpec) uint64 {
	if len(rs) == 0 {
		return 0
	}
	return regionShardBytes(rs[0])
}

// ValidateText checks a text of a client or peer, which people will see: its length, and that no terminal takes it for a command.
func ValidateText(field, s string, least, most int) error {
	if len(s) < least || len(s) > most {
		return invalid(field, "%d bytes: must have %d to %d", len(s), least, most)
	}
	if strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return invalid(field, "holds a control character")
	}
	return nil
}

// validateHashes checks a packed list and returns its length.
func validateHashes(field string, packed []byte, least, most int) (int, error) {
	if len(packed)%kvferry.HashSize != 0 {
		return 0, invalid(field, "%d bytes: not a multiple of %d", len(packed), kvferry.HashSize)
	}
	n := len(packed) / kvferry.HashSize
	if n < least || n > most {
		return 0, invalid(field, "%d hashes: must be %d to %d", n, least, most)
	}
	return n, nil
}

func hashAt(packed []byte, i int) kvferry.Hash {
	return kvferry.Hash(packed[i*kvferry.HashSize:])
}
