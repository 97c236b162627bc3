package rpc

import (
	"context"
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/handoff"
	"github.com/kvferry/kvferry/daemon/session"
	pb "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/transport"
)

const claimWaitMax = 5 * time.Second

// Peer serves the Peer API.
type Peer struct {
	pb.UnimplementedPeerServer
	Registry  *handoff.Registry
	Epoch     kvferry.Epoch
	HashesMax int
}

// Claim is pb.PeerServer.
func (p *Peer) Claim(ctx context.Context, r *pb.ClaimRequest) (*pb.ClaimResponse, error) {
	q := handoff.ClaimRequest{Instance: r.GetInstance(), Rank: r.GetRank(), TP: r.GetTp(), ClaimID: r.GetClaimId(), Hashes: r.GetHashes(), Wait: ms(r.GetWaitMs()),
		ReadsLent: r.GetReadsLent(), Path: r.GetPath()}
	if q.Path == "" {
		q.Path = "pool, tcp"
	}
	if r.GetWireVersion() != session.WireVersion {
		return nil, status.Errorf(codes.Unimplemented, "claim.wire_version: %d: this daemon speaks %d", r.GetWireVersion(), session.WireVersion)
	}
	var err error
	if q.Epoch, err = id16("claim.epoch", r.GetEpoch()); err != nil {
		return nil, statusOf(err)
	}
	if q.OfferID, err = id16("claim.offer_id", r.GetOfferId()); err != nil {
		return nil, statusOf(err)
	}
	if q.Secret, err = id16("claim.secret", r.GetSecret()); err != nil {
		return nil, statusOf(err)
	}
	if q.Space, err = id32("claim.space_id", r.GetSpaceId()); err != nil {
		return nil, statusOf(err)
	}
	switch n := len(q.Hashes); {
	case n == 0 || n%kvferry.HashSize != 0 || n/kvferry.HashSize > p.HashesMax:
		return nil, statusOf(invalid("claim.hashes", fmt.Sprintf("%d bytes: must be 1 to %d hashes of 32 bytes", n, p.HashesMax)))
	case session.ValidateText("claim.instance", q.Instance, 1, 128) != nil:
		return nil, statusOf(session.ValidateText("claim.instance", q.Instance, 1, 128))
	case session.ValidateText("claim.path", q.Path, 0, 128) != nil:
		return nil, statusOf(session.ValidateText("claim.path", q.Path, 0, 128))
	case q.Wait > claimWaitMax:
		return nil, statusOf(invalid("claim.wait_ms", "at most 5000"))
	case q.TP < 1 || q.TP > 4096:
		return nil, statusOf(invalid("claim.tp", fmt.Sprintf("%d: must be 1 to 4096", q.TP)))
	case q.Rank >= q.TP:
		return nil, statusOf(invalid("claim.rank", fmt.Sprintf("%d: must be below tp (%d)", q.Rank, q.TP)))
	}
	a, err := p.Registry.Claim(ctx, q)
	if err != nil {
		return nil, statusOf(err)
	}
	out := &pb.ClaimResponse{DataAddress: a.DataAddress, DataKey: a.Key[:], Status: make([]byte, len(a.Status)), Offsets: a.Offsets, Crc32C: a.CRC32C,
		ShardBytes: a.ShardBytes, LeaseMs: msOf(a.Lease), Parents: a.Parents, Epoch: a.Epoch[:]}
	for i, s := range a.Status {
		out.Status[i] = byte(s)
	}
	return out, nil
}

// Confirm is pb.PeerServer.
func (p *Peer) Confirm(ctx context.Context, r *pb.ConfirmRequest) (*pb.ConfirmResponse, error) {
	if err := p.mine("confirm.epoch", r.GetEpoch()); err != nil {
		return nil, statusOf(err)
	}
	key, err := id16("confirm.data_key", r.GetDataKey())
	if err != nil {
		return nil, statusOf(err)
	}
	if n := len(r.GetOffsets()); n > p.HashesMax {
		return nil, statusOf(invalid("confirm.offsets", fmt.Sprintf("%d: at most %d", n, p.HashesMax)))
	}
	held, crcs, err := p.Registry.Confirm(ctx, key, r.GetOffsets())
	if err != nil {
		return nil, statusOf(err)
	}
	out := &pb.ConfirmResponse{Held: make([]byte, len(held)), Crc32C: crcs}
	for i, h := range held {
		if h {
			out.Held[i] = 1
		} else {
			out.Crc32C[i] = 0
		}
	}
	return out, nil
}

