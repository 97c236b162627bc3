package tcp

import (
	"bytes"
	"errors"
	"flag"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/transport"
)

var seed = flag.Uint64("seed", uint64(time.Now().UnixNano()), "of TestFlakyNetwork")

// flaky forwards connections to a server and cuts each after some bytes: in a header, in a payload, before anything came.
func flaky(t *testing.T, server string, random *rand.Rand) string {
	var mu sync.Mutex
	return puppet(t, func(conn net.Conn, _ int) {
		mu.Lock()
		budget, whole := random.Int64N(12<<20), random.IntN(4) == 0
		mu.Unlock()
		up, err := net.Dial("tcp", server)
		if err != nil {
			return
		}
		defer up.Close()
		go func() { _, _ = io.Copy(up, conn); _ = up.(*net.TCPConn).CloseWrite() }()
		if whole {
			_, _ = io.Copy(conn, up)
			return
		}
		_, _ = io.CopyN(conn, up, budget)
	})
}

// Whatever the network does: a copy that has no error is right, all others say ErrLink, nothing is written after Copy has returned, and the next Copy is a new start.
func TestFlakyNetwork(t *testing.T) {
	t.Logf("-seed %d", *seed)
	random := rand.New(rand.NewPCG(*seed, 1))
	const size = 16 << 20
	dst, src := memories(t, size)
	server, stop := serve(t, &Server{Grants: &grants{memory: src.Bytes}})
	link := NewLink(flaky(t, server, rand.New(rand.NewPCG(*seed, 2))), testEpoch, Options{Lanes: 3, Stall: 5 * time.Second})
	good, bad := 0, 0
	for range 40 {
		each := uint64(1 + random.IntN(3<<20))
		n := 1 + random.IntN(int(size/each))
		batch := make([]transport.Copy, n)
		for i := range batch {
			from := random.Uint64N(size - each + 1)
			batch[i] = transport.Copy{Dst: []kvferry.Segment{{Region: 1, Offset: uint64(i) * each, Length: each}}, Src: []kvferry.Segment{{Region: 2, Offset: from, Length: each}}}
		}
		_ = link.Copier(testKey, src.Region(), dst).Copy(t.Context(), batch)
		for i, c := range batch {
			to, from := dst.Bytes[uint64(i)*each:][:each], src.Bytes[c.Src[0].Offset:][:each]
			switch {
			case c.Err == nil && (!bytes.Equal(to, from) || c.CRC32C != crc32.Checksum(from, castagnoli)):
				t.Fatal("a copy without an error is wrong")
			case c.Err == nil:
				good++
			case !errors.Is(c.Err, transport.ErrLink):
				t.Fatal(c.Err)
			default:
				bad++
			}
		}
		for i := range dst.Bytes[:4096] { // a late write here would be seen below
			dst.Bytes[i] = 0x5a
		}
	}
	_ = link.Close()
	stop()
	for _, b := range dst.Bytes[:4096] {
		if b != 0x5a {
			t.Fatal("something was written after Copy had returned")
		}
	}
	if t.Logf("%d copies went well, %d did not", good, bad); good == 0 || bad == 0 {
		t.Error("the network was not flaky")
	}
}
