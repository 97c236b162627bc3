package rpc

import (
	"context"
	"errors"
	"fmt"
	"net"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"github.com/kvferry/kvferry/daemon/session"
)

// peerCredentials is a transport security that asks the kernel who is at the other end of a unix socket.
type peerCredentials struct{}

type authInfo struct {
	credentials.CommonAuthInfo
	cred session.Credentials
}

// AuthType is credentials.AuthInfo.
func (authInfo) AuthType() string { return "unix-peer" }

func (peerCredentials) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("unix-peer credentials are for servers")
}

func (peerCredentials) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return nil, nil, fmt.Errorf("not a unix socket: %T", c)
	}
	cred, err := session.PeerCredentials(u)
	if err != nil {
		return nil, nil, err
	}
	return c, authInfo{credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}, cred}, nil
}

func (peerCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "unix-peer"}
}

func (p peerCredentials) Clone() credentials.TransportCredentials { return p }

func (peerCredentials) OverrideServerName(string) error { return nil }

func callerOf(ctx context.Context) (session.Credentials, error) {
	if p, ok := peer.FromContext(ctx); ok {
		if a, ok := p.AuthInfo.(authInfo); ok {
			return a.cred, nil
		}
	}
	return session.Credentials{}, fmt.Errorf("%w: no peer credentials", session.ErrDenied)
}
