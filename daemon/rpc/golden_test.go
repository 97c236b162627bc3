package rpc

import (
	"encoding/hex"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	pb "github.com/kvferry/kvferry/proto/kvferry/v1"
)

var update = flag.Bool("update", false, "write the golden messages of this version anew: only for a new wire version")

func bytesOf(n int, first byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = first + byte(i)
	}
	return b
}

func goldenSpace() *pb.Space {
	return &pb.Space{Model: "org/model", Revision: "rev", WeightsGeneration: "g", KvDtype: "bfloat16", BlockTokens: 16, Group: 1, Attention: "full", Layers: 32, Heads: 8,
		HeadSize: 128, Layout: "flash/v1", Tp: 2, Pp: 1, Dcp: 1, ShardKind: pb.ShardKind_SHARD_KIND_SHARDED, HashAlgorithm: "sha256_cbor", HashSeed: "s"}
}

// golden are messages with every field set. Their bytes in testdata/ are those of wire version 1: daemons and connectors of the version before send just these,
// and they must mean the same for ever.
func golden() map[string]proto.Message {
	load := &pb.Load{Operation: 7, Word: 3, SpaceId: bytesOf(32, 1), RequestId: "req", Hashes: bytesOf(64, 2), DeadlineMs: 500}
	request := func(m *pb.SessionRequest) proto.Message { return m }
	return map[string]proto.Message{
		"hello": request(&pb.SessionRequest{Message: &pb.SessionRequest_Hello{Hello: &pb.Hello{
			WireVersion: 1, Role: pb.Role_ROLE_WORKER, Instance: "i", Rank: 1, Ranks: 2, Space: goldenSpace(), Engine: "vllm", EngineVersion: "0.32", ServingAddress: "h:8000", Tenant: "t",
			Regions: []*pb.Region{{Id: 1, Kind: pb.RegionKind_REGION_KIND_SHARED_HOST, Bytes: 4096, Blocks: 2, Planes: []*pb.Plane{{Base: 1, Stride: 2, Bytes: 3, HeadFirst: 4, HeadCount: 5}}}},
		}}}),
		"use_space": request(&pb.SessionRequest{Message: &pb.SessionRequest_UseSpace{UseSpace: &pb.UseSpace{Sequence: 9, Space: goldenSpace()}}}),
		"store": request(&pb.SessionRequest{Message: &pb.SessionRequest_Store{Store: &pb.Store{Operation: 7, Word: 3, SpaceId: bytesOf(32, 1), RequestId: "req", Region: 1,
			BlockIds: []uint32{5, 300}, Hashes: bytesOf(64, 2), Parents: bytesOf(64, 3), DeadlineMs: 500}}}),
		"load":          request(&pb.SessionRequest{Message: &pb.SessionRequest_Load{Load: load}}),
		"accept":        request(&pb.SessionRequest{Message: &pb.SessionRequest_Accept{Accept: &pb.Accept{Load: load, Ticket: bytesOf(5, 9)}}}),
		"release":       request(&pb.SessionRequest{Message: &pb.SessionRequest_Release{Release: &pb.Release{Operations: []uint64{7, 1 << 40}, WrongBlocks: 2}}}),
		"revoke":        request(&pb.SessionRequest{Message: &pb.SessionRequest_Revoke{Revoke: &pb.Revoke{Operations: []uint64{7}}}}),
		"release_lease": request(&pb.SessionRequest{Message: &pb.SessionRequest_ReleaseLease{ReleaseLease: &pb.ReleaseLease{RequestIds: []string{"a", "b"}}}}),
		"offer": request(&pb.SessionRequest{Message: &pb.SessionRequest_Offer{Offer: &pb.Offer{OfferId: bytesOf(16, 1), Secret: bytesOf(16, 2), SpaceId: bytesOf(32, 3), RequestId: "req",
			Hashes: bytesOf(32, 4), Tokens: 31, LifetimeMs: 1000}}}),
		"welcome": &pb.SessionResponse{Message: &pb.SessionResponse_Welcome{Welcome: &pb.Welcome{Epoch: bytesOf(16, 1), SessionId: 5, Token: bytesOf(16, 2), SpaceId: bytesOf(32, 3), PoolBytes: 1 << 30,
			Words: 1024, StoreBlocksMax: 64, LoadBlocksMax: 8192, MatchBlocksMax: 65536, WireVersion: 1, PeerAddress: "h:7400", Version: "v1"}}},
		"load_result": &pb.SessionResponse{Message: &pb.SessionResponse_LoadResult{LoadResult: &pb.LoadResult{Operation: 7, First: 1, Status: []byte{1, 2}, Offsets: []uint64{4096, 0},
			HeaderOffsets: []uint64{256, 0}, Generations: []uint64{1 << 60, 0}, Crc32C: []uint32{1, 0}, ShardBytes: 4096, Last: true}}},
		"operation_end": &pb.SessionResponse{Message: &pb.SessionResponse_OperationEnd{OperationEnd: &pb.OperationEnd{Operation: 7, Outcome: pb.Outcome_OUTCOME_BUSY, Reason: "r", BlocksStored: 1, BlocksPresent: 2}}},
		"match":         &pb.MatchRequest{SessionId: 5, RequestId: "req", SpaceId: bytesOf(32, 1), Hashes: bytesOf(64, 2), LeaseMs: 9},
		"match_answer":  &pb.MatchResponse{Blocks: 3, DramBlocks: 2, NvmeBlocks: 1, RestoreUs: 77, LeaseMs: 9},
		"ticket": &pb.Ticket{WireVersion: 1, Addresses: []string{"a:1", "b:2"}, OfferId: bytesOf(16, 1), Secret: bytesOf(16, 2), Epoch: bytesOf(16, 3), SpaceId: bytesOf(32, 4), TailHash: bytesOf(32, 5),
			Blocks: 6, Tokens: 99, LifetimeMs: 7, Traceparent: "tp", Instance: "i"},
		"claim":        &pb.ClaimRequest{WireVersion: 1, Epoch: bytesOf(16, 1), OfferId: bytesOf(16, 2), Secret: bytesOf(16, 3), Instance: "d", Rank: 1, ClaimId: 8, SpaceId: bytesOf(32, 4), Hashes: bytesOf(32, 5), WaitMs: 6, Tp: 2},
		"claim_answer": &pb.ClaimResponse{DataAddress: "h:7401", DataKey: bytesOf(16, 1), Status: []byte{1, 3}, Offsets: []uint64{4096, 0}, Crc32C: []uint32{5, 0}, ShardBytes: 4096, LeaseMs: 10},
		"hello_lending": request(&pb.SessionRequest{Message: &pb.SessionRequest_Hello{Hello: &pb.Hello{WireVersion: 1, Role: pb.Role_ROLE_WORKER, Instance: "i", Ranks: 1, Generations: 9, ReadsLent: true,
			Regions: []*pb.Region{{Id: 1, Kind: pb.RegionKind_REGION_KIND_SHARED_HOST, Bytes: 4096, Blocks: 2, Writable: true}}}}}),
		"accept_lending": request(&pb.SessionRequest{Message: &pb.SessionRequest_Accept{Accept: &pb.Accept{Load: load, Ticket: bytesOf(5, 9), Region: 1, BlockIds: []uint32{5, 300}}}}),
		"offer_lending": request(&pb.SessionRequest{Message: &pb.SessionRequest_Offer{Offer: &pb.Offer{OfferId: bytesOf(16, 1), OpenEnded: true, Region: 1, BlockIds: []uint32{5, 300},
			Generations: []uint64{1, 1 << 60}}}}),
		"complete_offer": request(&pb.SessionRequest{Message: &pb.SessionRequest_CompleteOffer{CompleteOffer: &pb.CompleteOffer{OfferId: bytesOf(16, 1), Region: 1, BlockIds: []uint32{5, 300},
			Generations: []uint64{1, 1 << 60}}}}),
		"end_offer":      request(&pb.SessionRequest{Message: &pb.SessionRequest_EndOffer{EndOffer: &pb.EndOffer{OfferId: bytesOf(16, 1), Reason: "r"}}}),
		"offer_served":   &pb.SessionResponse{Message: &pb.SessionResponse_OfferServed{OfferServed: &pb.OfferServed{OfferId: bytesOf(16, 1), Reason: "done"}}},
		"lent_gone":      &pb.SessionResponse{Message: &pb.SessionResponse_LentGone{LentGone: &pb.LentGone{Handle: 1 << 40}}},
		"welcome_direct": &pb.SessionResponse{Message: &pb.SessionResponse_Welcome{Welcome: &pb.Welcome{Epoch: bytesOf(16, 1), Direct: true}}},
		"load_result_lent": &pb.SessionResponse{Message: &pb.SessionResponse_LoadResult{LoadResult: &pb.LoadResult{Operation: 7, Status: []byte{1, 1}, Offsets: []uint64{5, 300},
			HeaderOffsets: []uint64{0, 0}, Generations: []uint64{1, 2}, Crc32C: []uint32{1, 0}, ShardBytes: 4096, Source: []byte{1, 2},
			Lent: &pb.Lent{Handle: 9, Token: bytesOf(16, 1), Bytes: 1 << 30, Blocks: 400, Planes: []*pb.Plane{{Base: 1, Stride: 2, Bytes: 3}}, Generations: 400}}}},
		"match_peers":        &pb.MatchRequest{SessionId: 5, RequestId: "req", SpaceId: bytesOf(32, 1), Hashes: bytesOf(64, 2), Peers: []string{"h:7400"}, ComputeUs: 900},
		"match_answer_peers": &pb.MatchResponse{Blocks: 3, DramBlocks: 1, PeerBlocks: 2, PeerUs: 800, PeerReason: "fetch is faster"},
		"claim_lent":         &pb.ClaimRequest{WireVersion: 1, Epoch: bytesOf(16, 1), ReadsLent: true, Path: "direct, tcp"},
		"claim_answer_lent":  &pb.ClaimResponse{DataKey: bytesOf(16, 1), Status: []byte{4}, Offsets: []uint64{1 << 63}, Crc32C: []uint32{0}, Parents: bytesOf(32, 2), Epoch: bytesOf(16, 3)},
		"confirm":            &pb.ConfirmRequest{Epoch: bytesOf(16, 1), DataKey: bytesOf(16, 2), Offsets: []uint64{1 << 63, 1<<63 + 4096}},
		"confirm_answer":     &pb.ConfirmResponse{Held: []byte{1, 0}, Crc32C: []uint32{5, 0}},
		"fetch":              &pb.FetchRequest{WireVersion: 1, SpaceId: bytesOf(32, 1), Hashes: bytesOf(64, 2), Instance: "i", Tp: 2, LeaseMs: 9},
		"fetch_answer":       &pb.FetchResponse{Epoch: bytesOf(16, 1), OfferId: bytesOf(16, 2), Secret: bytesOf(16, 3), Blocks: 2, LeaseMs: 9, ShardBytes: 4096},
		"end_claim":          &pb.EndClaimRequest{Epoch: bytesOf(16, 1), DataKey: bytesOf(16, 2), BlocksReceived: 3, Reason: "r"},
	}
}

func TestGoldenMessages(t *testing.T) {
	for name, want := range golden() {
		path := filepath.Join("testdata", name+".v1.hex")
		if *update {
			b, err := proto.MarshalOptions{Deterministic: true}.Marshal(want)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(hex.EncodeToString(b)+"\n"), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		b, err := hex.DecodeString(strings.TrimSpace(string(text)))
		if err != nil {
			t.Fatal(err)
		}
		got := want.ProtoReflect().New().Interface()
		if err := proto.Unmarshal(b, got); err != nil || !proto.Equal(got, want) {
			t.Errorf("%s: the bytes of version 1 mean something else now: %v", name, err)
		}
		if n := len(got.ProtoReflect().GetUnknown()); n > 0 {
			t.Errorf("%s: %d bytes of version 1 are not known any more", name, n)
		}
	}
}
