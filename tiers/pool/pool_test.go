package pool

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kvferry/kvferry"
)

func testConfig(t *testing.T) Config {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "kvferry-pool-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return Config{Path: filepath.Join(dir, "pool"), Bytes: slabsAt + 4*(2<<20), SlabBytes: 2 << 20, BootID: "this-boot"}
}

func open(t *testing.T, c Config) (*Pool, []Resident) {
	t.Helper()
	p, found, err := Open(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p, found
}

// publish fills a slot as the mover and the ledger would.
func publish(p *Pool, slab, slot int, n byte) Header {
	h := Header{Generation: p.Fill(slab, slot), Hash: kvferry.Hash{n}, Space: kvferry.SpaceID{9}, Length: 5000, CRC32C: uint32(n), Shards: 1, StoredMs: 7}
	p.Publish(slab, slot, h)
	h.State = StateResident
	return h
}

func TestAdoption(t *testing.T) {
	c := testConfig(t)
	p, found := open(t, c)
	if p.Adopted() || len(found) != 0 {
		t.Fatal("a new file was adopted")
	}
	p.FormatSlab(1, 8192)
	p.FormatSlab(3, 64<<10)
	first := publish(p, 1, 2, 1)
	publish(p, 1, 3, 2)
	p.Clear(1, 3) // evicted
	second := publish(p, 3, 0, 3)
	p.Fill(3, 1) // killed while it was filled
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}

	q, found := open(t, c)
	if !q.Adopted() || len(found) != 2 {
		t.Fatalf("adopted %v, found %d, want 2", q.Adopted(), len(found))
	}
	for i, want := range []Header{first, second} {
		got := found[i].Header
		if got.Generation <= want.Generation || got.Generation <= second.Generation {
			t.Errorf("generation %d is not above the old ones", got.Generation)
		}
		if g := q.Generation(found[i].Slab, found[i].Slot); g != got.Generation {
			t.Errorf("header has generation %d, told %d", g, got.Generation)
		}
		want.Generation = got.Generation
		if got != want {
			t.Errorf("got %+v, want %+v", got, want)
		}
	}
	if n, _ := q.SlabInUse(0); n != 0 {
		t.Error("a free slab is in use")
	}
	if g := q.Fill(3, 1); g.Filling() || g <= found[1].Header.Generation {
		t.Errorf("a slot that was being filled gets generation %d", g)
	}
}

// A header that a kill has torn, or memory has flipped a bit of, is no block.
func TestFlippedHeaders(t *testing.T) {
	c := testConfig(t)
	for at := range HeaderBytes {
		p, _ := open(t, c)
		if n, _ := p.SlabInUse(0); n == 0 {
			p.FormatSlab(0, 8192)
		}
		publish(p, 0, 0, 1)
		want := publish(p, 0, 1, 2)
		p.header(0, 0)[at] ^= 0x10
		_ = p.Close()
		q, found := open(t, c)
		if len(found) != 1 || found[0].Header.Hash != want.Hash {
			t.Fatalf("byte %d flipped: %d slots were kept", at, len(found))
		}
		_ = q.Close()
	}
}

// Generations never go back, also where a slab was given back and the daemon started again.
func TestGenerationFloor(t *testing.T) {
	c := testConfig(t)
	p, _ := open(t, c)
	p.FormatSlab(0, 8192)
	var last kvferry.Generation
	for range 50 {
		last = publish(p, 0, 0, 1).Generation
	}
	p.FreeSlab(0)
	_ = p.Close()
	q, _ := open(t, c)
	q.FormatSlab(0, 4096)
	if g := q.Generation(0, 0); g < last {
		t.Fatalf("generation %d after %d", g, last)
	}
}

