package nvme_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/tiers/nvme"
	"github.com/kvferry/kvferry/tiers/nvme/nvmetest"
)

func TestValidate(t *testing.T) {
	for key, change := range map[string]func(*nvme.Config){
		"":            func(*nvme.Config) {},
		"nvme.path":   func(c *nvme.Config) { c.Path = "" },
		"nvme.size":   func(c *nvme.Config) { c.Bytes = 5 << 20 },
		"nvme.slab":   func(c *nvme.Config) { c.SlabBytes = 3 << 20 },
		"nvme.slab:":  func(c *nvme.Config) { c.SlabBytes = 2 << 30 },
		"nvme.engine": func(c *nvme.Config) { c.Engine = "spdk" },
		"nvme.depth":  func(c *nvme.Config) { c.Depth = -1 },
	} {
		cfg := nvmetest.Config
		cfg.Path = "x"
		change(&cfg)
		err := cfg.Validate()
		if key == "" && err != nil || key != "" && (err == nil || !strings.HasPrefix(err.Error(), key)) {
			t.Errorf("%s: %v", key, err)
		}
	}
}

// TestForeign: what is not ours is refused, and stays as it is.
func TestForeign(t *testing.T) {
	cfg := nvmetest.Config
	ours := filepath.Join(t.TempDir(), "ours")
	cfg.Path = ours
	d, _, err := nvme.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(ours)
	if err != nil {
		t.Fatal(err)
	}
	newer := bytes.Clone(whole)
	binary.LittleEndian.PutUint32(newer[8:], nvme.Format+1)
	binary.LittleEndian.PutUint32(newer[60:], crc32.Checksum(newer[:60], crc32.MakeTable(crc32.Castagnoli)))
	for name, make := range map[string]func(path string) error{
		"text":         func(p string) error { return os.WriteFile(p, []byte("do not lose me"), 0o600) },
		"empty":        func(p string) error { return os.WriteFile(p, nil, 0o600) },
		"zeros":        func(p string) error { return os.WriteFile(p, make([]byte, 18<<20), 0o600) },
		"other magic":  func(p string) error { return os.WriteFile(p, append([]byte("KVFPOOL1"), whole[8:]...), 0o600) },
		"newer format": func(p string) error { return os.WriteFile(p, newer, 0o600) },
		"short":        func(p string) error { return os.WriteFile(p, whole[:1<<20], 0o600) },
		"readable":     func(p string) error { return os.WriteFile(p, whole, 0o644) },
		"directory":    func(p string) error { return os.Mkdir(p, 0o700) },
		"link":         func(p string) error { return os.Symlink(ours, p) },
		"dead link":    func(p string) error { return os.Symlink(p+".nowhere", p) },
		"pipe":         func(p string) error { return unix.Mkfifo(p, 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			cfg.Path = filepath.Join(t.TempDir(), "drive")
			if err := make(cfg.Path); err != nil {
				t.Fatal(err)
			}
			before, _ := os.Lstat(cfg.Path)
			var content []byte
			if before.Mode().IsRegular() {
				content, _ = os.ReadFile(cfg.Path)
			}
			_, _, err := nvme.Open(cfg)
			if err == nil || !errors.Is(err, nvme.ErrForeign) && name != "directory" {
				t.Errorf("%v", err)
			}
			after, e := os.Lstat(cfg.Path)
			if e != nil || after.Mode() != before.Mode() || after.Size() != before.Size() {
				t.Errorf("it was changed: %v, %v", after, e)
			}
			if content != nil {
				if now, _ := os.ReadFile(cfg.Path); !bytes.Equal(now, content) {
					t.Error("its content was changed")
				}
			}
			if _, err := os.Lstat(cfg.Path + ".nowhere"); err == nil {
				t.Error("a file was made where a link points")
			}
		})
	}
	if os.Geteuid() == 0 {
		cfg.Path = ours
		if err := os.Chown(ours, 65534, 65534); err != nil {
			t.Fatal(err)
		}
		if _, _, err := nvme.Open(cfg); !errors.Is(err, nvme.ErrForeign) {
			t.Errorf("another owner: %v", err)
		}
	}
}

