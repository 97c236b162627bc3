package rpc

import (
	"context"
	"errors"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvferry/kvferry/daemon/handoff"
	"github.com/kvferry/kvferry/daemon/mover"
	"github.com/kvferry/kvferry/daemon/session"
	"github.com/kvferry/kvferry/daemon/tiering"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/transport"
)

// table is the one place where errors become gRPC status codes. The first match holds.
var table = []struct {
	err  error
	code codes.Code
}{
	{tiering.ErrNotDurable, codes.Aborted}, // whatever the reason was
	{session.ErrInvalid, codes.InvalidArgument},
	{session.ErrState, codes.FailedPrecondition},
	{session.ErrLimit, codes.ResourceExhausted},
	{session.ErrDenied, codes.PermissionDenied},
	{session.ErrUnsupported, codes.Unimplemented},
	{session.ErrNotFound, codes.NotFound},
	{handoff.ErrUnknown, codes.NotFound},
	{handoff.ErrSecret, codes.PermissionDenied},
	{handoff.ErrTaken, codes.FailedPrecondition},
	{handoff.ErrMismatch, codes.InvalidArgument},
	{handoff.ErrExists, codes.AlreadyExists},
	{handoff.ErrLimit, codes.ResourceExhausted},
	{tiers.ErrBusy, codes.ResourceExhausted},
	{tiers.ErrLimit, codes.ResourceExhausted},
	{tiers.ErrSpace, codes.InvalidArgument},
	{tiering.ErrNoDrives, codes.FailedPrecondition},
	{tiering.ErrVerifying, codes.ResourceExhausted},
	{mover.ErrBusy, codes.ResourceExhausted},
	{transport.ErrLink, codes.Unavailable},
	{transport.ErrRefused, codes.NotFound},
	{context.DeadlineExceeded, codes.DeadlineExceeded},
	{context.Canceled, codes.Canceled},
}

// Code is the status code of an error.
func Code(err error) codes.Code {
	if err == nil {
		return codes.OK
	}
	for _, t := range table {
		if errors.Is(err, t.err) {
			return t.code
		}
	}
	if s, ok := status.FromError(err); ok {
		return s.Code()
	}
	return codes.Internal
}

// statusOf is the error that a call returns.
func statusOf(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := status.FromError(err); ok { // it is one already
		return err
	}
	return status.Error(Code(err), err.Error())
}

// invalid is the error of a message that is wrong before any part of the daemon has seen it.
func invalid(field, reason string) error { return session.Invalid(field, reason) }