func TestOpenRefuses(t *testing.T) {
	c := testConfig(t)
	open(t, c)
	if _, _, err := Open(c); !errors.Is(err, ErrLocked) {
		t.Errorf("second open: %v", err)
	}
	foreign := testConfig(t)
	if err := os.WriteFile(foreign.Path, []byte(strings.Repeat("not a pool ", 1<<18)), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := Open(foreign); !errors.Is(err, ErrForeign) {
		t.Errorf("foreign file: %v", err)
	}
	if b, _ := os.ReadFile(foreign.Path); !strings.HasPrefix(string(b), "not a pool") {
		t.Error("the foreign file was changed")
	}
	huge := testConfig(t)
	huge.Bytes = 1 << 44
	huge.SlabBytes = 64 << 20
	if _, _, err := Open(huge); !errors.Is(err, ErrNoSpace) || !strings.Contains(err.Error(), "pool.size") {
		t.Errorf("more than there is: %v", err)
	}
	disk := testConfig(t)
	disk.Path = filepath.Join(t.TempDir(), "pool")
	if _, _, err := Open(disk); !errors.Is(err, ErrPath) || !strings.Contains(err.Error(), "tmpfs") {
		t.Errorf("not on tmpfs: %v", err)
	}
	// A file that begins with zeros may be somebody's all the same.
	zeros := testConfig(t)
	if err := os.WriteFile(zeros.Path, append(make([]byte, 8192), []byte(strings.Repeat("precious ", 1<<18))...), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := Open(zeros); !errors.Is(err, ErrForeign) {
		t.Errorf("file that begins with zeros: %v", err)
	}
	if b, _ := os.ReadFile(zeros.Path); !strings.HasSuffix(string(b), "precious ") {
		t.Error("the file was overwritten")
	}
	for _, name := range []string{"", ".lock"} { // everybody's directory: others may have put the files there before us
		open := testConfig(t)
		if err := os.WriteFile(open.Path+name, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(open.Path+name, 0o666); err != nil {
			t.Fatal(err)
		}
		if _, _, err := Open(open); !errors.Is(err, ErrForeign) {
			t.Errorf("file%s that others may write: %v", name, err)
		}
	}
	if _, err := os.Stat(huge.Path + ".new"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a failed start left its file: %v", err)
	}
	link := testConfig(t)
	if err := os.Symlink(foreign.Path, link.Path); err != nil {
		t.Fatal(err)
	}
	if _, _, err := Open(link); err == nil {
		t.Error("followed a symlink")
	}
}

func TestNewerFormatStaysUntouched(t *testing.T) {
	c := testConfig(t)
	p, _ := open(t, c)
	p.FormatSlab(0, 8192)
	publish(p, 0, 0, 1)
	_ = p.Close()
	spoil(t, c.Path, func(super []byte) {
		binary.LittleEndian.PutUint32(super[8:], Format+1)
		binary.LittleEndian.PutUint32(super[superCRCAt:], crcOf(super[:superCRCAt]))
	})
	before, _ := os.ReadFile(c.Path)
	if _, _, err := Open(c); !errors.Is(err, ErrForeign) {
		t.Fatalf("open of format %d: %v", Format+1, err)
	}
	if after, _ := os.ReadFile(c.Path); string(after) != string(before) {
		t.Error("the file was changed")
	}
}

func TestOtherBootOrSizeStartsCold(t *testing.T) {
	c := testConfig(t)
	p, _ := open(t, c)
	p.FormatSlab(0, 8192)
	publish(p, 0, 0, 1)
	_ = p.Close()
	c.BootID = "next-boot"
	q, found := open(t, c)
	if q.Adopted() || len(found) != 0 {
		t.Error("adopted the pool of another boot")
	}
	_ = q.Close()
	c.SlabBytes *= 2
	if q, _ := open(t, c); q.Adopted() {
		t.Error("adopted a pool with other slabs")
	}
}

// spoil changes the superblock of a pool that is closed.
func spoil(t *testing.T, path string, change func(super []byte)) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, superBytes)
	if _, err := f.ReadAt(b, 0); err != nil {
		t.Fatal(err)
	}
	change(b)
	if _, err := f.WriteAt(b, 0); err != nil {
		t.Fatal(err)
	}
}

// A flipped bit in the superblock costs what was kept, and not the start: also one in what says whose it is, and of which format.
func TestDamagedSuperblock(t *testing.T) {
	for at := 0; at < superCRCAt+4; at += 1 + at/12*5 {
		c := testConfig(t)
		p, _ := open(t, c)
		p.FormatSlab(0, 8192)
		publish(p, 0, 0, 1)
		p.mem[at] ^= 1 << (at * 5 % 8)
		_ = p.Close() // makes it whole
		p, found := open(t, c)
		if !p.Adopted() || len(found) != 1 {
			t.Errorf("byte %d, while a daemon had it: adopted %v, found %d, %s", at, p.Adopted(), len(found), p.Cold())
		}
		_ = p.Close()
		spoil(t, c.Path, func(super []byte) { super[at] ^= 1 << (at * 5 % 8) })
		q, found := open(t, c)
		if q.Adopted() || len(found) != 0 || q.Cold() == "" {
			t.Errorf("byte %d: adopted %v, found %d", at, q.Adopted(), len(found))
		}
		_ = q.Close()
	}
}

// A pool keeps what fits when its size is changed.
func TestResize(t *testing.T) {
	c := testConfig(t)
	p, _ := open(t, c)
	p.FormatSlab(0, 8192)
	p.FormatSlab(3, 8192)
	first, last := publish(p, 0, 0, 1), publish(p, 3, 0, 2)
	outside := append([]byte{}, p.header(3, 0)...)
	_ = p.Close()

	c.Bytes += 2 << 20
	p, found := open(t, c)
	if len(found) != 2 || p.Slabs() != 5 || len(p.Bytes()) != int(c.Bytes) {
		t.Fatalf("grown: %d slots found, %d slabs, %d bytes", len(found), p.Slabs(), len(p.Bytes()))
	}
	p.FormatSlab(4, 8192)
	publish(p, 4, 0, 3)
	_ = p.Close()

	c.Bytes = slabsAt + 2*c.SlabBytes
	p, found = open(t, c)
	if len(found) != 1 || found[0].Header.Hash != first.Hash {
		t.Fatalf("shrunk: found %+v", found)
	}
	if st, err := os.Stat(c.Path); err != nil || st.Sys().(*syscall.Stat_t).Blocks*512 > int64(c.Bytes)+1<<20 {
		t.Errorf("shrunk: the file has %v, %v", st, err)
	}
	floor := found[0].Header.Generation
	if floor <= last.Generation+2 {
		t.Errorf("generation %d may have been used in what was cut off", floor)
	}
	_ = p.Close()

	c.Bytes = slabsAt + 4*c.SlabBytes
	p, found = open(t, c)
	if len(found) != 1 || p.Slabs() != 4 {
		t.Fatalf("grown again: %d slots found, %d slabs", len(found), p.Slabs())
	}
	p.FormatSlab(3, 8192)
	if g := p.Fill(3, 0); uint64(g) <= binary.LittleEndian.Uint64(outside) {
		t.Errorf("a slot that was cut off has generation %d again", g)
	}
}

// A slot that a device was writing is not used before the device is done, also over several restarts.
func TestAside(t *testing.T) {
	c := testConfig(t)
	p, _ := open(t, c)
	p.FormatSlab(0, 8192)
	p.Fill(0, 1)
	p.MarkFromDrive(0, 1, 77)
	p.Fill(0, 2)
	_ = p.Close()
	for range 2 {
		q, found := open(t, c)
		if len(found) != 1 || !found[0].Aside || found[0].Slot != 1 || found[0].Header.StoredMs != 77 {
			t.Fatalf("found %+v", found)
		}
		_ = q.Close()
	}
	q, _ := open(t, c)
	q.Clear(0, 1)
	_ = q.Close()
	if _, found := open(t, c); len(found) != 0 {
		t.Fatalf("found %+v after it was cleared", found)
	}
}

func TestHeadersStayInsideSectors(t *testing.T) {
	c := testConfig(t)
	p, _ := open(t, c)
	n := p.FormatSlab(0, 4096)
	for k := range n {
		if at := p.HeaderOffset(0, k); at/512 != (at+HeaderBytes-1)/512 {
			t.Fatalf("header %d at %d crosses 512 bytes", k, at)
		}
	}
	if end := p.SlotOffset(0, n-1) + 4096; end > slabsAt+p.SlabBytes() {
		t.Fatalf("the last slot ends at %d, the slab at %d", end, slabsAt+p.SlabBytes())
	}
}

func FuzzParseHeader(f *testing.F) {
	var b [HeaderBytes]byte
	putHeader(b[:], Header{State: StateResident, Length: 5, Shards: 1})
	sealHeader(b[:], 0)
	f.Add(b[:])
	f.Fuzz(func(t *testing.T, b []byte) {
		if h, ok := ParseHeader(b); ok {
			var c [HeaderBytes]byte
			putHeader(c[:], h)
			if string(c[16:136]) != string(b[16:136]) {
				t.Error("parsed to something else")
			}
		}
	})
}

func FuzzParseSuper(f *testing.F) {
	f.Add(make([]byte, superBytes))
	f.Fuzz(func(t *testing.T, b []byte) { parseSuper(b) })
}
