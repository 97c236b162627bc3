package rpc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/kvferry/kvferry/daemon/handoff"
	"github.com/kvferry/kvferry/daemon/session"
	pb "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/tiers"
)

func TestErrorTable(t *testing.T) {
	for err, want := range map[error]codes.Code{
		nil:                                   codes.OK,
		session.ErrInvalid:                    codes.InvalidArgument,
		session.ErrDenied:                     codes.PermissionDenied,
		handoff.ErrUnknown:                    codes.NotFound,
		handoff.ErrTaken:                      codes.FailedPrecondition,
		tiers.ErrBusy:                         codes.ResourceExhausted,
		context.DeadlineExceeded:              codes.DeadlineExceeded,
		errors.New("something else"):          codes.Internal,
		fmt.Errorf("a: %w", session.ErrState): codes.FailedPrecondition,
	} {
		if got := Code(err); got != want {
			t.Errorf("%v: %v, want %v", err, got, want)
		}
	}
}

func TestSpaceTranslation(t *testing.T) {
	s := goldenSpace()
	if got := spaceProto(spaceOf(s)); !proto.Equal(got, s) {
		t.Errorf("%v came back as %v", s, got)
	}
}

func FuzzTicket(f *testing.F) {
	b, err := proto.Marshal(golden()["ticket"])
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add(bytes.Repeat([]byte{0xff}, 100))
	f.Fuzz(func(t *testing.T, b []byte) {
		if ticket, err := ticketOf(b); err == nil && ticket == nil {
			t.Error("neither ticket nor error")
		}
	})
}

// FuzzMessages translates whatever can be parsed: none of it may panic.
func FuzzMessages(f *testing.F) {
	for _, m := range golden() {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var m pb.SessionRequest
		if proto.Unmarshal(b, &m) != nil {
			return
		}
		_ = helloOf(m.GetHello())
		_ = helloOf(m.GetHello()).Space.Validate()
		_, _ = storeOf(m.GetStore())
		_, _ = loadOf("load", m.GetLoad())
		_, _ = offerOf(m.GetOffer())
	})
}
