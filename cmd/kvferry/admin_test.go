package main

import (
	"context"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/reflect/protoreflect"

	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
)

// now is the moment of every test: all that is relative to it is the same each time.
var now = time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)

func before(d time.Duration) int64 { return now.Add(-d).UnixMilli() }

// canned is a daemon that answers what it was given.
type canned struct {
	kvferryv1.UnimplementedAdminServer
	status  *kvferryv1.StatusResponse
	workers []*kvferryv1.Worker
	spaces  []*kvferryv1.SpaceInfo
	blocks  func(*kvferryv1.BlocksRequest) (*kvferryv1.BlocksResponse, error)
	offers  []*kvferryv1.OfferInfo
	yaml    string        // of Config, where it is not empty
	hang    chan struct{} // closed when Config is asked; it then waits for its context
}

func (c *canned) Status(context.Context, *kvferryv1.StatusRequest) (*kvferryv1.StatusResponse, error) {
	return c.status, nil
}

func (c *canned) Workers(context.Context, *kvferryv1.WorkersRequest) (*kvferryv1.WorkersResponse, error) {
	return &kvferryv1.WorkersResponse{Workers: c.workers}, nil
}

func (c *canned) Spaces(context.Context, *kvferryv1.SpacesRequest) (*kvferryv1.SpacesResponse, error) {
	return &kvferryv1.SpacesResponse{Spaces: c.spaces}, nil
}

func (c *canned) Blocks(_ context.Context, q *kvferryv1.BlocksRequest) (*kvferryv1.BlocksResponse, error) {
	return c.blocks(q)
}

func (c *canned) Offers(context.Context, *kvferryv1.OffersRequest) (*kvferryv1.OffersResponse, error) {
	return &kvferryv1.OffersResponse{Offers: c.offers}, nil
}

func (c *canned) Config(ctx context.Context, _ *kvferryv1.ConfigRequest) (*kvferryv1.ConfigResponse, error) {
	if c.hang != nil {
		close(c.hang)
		<-ctx.Done()
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	if c.yaml != "" {
		return &kvferryv1.ConfigResponse{Yaml: c.yaml}, nil
	}
	return &kvferryv1.ConfigResponse{Yaml: "node: node-a\npool:\n  path: /dev/shm/kvferry\n  size: 16GiB\n"}, nil
}

func (c *canned) Version(context.Context, *kvferryv1.VersionRequest) (*kvferryv1.VersionResponse, error) {
	return &kvferryv1.VersionResponse{Version: "0.1.0", WireVersion: 1, PoolFormat: 1, GoVersion: "go1.26.8"}, nil
}

// listen serves c on a socket until the test ends.
func listen(t *testing.T, c *canned) (socket string) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "admin.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	kvferryv1.RegisterAdminServer(s, c)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(l)
	}()
	t.Cleanup(func() { s.Stop(); <-done })
	return socket
}

func id(seed byte, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = seed + byte(i)*17
	}
	return b
}

