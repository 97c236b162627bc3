package daemon

import (
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/handoff"
	pb "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/standin"
)

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

func packed(hashes []kvferry.Hash) (b []byte) {
	for i := range hashes {
		b = append(b, hashes[i][:]...)
	}
	return b
}

const rawBlocks, rawPlane = 16, 4096

func helloOf(role pb.Role) *pb.Hello {
	h := &pb.Hello{WireVersion: 1, Role: role, Instance: "raw", Ranks: 1, Space: testSpace()}
	h.Space.Model = "raw"
	if role == worker {
		r := &pb.Region{Id: 1, Kind: pb.RegionKind_REGION_KIND_SHARED_HOST, Bytes: 4 * rawBlocks * rawPlane, Blocks: rawBlocks}
		for p := range uint64(4) {
			r.Planes = append(r.Planes, &pb.Plane{Base: p * rawBlocks * rawPlane, Stride: rawPlane, Bytes: rawPlane})
		}
		h.Regions = []*pb.Region{r}
		h.Space = testSpace() // another worker of the test's may have the same space: then it must have the same shape
		h.Space.Model = "raw"
	}
	return h
}

// rawSession speaks the protocol by hand, so that it can speak it wrongly.
type rawSession struct {
	t       *testing.T
	stream  grpc.BidiStreamingClient[pb.SessionRequest, pb.SessionResponse]
	welcome *pb.Welcome
	words   []byte
}

func (n *node) hello(h *pb.Hello) (*rawSession, error) {
	stream, err := n.engine().Session(n.t.Context())
	if err != nil {
		return nil, err
	}
	if err := stream.Send(&pb.SessionRequest{Message: &pb.SessionRequest_Hello{Hello: h}}); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	} // EOF: the call has ended already, and Recv says why
	m, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	return &rawSession{t: n.t, stream: stream, welcome: m.GetWelcome()}, nil
}

// helloError is how a Hello is refused.
func (n *node) helloError(h *pb.Hello) error {
	r, err := n.hello(h)
	if err == nil {
		_ = r.stream.CloseSend()
	}
	return err
}

func (n *node) rawSession(h *pb.Hello) *rawSession {
	n.t.Helper()
	r, err := n.hello(h)
	if err != nil {
		n.t.Fatal(err)
	}
	var fds []int
	entries := []uint32{0xffffffff}
	pidfd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		n.t.Fatal(err)
	}
	fds = append(fds, pidfd)
	for _, reg := range h.Regions {
		fds, entries = append(fds, memfd(n.t, int64(reg.Bytes), true)), append(entries, reg.Id)
	}
	code, text, got := n.passDescriptors(descriptorPacket(r.welcome.Token, entries), fds)
	if code != codes.OK || len(got) != 2 {
		n.t.Fatalf("descriptors: %v %s", code, text)
	}
	_ = unix.Close(got[0])
	if r.words, err = unix.Mmap(got[1], 0, 65536, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		n.t.Fatal(err)
	}
	_ = unix.Close(got[1])
	n.t.Cleanup(func() { _ = unix.Munmap(r.words) })
	if m := r.receive(); m.GetAttached() == nil {
		n.t.Fatalf("after the descriptors: %v", m)
	}
	return r
}

func memfd(t *testing.T, bytes int64, seal bool) int {
	t.Helper()
	fd, err := unix.MemfdCreate("kvferry-test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Ftruncate(fd, bytes); err != nil {
		t.Fatal(err)
	}
	if seal {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK); err != nil {
			t.Fatal(err)
		}
	}
	return fd
}

func descriptorPacket(token []byte, entries []uint32) []byte {
	b := make([]byte, 84)
	binary.LittleEndian.PutUint32(b, 0x4446564b)
	binary.LittleEndian.PutUint16(b[4:], 1)
	binary.LittleEndian.PutUint16(b[6:], uint16(len(entries)))
	copy(b[8:24], token)
	for i, e := range entries {
		binary.LittleEndian.PutUint32(b[24+4*i:], e)
	}
	return b
}