func TestLock(t *testing.T) {
	cfg := nvmetest.Config
	cfg.Path = filepath.Join(t.TempDir(), "drive")
	d, _, err := nvme.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := nvme.Open(cfg); !errors.Is(err, nvme.ErrLocked) {
		t.Errorf("%v", err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if d, _, err = nvme.Open(cfg); err != nil {
		t.Fatal(err)
	}
	_ = d.Close()
}

func usage(t *testing.T, path string) (size, blocks uint64) {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return uint64(st.Size), uint64(st.Blocks) * 512
}

// TestSpace: the file is allocated whole, is never longer than it may be, and leaves the reserve.
func TestSpace(t *testing.T) {
	cfg := nvmetest.Config
	dir := t.TempDir()
	cfg.Path = filepath.Join(dir, "drive")
	cfg.Reserve = 1 << 60
	_, _, err := nvme.Open(cfg)
	if !errors.Is(err, nvme.ErrNoSpace) || !strings.Contains(err.Error(), "nvme.reserve") {
		t.Errorf("reserve: %v", err)
	}
	cfg.Reserve, cfg.Bytes = 0, 1<<48
	cfg.SlabBytes = 1 << 30
	if _, _, err = nvme.Open(cfg); !errors.Is(err, nvme.ErrNoSpace) || !strings.Contains(err.Error(), "nvme.size") {
		t.Errorf("size: %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "drive*")); len(left) != 1 { // the lock
		t.Errorf("left behind: %v", left)
	}
	cfg = nvmetest.Config
	cfg.Path = filepath.Join(dir, "drive")
	if err := os.WriteFile(cfg.Path+".new", []byte("of a crash"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, bytes := range []uint64{18<<20 + 4095, 40 << 20, 9 << 20} {
		cfg.Bytes = bytes
		d, _, err := nvme.Open(cfg)
		if err != nil {
			t.Fatal(err)
		}
		size, blocks := usage(t, cfg.Path)
		if want := uint64(2<<20 + d.Slabs()*2<<20); size != want || blocks < want || want > bytes || want+2<<20 <= bytes {
			t.Errorf("%d bytes: the file has %d, %d allocated, for %d slabs", bytes, size, blocks, d.Slabs())
		}
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
	}
	// A hole that somebody made is filled again, and who cuts off the end loses what was there.
	d, _, err := nvme.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	for slab := range 3 {
		d.FormatSlab(slab, 64<<10)
		if _, err := nvmetest.Write(context.Background(), d, slab, 0, nvmetest.NewBlock(uint64(slab), 1, 64<<10)); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	for _, length := range []int64{6 << 20, 100 << 20} {
		if err := os.Truncate(cfg.Path, length); err != nil {
			t.Fatal(err)
		}
		d, keep, err := nvme.Open(cfg)
		if err != nil {
			t.Fatal(err)
		}
		if size, blocks := usage(t, cfg.Path); size != 8<<20 || blocks < 8<<20 || len(keep) != 2 || d.Slabs() != 3 {
			t.Errorf("cut to %d: %d bytes, %d allocated, %d slots, %d slabs", length, size, blocks, len(keep), d.Slabs())
		}
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestFlipWhileOpen changes the file behind the drive's back.
func TestFlipWhileOpen(t *testing.T) {
	ctx := context.Background()
	for _, engine := range []string{nvme.EngineAuto, nvme.EngineThreads} {
		cfg := nvmetest.Config
		cfg.Path, cfg.Engine = filepath.Join(t.TempDir(), "drive"), engine
		d, _, err := nvme.Open(cfg)
		if err != nil {
			t.Fatal(err)
		}
		d.FormatSlab(0, 64<<10)
		var blocks []nvmetest.Block
		for slot := range 3 {
			b := nvmetest.NewBlock(uint64(slot), 1, 64<<10)
			if b.Header, err = nvmetest.Write(ctx, d, 0, slot, b); err != nil {
				t.Fatal(err)
			}
			blocks = append(blocks, b)
		}
		flip := func(at uint64) {
			t.Helper()
			f, err := os.OpenFile(cfg.Path, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			var b [1]byte
			if _, err := f.ReadAt(b[:], int64(at)); err != nil {
				t.Fatal(err)
			}
			b[0] ^= 0x10
			if _, err := f.WriteAt(b[:], int64(at)); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(f.Sync(), f.Close()); err != nil {
				t.Fatal(err)
			}
		}
		flip(d.SlotOffset(0, 0) + 12345)
		flip(d.HeaderOffset(0, 1) + 20)
		for slot, b := range blocks {
			got, err := nvmetest.Read(ctx, d, 0, slot, b.Header)
			if slot == 0 {
				if !errors.Is(err, nvme.ErrCorrupt) {
					t.Errorf("%s: a flipped payload: %v", engine, err)
				}
			} else if err != nil || !bytes.Equal(got, b.Payload) {
				t.Errorf("%s: slot %d: %v, or wrong bytes", engine, slot, err)
			}
		}
		if s := d.Stats(); s.Corrupt != 1 {
			t.Errorf("%d corrupt", s.Corrupt)
		}
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
		d, keep, err := nvme.Open(cfg)
		if err != nil || len(keep) != 3 { // the log says what the header was
			t.Errorf("%s: %v, %d slots", engine, err, len(keep))
		}
		_ = d.Close()
	}
}
