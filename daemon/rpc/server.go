package rpc

import (
	"context"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
)

const (
	// messageMax holds 65,536 hashes of 32 bytes with room to spare.
	messageMax = 4 << 20
	// peerMessageMax holds a Claim of 8,192 hashes.
	peerMessageMax = 1 << 20
	// windowBytes lets a Match of 8,192 hashes go out without waiting for the receiver's window.
	windowBytes = 2 << 20
)

// NewLocalServer makes a server for unix sockets that knows its callers' credentials.
// Calls of others than those allowed are refused by name.
func NewLocalServer(allowed func(uid uint32) bool) *grpc.Server {
	check := func(ctx context.Context) error {
		cred, err := callerOf(ctx)
		if err != nil {
			return statusOf(err)
		}
		if !allowed(cred.UID) {
			return status.Errorf(codes.PermissionDenied, "uid: %d may not use this socket (sockets.allowUIDs)", cred.UID)
		}
		return nil
	}
	unary := func(ctx context.Context, m any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		if err := check(ctx); err != nil {
			return nil, err
		}
		return next(ctx, m)
	}
	stream := func(srv any, s grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		if err := check(s.Context()); err != nil {
			return err
		}
		return next(srv, s)
	}
	return grpc.NewServer(grpc.Creds(peerCredentials{allowed, new(atomic.Int32)}), grpc.UnaryInterceptor(unary), grpc.StreamInterceptor(stream), grpc.WaitForHandlers(true), grpc.MaxRecvMsgSize(messageMax), grpc.InitialWindowSize(windowBytes),
		grpc.InitialConnWindowSize(2*windowBytes), grpc.MaxConcurrentStreams(4096), grpc.ConnectionTimeout(5*time.Second))
}

// NewPeerServer makes a server for other daemons. Dead ones are noticed by keepalives.
func NewPeerServer() *grpc.Server {
	return grpc.NewServer(grpc.WaitForHandlers(true), grpc.MaxRecvMsgSize(peerMessageMax), grpc.InitialWindowSize(windowBytes), grpc.InitialConnWindowSize(2*windowBytes),
		grpc.MaxConcurrentStreams(256), grpc.ConnectionTimeout(5*time.Second),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}))
}
