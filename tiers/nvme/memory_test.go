package nvme_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/tiers/nvme"
	"github.com/kvferry/kvferry/tiers/nvme/nvmetest"
	"github.com/kvferry/kvferry/tiers/pool"
)

// memoryBytes is three pieces, the last of which is short.
const memoryBytes = 34 << 20

var now = func() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

func mapped(t *testing.T) []byte {
	t.Helper()
	b, err := unix.Mmap(-1, 0, memoryBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(b) })
	return b
}

// onRings opens a drive that uses memory.
func onRings(t *testing.T, m *nvme.Memory) *nvme.Drive {
	t.Helper()
	cfg := nvmetest.Config
	cfg.Path, cfg.Engine, cfg.Memory = filepath.Join(t.TempDir(), "drive"), nvme.EngineUring, m
	d, _, err := nvme.Open(cfg)
	if errors.Is(err, nvme.ErrEngine) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	d.FormatSlab(0, 64<<10)
	return d
}

// gate lets pieces be pinned one by one.
type gate struct {
	entered chan struct{}
	let     chan error
}

func gated(b []byte) (*nvme.Memory, gate) {
	m, g := nvme.NewMemory(b, now), gate{make(chan struct{}), make(chan error)}
	m.Pinning(func(next func() (bool, error)) (bool, error) {
		g.entered <- struct{}{}
		if err := <-g.let; err != nil {
			return false, err
		}
		return next()
	})
	return m, g
}

// enter waits for a piece to be begun; where the kernel cannot share registered memory none is.
func (g gate) enter(t *testing.T, m *nvme.Memory) {
	t.Helper()
	select {
	case <-g.entered:
	case <-m.Settled():
		t.Skipf("no registered memory: %v", m.Err())
	}
}

// move writes a block out of memory to a slot and reads it back into memory behind it.
func move(d *nvme.Drive, slot int, memory []byte, random *rand.Rand) error {
	const length = 64 << 10
	from, into := memory[:length], memory[length:2*length]
	for i := range from {
		from[i] = byte(random.Uint32())
	}
	h := pool.Header{Length: length, CRC32C: crc32.Checksum(from, crc32.MakeTable(crc32.Castagnoli)), Shards: 1, Generation: d.Fill(0, slot)}
	w := []nvme.WriteOp{{Slab: 0, Slot: slot, Header: h, Payload: from}}
	if d.Write(context.Background(), w); w[0].Err != nil {
		return w[0].Err
	}
	clear(into)
	r := []nvme.ReadOp{{Slab: 0, Slot: slot, Into: into, CRC32C: h.CRC32C}}
	if d.Read(context.Background(), r); r[0].Err != nil {
		return r[0].Err
	}
	if !bytes.Equal(from, into) {
		return errors.New("wrong bytes")
	}
	return nil
}

func wantRegistered(t *testing.T, d *nvme.Drive, registered bool, why string) {
	t.Helper()
	s := d.Stats()
	if s.Registered != registered || !strings.Contains(s.Why, why) || (why == "") != (s.Why == "") {
		t.Errorf("registered %v, %q; want %v, %q", s.Registered, s.Why, registered, why)
	}
}

// pinnedKB is how much memory of this process the kernel keeps in place.
func pinnedKB() (kb int) {
	f, err := os.Open("/proc/self/status")
	if err != nil {
		return -1
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if _, err := fmt.Sscanf(s.Text(), "VmPin: %d kB", &kb); err == nil {
			return kb
		}
	}
	return -1
}

func noneIsPinned(t *testing.T) {
	t.Helper()
	for range 1000 {
		if pinnedKB() == 0 {
			return
		}
		time.Sleep(5 * time.Millisecond) // the kernel ends rings behind their back
	}
	t.Errorf("%d kB stay pinned", pinnedKB())
}

