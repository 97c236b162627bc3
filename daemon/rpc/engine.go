// Package rpc is the daemon's gRPC, both directions: it translates messages and delegates. Every error becomes a status in one table (errors.go). It owns nothing but client connections to peers.
package rpc

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/session"
	pb "github.com/kvferry/kvferry/proto/kvferry/v1"
)

// Engine serves the Engine API.
type Engine struct {
	pb.UnimplementedEngineServer
	Sessions    *session.Manager
	Epoch       kvferry.Epoch
	PoolBytes   uint64
	PeerAddress string
	Version     string
	Direct      bool // Accepts may lend blocks to be written
	Limits      session.Limits
}

// Session is pb.EngineServer.
func (e *Engine) Session(stream grpc.BidiStreamingServer[pb.SessionRequest, pb.SessionResponse]) error {
	cred, err := callerOf(stream.Context())
	if err != nil {
		return statusOf(err)
	}
	first, err := firstMessage(stream)
	if err != nil {
		return err
	}
	if first.GetHello() == nil {
		return status.Error(codes.FailedPrecondition, "hello: must be the first message of a session")
	}
	s, err := e.Sessions.Open(helloOf(first.GetHello()), cred)
	if err != nil {
		return statusOf(err)
	}
	if err := stream.Send(e.welcome(s)); err != nil {
		s.Close(err)
		return err
	}
	ctx, cancel := context.WithCancelCause(stream.Context())
	go func() { cancel(receive(stream, s)) }()
	delivered := make(chan error, 1)
	go func() { delivered <- deliver(ctx, stream, s) }()
	select {
	case err = <-delivered:
	case <-s.Done(): // also while Send waits for a process that does not read
		err = s.Cause()
	}
	s.Close(err)
	if errors.Is(err, io.EOF) || errors.Is(err, context.Canceled) {
		return nil
	}
	return statusOf(err)
}

// helloTimeout is how long a stream may be open before its first message.
const helloTimeout = 5 * time.Second

func firstMessage(stream grpc.BidiStreamingServer[pb.SessionRequest, pb.SessionResponse]) (*pb.SessionRequest, error) {
	type message struct {
		m   *pb.SessionRequest
		err error
	}
	first := make(chan message, 1)
	go func() {
		m, err := stream.Recv()
		first <- message{m, err}
	}()
	timeout := time.NewTimer(helloTimeout)
	defer timeout.Stop()
	select {
	case r := <-first:
		return r.m, r.err
	case <-timeout.C:
		return nil, status.Errorf(codes.DeadlineExceeded, "hello: did not come within %v", helloTimeout)
	}
}

func (e *Engine) welcome(s *session.Session) *pb.SessionResponse {
	token, space := s.Token(), s.SpaceID()
	return &pb.SessionResponse{Message: &pb.SessionResponse_Welcome{Welcome: &pb.Welcome{
		Epoch: e.Epoch[:], SessionId: s.ID, Token: token[:], SpaceId: space[:], PoolBytes: e.PoolBytes, Words: session.WordsPerSession,
		StoreBlocksMax: uint32(e.Limits.StoreBlocks), LoadBlocksMax: uint32(e.Limits.LoadBlocks), MatchBlocksMax: uint32(e.Limits.MatchBlocks),
		WireVersion: session.WireVersion, PeerAddress: e.PeerAddress, Version: e.Version, Direct: e.Direct,
	}}}
}

// deliver sends the session's events until it or the stream ends, and answers why.
func deliver(ctx context.Context, stream grpc.BidiStreamingServer[pb.SessionRequest, pb.SessionResponse], s *session.Session) error {
	for {
		events, err := s.Next(ctx)
		if err != nil {
			return err
		}
		for _, ev := range events {
			if err := stream.Send(response(ev)); err != nil {
				return err
			}
		}
	}
}

// receive delegates the process's messages until the stream ends, and answers why. A message that cannot be parsed at all ends the session; one that is wrong is refused.
func receive(stream grpc.BidiStreamingServer[pb.SessionRequest, pb.SessionResponse], s *session.Session) error {
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		s.Do(func() { err = dispatch(s, m) })
		if err != nil {
			return err
		}
	}
}

