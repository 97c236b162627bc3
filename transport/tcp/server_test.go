package tcp

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/transport"
	"github.com/kvferry/kvferry/transport/transporttest"
)

func dial(t *testing.T, address string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	return conn
}

// ended reads until the server closes, and fails if it does not.
func ended(t *testing.T, conn net.Conn) []byte {
	t.Helper()
	b, err := io.ReadAll(conn)
	if n := net.Error(nil); errors.As(err, &n) && n.Timeout() {
		t.Fatal("the server keeps the connection")
	}
	return b
}

func TestServerEndsOnGarbage(t *testing.T) {
	g := &grants{memory: make([]byte, 1<<20)}
	address, _ := serve(t, &Server{Grants: g})
	good := appendPreface(nil, testEpoch)
	req := appendRequest(nil, &request{key: testKey, spans: []span{{0, 10}}})
	damaged := bytes.Clone(req)
	damaged[20] ^= 1
	for name, b := range map[string][]byte{
		"http":                 append([]byte("GET / HTTP/1.1\r\nHost: kvferry\r\n\r\n"), make([]byte, 64)...),
		"zeros":                make([]byte, 4096),
		"garbage after":        append(bytes.Clone(good), "what is this, then? It is long enough to be judged."...),
		"request first":        append(bytes.Clone(req), req...),
		"damaged request":      append(bytes.Clone(good), damaged...),
		"2^32 ranges":          append(bytes.Clone(good), "KVRQ\xff\xff\xff\xff........"...),
		"request after damage": append(append(bytes.Clone(good), damaged...), req...),
	} {
		t.Run(name, func(t *testing.T) {
			conn := dial(t, address)
			if _, err := conn.Write(b); err != nil {
				t.Fatal(err)
			}
			if got := ended(t, conn); len(got) > answerSize {
				t.Errorf("%d bytes came", len(got))
			}
		})
	}
	if n := g.total.Load(); n != 0 {
		t.Errorf("%d grants acquired by garbage", n)
	}
}

func TestServerEndsOnHalfAndSilence(t *testing.T) {
	address, _ := serve(t, &Server{Grants: &grants{memory: make([]byte, 100)}, Stall: 30 * time.Millisecond, Idle: 60 * time.Millisecond})
	good := appendPreface(nil, testEpoch)
	req := appendRequest(nil, &request{key: testKey, spans: []span{{0, 10}}})
	for name, b := range map[string][]byte{
		"nothing":        nil,
		"half a preface": good[:30],
		"half a request": append(bytes.Clone(good), req[:33]...),
		"no request":     good,
	} {
		t.Run(name, func(t *testing.T) {
			conn := dial(t, address)
			if _, err := conn.Write(b); err != nil {
				t.Fatal(err)
			}
			ended(t, conn)
		})
	}
}

// A client that asks and does not read loses its connection, and the claim is held no longer.
func TestServerEndsOnHungClient(t *testing.T) {
	g := &grants{memory: make([]byte, 64<<20)}
	address, stop := serve(t, &Server{Grants: g, Stall: 50 * time.Millisecond})
	conn := dial(t, address)
	b := appendPreface(nil, testEpoch)
	for id := range uint64(8) {
		b = appendRequest(b, &request{id: id, key: testKey, spans: []span{{0, 64 << 20}}})
	}
	if _, err := conn.Write(b); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(20 * time.Second); g.total.Load() == 0 || g.held.Load() != 0; {
		if time.Now().After(deadline) {
			t.Fatal("the grant is held")
		}
		time.Sleep(time.Millisecond)
	}
	stop()
}

func TestServerTurnsAway(t *testing.T) {
	address, _ := serve(t, &Server{Grants: &grants{memory: make([]byte, 100)}, ConnectionsMax: 1})
	first := dial(t, address)
	_, _ = first.Write(appendPreface(nil, testEpoch))
	answer := make([]byte, answerSize)
	if _, err := io.ReadFull(first, answer); err != nil {
		t.Fatal(err)
	}
	second := dial(t, address)
	if got := ended(t, second); len(got) > 0 {
		if s, err := parseAnswer(got); s != statusExhausted || err != nil {
			t.Error(s, err)
		}
	}
	// The first one still works.
	_, _ = first.Write(appendRequest(nil, &request{id: 5, key: testKey, spans: []span{{90, 10}}}))
	if _, err := io.ReadFull(first, make([]byte, responseSize+10)); err != nil {
		t.Error(err)
	}
}