// TestMemory: two drives work while their memory is being registered, on several rings each; all of these take it over then, and it is pinned once.
func TestMemory(t *testing.T) {
	noneIsPinned(t)
	b := mapped(t)
	m, g := gated(b)
	drives := []*nvme.Drive{onRings(t, m), onRings(t, m)}
	g.enter(t, m)
	var stop atomic.Bool
	var moved atomic.Int64
	var wg sync.WaitGroup
	errs := make(chan error, 8)
	for n := range 8 {
		wg.Go(func() {
			// Each has its part of memory; those of numbers 3 and 7 lie across a border.
			part, random := b[(n+1)*(15<<20)/4-(32<<10):], rand.New(rand.NewPCG(uint64(n), 1))
			for !stop.Load() {
				if err := move(drives[n%2], n/2, part, random); err != nil {
					errs <- fmt.Errorf("mover %d: %w", n, err)
					return
				}
				moved.Add(1)
			}
		})
	}
	more := func(n int64) {
		for from := moved.Load(); moved.Load() < from+n && len(errs) == 0; {
			time.Sleep(time.Millisecond)
		}
	}
	more(16)
	for _, d := range drives {
		wantRegistered(t, d, false, "it is being registered")
	}
	for i := range 3 {
		if i > 0 {
			g.enter(t, m)
		}
		more(8)
		g.let <- nil
	}
	<-m.Settled()
	more(16)
	stop.Store(true)
	wg.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
	for i, d := range drives {
		for range 8 { // rings take turns
			if err := move(d, 0, b, rand.New(rand.NewPCG(1, 2))); err != nil {
				t.Fatal(err)
			}
		}
		wantRegistered(t, d, true, "")
		if made, registered := d.Rings(); made < 2 || registered != made {
			t.Errorf("drive %d: %d of %d rings have taken it over", i, registered, made)
		}
	}
	if kb := pinnedKB(); kb != memoryBytes>>10 {
		t.Errorf("%d kB are pinned, want %d", kb, memoryBytes>>10)
	}
	m.Close() // too early: a ring keeps what it has
	if err := move(drives[0], 0, b, rand.New(rand.NewPCG(1, 3))); err != nil {
		t.Error(err)
	}
	for _, d := range drives {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
	noneIsPinned(t)
}

// TestMemoryClosed closes it at each stage: before any ring is there, while what is waited for has not come, while a piece is being pinned.
func TestMemoryClosed(t *testing.T) {
	b := mapped(t)
	m := nvme.NewMemory(b, now)
	m.Close()
	<-m.Settled()
	d := onRings(t, m)
	wantRegistered(t, d, false, "closed")
	_ = d.Close()

	m = nvme.NewMemory(b, make(chan struct{}))
	m.Pinning(func(func() (bool, error)) (bool, error) {
		t.Error("registered before the time")
		return false, nil
	})
	d = onRings(t, m)
	wantRegistered(t, d, false, "it is being registered")
	m.Close()
	wantRegistered(t, d, false, "closed")
	_ = d.Close()

	m, g := gated(b)
	d = onRings(t, m)
	g.enter(t, m)
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		m.Close()
	}()
	<-m.Stopping()
	select {
	case <-closed:
		t.Error("closed while a piece is being pinned")
	default:
	}
	g.let <- nil
	select {
	case <-closed:
	case <-g.entered:
		t.Fatal("another piece is begun")
	}
	m.Close() // once more
	wantRegistered(t, d, false, "closed")
	if err := move(d, 0, b, rand.New(rand.NewPCG(1, 4))); err != nil {
		t.Error(err)
	}
	_ = d.Close()
	noneIsPinned(t)
}

// TestMemoryRefused: the kernel gives so much and no more. All of it is given back, that is said, and drives work without.
func TestMemoryRefused(t *testing.T) {
	b := mapped(t)
	m, g := gated(b)
	d := onRings(t, m)
	g.enter(t, m)
	g.let <- nil
	g.enter(t, m)
	if pinnedKB() == 0 {
		t.Error("nothing is pinned")
	}
	g.let <- unix.ENOMEM
	<-m.Settled()
	if err := m.Err(); !errors.Is(err, unix.ENOMEM) {
		t.Error(err)
	}
	wantRegistered(t, d, false, "without registered memory: cannot allocate memory")
	if err := move(d, 0, b, rand.New(rand.NewPCG(1, 5))); err != nil {
		t.Error(err)
	}
	noneIsPinned(t)
	_ = d.Close()
	m.Close()
}

// TestMemoryNotTaken: a ring cannot take it over. It works without, and that is said; it is as long as another one has not.
func TestMemoryNotTaken(t *testing.T) {
	b := mapped(t)
	m, g := gated(b)
	d := onRings(t, m)
	g.enter(t, m)
	if err := d.Occupy(mapped(t)); err != nil {
		t.Fatal(err)
	}
	go func() {
		for range g.entered {
		}
	}()
	for range 3 {
		g.let <- nil
	}
	<-m.Settled()
	close(g.entered)
	for range 2 {
		if err := move(d, 0, b, rand.New(rand.NewPCG(1, 6))); err != nil {
			t.Error(err)
		}
		wantRegistered(t, d, false, "without registered memory: take over registered memory: device or resource busy")
	}
	_ = d.Close()
	m.Close()
}

// TestMemoryUnused: threads have no use for it, so it is not registered for them.
func TestMemoryUnused(t *testing.T) {
	m := nvme.NewMemory(mapped(t), now)
	cfg := nvmetest.Config
	cfg.Path, cfg.Engine, cfg.Memory = filepath.Join(t.TempDir(), "drive"), nvme.EngineThreads, m
	d, _, err := nvme.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	select {
	case <-m.Settled():
		t.Error("it is settled")
	default:
	}
	wantRegistered(t, d, false, "")
	m.Close()
}