// node is a node with something of everything.
func node() *canned {
	space := func(model, dtype string, tp uint32) *kvferryv1.Space {
		return &kvferryv1.Space{Model: model, KvDtype: dtype, BlockTokens: 16, Attention: "full", Layers: 32, Heads: 8, HeadSize: 128, Layout: "flash/v1", Tp: tp, Pp: 1, Dcp: 1,
			ShardKind: kvferryv1.ShardKind_SHARD_KIND_SHARDED, HashAlgorithm: "sha256_cbor"}
	}
	preimage := func(model, dtype, tp string) string {
		return "kvferry space v1\nmodel=\"" + model + "\"\nkv_dtype=\"" + dtype + "\"\nblock_tokens=16\ntp=" + tp + "\n"
	}
	blocks := []*kvferryv1.BlockInfo{
		{SpaceId: id(0x3f, 32), Hash: id(0x90, 32), Parent: id(0x11, 32), Matchable: true, ShardsResident: 2, Leases: 1, Tier: "dram", Bytes: 4 << 20, IdleMs: 90_500},
		{SpaceId: id(0x3f, 32), Hash: id(0x11, 32), Parent: make([]byte, 32), Matchable: true, ShardsResident: 2, Children: 1, Pins: 3, Tier: "dram", Bytes: 4 << 20, IdleMs: 12},
		{SpaceId: id(0x3f, 32), Hash: id(0xd0, 32), Parent: id(0xaa, 32), ShardsResident: 1, Tier: "dram", Bytes: 2 << 20, IdleMs: 7_300_000},
	}
	return &canned{
		status: &kvferryv1.StatusResponse{
			Node: "node-a", Health: kvferryv1.Health_HEALTH_OK, Epoch: id(7, 16), StartedUnixMs: before(51*time.Hour + 13*time.Minute), Version: "0.1.0",
			Tiers:   []*kvferryv1.TierStatus{{Tier: "dram", CapacityBytes: 16 << 30, UsedBytes: 5<<30 + 300<<20, FreeBytes: 11<<30 - 300<<20, Blocks: 12_345, LeasedBlocks: 210, PinnedSlots: 9}},
			Workers: 2, Schedulers: 1, Spaces: 2, OffersOpen: 1, TransfersQueued: 4, TransfersRunning: 2,
			Counters: []*kvferryv1.Counter{{Name: "stored_bytes", Value: 51 << 30}, {Name: "lookup_blocks", Reason: "miss", Value: 1_234_567}, {Name: "lookup_blocks", Reason: "dram", Value: 98_765}},
		},
		workers: []*kvferryv1.Worker{
			{SessionId: 9, Role: kvferryv1.Role_ROLE_WORKER, Instance: "prefill-0", Rank: 1, Ranks: 2, Pid: 4711, Engine: "vllm", EngineVersion: "0.20.1", SpaceId: id(0x3f, 32), LentBytes: 60 << 30,
				Mode: "shared-host", AttachedUnixMs: before(26 * time.Minute), Operations: 3, PinnedSlots: 9, StoredBlocks: 12_001, LoadedBlocks: 873},
			{SessionId: 8, Role: kvferryv1.Role_ROLE_WORKER, Instance: "prefill-0", Rank: 0, Ranks: 2, Pid: 4710, Engine: "vllm", EngineVersion: "0.20.1", SpaceId: id(0x3f, 32), LentBytes: 60 << 30,
				Mode: "shared-host", AttachedUnixMs: before(26 * time.Minute), StoredBlocks: 12_003, LoadedBlocks: 873},
			{SessionId: 7, Role: kvferryv1.Role_ROLE_SCHEDULER, Instance: "prefill-0", Pid: 4700, Engine: "vllm", SpaceId: id(0x3f, 32), Mode: "none", AttachedUnixMs: before(27 * time.Minute), Leases: 14},
		},
		spaces: []*kvferryv1.SpaceInfo{
			{SpaceId: id(0x3f, 32), Space: space("meta/llama-70b", "bfloat16", 2), Preimage: preimage("meta/llama-70b", "bfloat16", "2"), ShardBytes: 2 << 20, Shards: 2, Blocks: 12_345, Bytes: 49_380 << 20},
			{SpaceId: id(0x3e, 32), Space: space("meta/llama-70b", "fp8_e4m3", 4), Preimage: preimage("meta/llama-70b", "fp8_e4m3", "4"), ShardBytes: 512 << 10, Shards: 4},
		},
		blocks: func(q *kvferryv1.BlocksRequest) (*kvferryv1.BlocksResponse, error) {
			r := &kvferryv1.BlocksResponse{Total: 12_345}
			if len(q.SpaceId) > 0 && q.SpaceId[0] != 0x3f {
				return &kvferryv1.BlocksResponse{}, nil
			}
			for _, b := range blocks[:min(int(q.Limit), len(blocks))] {
				if string(b.Hash[:len(q.HashPrefix)]) == string(q.HashPrefix) {
					r.Blocks = append(r.Blocks, b)
				}
			}
			return r, nil
		},
		offers: []*kvferryv1.OfferInfo{
			{OfferId: id(0x20, 16), RequestId: "req-17", Instance: "prefill-0", State: "ended", Reason: "expired", Blocks: 40, Tokens: 650, AgeMs: 130_000, Path: "pool"},
			{OfferId: id(0x21, 16), RequestId: "req-18", Instance: "prefill-0", State: "claimed", Blocks: 512, Tokens: 8200, AgeMs: 800, ExpiresInMs: 119_200, ClaimedBy: "decode-3", Path: "pool, tcp"},
			{OfferId: id(0x22, 16), RequestId: "req-19", Instance: "prefill-0", State: "open", Blocks: 1, Tokens: 19, AgeMs: 35, ExpiresInMs: 119_965, Path: "pool"},
		},
	}
}

// ill is a node with problems.
func ill() *canned {
	c := node()
	c.status.Health = kvferryv1.Health_HEALTH_DEGRADED
	c.status.Draining = true
	c.status.Problems = []*kvferryv1.Problem{
		{Component: "pool", Reason: "full of leased blocks: stores are refused", SinceUnixMs: before(42 * time.Second), NextCommand: "kvferry workers"},
		{Component: "peer 10.0.0.2:7400", Reason: "connection refused", SinceUnixMs: before(5*time.Minute + 12*time.Second), NextCommand: "kvferry offers"},
	}
	return c
}

// evil clears the screen, sets the title, deletes, turns the direction of text, and makes a line and a column of its own. Its letters stay.
const evil = "größe 模型\x1b[2J\x1b]0;title\a\r\nfake line\tcolumn\u009b31m\x7f\u202e\u2028"

// hostile is a node whose every string is evil.
func hostile() *canned {
	c := ill()
	c.yaml = "node: " + strings.ReplaceAll(evil, "\n", "") + "\npool:\n  size: 1\n"
	poison(c.status.ProtoReflect())
	for _, w := range c.workers {
		poison(w.ProtoReflect())
	}
	for _, s := range c.spaces {
		poison(s.ProtoReflect())
	}
	for _, o := range c.offers {
		poison(o.ProtoReflect())
	}
	inner := c.blocks
	c.blocks = func(q *kvferryv1.BlocksRequest) (*kvferryv1.BlocksResponse, error) {
		r, err := inner(q)
		for _, b := range r.GetBlocks() {
			poison(b.ProtoReflect())
		}
		return r, err
	}
	return c
}

func poison(m protoreflect.Message) {
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.IsList() && f.Kind() == protoreflect.MessageKind:
			for i := range v.List().Len() {
				poison(v.List().Get(i).Message())
			}
		case f.IsList():
		case f.Kind() == protoreflect.MessageKind:
			poison(v.Message())
		case f.Name() == "preimage":
			m.Set(f, protoreflect.ValueOfString(strings.ReplaceAll(v.String(), "\n", strings.ReplaceAll(evil, "\n", "")+"\n")))
		case f.Kind() == protoreflect.StringKind:
			m.Set(f, protoreflect.ValueOfString(evil))
		}
		return true
	})
}

var errNoSpace = status.Error(codes.InvalidArgument, "space_id: unknown")
