package session

import (
	"errors"
	"testing"

	"github.com/kvferry/kvferry"
)

func FuzzDescriptorRequest(f *testing.F) {
	good := descriptorAnswer(0, "", entryPool, entryWords)[:requestBytes]
	f.Add(good)
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := parseDescriptorRequest(b)
		if err == nil && (len(r.entries) < 1 || len(r.entries) > descriptorsMax) {
			t.Errorf("%d entries", len(r.entries))
		}
	})
}

func FuzzRights(f *testing.F) {
	f.Add([]byte{})
	f.Add(make([]byte, 24))
	f.Fuzz(func(t *testing.T, b []byte) {
		for i := 16; i < len(b); i++ {
			b[i] = 0xff // no number of a descriptor that this process has
		}
		fds, _ := parseRights(b)
		for _, fd := range fds {
			_ = fd.Close()
		}
	})
}

// Every segment of every block of a region that passes lies inside of it.
func FuzzRegion(f *testing.F) {
	f.Add(uint64(1<<20), uint32(16), uint64(0), uint64(4096), uint64(4096))
	f.Add(uint64(1<<46), uint32(1<<30), uint64(1<<63), uint64(1<<62), uint64(1))
	f.Fuzz(func(t *testing.T, bytes uint64, blocks uint32, base, stride, n uint64) {
		r := RegionSpec{ID: 1, Kind: SharedHost, Bytes: bytes, Blocks: blocks, Planes: []kvferry.Plane{{Base: base, Stride: stride, Bytes: n}}}
		if err := validateRegion(r); err != nil {
			if !errors.Is(err, ErrInvalid) {
				t.Error(err)
			}
			return
		}
		reg := region{spec: r}
		for _, b := range []uint32{0, blocks - 1, blocks / 2} {
			for _, s := range reg.segments(b) {
				if s.Offset+s.Length < s.Offset || s.Offset+s.Length > bytes {
					t.Fatalf("block %d: %+v of %d bytes", b, s, bytes)
				}
			}
		}
	})
}

func FuzzHello(f *testing.F) {
	f.Add("i", uint32(0), uint32(1), "model", "\x00")
	f.Fuzz(func(t *testing.T, instance string, rank, ranks uint32, model, layout string) {
		h := Hello{WireVersion: 1, Role: Scheduler, Instance: instance, Rank: rank, Ranks: ranks, Space: kvferry.Space{Model: model, Layout: layout, KVDtype: "x", BlockTokens: 1, Attention: "full",
			Layers: 1, Heads: 1, HeadSize: 1, TP: 1, PP: 1, DCP: 1, ShardKind: kvferry.Sharded, HashAlgorithm: "x"}}
		if err := validateHello(h); err != nil {
			var fe *FieldError
			if !errors.As(err, &fe) || fe.Field == "" {
				t.Errorf("%v names no field", err)
			}
		}
	})
}