const fetchLeaseMax = time.Minute

// Fetch is pb.PeerServer.
func (p *Peer) Fetch(_ context.Context, r *pb.FetchRequest) (*pb.FetchResponse, error) {
	if r.GetWireVersion() != session.WireVersion {
		return nil, status.Errorf(codes.Unimplemented, "fetch.wire_version: %d: this daemon speaks %d", r.GetWireVersion(), session.WireVersion)
	}
	q := handoff.FindRequest{RequestID: r.GetRequestId(), Hashes: r.GetHashes(), Instance: r.GetInstance(), TP: r.GetTp(), Lease: ms(r.GetLeaseMs())}
	var err error
	if q.Space, err = id32("fetch.space_id", r.GetSpaceId()); err != nil {
		return nil, statusOf(err)
	}
	if err := session.ValidateText("fetch.instance", q.Instance, 1, 128); err != nil {
		return nil, statusOf(err)
	}
	if err := session.ValidateText("fetch.request_id", q.RequestID, 0, 256); err != nil {
		return nil, statusOf(err)
	}
	switch n := len(q.Hashes); {
	case n == 0 || n%kvferry.HashSize != 0 || n/kvferry.HashSize > p.HashesMax:
		return nil, statusOf(invalid("fetch.hashes", fmt.Sprintf("%d bytes: must be 1 to %d hashes of 32 bytes", n, p.HashesMax)))
	case q.TP < 1 || q.TP > 4096:
		return nil, statusOf(invalid("fetch.tp", fmt.Sprintf("%d: must be 1 to 4096", q.TP)))
	case q.Lease <= 0 || q.Lease > fetchLeaseMax:
		return nil, statusOf(invalid("fetch.lease_ms", fmt.Sprintf("%v: must be 1 ms to %v", q.Lease, fetchLeaseMax)))
	}
	a, err := p.Registry.Fetch(q)
	if err != nil {
		return nil, statusOf(err)
	}
	out := &pb.FetchResponse{Epoch: a.Epoch[:], Blocks: uint32(a.Blocks), LeaseMs: msOf(a.Lease), ShardBytes: a.ShardBytes}
	if a.Blocks > 0 {
		out.OfferId, out.Secret = a.OfferID[:], a.Secret[:]
	}
	return out, nil
}

// Renew is pb.PeerServer.
func (p *Peer) Renew(_ context.Context, r *pb.RenewRequest) (*pb.RenewResponse, error) {
	if err := p.mine("renew.epoch", r.GetEpoch()); err != nil {
		return nil, statusOf(err)
	}
	if len(r.GetDataKeys()) > 4096 {
		return nil, statusOf(invalid("renew.data_keys", "at most 4096"))
	}
	var keys [][16]byte
	for _, b := range r.GetDataKeys() {
		k, err := id16("renew.data_keys", b)
		if err != nil {
			return nil, statusOf(err)
		}
		keys = append(keys, k)
	}
	out := &pb.RenewResponse{}
	for _, k := range p.Registry.Renew(keys) {
		out.Ended = append(out.Ended, k[:])
	}
	return out, nil
}

// EndClaim is pb.PeerServer.
func (p *Peer) EndClaim(_ context.Context, r *pb.EndClaimRequest) (*pb.EndClaimResponse, error) {
	if err := p.mine("end_claim.epoch", r.GetEpoch()); err != nil {
		return nil, statusOf(err)
	}
	k, err := id16("end_claim.data_key", r.GetDataKey())
	if err != nil {
		return nil, statusOf(err)
	}
	if err := session.ValidateText("end_claim.reason", r.GetReason(), 0, 256); err != nil {
		return nil, statusOf(err)
	}
	p.Registry.EndClaim(k, r.GetReason())
	return &pb.EndClaimResponse{}, nil
}

