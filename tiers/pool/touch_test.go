package pool

import (
	"bufio"
	"errors"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// left is the configuration of a pool that an earlier daemon has left with a block in it.
func left(t *testing.T) (Config, Header) {
	t.Helper()
	c := testConfig(t)
	p, _ := open(t, c)
	p.FormatSlab(1, 8192)
	h := publish(p, 1, 2, 1)
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	return c, h
}

// gate stands in for the kernel: it maps a part when it is let, and notes what it was asked for.
type gate struct {
	entered chan []byte
	let     chan error
	begun   atomic.Int64
	ended   atomic.Int64
}

func newGate() *gate { return &gate{entered: make(chan []byte), let: make(chan error)} }

func (g *gate) populate(part []byte) error {
	g.begun.Add(1)
	g.entered <- part
	err := <-g.let
	g.ended.Add(1)
	return err
}

// An adopted pool serves before its pages are mapped, and all of them are in the end, each once.
func TestServesBeforeMapped(t *testing.T) {
	c, want := left(t)
	g := newGate()
	c.populate = g.populate
	p, found := open(t, c)
	part := <-g.entered
	if len(found) != 1 || found[0].Header.Hash != want.Hash {
		t.Fatalf("found %v", found)
	}
	select {
	case <-p.Mapped():
		t.Error("mapped, and no part of it is")
	default:
	}
	publish(p, 1, 3, 2)
	p.FormatSlab(3, 64<<10)
	at := p.SlotOffset(3, 0)
	p.Bytes()[at], p.Bytes()[len(p.Bytes())-1] = 42, 43
	for at := 0; ; part = <-g.entered {
		if &part[0] != &p.Bytes()[at] || len(part) > touchBytes {
			t.Fatalf("%d bytes, not from %d on", len(part), at)
		}
		at += len(part)
		g.let <- nil
		if at == len(p.Bytes()) {
			break
		}
	}
	<-p.Mapped()
	if err := p.MapError(); err != nil {
		t.Error(err)
	}
	if p.Bytes()[at] != 42 || p.Bytes()[len(p.Bytes())-1] != 43 {
		t.Error("mapping has changed what was written meanwhile")
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	c.populate = nil
	if _, found := open(t, c); len(found) != 2 {
		t.Errorf("%d blocks after another start, want 2", len(found))
	}
}

// Close waits for the part that is being mapped, and no other one is begun in memory that is unmapped by then.
func TestCloseWhileMapping(t *testing.T) {
	c, _ := left(t)
	g := newGate()
	c.populate = g.populate
	p, _ := open(t, c)
	<-g.entered
	closed := make(chan error)
	go func() { closed <- p.Close() }()
	for !p.touching.stop.Load() { // Close has come so far
		select {
		case err := <-closed:
			t.Fatalf("closed while a part is being mapped: %v", err)
		default:
		}
	}
	g.let <- nil
	if err := <-closed; err != nil {
		t.Fatal(err)
	}
	if b, e := g.begun.Load(), g.ended.Load(); b != 1 || e != 1 {
		t.Errorf("%d parts begun, %d ended", b, e)
	}
	c.populate = nil
	if _, found := open(t, c); len(found) != 1 {
		t.Errorf("%d blocks after another start, want 1", len(found))
	}
}

// Where mapping fails the pool works as before, and what is wrong is told.
func TestMappingFails(t *testing.T) {
	c, _ := left(t)
	broken := errors.New("broken")
	calls := 0
	c.populate = func([]byte) error { calls++; return broken }
	p, _ := open(t, c)
	<-p.Mapped()
	if err := p.MapError(); !errors.Is(err, broken) || calls != 1 {
		t.Errorf("%v after %d calls", err, calls)
	}
	publish(p, 1, 3, 2)
}

// All of an adopted file's memory is allocated when Open returns, also what somebody has given back, and before any of it is mapped.
func TestAllocatedBeforeMapped(t *testing.T) {
	c, _ := left(t)
	f, err := os.OpenFile(c.Path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(c.Bytes)-1<<20, 1<<20); err != nil {
		t.Fatal(err)
	}
	g := newGate()
	c.populate = g.populate
	p, _ := open(t, c)
	<-g.entered
	var st syscall.Stat_t
	if err := syscall.Fstat(int(f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	if has := st.Blocks * 512; has < int64(c.Bytes) {
		t.Errorf("%d of %d bytes are allocated", has, c.Bytes)
	}
	p.touching.stop.Store(true)
	g.let <- nil
}

// TestMapped asks the kernel: a new pool is mapped at once, an adopted one when it says so.
func TestMapped(t *testing.T) {
	c := testConfig(t)
	for range 2 { // a new one, then an adopted one
		p, _ := open(t, c)
		if !p.Adopted() {
			select {
			case <-p.Mapped():
			default:
				t.Error("not mapped when Open returns")
			}
		}
		<-p.Mapped()
		if err := p.MapError(); err != nil {
			t.Fatal(err)
		}
		if err := unix.Madvise(p.mem[:4096], unix.MADV_POPULATE_WRITE); err != nil {
			t.Skipf("the kernel maps nothing beforehand: %v", err)
		}
		if kb := mappedKB(t, c.Path); kb != len(p.mem)>>10 {
			t.Errorf("adopted %v: %d kB of %d are mapped", p.Adopted(), kb, len(p.mem)>>10)
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// mappedKB is how much of a file this process has in its page tables. A file that was renamed stands there with its new name.
func mappedKB(t *testing.T, path string) (kb int) {
	t.Helper()
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	here := false
	for s := bufio.NewScanner(f); s.Scan(); {
		fields := strings.Fields(s.Text())
		if strings.Contains(fields[0], "-") {
			here = fields[len(fields)-1] == path
		} else if here && fields[0] == "Rss:" {
			n, err := strconv.Atoi(fields[1])
			if err != nil {
				t.Fatal(err)
			}
			kb += n
		}
	}
	return kb
}
