package transport_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/transport"
	"github.com/kvferry/kvferry/transport/transporttest"
)

func TestLocal(t *testing.T) {
	for _, threads := range []int{1, 2, 5} {
		t.Run(fmt.Sprintf("%d threads", threads), func(t *testing.T) {
			transporttest.Run(t, func(t *testing.T, dst, src transport.Memory) transport.Copier {
				return transport.NewLocal(dst, src, threads)
			})
		})
	}
}

func TestMemorySlice(t *testing.T) {
	m := transport.Memory{ID: 3, Bytes: make([]byte, 100)}
	for _, c := range []struct {
		segment kvferry.Segment
		ok      bool
	}{
		{kvferry.Segment{Region: 3, Offset: 0, Length: 100}, true},
		{kvferry.Segment{Region: 3, Offset: 100, Length: 0}, true},
		{kvferry.Segment{Region: 3, Offset: 99, Length: 1}, true},
		{kvferry.Segment{Region: 3, Offset: 99, Length: 2}, false},
		{kvferry.Segment{Region: 3, Offset: 101, Length: 0}, false},
		{kvferry.Segment{Region: 3, Offset: ^uint64(0), Length: 2}, false},
		{kvferry.Segment{Region: 4, Offset: 0, Length: 1}, false},
	} {
		b, err := m.Slice(c.segment)
		if (err == nil) != c.ok || (err != nil && !errors.Is(err, transport.ErrRange)) {
			t.Errorf("%+v: %v", c.segment, err)
		}
		if err == nil && (uint64(len(b)) != c.segment.Length || cap(b) != len(b)) {
			t.Errorf("%+v: len %d cap %d", c.segment, len(b), cap(b))
		}
	}
}

func TestFault(t *testing.T) {
	dst, src := transporttest.NewMemory(t, 1, 4096), transporttest.NewMemory(t, 2, 4096)
	transporttest.Fill(src.Bytes, 5)
	broken := errors.New("broken")
	f := &transporttest.Fault{Copier: transport.NewLocal(dst, src, 1), Dst: dst, FailNth: 2, Err: broken, FlipNth: 5}
	at := func(i uint64) transport.Copy {
		return transport.Copy{
			Dst: []kvferry.Segment{{Region: 1, Offset: i * 512, Length: 512}},
			Src: []kvferry.Segment{{Region: 2, Offset: i * 512, Length: 512}},
		}
	}
	batch := []transport.Copy{at(0), at(1), at(2)}
	if err := f.Copy(t.Context(), batch); err != nil {
		t.Fatal(err)
	}
	if batch[0].Err != nil || !errors.Is(batch[1].Err, broken) || batch[2].Err != nil {
		t.Errorf("errors %v %v %v", batch[0].Err, batch[1].Err, batch[2].Err)
	}
	batch = []transport.Copy{at(3), at(4)}
	if err := f.Copy(t.Context(), batch); err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		same := string(dst.Bytes[i*512:(i+1)*512]) == string(src.Bytes[i*512:(i+1)*512])
		if same != (i != 1 && i != 4) {
			t.Errorf("copy %d: same %v", i, same)
		}
	}

	held, hold := make(chan struct{}), make(chan struct{})
	f = &transporttest.Fault{Copier: f.Copier, Hold: hold, Held: held}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- f.Copy(ctx, []transport.Copy{at(0)}) }()
	<-held
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("held copy: %v", err)
	}
	go func() { done <- f.Copy(t.Context(), []transport.Copy{at(0)}) }()
	<-held
	close(hold)
	if err := <-done; err != nil {
		t.Errorf("released copy: %v", err)
	}
}