func TestServerNewerVersion(t *testing.T) {
	address, _ := serve(t, &Server{Grants: &grants{}})
	b := appendPreface(nil, testEpoch)[:60]
	b[8] = 9
	conn := dial(t, address)
	_, _ = conn.Write(seal(b, 0, prefaceSize))
	if s, err := parseAnswer(ended(t, conn)); s != statusVersion || err != nil {
		t.Error(s, err)
	}
}

// What the server refuses fails alone; the connection and its neighbours go on.
func TestRefusals(t *testing.T) {
	dst, src := transporttest.NewMemory(t, 1, 8<<20), transporttest.NewMemory(t, 2, 8<<20)
	transporttest.Fill(src.Bytes, 3)
	g := &grants{memory: src.Bytes[:4<<20]} // the claim covers half of the region
	address, _ := serve(t, &Server{Grants: g})
	link := NewLink(address, testEpoch, patient)
	defer link.Close()

	batch := make([]transport.Copy, 64)
	bad := map[int]bool{0: true, 7: true, 8: true, 40: true, 63: true}
	for i := range batch {
		off := uint64(i) * (64 << 10)
		from := off
		if bad[i] {
			from = 4<<20 - 100
		}
		batch[i] = transport.Copy{
			Dst: []kvferry.Segment{{Region: 1, Offset: off, Length: 64 << 10}},
			Src: []kvferry.Segment{{Region: 2, Offset: from, Length: 64 << 10}},
		}
	}
	if err := link.Copier(testKey, src.Region(), dst).Copy(t.Context(), batch); err != nil {
		t.Error(err)
	}
	for i, c := range batch {
		off := i * (64 << 10)
		switch {
		case bad[i] && !errors.Is(c.Err, transport.ErrRefused):
			t.Errorf("copy %d: %v, want ErrRefused", i, c.Err)
		case !bad[i] && (c.Err != nil || !bytes.Equal(dst.Bytes[off:off+64<<10], src.Bytes[off:off+64<<10])):
			t.Errorf("copy %d: %v or wrong bytes", i, c.Err)
		}
	}

	one := func(c transport.Copier) error {
		b := batch[1:2]
		_ = c.Copy(t.Context(), b)
		return b[0].Err
	}
	if err := one(link.Copier([16]byte{9}, src.Region(), dst)); !errors.Is(err, transport.ErrRefused) {
		t.Error("other key:", err)
	}
	other := NewLink(address, kvferry.Epoch{9}, patient)
	defer other.Close()
	if err := one(other.Copier(testKey, src.Region(), dst)); !errors.Is(err, transport.ErrRefused) {
		t.Error("other epoch:", err)
	}
	if err := one(link.Copier(testKey, src.Region(), dst)); err != nil {
		t.Error("afterwards:", err)
	}
	if n := len(link.idle); n != 1 && n != 2 {
		t.Errorf("%d lanes", n)
	}
}

func TestServerDown(t *testing.T) {
	src := transporttest.NewMemory(t, 2, 4096)
	address, _ := serve(t, &Server{Grants: &grants{err: fmt.Errorf("stopping: %w", transport.ErrLink)}})
	link := NewLink(address, testEpoch, patient)
	defer link.Close()
	batch := []transport.Copy{{Dst: []kvferry.Segment{{Region: 2, Length: 10}}, Src: []kvferry.Segment{{Region: 2, Offset: 100, Length: 10}}}}
	_ = link.Copier(testKey, src.Region(), src).Copy(t.Context(), batch)
	if !errors.Is(batch[0].Err, transport.ErrLink) {
		t.Error(batch[0].Err)
	}
}

// FuzzServe feeds a connection with anything: the server must come to its end and hold nothing.
func FuzzServe(f *testing.F) {
	preface := appendPreface(nil, testEpoch)
	good := appendRequest(nil, &request{id: 1, key: testKey, spans: []span{{0, 10}, {500, 1000}}})
	other := appendRequest(nil, &request{id: 2, key: [16]byte{1}, spans: []span{{0, 10}}})
	f.Add(slices.Concat(preface, good, other, good))
	f.Add(slices.Concat(preface, good[:20]))
	f.Add(slices.Concat(preface, good, []byte("KVRQ\x01\x00\x00\x00")))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		g := &grants{memory: make([]byte, 4096)}
		s := (&Server{Grants: g}).defaults()
		near, far := net.Pipe()
		done := make(chan struct{})
		go func() {
			defer close(done)
			s.serve(t.Context(), far)
		}()
		go func() {
			_, _ = near.Write(b)
			_ = near.Close()
		}()
		_, _ = io.Copy(io.Discard, near)
		<-done
		if g.held.Load() != 0 {
			t.Fatal("a grant is held")
		}
	})
}