func (p *Peer) mine(field string, b []byte) error {
	e, err := id16(field, b)
	if err != nil {
		return err
	}
	if kvferry.Epoch(e) != p.Epoch {
		return status.Errorf(codes.NotFound, "%s: this daemon's is %v", field, p.Epoch)
	}
	return nil
}

// Peers is the client side of the Peer API: handoff.Control.
type Peers struct {
	mu    sync.Mutex
	conns map[string]*grpc.ClientConn
}

const peerConnsMax = 1024

// NewPeers makes one without connections.
func NewPeers() *Peers { return &Peers{conns: map[string]*grpc.ClientConn{}} }

func (p *Peers) client(address string) (pb.PeerClient, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.conns[address]
	if c == nil {
		if len(p.conns) >= peerConnsMax {
			for a, old := range p.conns { // any: it is dialled again when it is needed
				_ = old.Close()
				delete(p.conns, a)
				break
			}
		}
		var err error
		c, err = grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(dialPeer), grpc.WithNoProxy(),
			grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: time.Second}), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(messageMax)),
			grpc.WithConnectParams(grpc.ConnectParams{
				// The circuit breaker of package handoff decides when to try again: gRPC itself should not make it wait.
				Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, MaxDelay: time.Second},
				MinConnectTimeout: time.Second,
			}))
		if err != nil {
			return nil, fmt.Errorf("%w: dial %s: %v", transport.ErrLink, address, err)
		}
		p.conns[address] = c
	}
	return pb.NewPeerClient(c), nil
}

// dialPeer connects with a bound on how long sent bytes may stay unacknowledged: gRPC's own keepalive cannot be set below 10 s.
func dialPeer(ctx context.Context, address string) (net.Conn, error) {
	d := net.Dialer{Timeout: time.Second, Control: func(_, _ string, c syscall.RawConn) error {
		var serr error
		err := c.Control(func(fd uintptr) { serr = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, 1000) })
		if err != nil {
			return err
		}
		return serr
	}}
	return d.DialContext(ctx, "tcp", address)
}

// Claim is handoff.Control.
func (p *Peers) Claim(ctx context.Context, address string, q handoff.ClaimRequest) (handoff.ClaimAnswer, error) {
	c, err := p.client(address)
	if err != nil {
		return handoff.ClaimAnswer{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, q.Wait+time.Second)
	defer cancel()
	r, err := c.Claim(ctx, &pb.ClaimRequest{
		WireVersion: session.WireVersion, Epoch: q.Epoch[:], OfferId: q.OfferID[:], Secret: q.Secret[:], Instance: q.Instance, Rank: q.Rank, ClaimId: q.ClaimID,
		SpaceId: q.Space[:], Hashes: q.Hashes, WaitMs: msOf(q.Wait), Tp: q.TP, ReadsLent: q.ReadsLent, Path: q.Path[:min(len(q.Path), 128)],
	})
	if err != nil {
		return handoff.ClaimAnswer{}, peerError(err)
	}
	n := len(q.Hashes) / kvferry.HashSize
	a := handoff.ClaimAnswer{Epoch: q.Epoch, DataAddress: r.GetDataAddress(), Offsets: r.GetOffsets(), CRC32C: r.GetCrc32C(), ShardBytes: r.GetShardBytes(), Lease: ms(r.GetLeaseMs())}
	if epoch, err := id16("claim.epoch", r.GetEpoch()); err == nil { // older daemons do not tell, and then it was named
		a.Epoch = epoch
	}
	key, err := id16("claim.data_key", r.GetDataKey())
	if err != nil || len(r.GetStatus()) != n || len(a.Offsets) != n || len(a.CRC32C) != n {
		return handoff.ClaimAnswer{}, fmt.Errorf("%w: malformed answer of %s", handoff.ErrMismatch, address)
	}
	a.Key = key
	if len(r.GetParents()) == len(q.Hashes) {
		a.Parents = r.GetParents()
	}
	for _, s := range r.GetStatus() {
		a.Status = append(a.Status, handoff.ClaimStatus(s))
	}
	return a, nil
}

// confirmTimeout and fetchTimeout bound calls that wait for nothing.
const (
	confirmTimeout = 2 * time.Second
	fetchTimeout   = time.Second
)

// Confirm is handoff.Control.
func (p *Peers) Confirm(ctx context.Context, address string, epoch kvferry.Epoch, key [16]byte, offsets []uint64) ([]bool, []uint32, error) {
	c, err := p.client(address)
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, confirmTimeout)
	defer cancel()
	r, err := c.Confirm(ctx, &pb.ConfirmRequest{Epoch: epoch[:], DataKey: key[:], Offsets: offsets})
	if err != nil {
		return nil, nil, peerError(err)
	}
	if len(r.GetHeld()) != len(offsets) || len(r.GetCrc32C()) != len(offsets) {
		return nil, nil, fmt.Errorf("%w: malformed answer of %s", handoff.ErrMismatch, address)
	}
	held := make([]bool, len(offsets))
	for i, h := range r.GetHeld() {
		held[i] = h == 1
	}
	return held, r.GetCrc32C(), nil
}