func dispatch(s *session.Session, m *pb.SessionRequest) error {
	switch m := m.GetMessage().(type) {
	case *pb.SessionRequest_Store:
		r, err := storeOf(m.Store)
		if err != nil {
			s.Reject(r.Operation, "store", err)
			return nil
		}
		s.Store(r)
	case *pb.SessionRequest_Load:
		r, err := loadOf("load", m.Load)
		if err != nil {
			s.Reject(r.Operation, "load", err)
			return nil
		}
		s.Load(r)
	case *pb.SessionRequest_Accept:
		r, err := loadOf("accept.load", m.Accept.GetLoad())
		if err == nil {
			r.Ticket, err = ticketOf(m.Accept.GetTicket())
			r.Region, r.BlockIDs = m.Accept.GetRegion(), m.Accept.GetBlockIds()
		}
		if err != nil {
			s.Reject(r.Operation, "accept", err)
			return nil
		}
		s.Load(r)
	case *pb.SessionRequest_Release:
		s.Release(m.Release.GetOperations(), m.Release.GetWrongBlocks())
	case *pb.SessionRequest_Revoke:
		s.Revoke(m.Revoke.GetOperations())
	case *pb.SessionRequest_Offer:
		r, err := offerOf(m.Offer)
		if err != nil {
			s.Refuse(err)
			return nil
		}
		s.Offer(r)
	case *pb.SessionRequest_CompleteOffer:
		id, err := id16("complete_offer.offer_id", m.CompleteOffer.GetOfferId())
		if err != nil {
			s.Refuse(err)
			return nil
		}
		s.CompleteOffer(id, lentBlocksOf(m.CompleteOffer))
	case *pb.SessionRequest_EndOffer:
		id, err := id16("end_offer.offer_id", m.EndOffer.GetOfferId())
		if err != nil {
			s.Refuse(err)
			return nil
		}
		s.EndOffer(id, m.EndOffer.GetReason())
	case *pb.SessionRequest_ReleaseLease:
		s.ReleaseLease(m.ReleaseLease.GetRequestIds())
	case *pb.SessionRequest_Prefetch:
		space, err := id32("prefetch.space_id", m.Prefetch.GetSpaceId())
		if err != nil {
			s.Refuse(err)
			return nil
		}
		s.Prefetch(space, m.Prefetch.GetHashes())
	case *pb.SessionRequest_UseSpace:
		s.UseSpace(m.UseSpace.GetSequence(), spaceOf(m.UseSpace.GetSpace()))
	case *pb.SessionRequest_Hello:
		return status.Error(codes.FailedPrecondition, "hello: this session has had one")
	default:
		return status.Error(codes.InvalidArgument, "message: none that this daemon knows")
	}
	return nil
}

// Match is pb.EngineServer.
func (e *Engine) Match(ctx context.Context, r *pb.MatchRequest) (*pb.MatchResponse, error) {
	cred, err := callerOf(ctx)
	if err != nil {
		return nil, statusOf(err)
	}
	s, err := e.Sessions.Find(r.GetSessionId())
	if err != nil {
		return nil, statusOf(err)
	}
	if s.Credentials() != cred {
		return nil, status.Error(codes.PermissionDenied, "session_id: is another process's")
	}
	space, err := id32("match.space_id", r.GetSpaceId())
	if err != nil {
		return nil, statusOf(err)
	}
	res, err := s.Match(ctx, session.Match{RequestID: r.GetRequestId(), Space: space, Hashes: r.GetHashes(), Lease: ms(r.GetLeaseMs()), Peers: r.GetPeers(),
		Compute: time.Duration(r.GetComputeUs()) * time.Microsecond})
	if err != nil {
		return nil, statusOf(err)
	}
	n := uint32(res.Blocks)
	return &pb.MatchResponse{Blocks: n, DramBlocks: n - uint32(res.Peer+res.NVMe), NvmeBlocks: uint32(res.NVMe), RestoreUs: usOf(res.Restore), LeaseMs: msOf(res.Lease), PeerBlocks: uint32(res.Peer),
		PeerUs: usOf(res.Fetch), PeerReason: res.Reason}, nil
}
