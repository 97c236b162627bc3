package kvferry

import (
	"crypto/sha256"
	"fmt"
	"strconv"
	"strings"
)

// ShardKind says how the ranks of an engine share a block.
type ShardKind string

// The kinds.
const (
	Sharded    ShardKind = "sharded"    // each rank has a part of its own
	Replicated ShardKind = "replicated" // all ranks hold the same bytes, stored once (MLA)
)

// Space is a namespace of blocks whose bytes are interchangeable: everything that decides what a block's bytes mean, beyond its tokens.
type Space struct {
	Model             string // name
	Revision          string // or weights digest
	WeightsGeneration string // empty at start; a random value after weights were changed in place
	KVDtype           string
	BlockTokens       uint32
	Group             uint32 // KV group
	Attention         string
	Layers            uint32
	Heads             uint32
	HeadSize          uint32
	Layout            string // id and version of the bytes' order inside a block
	TP, PP, DCP       uint32
	ShardKind         ShardKind
	HashAlgorithm     string
	HashSeed          string
}

// Field is one line of a preimage.
type Field struct{ Name, Value string }

// Fields lists s in the order of its preimage, values as they stand there.
func (s Space) Fields() []Field {
	n := func(v uint32) string { return strconv.FormatUint(uint64(v), 10) }
	q := strconv.Quote
	return []Field{
		{"model", q(s.Model)}, {"revision", q(s.Revision)}, {"weights_generation", q(s.WeightsGeneration)}, {"kv_dtype", q(s.KVDtype)},
		{"block_tokens", n(s.BlockTokens)}, {"group", n(s.Group)}, {"attention", q(s.Attention)}, {"layers", n(s.Layers)}, {"heads", n(s.Heads)},
		{"head_size", n(s.HeadSize)}, {"layout", q(s.Layout)}, {"tp", n(s.TP)}, {"pp", n(s.PP)}, {"dcp", n(s.DCP)},
		{"shard_kind", q(string(s.ShardKind))}, {"hash_algorithm", q(s.HashAlgorithm)}, {"hash_seed", q(s.HashSeed)},
	}
}

// Preimage is the text whose SHA-256 is the space's id (WIRE.md).
func (s Space) Preimage() string {
	var b strings.Builder
	b.WriteString("kvferry space v1\n")
	for _, f := range s.Fields() {
		b.WriteString(f.Name + "=" + f.Value + "\n")
	}
	return b.String()
}

// ID names the space.
func (s Space) ID() SpaceID { return sha256.Sum256([]byte(s.Preimage())) }

// Validate names the first field that is out of its bounds.
func (s Space) Validate() error {
	for _, f := range []struct {
		name, value string
		min, max    int
	}{
		{"model", s.Model, 1, 512}, {"revision", s.Revision, 0, 256}, {"weights_generation", s.WeightsGeneration, 0, 64}, {"kv_dtype", s.KVDtype, 1, 64},
		{"attention", s.Attention, 1, 64}, {"layout", s.Layout, 1, 256}, {"hash_algorithm", s.HashAlgorithm, 1, 64}, {"hash_seed", s.HashSeed, 0, 256},
	} {
		if len(f.value) < f.min || len(f.value) > f.max {
			return fmt.Errorf("space.%s: %d bytes: must have %d to %d", f.name, len(f.value), f.min, f.max)
		}
		if strings.ContainsFunc(f.value, func(r rune) bool { return r < ' ' || r == 0x7f }) {
			return fmt.Errorf("space.%s: holds a control character", f.name)
		}
	}
	for _, f := range []struct {
		name            string
		value, min, max uint32
	}{
		{"block_tokens", s.BlockTokens, 1, 65536}, {"group", s.Group, 0, 255}, {"layers", s.Layers, 1, 65536}, {"heads", s.Heads, 1, 65536},
		{"head_size", s.HeadSize, 1, 65536}, {"tp", s.TP, 1, 4096}, {"pp", s.PP, 1, 4096}, {"dcp", s.DCP, 1, 4096},
	} {
		if f.value < f.min || f.value > f.max {
			return fmt.Errorf("space.%s: %d: must be %d to %d", f.name, f.value, f.min, f.max)
		}
	}
	if s.ShardKind != Sharded && s.ShardKind != Replicated {
		return fmt.Errorf("space.shard_kind: must be sharded or replicated")
	}
	if s.Revision == "" && (strings.HasPrefix(s.Model, "/") || strings.HasPrefix(s.Model, ".")) {
		return fmt.Errorf("space.revision: a model given by a local path needs a revision or weights digest")
	}
	return nil
}
