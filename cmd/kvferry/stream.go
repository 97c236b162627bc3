package main

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/grpc"

	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
)

// errEnough ends a stream from this side: each says that it has what it wanted.
var errEnough = errors.New("enough")

// errSilent is why a stream ends from which nothing came for too long.
var errSilent = errors.New("silent")

// listenTo dials, and gives each message of a stream to each, until the stream ends. The daemon has the timeout to begin and, unless the stream may be quiet, for each message. Where ctx ends, it answers its error.
func listenTo[Q, M any](ctx context.Context, a *app, call func(kvferryv1.AdminClient, context.Context, Q, ...grpc.CallOption) (grpc.ServerStreamingClient[M], error), q Q, mayBeQuiet bool, each func(*M) error) error {
	inner, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	patience := time.AfterFunc(a.timeout, func() { cancel(errSilent) })
	defer patience.Stop()
	sorted := func(err error) error {
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(context.Cause(inner), errSilent):
			return &downError{socket: a.path, timeout: a.timeout, cause: context.DeadlineExceeded}
		}
		return a.failed(err)
	}
	client, closeConn, err := dial(inner, a.path)
	if err != nil {
		if inner.Err() != nil {
			return sorted(err)
		}
		return a.undialled(err)
	}
	defer closeConn()
	s, err := call(client, inner, q)
	if err != nil {
		return sorted(err)
	}
	if mayBeQuiet {
		if _, err := s.Header(); err != nil { // it has begun
			return sorted(err)
		}
		patience.Stop()
	}
	for {
		m, err := s.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return sorted(err)
		}
		if !mayBeQuiet {
			patience.Reset(a.timeout)
		}
		a.scrubbed(m)
		if err := each(m); errors.Is(err, errEnough) {
			return nil
		} else if err != nil {
			return err
		}
	}
}
