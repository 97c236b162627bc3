package rpc

import (
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
)

const (
	// messageMax holds 65,536 hashes of 32 bytes with room to spare.
	messageMax = 4 << 20
	// windowBytes lets a Match of 8,192 hashes go out without waiting for the receiver's window.
	windowBytes = 2 << 20
)

// NewLocalServer makes a server for unix sockets that knows its callers' credentials.
func NewLocalServer() *grpc.Server {
	return grpc.NewServer(grpc.Creds(peerCredentials{}), grpc.MaxRecvMsgSize(messageMax), grpc.InitialWindowSize(windowBytes),
		grpc.InitialConnWindowSize(2*windowBytes), grpc.MaxConcurrentStreams(4096), grpc.ConnectionTimeout(5*time.Second))
}

// NewPeerServer makes a server for other daemons. Dead ones are noticed by keepalives.
func NewPeerServer() *grpc.Server {
	return grpc.NewServer(grpc.MaxRecvMsgSize(messageMax), grpc.InitialWindowSize(windowBytes), grpc.InitialConnWindowSize(2*windowBytes),
		grpc.MaxConcurrentStreams(4096), grpc.ConnectionTimeout(5*time.Second),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}))
}
