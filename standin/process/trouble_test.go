package process

import (
	"errors"
	"flag"
	"net"
	"os"
	"testing"
	"time"
)

var loopback = flag.Bool("loopback", false, "tests of failures do without networks of their own, as where nobody is root")

// network is one until the test ends.
func network(t *testing.T) (*Network, error) {
	if *loopback {
		return nil, errors.New("-loopback")
	}
	n, err := NewNetwork()
	if err == nil {
		t.Cleanup(func() { _ = n.Close() })
	}
	return n, err
}

// What the tests of failures rely on: packets are lost and nobody is told, a link without a cable carries nothing, and what was sent in the meantime comes when it is back.
func TestNetworkTrouble(t *testing.T) {
	n, err := network(t)
	if err != nil {
		t.Skipf("needs a network of its own, which root can make: %v", err)
	}
	l, err := n.Listen()
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	here, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	there, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer there.Close()
	sent := byte(0)
	pass := func() error { // what was sent before may come first
		sent++
		if _, err := here.Write([]byte{sent}); err != nil {
			t.Fatal("the connection was reset:", err)
		}
		_ = there.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
		for b := []byte{0}; b[0] != sent; {
			if _, err := there.Read(b); err != nil {
				return err
			}
		}
		return nil
	}
	if err := pass(); err != nil {
		t.Fatal(err)
	}
	for name, f := range map[string][2]func() error{"dropped": {n.Drop, n.Restore}, "down": {n.Down, n.Up}} {
		if err := f[0](); err != nil {
			t.Fatal(name, err)
		}
		if err := pass(); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("%s: a byte came: %v", name, err)
		}
		if _, err := net.DialTimeout("tcp", l.Addr().String(), 300*time.Millisecond); err == nil {
			t.Fatal(name, ": somebody answers")
		}
		if err := f[1](); err != nil {
			t.Fatal(name, err)
		}
		deadline := time.Now().Add(10 * time.Second)
		for pass() != nil {
			if time.Now().After(deadline) {
				t.Fatalf("%s: nothing comes although the link is back", name)
			}
		}
	}
	if err := n.Slow(4 << 20); err != nil {
		t.Fatal(err)
	}
	const bytes = 2 << 20
	start := time.Now()
	go func() { _, _ = there.Write(make([]byte, bytes)) }()
	_ = here.SetReadDeadline(time.Now().Add(10 * time.Second))
	for got, b := 0, make([]byte, 1<<20); got < bytes; {
		k, err := here.Read(b)
		if err != nil {
			t.Fatal(err)
		}
		got += k
	}
	if took := time.Since(start); took < 300*time.Millisecond {
		t.Errorf("2 MiB took %v at 4 MiB/s", took)
	}
}
