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
	"google.golang.org/protobuf/proto"
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
	tiers   *kvferryv1.TiersResponse
	asked   []proto.Message // Evict, Demote, PrefetchBlocks
	verify  []*kvferryv1.VerifyResponse
	explain func(*kvferryv1.ExplainRequest) *kvferryv1.ExplainResponse
	trace   []*kvferryv1.TraceResponse
	traced  chan struct{} // closed when all of trace is sent; the stream ends then if it is nil
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

func (c *canned) Tiers(context.Context, *kvferryv1.TiersRequest) (*kvferryv1.TiersResponse, error) {
	return c.tiers, nil
}

func (c *canned) Evict(_ context.Context, q *kvferryv1.EvictRequest) (*kvferryv1.EvictResponse, error) {
	c.asked = append(c.asked, q)
	if q.From == 0 {
		return &kvferryv1.EvictResponse{Blocks: 12_000, Next: 7}, nil
	}
	return &kvferryv1.EvictResponse{Blocks: 345}, nil
}

func (c *canned) Demote(_ context.Context, q *kvferryv1.DemoteRequest) (*kvferryv1.DemoteResponse, error) {
	c.asked = append(c.asked, q)
	switch {
	case c.tiers == nil:
		return nil, status.Error(codes.FailedPrecondition, "tiering: this node has no drives (nvme.drives)")
	case !q.Blocks.All:
		return &kvferryv1.DemoteResponse{Blocks: 2, Present: 1, Left: 1}, nil
	case q.From == 0:
		return &kvferryv1.DemoteResponse{Blocks: 1000, Next: 1<<32 | 5}, nil
	}
	return &kvferryv1.DemoteResponse{Blocks: 1, Present: 1, Left: 1002, Failed: 1, NoRoom: 4, UnderWay: 3}, nil
}

func (c *canned) PrefetchBlocks(_ context.Context, q *kvferryv1.PrefetchBlocksRequest) (*kvferryv1.PrefetchBlocksResponse, error) {
	c.asked = append(c.asked, q)
	if q.Blocks.All {
		return &kvferryv1.PrefetchBlocksResponse{Blocks: 4096, NoRoom: 1}, nil
	}
	return &kvferryv1.PrefetchBlocksResponse{Blocks: 1}, nil
}

func (c *canned) Verify(_ *kvferryv1.VerifyRequest, s grpc.ServerStreamingServer[kvferryv1.VerifyResponse]) error {
	for _, r := range c.verify {
		if err := s.Send(r); err != nil {
			return err
		}
	}
	return nil
}

func (c *canned) Explain(_ context.Context, q *kvferryv1.ExplainRequest) (*kvferryv1.ExplainResponse, error) {
	return c.explain(q), nil
}

func (c *canned) Trace(_ *kvferryv1.TraceRequest, s grpc.ServerStreamingServer[kvferryv1.TraceResponse]) error {
	if err := s.SendHeader(nil); err != nil {
		return err
	}
	for _, r := range c.trace {
		if err := s.Send(r); err != nil {
			return err
		}
	}
	if c.traced != nil {
		close(c.traced)
		<-s.Context().Done()
	}
	return nil
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
		{SpaceId: id(0x3f, 32), Hash: id(0x11, 32), Parent: make([]byte, 32), Matchable: true, ShardsResident: 2, Children: 1, Pins: 3, Tier: "dram+nvme", Bytes: 4 << 20, IdleMs: 12},
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
			{SpaceId: id(0x3f, 32), Space: space("meta/llama-70b", "bfloat16", 2), Preimage: preimage("meta/llama-70b", "bfloat16", "2"), ShardBytes: 2 << 20, Shards: 2, Blocks: 12_345, Bytes: 49_380 << 20, DramBlocks: 2_345, NvmeBlocks: 12_000, DramBytes: 9_380 << 20, NvmeBytes: 40_000 << 20},
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
		tiers: &kvferryv1.TiersResponse{
			Policy: "s3fifo", PromotedShards: 1_204, DemotedShards: 98_765, NotAdmittedBlocks: 1,
			Stores: []*kvferryv1.StoreInfo{
				{Tier: "dram", Name: "/dev/shm/kvferry.pool", CapacityBytes: 16 << 30, UsedBytes: 5<<30 + 300<<20, FreeBytes: 11<<30 - 300<<20, Blocks: 2_345, Health: kvferryv1.Health_HEALTH_OK, ReadRate: 11e9, Running: 1},
				{Tier: "nvme", Name: "/mnt/a/kvferry", CapacityBytes: 1 << 40, UsedBytes: 700 << 30, FreeBytes: 324 << 30, Blocks: 350_000, Health: kvferryv1.Health_HEALTH_OK, Engine: "uring", ReadBytes: 9 << 40,
					WrittenBytes: 2 << 40, ReadP50Us: 410, ReadP99Us: 2_300, WriteP50Us: 900, WriteP99Us: 31_000, LifetimeWrittenBytes: 81 << 40, ReadRate: 6.4e9, Queued: 3, Running: 2},
				{Tier: "nvme", Name: "/mnt/b/kvferry", CapacityBytes: 1 << 40, FreeBytes: 1 << 40, Health: kvferryv1.Health_HEALTH_OK, Engine: "threads: io_uring is forbidden here (EPERM)"},
			},
		},
		verify: []*kvferryv1.VerifyResponse{
			{SlotsTotal: 1000}, {Slots: 90, SlotsTotal: 1000, Bytes: 90 << 20}, {Slots: 333, SlotsTotal: 1000, Bytes: 333 << 20}, {Slots: 340, SlotsTotal: 1000, Bytes: 340 << 20},
			{Slots: 999, SlotsTotal: 1000, Bytes: 999 << 20}, {Slots: 1000, SlotsTotal: 1000, Bytes: 1000 << 20, Done: true},
		},
		explain: explained,
		offers: []*kvferryv1.OfferInfo{
			{OfferId: id(0x20, 16), RequestId: "req-17", Instance: "prefill-0", State: "ended", Reason: "expired", Blocks: 40, Tokens: 650, AgeMs: 130_000, Path: "pool"},
			{OfferId: id(0x21, 16), RequestId: "req-18", Instance: "prefill-0", State: "claimed", Blocks: 512, Tokens: 8200, AgeMs: 800, ExpiresInMs: 119_200, ClaimedBy: "decode-3", Path: "pool, tcp"},
			{OfferId: id(0x22, 16), RequestId: "req-19", Instance: "prefill-0", State: "open", Blocks: 1, Tokens: 19, AgeMs: 35, ExpiresInMs: 119_965, Path: "pool"},
		},
	}
}

