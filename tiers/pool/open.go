package pool

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"
)

// Open maps the pool, making the file where it is not there, and returns the slots that were adopted from an earlier daemon of this boot.
// All memory is allocated before it returns: what the machine cannot give is an error at start, never a SIGBUS later. That of an adopted file is mapped behind its back (touch.go): Mapped tells when.
func Open(cfg Config) (*Pool, []Resident, error) {
	if err := cfg.Validate(); err != nil {
		return nil, nil, err
	}
	cfg.Bytes = slabsAt + (cfg.Bytes-slabsAt)/cfg.SlabBytes*cfg.SlabBytes
	if cfg.populate == nil {
		cfg.populate = populate
	}
	p := &Pool{cfg: cfg, slabs: make([]slab, (cfg.Bytes-slabsAt)/cfg.SlabBytes)}
	keep, err := p.open()
	if err != nil {
		_ = p.Close()
		return nil, nil, fmt.Errorf("pool.path %s: %w", cfg.Path, err)
	}
	return p, keep, nil
}

func (p *Pool) open() (keep []Resident, err error) {
	if err := checkFileSystem(filepath.Dir(p.cfg.Path)); err != nil {
		return nil, err
	}
	// The lock is on a file of its own: a descriptor of the pool is handed out, and would keep a lock alive.
	if p.lock, err = openOwn(p.cfg.Path+".lock", os.O_RDWR|os.O_CREATE); err != nil {
		return nil, err
	}
	if err = unix.Flock(int(p.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, ErrLocked
		}
		return nil, fmt.Errorf("lock: %w", err)
	}
	if err := p.look(); err != nil {
		return nil, err
	}
	if p.adopted {
		if err := p.resize(); err != nil {
			return nil, err
		}
		if err := p.mapFile(); err != nil {
			return nil, err
		}
		if keep, err = p.scan(); err != nil {
			return nil, err
		}
	} else if err := p.create(); err != nil {
		return nil, err
	}
	if p.readOnly, err = openOwn(p.cfg.Path, os.O_RDONLY); err != nil {
		return nil, err
	}
	if p.adopted {
		p.touching = startTouching(p.mem, p.cfg.populate)
	}
	return keep, nil
}

// openOwn is OpenOwn for a pool.
func openOwn(path string, flags int) (*os.File, error) { return OpenOwn(path, flags, ErrForeign) }

