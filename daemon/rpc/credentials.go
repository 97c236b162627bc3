package rpc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"github.com/kvferry/kvferry/daemon/session"
)

// foreignMax is how many connections of uids that are not allowed may be open, to be told so: others could use up the daemon's descriptors.
const foreignMax = 16

// peerCredentials is a transport security that asks the kernel who is at the other end of a unix socket.
type peerCredentials struct {
	allowed func(uid uint32) bool
	foreign *atomic.Int32 // open connections of others
}

// foreignConn is one of them.
type foreignConn struct {
	net.Conn
	foreign *atomic.Int32
	once    sync.Once
}

// Close is net.Conn.
func (c *foreignConn) Close() error {
	c.once.Do(func() { c.foreign.Add(-1) })
	return c.Conn.Close()
}

type authInfo struct {
	credentials.CommonAuthInfo
	cred session.Credentials
}

// AuthType is credentials.AuthInfo.
func (authInfo) AuthType() string { return "unix-peer" }

func (peerCredentials) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("unix-peer credentials are for servers")
}

func (p peerCredentials) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return nil, nil, fmt.Errorf("not a unix socket: %T", c)
	}
	cred, err := session.PeerCredentials(u)
	if err != nil {
		return nil, nil, err
	}
	if !p.allowed(cred.UID) {
		if p.foreign.Add(1) > foreignMax {
			p.foreign.Add(-1)
			return nil, nil, fmt.Errorf("%w: uid %d, and too many others", session.ErrDenied, cred.UID)
		}
		c = &foreignConn{Conn: c, foreign: p.foreign}
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