// passDescriptors sends one packet and closes the descriptors that went with it.
func (n *node) passDescriptors(packet []byte, fds []int) (codes.Code, string, []int) {
	n.t.Helper()
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: filepath.Join(n.cfg.Sockets.Dir, DescriptorsSocket), Net: "unixpacket"})
	if err != nil {
		n.t.Fatal(err)
	}
	defer c.Close()
	_, _, err = c.WriteMsgUnix(packet, unix.UnixRights(fds...), nil)
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
	if err != nil {
		n.t.Fatal(err)
	}
	b, oob := make([]byte, 512), make([]byte, 256)
	k, oobn, _, _, err := c.ReadMsgUnix(b, oob)
	if err != nil || k < 84 {
		n.t.Fatalf("answer of %d bytes: %v", k, err)
	}
	var got []int
	if msgs, err := unix.ParseSocketControlMessage(oob[:oobn]); err == nil && len(msgs) > 0 {
		got, _ = unix.ParseUnixRights(&msgs[0])
	}
	return codes.Code(binary.LittleEndian.Uint32(b[8:])), string(b[84:k]), got
}

func (r *rawSession) send(m *pb.SessionRequest) {
	r.t.Helper()
	if err := r.stream.Send(m); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rawSession) receive() *pb.SessionResponse {
	r.t.Helper()
	m, err := r.stream.Recv()
	if err != nil {
		r.t.Fatal(err)
	}
	return m
}

// word puts an operation into a word, as a worker does before it sends it.
func (r *rawSession) word(i int, operation uint64) {
	atomic.StoreUint64((*uint64)(unsafe.Pointer(&r.words[64*i])), operation<<8|1)
}

// placeOf is where in the pool a block's payload lies.
func (n *node) placeOf(s *standin.Session, h kvferry.Hash) uint64 {
	n.t.Helper()
	ref, _, ok := n.ledger.FindSpace(s.Space)
	if !ok {
		n.t.Fatal("unknown space")
	}
	res, err := n.ledger.Pin(n.started, 1<<50, ref, 0, h[:], n.started)
	if err != nil || res.Hits != 1 {
		n.t.Fatalf("pin: %+v %v", res, err)
	}
	n.ledger.Unpin(res.Hold)
	return res.Places[0].Offset
}

// claim takes an offer as another node's daemon would.
func (n *node) claim(ticket *pb.Ticket, instance string, hashes []kvferry.Hash) [16]byte {
	n.t.Helper()
	a, err := n.registry.Claim(n.t.Context(), handoff.ClaimRequest{
		Epoch: n.epoch, OfferID: [16]byte(ticket.OfferId), Secret: [16]byte(ticket.Secret), Instance: instance, TP: 1, Space: [32]byte(ticket.SpaceId), Hashes: packed(hashes), Wait: time.Second,
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return a.Key
}

func TestBadDescriptors(t *testing.T) {
	n := newNode(t)
	pidfd := func(pid int) int {
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			t.Fatal(err)
		}
		return fd
	}
	size := int64(4 * rawBlocks * rawPlane)
	for name, c := range map[string]struct {
		entries []uint32
		fds     func() []int
		want    string
	}{
		"no pidfd":       {[]uint32{1, 2}, func() []int { return []int{memfd(t, size, true), memfd(t, size, true)} }, "pidfd"},
		"not a pidfd":    {[]uint32{0xffffffff, 1}, func() []int { return []int{memfd(t, size, true), memfd(t, size, true)} }, "pidfd"},
		"foreign pidfd":  {[]uint32{0xffffffff, 1}, func() []int { return []int{pidfd(1), memfd(t, size, true)} }, "pidfd"},
		"missing region": {[]uint32{0xffffffff}, func() []int { return []int{pidfd(os.Getpid())} }, "descriptors"},
		"wrong region":   {[]uint32{0xffffffff, 3}, func() []int { return []int{pidfd(os.Getpid()), memfd(t, size, true)} }, "region 1"},
		"twice":          {[]uint32{1, 1}, func() []int { return []int{memfd(t, size, true), memfd(t, size, true)} }, "twice"},
		"fewer fds":      {[]uint32{0xffffffff, 1}, func() []int { return []int{pidfd(os.Getpid())} }, "count"},
		"too small":      {[]uint32{0xffffffff, 1}, func() []int { return []int{pidfd(os.Getpid()), memfd(t, size-1, true)} }, "regions[1]"},
		"not sealed":     {[]uint32{0xffffffff, 1}, func() []int { return []int{pidfd(os.Getpid()), memfd(t, size, false)} }, "F_SEAL_SHRINK"},
	} {
		r, err := n.hello(helloOf(worker))
		if err != nil {
			t.Fatal(err)
		}
		code, text, _ := n.passDescriptors(descriptorPacket(r.welcome.Token, c.entries), c.fds())
		if code == codes.OK || !strings.Contains(text, c.want) {
			t.Errorf("%s: %v %q, want an error that names %q", name, code, text, c.want)
		}
		if _, err := r.stream.Recv(); err == nil {
			t.Errorf("%s: the session goes on", name)
		}
		// The token was for once.
		if code, _, _ := n.passDescriptors(descriptorPacket(r.welcome.Token, []uint32{0xffffffff}), []int{pidfd(os.Getpid())}); code != codes.NotFound {
			t.Errorf("%s: the token was taken twice: %v", name, code)
		}
	}
	for name, b := range map[string][]byte{
		"empty-ish": {0}, "garbage": []byte("garbage"), "long": make([]byte, 200),
		"magic": make([]byte, 84), "half": descriptorPacket(make([]byte, 16), []uint32{1})[:40],
	} {
		if code, text, _ := n.passDescriptors(b, []int{pidfd(os.Getpid())}); code != codes.InvalidArgument {
			t.Errorf("%s: %v %q", name, code, text)
		}
	}
	n.nothingHeld()
}

func TestSecondHelloAndOrder(t *testing.T) {
	n := newNode(t)
	r := n.rawSession(helloOf(scheduler))
	r.send(&pb.SessionRequest{Message: &pb.SessionRequest_Hello{Hello: helloOf(scheduler)}})
	if _, err := r.stream.Recv(); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "hello") {
		t.Errorf("second hello: %v", err)
	}
	stream, err := n.engine().Session(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&pb.SessionRequest{Message: &pb.SessionRequest_Release{Release: &pb.Release{}}}); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("no hello: %v", err)
	}
	early, err := n.hello(helloOf(worker))
	if err != nil {
		t.Fatal(err)
	}
	hashes, parents := prompt(1, 1)
	early.send(&pb.SessionRequest{Message: &pb.SessionRequest_Store{Store: &pb.Store{Operation: 1, SpaceId: early.welcome.SpaceId, Region: 1, BlockIds: []uint32{0}, Hashes: packed(hashes), Parents: packed(parents)}}})
	if end := early.receive().GetOperationEnd(); end.GetOutcome() != pb.Outcome_OUTCOME_REJECTED {
		t.Errorf("store before the descriptors: %v", end)
	}
}

