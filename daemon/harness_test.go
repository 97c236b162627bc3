package daemon

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvferry/kvferry"
	pb "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/standin"
	"github.com/kvferry/kvferry/standin/process"
)

func TestMain(m *testing.M) {
	process.Main() // a worker process of crash_test.go does not return
	// The thread that starts processes lives as long as this one: they die with it.
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("github.com/kvferry/kvferry/standin/process.init.func1.1"))
}

// node is a daemon in this process, on a real pool and real sockets.
type node struct {
	*Daemon
	t   *testing.T
	cfg Config
}

func newNode(t *testing.T, change ...func(*Config)) *node {
	t.Helper()
	shm, err := os.MkdirTemp("/dev/shm", "kvferry-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(shm) })
	c := DefaultConfig()
	c.Node, c.Sockets.Dir, c.Pool.Path, c.Pool.Size, c.Pool.Slab = "test", t.TempDir(), filepath.Join(shm, "pool"), 34<<20, 8<<20
	c.Peer.Listen, c.Data.Listen, c.Metrics.Listen = "127.0.0.1:0", "127.0.0.1:0", ""
	for _, f := range change {
		f(&c)
	}
	n := &node{t: t, cfg: c}
	n.start()
	t.Cleanup(func() { n.Stop() })
	return n
}

func (n *node) start() {
	n.t.Helper()
	d, err := Start(n.cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		n.t.Fatal(err)
	}
	n.Daemon = d
}

// restart makes the next incarnation over the same pool.
func (n *node) restart() {
	n.Stop()
	n.start()
}

func testSpace() *pb.Space {
	return &pb.Space{Model: "test", KvDtype: "bfloat16", BlockTokens: 16, Attention: "full", Layers: 4, Heads: 4, HeadSize: 64, Layout: "test/v1", Tp: 1, Pp: 1, Dcp: 1,
		ShardKind: pb.ShardKind_SHARD_KIND_SHARDED, HashAlgorithm: "sha256_cbor"}
}

func ctx10(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func (n *node) attach(role pb.Role, change ...func(*standin.Config)) (*standin.Session, *standin.Memory) {
	n.t.Helper()
	c := standin.Config{SocketsDir: n.cfg.Sockets.Dir, Role: role, Instance: "engine", Space: testSpace()}
	if role == pb.Role_ROLE_WORKER {
		m, err := standin.NewMemory(standin.Shape{Blocks: 256, Planes: 4, PlaneBytes: 16 << 10})
		if err != nil {
			n.t.Fatal(err)
		}
		n.t.Cleanup(func() { _ = m.Close() })
		c.Memory = m
	}
	for _, f := range change {
		f(&c)
	}
	s, err := standin.Attach(ctx10(n.t), c)
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { _ = s.Close() })
	return s, c.Memory
}

func (n *node) engine() pb.EngineClient {
	n.t.Helper()
	conn, err := grpc.NewClient("unix:"+filepath.Join(n.cfg.Sockets.Dir, EngineSocket), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { _ = conn.Close() })
	return pb.NewEngineClient(conn)
}

func (n *node) admin() pb.AdminClient {
	n.t.Helper()
	conn, err := grpc.NewClient("unix:"+filepath.Join(n.cfg.Sockets.Dir, AdminSocket), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { _ = conn.Close() })
	return pb.NewAdminClient(conn)
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

func numbers(from, n int) (out []uint32) {
	for i := range n {
		out = append(out, uint32(from+i))
	}
	return out
}

// store computes blocks and stores them.
func store(t *testing.T, s *standin.Session, m *standin.Memory, from int, hashes, parents []kvferry.Hash) *pb.OperationEnd {
	t.Helper()
	for i, h := range hashes {
		m.Write(uint32(from+i), h)
	}
	o, err := s.Store(standin.StoreRequest{RequestID: "r", Blocks: numbers(from, len(hashes)), Hashes: hashes, Parents: parents})
	if err != nil {
		t.Fatal(err)
	}
	end, err := o.Wait(ctx10(t))
	if err != nil {
		t.Fatal(err)
	}
	return end
}

// load loads into blocks that held something else and answers how many came; what came must be right.
func load(t *testing.T, s *standin.Session, m *standin.Memory, from int, hashes []kvferry.Hash, ticket []byte) *standin.LoadReport {
	t.Helper()
	for i := range hashes {
		m.Scribble(uint32(from + i))
	}
	r, err := s.Load(ctx10(t), standin.LoadRequest{RequestID: "r", Blocks: numbers(from, len(hashes)), Hashes: hashes, Ticket: ticket})
	if err != nil {
		t.Fatal(err)
	}
	for i, st := range r.Status {
		if st == pb.BlockStatus_BLOCK_STATUS_READY && m.Wrong(uint32(from+i), hashes[i]) != 0 {
			t.Fatalf("block %d was served with wrong bytes", i)
		}
	}
	return r
}

// eventually waits for something that another goroutine brings about, for at most 5 s.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	deadline := time.Now().Add(5 * time.Second)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !f() {
		if time.Now().After(deadline) {
			t.Fatalf("did not happen: %s", what)
		}
		<-tick.C
	}
}

// nothingHeld waits until no session, lease, pin or filling slot is left, and lets the ledger prove itself.
func (n *node) nothingHeld() {
	n.t.Helper()
	eventually(n.t, "everything is given back", func() bool {
		st := n.ledger.Stats()
		return len(n.sessions.All()) == 0 && st.Leases == 0 && st.Pins == 0 && st.Filling == 0
	})
	if err := n.ledger.Check(); err != nil {
		n.t.Fatal(err)
	}
}

// nothingMoves waits until no claim, pin or filling slot is left.
func (n *node) nothingMoves() {
	n.t.Helper()
	eventually(n.t, "everything is quiet", func() bool {
		st := n.ledger.Stats()
		return st.Pins == 0 && st.Filling == 0 && n.registry.ActiveClaims() == 0
	})
	if err := n.ledger.Check(); err != nil {
		n.t.Fatal(err)
	}
}