// Fetch is handoff.Control.
func (p *Peers) Fetch(ctx context.Context, address string, q handoff.FindRequest) (handoff.FindAnswer, error) {
	c, err := p.client(address)
	if err != nil {
		return handoff.FindAnswer{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	r, err := c.Fetch(ctx, &pb.FetchRequest{WireVersion: session.WireVersion, SpaceId: q.Space[:], Hashes: q.Hashes, Instance: q.Instance, Tp: q.TP, LeaseMs: msOf(q.Lease),
		RequestId: q.RequestID})
	if err != nil {
		return handoff.FindAnswer{}, peerError(err)
	}
	a := handoff.FindAnswer{Blocks: int(r.GetBlocks()), Lease: ms(r.GetLeaseMs()), ShardBytes: r.GetShardBytes()}
	if a.Blocks == 0 {
		return a, nil
	}
	if a.OfferID, err = id16("fetch.offer_id", r.GetOfferId()); err == nil {
		if a.Secret, err = id16("fetch.secret", r.GetSecret()); err == nil {
			a.Epoch, err = id16("fetch.epoch", r.GetEpoch())
		}
	}
	if err != nil || a.Blocks > len(q.Hashes)/kvferry.HashSize {
		return handoff.FindAnswer{}, fmt.Errorf("%w: malformed answer of %s", handoff.ErrMismatch, address)
	}
	return a, nil
}

// Renew is handoff.Control.
func (p *Peers) Renew(ctx context.Context, address string, epoch kvferry.Epoch, keys [][16]byte) error {
	c, err := p.client(address)
	if err != nil {
		return err
	}
	m := &pb.RenewRequest{Epoch: epoch[:]}
	for i := range keys {
		m.DataKeys = append(m.DataKeys, keys[i][:])
	}
	_, err = c.Renew(ctx, m)
	return peerError(err)
}

// EndClaim is handoff.Control.
func (p *Peers) EndClaim(ctx context.Context, address string, epoch kvferry.Epoch, key [16]byte, received uint32, reason string) error {
	c, err := p.client(address)
	if err != nil {
		return err
	}
	_, err = c.EndClaim(ctx, &pb.EndClaimRequest{Epoch: epoch[:], DataKey: key[:], BlocksReceived: received, Reason: reason})
	return peerError(err)
}

// peerError turns what a peer answered back into this module's errors.
func peerError(err error) error {
	switch status.Code(err) {
	case codes.OK:
		return nil
	case codes.Unavailable, codes.DeadlineExceeded:
		return fmt.Errorf("%w: %v", transport.ErrLink, err)
	case codes.NotFound:
		return fmt.Errorf("%w: %v", handoff.ErrUnknown, err)
	case codes.PermissionDenied:
		return fmt.Errorf("%w: %v", handoff.ErrSecret, err)
	case codes.FailedPrecondition:
		return fmt.Errorf("%w: %v", handoff.ErrTaken, err)
	case codes.Canceled:
		return fmt.Errorf("%w: %v", context.Canceled, err)
	}
	return err
}

// Close closes the connections.
func (p *Peers) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for a, c := range p.conns {
		_ = c.Close()
		delete(p.conns, a)
	}
}