// Garbage on the TCP ports ends its connection and nothing else.
func TestGarbageOnPeerPorts(t *testing.T) {
	n := newNode(t)
	for _, address := range []string{n.peerAddress, n.dataAddress} {
		for _, b := range []string{"GET / HTTP/1.1\r\n\r\n", strings.Repeat("\xff", 5000), "KVFDATA1"} {
			c, err := net.Dial("tcp", address)
			if err != nil {
				t.Fatal(err)
			}
			_, _ = c.Write([]byte(b))
			_ = c.Close()
		}
	}
	s, m := n.attach(worker)
	hashes, parents := prompt(4, 1)
	store(t, s, m, 0, hashes, parents)
}

func TestForeignUIDIsRefused(t *testing.T) {
	n := newNode(t, func(c *Config) { c.Sockets.AllowUIDs = []uint32{12345} })
	if err := n.helloError(helloOf(scheduler)); status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), "uid") {
		t.Errorf("hello of a foreign uid: %v", err)
	}
}

// buildDaemon builds kvferryd as it is now.
func buildDaemon(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kvferryd")
	if out, err := exec.Command("go", "build", "-o", path, "../cmd/kvferryd").CombinedOutput(); err != nil {
		t.Fatalf("build kvferryd: %v\n%s", err, out)
	}
	return path
}

// A process that has not attached yet waits for Attached: what it has not asked for comes after that, or not at all.
func TestNothingBeforeAttached(t *testing.T) {
	n := newNode(t)
	h := helloOf(worker)
	r, err := n.hello(h)
	if err != nil {
		t.Fatal(err)
	}
	n.sessions.Served("raw", 0, [16]byte{1}, "done") // of the worker whose place it takes
	n.sessions.Drain(time.Second)
	pidfd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		t.Fatal(err)
	}
	code, text, got := n.passDescriptors(descriptorPacket(r.welcome.Token, []uint32{0xffffffff, 1}), []int{pidfd, memfd(t, int64(h.Regions[0].Bytes), true)})
	for _, fd := range got {
		_ = unix.Close(fd)
	}
	if code != codes.OK {
		t.Fatal(code, text)
	}
	if m := r.receive(); m.GetAttached() == nil {
		t.Fatalf("before Attached: %v", m)
	}
	if m := r.receive(); m.GetDraining() == nil {
		t.Fatalf("after Attached: %v", m)
	}
}
