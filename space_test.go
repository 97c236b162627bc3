package kvferry

import (
	"strings"
	"testing"
)

// The preimage and its hash are part of the wire: daemons of all versions must come to the same id.
func TestSpaceID(t *testing.T) {
	s := Space{Model: "org/model", Revision: "abc", KVDtype: "bfloat16", BlockTokens: 16, Attention: "full", Layers: 32, Heads: 8, HeadSize: 128, Layout: "flash \"x\"/v1",
		TP: 2, PP: 1, DCP: 1, ShardKind: Sharded, HashAlgorithm: "sha256_cbor"}
	want := "kvferry space v1\nmodel=\"org/model\"\nrevision=\"abc\"\nweights_generation=\"\"\nkv_dtype=\"bfloat16\"\nblock_tokens=16\ngroup=0\nattention=\"full\"\nlayers=32\nheads=8\n" +
		"head_size=128\nlayout=\"flash \\\"x\\\"/v1\"\ntp=2\npp=1\ndcp=1\nshard_kind=\"sharded\"\nhash_algorithm=\"sha256_cbor\"\nhash_seed=\"\"\n"
	if got := s.Preimage(); got != want {
		t.Errorf("preimage is\n%s\nwant\n%s", got, want)
	}
	if got := s.ID().String(); got != "016ded50bb03b3567458de07150eb981527a8afa16ed9985b4259f69bc64ddfa" {
		t.Errorf("id is %s", got)
	}
	if err := s.Validate(); err != nil {
		t.Error(err)
	}
}

// Each field decides: no two spaces that differ in one have the same id.
func TestEveryFieldIsInTheID(t *testing.T) {
	base := Space{Model: "m", KVDtype: "x", BlockTokens: 1, Attention: "full", Layers: 1, Heads: 1, HeadSize: 1, Layout: "l", TP: 1, PP: 1, DCP: 1, ShardKind: Sharded, HashAlgorithm: "h"}
	changes := []func(*Space){
		func(s *Space) { s.Model += "2" }, func(s *Space) { s.Revision += "2" }, func(s *Space) { s.WeightsGeneration += "2" }, func(s *Space) { s.KVDtype += "2" },
		func(s *Space) { s.BlockTokens++ }, func(s *Space) { s.Group++ }, func(s *Space) { s.Attention += "2" }, func(s *Space) { s.Layers++ }, func(s *Space) { s.Heads++ },
		func(s *Space) { s.HeadSize++ }, func(s *Space) { s.Layout += "2" }, func(s *Space) { s.TP++ }, func(s *Space) { s.PP++ }, func(s *Space) { s.DCP++ },
		func(s *Space) { s.ShardKind = Replicated }, func(s *Space) { s.HashAlgorithm += "2" }, func(s *Space) { s.HashSeed += "2" },
	}
	if len(changes) != len(base.Fields()) {
		t.Fatalf("%d fields, %d changes", len(base.Fields()), len(changes))
	}
	seen := map[SpaceID]int{base.ID(): -1}
	for i, change := range changes {
		s := base
		change(&s)
		if j, ok := seen[s.ID()]; ok {
			t.Errorf("changes %d and %d give one id", i, j)
		}
		seen[s.ID()] = i
	}
}

func TestSpaceBounds(t *testing.T) {
	good := Space{Model: "m", KVDtype: "x", BlockTokens: 1, Attention: "full", Layers: 1, Heads: 1, HeadSize: 1, Layout: "l", TP: 1, PP: 1, DCP: 1, ShardKind: Sharded, HashAlgorithm: "h"}
	for field, change := range map[string]func(*Space){
		"space.model": func(s *Space) { s.Model = "" }, "space.revision": func(s *Space) { s.Model = "./local" }, "space.kv_dtype": func(s *Space) { s.KVDtype = strings.Repeat("x", 65) },
		"space.block_tokens": func(s *Space) { s.BlockTokens = 0 }, "space.group": func(s *Space) { s.Group = 256 }, "space.layout": func(s *Space) { s.Layout = "a\nb" },
		"space.tp": func(s *Space) { s.TP = 5000 }, "space.shard_kind": func(s *Space) { s.ShardKind = "" },
	} {
		s := good
		change(&s)
		if err := s.Validate(); err == nil || !strings.HasPrefix(err.Error(), field+":") {
			t.Errorf("%s: %v", field, err)
		}
	}
}
