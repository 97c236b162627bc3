package nvme

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/tiers/pool"
)

// place is where a drive lies, as far as it is a file.
type place struct {
	lock  *os.File // keeps other daemons away
	made  bool     // it was not there
	notes []string // about what was done to it
}

// Open locks the file, makes it where it is not there, and answers the slots that are worth keeping, their generations as they stand in the file. All of the
// file is allocated before it returns.
func Open(cfg Config) (*Drive, []pool.Resident, error) {
	if err := cfg.Validate(); err != nil {
		return nil, nil, err
	}
	cfg = cfg.withDefaults()
	p, dev, err := openFile(cfg)
	var d *Drive
	var keep []pool.Resident
	if err == nil {
		d, keep, err = attach(cfg, dev, p, 0)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("nvme.path %s: %w", cfg.Path, err)
	}
	return d, keep, nil
}

// openFile locks and opens; on error nothing is held any more.
func openFile(cfg Config) (p place, dev Device, err error) {
	if p.lock, err = pool.OpenOwn(cfg.Path+".lock", os.O_RDWR|os.O_CREATE, ErrForeign); err != nil {
		return p, nil, err
	}
	defer func() {
		if err != nil {
			_ = p.lock.Close()
		}
	}()
	if err = unix.Flock(int(p.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			return p, nil, ErrLocked
		}
		return p, nil, fmt.Errorf("lock: %w", err)
	}
	meta, err := pool.OpenOwn(cfg.Path, os.O_RDWR, ErrForeign)
	if errors.Is(err, os.ErrNotExist) {
		p.made = true
		if err = create(cfg); err == nil {
			meta, err = pool.OpenOwn(cfg.Path, os.O_RDWR, ErrForeign)
		}
	}
	if err != nil {
		return p, nil, err
	}
	// The file itself is locked too: it may have other names. No descriptor of it is handed out.
	if err = unix.Flock(int(meta.Fd()), unix.LOCK_EX|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) {
		err = fmt.Errorf("%w, under another name", ErrLocked)
	}
	if err == nil {
		err = fit(meta, cfg, &p.notes)
	}
	if err == nil {
		dev, err = newFileDevice(meta, cfg)
	}
	if err != nil {
		_ = meta.Close()
	}
	return p, dev, err
}

// create makes the file under another name and gives it its own when it is a drive: a crash leaves nothing behind that would have to be told from a stranger's.
func create(cfg Config) error {
	unfinished := cfg.Path + ".new"
	if err := os.Remove(unfinished); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	f, err := pool.OpenOwn(unfinished, os.O_RDWR|os.O_CREATE|os.O_EXCL, ErrForeign)
	if err != nil {
		return err
	}
	err = allocate(f, fileBytes(slabsIn(cfg.Bytes, cfg.SlabBytes), cfg.SlabBytes), cfg)
	if err == nil {
		d := &Drive{cfg: cfg, dev: &fileDevice{meta: f, size: int64(fileBytes(slabsIn(cfg.Bytes, cfg.SlabBytes), cfg.SlabBytes))}}
		err = d.initialise()
	}
	if err == nil {
		err = f.Sync() // its length and blocks too
	}
	if err == nil {
		err = os.Rename(unfinished, cfg.Path)
	}
	if err == nil {
		err = syncDir(filepath.Dir(cfg.Path))
	}
	if e := f.Close(); err == nil {
		err = e
	}
	if err != nil {
		_ = os.Remove(unfinished)
	}
	return err
}

func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Sync()
}

// fit gives a file of ours the configured length. What is not ours is refused here, before anything of it is changed.
func fit(f *os.File, cfg Config, notes *[]string) error {
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if st.Size() < slabsAt {
		return fmt.Errorf("%w: %d bytes; remove the file if it may be overwritten", ErrForeign, st.Size())
	}
	s, found, err := readSuper(&fileDevice{meta: f})
	switch {
	case err != nil:
		return err
	case found == 0: // a file of zeros
		return fmt.Errorf("%w: it has no superblock; remove the file if it may be overwritten", ErrForeign)
	case s.version != Format:
		return fmt.Errorf("%w: format %d, this daemon has %d; nothing is changed", ErrForeign, s.version, Format)
	}
	n := slabsIn(cfg.Bytes, s.slabBytes)
	if n == 0 {
		return fmt.Errorf("%w: nvme.size: %d bytes: no room for a slab of the file's, of %d bytes", ErrNoSpace, cfg.Bytes, s.slabBytes)
	}
	want := fileBytes(n, s.slabBytes)
	if uint64(st.Size()) != want {
		*notes = append(*notes, fmt.Sprintf("the file has %d bytes, is to have %d", st.Size(), want))
	}
	if uint64(st.Size()) > want {
		// First the superblock: slabs that are cut off must not be believed when the file grows again.
		if s.slabs > uint64(n) {
			s.slabs = uint64(n)
			d := &Drive{dev: &fileDevice{meta: f}}
			if err := d.writeSuper(s); err != nil {
				return err
			}
		}
		if err := f.Truncate(int64(want)); err != nil {
			return fmt.Errorf("shrink to %d bytes: %w", want, err)
		}
	}
	err = allocate(f, want, cfg)
	if errors.Is(err, ErrNoSpace) && uint64(st.Size()) < want { // what it has is not lost for that
		*notes = append(*notes, fmt.Sprintf("it stays as long as it is: %v", err))
		return nil
	}
	return err
}

// allocate reserves every block of the file, so that no write ever fails for lack of space.
func allocate(f *os.File, bytes uint64, cfg Config) error {
	var fs unix.Statfs_t
	var st unix.Stat_t
	if err := unix.Fstatfs(int(f.Fd()), &fs); err != nil {
		return err
	}
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	have := uint64(st.Blocks) * 512
	if uint64(st.Size) >= bytes && have >= bytes {
		return nil
	}
	free, need := fs.Bavail*uint64(fs.Bsize), bytes-min(have, bytes)
	if need > free || free-need < cfg.Reserve {
		return fmt.Errorf("%w: nvme.size: %d bytes more are needed and nvme.reserve wants %d to stay free, the file system has %d", ErrNoSpace, need, cfg.Reserve, free)
	}
	size := st.Size
	for {
		err := unix.Fallocate(int(f.Fd()), 0, 0, int64(bytes))
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			_ = f.Truncate(size) // of a file that is there, no more than it had
			return fmt.Errorf("%w: nvme.size: allocate %d bytes: %w", ErrNoSpace, bytes, err)
		}
		return nil
	}
}