// explained knows one block that is here, one that is not, and a request.
func explained(q *kvferryv1.ExplainRequest) *kvferryv1.ExplainResponse {
	here := &kvferryv1.BlockExplanation{
		Hash: id(0x90, 32), SpaceId: id(0x3f, 32), Verdict: "miss: it is here, but not its ancestor 1122: it was evicted to make room, from dram, 3m0s ago", MissingAncestor: id(0x11, 32),
		Block: &kvferryv1.BlockInfo{SpaceId: id(0x3f, 32), Hash: id(0x90, 32), Parent: id(0x11, 32), ShardsResident: 2, Leases: 1, Tier: "dram+nvme", Bytes: 4 << 20, IdleMs: 90_500},
	}
	gone := &kvferryv1.BlockExplanation{Hash: id(0x11, 32), SpaceId: id(0x3f, 32), Verdict: "miss: it was evicted to make room, from dram, 3m0s ago", RemovedReason: "evicted", RemovedUnixMs: before(3 * time.Minute), RemovedTier: "dram"}
	r := &kvferryv1.ExplainResponse{}
	for _, b := range []*kvferryv1.BlockExplanation{here, gone} {
		if len(q.HashPrefix) > 0 && string(b.Hash[:len(q.HashPrefix)]) == string(q.HashPrefix) {
			r.Blocks = append(r.Blocks, b)
		}
	}
	if q.RequestId == "cmpl-17" {
		r.Lookups = []*kvferryv1.LookupExplanation{
			{AtUnixMs: before(12 * time.Second), RequestId: "cmpl-17", Instance: "decode-0", SpaceId: id(0x3f, 32), AskedBlocks: 40, DramBlocks: 40, Reason: "all that was asked for was found"},
			{AtUnixMs: before(time.Minute), RequestId: "cmpl-17", Instance: "prefill-0", SpaceId: id(0x3f, 32), AskedBlocks: 40, DramBlocks: 6, NvmeBlocks: 1, Reason: "the next block was in no tier of this node",
				FirstMissed: gone},
		}
	}
	return r
}

// ill is a node with problems.
func ill() *canned {
	c := node()
	c.status.Health = kvferryv1.Health_HEALTH_DEGRADED
	c.status.Draining = true
	c.tiers.Stores[1].Health, c.tiers.Stores[1].Reason, c.tiers.Stores[1].SinceUnixMs = kvferryv1.Health_HEALTH_DEGRADED, "nvme: device error: write slab 3, slot 9: input/output error", before(90*time.Second)
	c.tiers.Stores[2].Slow = "slower than recomputing: 2s against 100ms"
	c.verify[5].Broken, c.verify[5].Unreadable, c.verify[5].Skipped = 1, 2, 1200
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
	poison(c.tiers.ProtoReflect())
	known := c.explain
	c.explain = func(q *kvferryv1.ExplainRequest) *kvferryv1.ExplainResponse {
		r := known(q)
		poison(r.ProtoReflect())
		return r
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
