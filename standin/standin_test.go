package standin_test

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon"
	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/standin"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// start runs a real daemon in this process and returns its sockets' directory.
func start(t *testing.T, name string) (dir string, stop func()) {
	t.Helper()
	dir = t.TempDir()
	pool, err := os.MkdirTemp("/dev/shm", "kvferry-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(pool) })
	c := daemon.DefaultConfig()
	c.Node, c.Sockets.Dir, c.Pool.Path = name, dir, filepath.Join(pool, "pool")
	c.Pool.Size, c.Pool.Slab = 66<<20, 8<<20
	c.Peer.Listen, c.Data.Listen, c.Metrics.Listen = "127.0.0.1:0", "127.0.0.1:0", ""
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	d, err := daemon.Start(c, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	stopped := false
	stop = func() {
		if !stopped {
			stopped = true
			d.Stop()
		}
	}
	t.Cleanup(stop)
	return dir, stop
}

func space() *kvferryv1.Space {
	return &kvferryv1.Space{Model: "standin", KvDtype: "bfloat16", BlockTokens: 16, Attention: "full", Layers: 4, Heads: 4, HeadSize: 64, Layout: "standin/v1",
		Tp: 1, Pp: 1, Dcp: 1, ShardKind: kvferryv1.ShardKind_SHARD_KIND_SHARDED, HashAlgorithm: "sha256_cbor"}
}

func attach(t *testing.T, dir, instance string, role kvferryv1.Role) (*standin.Session, *standin.Memory) {
	t.Helper()
	var m *standin.Memory
	if role == kvferryv1.Role_ROLE_WORKER {
		var err error
		if m, err = standin.NewMemory(standin.Shape{Blocks: 64, Planes: 4, PlaneBytes: 16 << 10}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = m.Close() })
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	s, err := standin.Attach(ctx, standin.Config{SocketsDir: dir, Role: role, Instance: instance, Space: space(), Memory: m})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s, m
}

// prompt is a chain of blocks.
func prompt(n int, seed uint64) (hashes, parents []kvferry.Hash) {
	var parent kvferry.Hash
	for i := range n {
		h := standin.Chain(parent, seed+uint64(i))
		hashes, parents = append(hashes, h), append(parents, parent)
		parent = h
	}
	return hashes, parents
}

func ids(first, n uint32) (list []uint32) {
	for i := range n {
		list = append(list, first+i)
	}
	return list
}

func store(t *testing.T, s *standin.Session, m *standin.Memory, first uint32, hashes, parents []kvferry.Hash) {
	t.Helper()
	for i, h := range hashes {
		m.Write(first+uint32(i), h)
	}
	o, err := s.Store(standin.StoreRequest{RequestID: "r", Blocks: ids(first, uint32(len(hashes))), Hashes: hashes, Parents: parents})
	if err != nil {
		t.Fatal(err)
	}
	end, err := o.Wait(t.Context())
	if err != nil || end.Outcome != kvferryv1.Outcome_OUTCOME_COMMITTED {
		t.Fatal("store:", end, err)
	}
}

func load(t *testing.T, s *standin.Session, m *standin.Memory, first uint32, hashes []kvferry.Hash, ticket []byte) *standin.LoadReport {
	t.Helper()
	for i := range hashes {
		m.Scribble(first + uint32(i))
	}
	r, err := s.Load(t.Context(), standin.LoadRequest{RequestID: "r", Blocks: ids(first, uint32(len(hashes))), Hashes: hashes, Ticket: ticket, DeadlineMs: 10_000})
	if err != nil {
		t.Fatal(err)
	}
	for i, st := range r.Status {
		if st == kvferryv1.BlockStatus_BLOCK_STATUS_READY && m.Wrong(first+uint32(i), hashes[i]) > 0 {
			t.Errorf("block %d has wrong bytes", i)
		}
	}
	return r
}

func TestStoreMatchLoad(t *testing.T) {
	dir, _ := start(t, "a")
	w, m := attach(t, dir, "e", kvferryv1.Role_ROLE_WORKER)
	sched, _ := attach(t, dir, "e", kvferryv1.Role_ROLE_SCHEDULER)
	if w.Space != sched.Space {
		t.Fatal("worker and scheduler are in different spaces")
	}
	hashes, parents := prompt(20, 1)
	store(t, w, m, 0, hashes, parents)
	more, _ := prompt(30, 1)
	r, err := sched.Match(t.Context(), "r", more, 1000)
	if err != nil || r.Blocks != 20 {
		t.Fatal("match:", r, err)
	}
	if got := load(t, w, m, 30, more, nil); got.Loaded != 20 || got.Wrong != 0 || got.Status[20] != kvferryv1.BlockStatus_BLOCK_STATUS_MISS {
		t.Errorf("load: %+v", got)
	}
	if err := sched.ReleaseLease("r"); err != nil {
		t.Error(err)
	}
}

func TestHandoff(t *testing.T) {
	a, _ := start(t, "a")
	b, _ := start(t, "b")
	prefill, pm := attach(t, a, "prefill", kvferryv1.Role_ROLE_WORKER)
	sched, _ := attach(t, a, "prefill", kvferryv1.Role_ROLE_SCHEDULER)
	decode, dm := attach(t, b, "decode", kvferryv1.Role_ROLE_WORKER)
	hashes, parents := prompt(24, 9)
	store(t, prefill, pm, 0, hashes, parents)
	ticket, err := sched.Offer(standin.OfferRequest{RequestID: "r", Hashes: hashes, Tokens: 24 * 16, LifetimeMs: 10_000})
	if err != nil {
		t.Fatal(err)
	}
	if got := load(t, decode, dm, 8, hashes, ticket); got.Loaded != 24 {
		t.Errorf("accept: %+v", got)
	}
	if got := load(t, decode, dm, 32, hashes, nil); got.Loaded != 24 {
		t.Errorf("load of what was handed over: %+v", got)
	}
}

func TestSessionEndsWithDaemon(t *testing.T) {
	dir, stop := start(t, "a")
	w, _ := attach(t, dir, "e", kvferryv1.Role_ROLE_WORKER)
	stop()
	select {
	case <-w.Done():
	case <-time.After(10 * time.Second):
		t.Fatal("the session lives on")
	}
	if _, err := w.Store(standin.StoreRequest{Blocks: []uint32{0}, Hashes: make([]kvferry.Hash, 1), Parents: make([]kvferry.Hash, 1)}); !errors.Is(err, standin.ErrEnded) {
		t.Error("store:", err)
	}
	if _, err := standin.Attach(t.Context(), standin.Config{SocketsDir: dir, Role: kvferryv1.Role_ROLE_SCHEDULER, Instance: "e", Space: space()}); err == nil {
		t.Error("attached to nothing")
	}
}

func TestRevoke(t *testing.T) {
	dir, _ := start(t, "a")
	w, m := attach(t, dir, "e", kvferryv1.Role_ROLE_WORKER)
	outcomes := map[kvferryv1.Outcome]int{}
	for round := range 50 {
		hashes, parents := prompt(16, uint64(round)*100)
		for i, h := range hashes {
			m.Write(uint32(i), h)
		}
		o, err := w.Store(standin.StoreRequest{Blocks: ids(0, 16), Hashes: hashes, Parents: parents})
		if err != nil {
			t.Fatal(err)
		}
		won := o.Revoke()
		if won { // the engine takes its blocks back at once
			for i := range uint32(16) {
				m.Scribble(i)
			}
		}
		end, err := o.Wait(t.Context())
		if err != nil || won == (end.Outcome == kvferryv1.Outcome_OUTCOME_COMMITTED) {
			t.Fatal("revoked:", won, "end:", end, err)
		}
		outcomes[end.Outcome]++
		if got := load(t, w, m, 32, hashes, nil); won && got.Loaded != 0 {
			t.Fatal("a revoked store was published")
		}
	}
	t.Log(outcomes)
}

func TestContent(t *testing.T) {
	m, err := standin.NewMemory(standin.Shape{Blocks: 4, Planes: 3, PlaneBytes: 4096})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	hashes, _ := prompt(4, 3)
	for i, h := range hashes {
		m.Write(uint32(i), h)
	}
	var wrong []string
	for i, h := range hashes {
		wrong = append(wrong, fmt.Sprint(m.Wrong(uint32(i), h) == 0, m.Wrong(uint32(i), hashes[(i+1)%4]) > 3*4000))
	}
	if diff := cmp.Diff([]string{"true true", "true true", "true true", "true true"}, wrong); diff != "" {
		t.Error(diff)
	}
	m.Plane(2, 1)[77] ^= 1
	if n := m.Wrong(2, hashes[2]); n != 8 {
		t.Errorf("one flipped bit: %d bytes wrong", n)
	}
	if hex.EncodeToString(hashes[0][:4]) == hex.EncodeToString(hashes[1][:4]) {
		t.Error("hashes")
	}
}