// OpenOwn opens a file that must be a regular one of this daemon's own, closed to everybody else: its directory may be everybody's, and who owns the file can write what workers read. What is something else is refused with foreign.
func OpenOwn(path string, flags int, foreign error) (*os.File, error) {
	f, err := os.OpenFile(path, flags|unix.O_NOFOLLOW, 0o600)
	if errors.Is(err, unix.ELOOP) {
		return nil, fmt.Errorf("%w: %s is a symbolic link", foreign, path)
	}
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%w: %s is not a regular file", foreign, path)
	}
	if err == nil {
		if sys, ok := st.Sys().(*syscall.Stat_t); !ok || sys.Uid != uint32(os.Geteuid()) || st.Mode().Perm()&0o077 != 0 {
			err = fmt.Errorf("%w: %s has another owner, or mode %v: must be this daemon's own, and 0600", foreign, path, st.Mode().Perm())
		}
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// look decides what an existing file is: ours and of this boot and size (adopted), ours but outdated or empty (made anew), or not ours (refused).
func (p *Pool) look() error {
	f, err := openOwn(p.cfg.Path, os.O_RDWR)
	if errors.Is(err, os.ErrNotExist) {
		p.cold = "there was none"
		return nil
	}
	if err != nil {
		return err
	}
	p.file = f
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if st.Size() == 0 {
		p.cold = "the file was empty"
		return nil
	}
	if st.Size() < slabsAt {
		return fmt.Errorf("%w: %d bytes", ErrForeign, st.Size())
	}
	// Mapped: hugetlbfs has no read of part of a page in every kernel.
	b, err := unix.Mmap(int(f.Fd()), 0, slabsAt, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Munmap(b) }()
	s, ok := parseSuper(b)
	switch {
	case !ok && wasOurs(b):
		p.cold = "its superblock was damaged"
	case !ok:
		return fmt.Errorf("%w: wrong magic or checksum; remove the file if it may be overwritten", ErrForeign)
	case s.version != Format:
		return fmt.Errorf("%w: format %d, this daemon has %d", ErrForeign, s.version, Format)
	case s.bootID != p.cfg.BootID:
		p.cold = "the machine was booted since"
	case s.slabBytes != p.cfg.SlabBytes || uint64(st.Size()-slabsAt)%s.slabBytes != 0:
		p.cold = fmt.Sprintf("it had %d bytes in slabs of %d", st.Size(), s.slabBytes)
	default:
		p.adopted, p.generation = true, s.generation
	}
	return nil
}

// wasOurs tells whether a superblock that does not hold is damaged, rather than a stranger's or of a newer format, whose checksum may lie elsewhere: it says that it is of this one, or it holds if it did.
func wasOurs(b []byte) bool {
	if binary.LittleEndian.Uint64(b) == superMagic && binary.LittleEndian.Uint32(b[8:]) == Format {
		return true
	}
	b = slices.Clone(b[:floorAt+8])
	binary.LittleEndian.PutUint64(b, superMagic)
	binary.LittleEndian.PutUint32(b[8:], Format)
	_, ok := parseSuper(b)
	return ok
}

// resizeGenerations is more than a daemon can have used since it last wrote the floor: what is cut off may have had them.
const resizeGenerations = 1 << 33

// resize gives an adopted file the configured size. What lies beyond a smaller one is given back by a hole: workers of before may still map it, and a truncated file would fault them; they find no generation that they know.
func (p *Pool) resize() error {
	st, err := p.file.Stat()
	if err != nil {
		return err
	}
	if beyond := st.Size() - int64(p.cfg.Bytes); beyond > 0 {
		p.generation += resizeGenerations
		if err := unix.Fallocate(int(p.file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(p.cfg.Bytes), beyond); err != nil {
			return fmt.Errorf("give %d bytes back: %w", beyond, err)
		}
		if st, err = p.file.Stat(); err != nil { // what it has now is what is missing
			return err
		}
	}
	return p.reserve(st)
}

// create makes the file under another name and gives it its own when it is whole. An outdated one is replaced and not truncated: that would fault engines that still map it.
func (p *Pool) create() error {
	if p.file != nil {
		_ = p.file.Close()
		p.file = nil
		if err := os.Remove(p.cfg.Path); err != nil { // first: both may not fit
			return err
		}
	}
	unfinished := p.cfg.Path + ".new"
	if err := os.Remove(unfinished); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	f, err := openOwn(unfinished, os.O_RDWR|os.O_CREATE|os.O_EXCL)
	if err != nil {
		return err
	}
	p.file = f
	err = p.allocate()
	if err == nil {
		err = p.mapFile()
	}
	if err == nil {
		err = touchAll(p.mem)
	}
	if err == nil {
		p.generation = firstGeneration()
		p.writeSuper()
		err = os.Rename(unfinished, p.cfg.Path)
	}
	if err != nil {
		_ = os.Remove(unfinished)
	}
	return err
}

func (p *Pool) mapFile() error {
	mem, err := unix.Mmap(int(p.file.Fd()), 0, int(p.cfg.Bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map %d bytes: %w", p.cfg.Bytes, err)
	}
	p.mem = mem
	return nil
}

// Close unmaps the pool and keeps the file for the next daemon.
func (p *Pool) Close() error {
	var errs []error
	if p.touching != nil {
		p.touching.end()
	}
	if p.mem != nil {
		p.writeSuper() // what of it was damaged meanwhile is whole again
		errs = append(errs, unix.Munmap(p.mem))
		p.mem = nil
	}
	for _, f := range []*os.File{p.readOnly, p.file, p.lock} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}
