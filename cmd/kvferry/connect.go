package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
)

// dial opens the socket first by hand: the system's own error says best why a daemon is not there.
func dial(ctx context.Context, path string) (kvferryv1.AdminClient, func(), error) {
	var dialer net.Dialer
	probe, err := dialer.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, nil, err
	}
	_ = probe.Close()
	conn, err := grpc.NewClient("passthrough:///kvferry-admin",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return dialer.DialContext(ctx, "unix", path) }))
	if err != nil {
		return nil, nil, err
	}
	return kvferryv1.NewAdminClient(conn), func() { _ = conn.Close() }, nil
}

// undialled sorts an error of dial: the daemon is down, or the path was that of its descriptors socket, which is of another type.
func (a *app) undialled(err error) error {
	if errors.Is(err, syscall.EPROTOTYPE) {
		return notAdmin(a.path)
	}
	return &downError{socket: a.path, timeout: a.timeout, cause: err}
}

// adminName is what the daemon calls its Admin socket.
const adminName = "admin.sock"

func notAdmin(path string) error {
	return fmt.Errorf("%s is not the Admin socket: that has the name %s: kvferry --socket %s", path, adminName, filepath.Join(filepath.Dir(path), adminName))
}

// failed sorts a call's error: the daemon is down, or the request was wrong.
func (a *app) failed(err error) error {
	s := status.Convert(err)
	switch s.Code() {
	case codes.Canceled:
		return errors.New("interrupted")
	case codes.Unavailable, codes.DeadlineExceeded:
		return &downError{socket: a.path, timeout: a.timeout, cause: err}
	case codes.Unimplemented:
		if strings.HasPrefix(s.Message(), "unknown service") { // another gRPC server, such as the engines'
			return notAdmin(a.path)
		}
		return fmt.Errorf("the daemon at %s does not know this request: it is older than this command (%s)", a.path, s.Message())
	}
	return fmt.Errorf("the daemon at %s answered %s: %s", a.path, s.Code(), s.Message())
}

// downError is a daemon that cannot be reached. Its text says which, why, and what to do next.
type downError struct {
	socket  string
	timeout time.Duration
	cause   error
}

func (e *downError) Error() string { return "daemon not reachable at " + e.socket }
func (e *downError) Unwrap() error { return e.cause }

func (e *downError) text() string {
	reason, next := e.explain()
	reason = plain(reason)
	return strings.Join([]string{
		"kvferry: the daemon is not reachable at " + e.socket,
		"  reason: " + reason,
		"  next:   " + next,
	}, "\n")
}

func (e *downError) explain() (reason, next string) {
	start := "start it (kvferryd --config FILE), or look why it ended: journalctl -u kvferryd -n 50"
	switch {
	case errors.Is(e.cause, syscall.ENOENT):
		return "there is no such socket: the daemon is not running, or its sockets lie elsewhere (sockets.dir in its configuration)",
			start + "; for another socket: kvferry --socket PATH, or KVFERRY_ADMIN_SOCKET"
	case errors.Is(e.cause, syscall.ECONNREFUSED) && !isSocket(e.socket):
		return "this is not a socket", "give the path of admin.sock: kvferry --socket PATH"
	case errors.Is(e.cause, syscall.ECONNREFUSED):
		return "the socket is there, but nobody listens: the daemon has ended", start
	case errors.Is(e.cause, syscall.EACCES), errors.Is(e.cause, syscall.EPERM):
		return "permission denied: the socket belongs to the daemon's user", "run this as that user, or as root: sudo kvferry status"
	case errors.Is(e.cause, context.DeadlineExceeded), status.Code(e.cause) == codes.DeadlineExceeded:
		return fmt.Sprintf("it did not answer within %s: it is frozen or overloaded", e.timeout),
			"look at the process (ps -o pid,stat,wchan -C kvferryd), or give it longer: kvferry --timeout 30s"
	case status.Code(e.cause) == codes.Unavailable:
		return "the connection broke: " + status.Convert(e.cause).Message(), start
	}
	return e.cause.Error(), start
}

func isSocket(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode()&os.ModeSocket != 0
}
