package pool

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Open maps the pool, making the file where it is not there, and returns the slots that were adopted from an earlier daemon of this boot.
// All memory is allocated before it returns: what the machine cannot give is an error at start, never a SIGBUS later.
func Open(cfg Config) (*Pool, []Resident, error) {
	if err := cfg.Validate(); err != nil {
		return nil, nil, err
	}
	cfg.Bytes = slabsAt + (cfg.Bytes-slabsAt)/cfg.SlabBytes*cfg.SlabBytes
	p := &Pool{cfg: cfg, slabs: make([]slab, (cfg.Bytes-slabsAt)/cfg.SlabBytes)}
	if err := p.open(); err != nil {
		p.Close()
		return nil, nil, fmt.Errorf("open pool %s: %w", cfg.Path, err)
	}
	var keep []Resident
	if p.adopted {
		keep = p.scan()
	} else {
		p.generation = firstGeneration()
		p.writeSuper()
	}
	return p, keep, nil
}

func (p *Pool) open() error {
	var err error
	// The lock is on a file of its own: a descriptor of the pool is handed out, and would keep a lock alive.
	if p.lock, err = os.OpenFile(p.cfg.Path+".lock", os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return err
	}
	if err = unix.Flock(int(p.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			return ErrLocked
		}
		return fmt.Errorf("lock: %w", err)
	}
	if p.file, err = os.OpenFile(p.cfg.Path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600); err != nil {
		return err
	}
	if err = p.look(); err != nil {
		return err
	}
	if err = p.allocate(); err != nil {
		return err
	}
	if p.readOnly, err = os.OpenFile(p.cfg.Path, os.O_RDONLY|unix.O_NOFOLLOW, 0); err != nil {
		return err
	}
	p.mem, err = unix.Mmap(int(p.file.Fd()), 0, int(p.cfg.Bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map %d bytes: %w", p.cfg.Bytes, err)
	}
	return p.touch()
}

// look decides what an existing file is: ours and of this boot and size (adopted), ours but outdated (made anew), or not ours (refused).
func (p *Pool) look() error {
	st, err := p.file.Stat()
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() {
		return fmt.Errorf("%w: not a regular file", ErrForeign)
	}
	// The directory may be everybody's: who owns the file can write what workers read.
	if sys, ok := st.Sys().(*syscall.Stat_t); !ok || sys.Uid != uint32(os.Geteuid()) || st.Mode().Perm()&0o077 != 0 {
		return fmt.Errorf("%w: owner or mode %v: must be this daemon's own, and 0600", ErrForeign, st.Mode().Perm())
	}
	if st.Size() == 0 {
		return nil
	}
	// hugetlbfs has no read of part of a page for every kernel: map the first 2 MiB instead.
	if st.Size() < slabsAt {
		return fmt.Errorf("%w: %d bytes", ErrForeign, st.Size())
	}
	b, err := unix.Mmap(int(p.file.Fd()), 0, slabsAt, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Munmap(b) }()
	s, ok := parseSuper(b)
	if !ok {
		// A daemon that was killed while it allocated leaves a file of zeros.
		for _, x := range b[:superBytes] {
			if x != 0 {
				return fmt.Errorf("%w: wrong magic or checksum; remove the file if it may be overwritten", ErrForeign)
			}
		}
		return p.remake()
	}
	if s.version != Format {
		return fmt.Errorf("%w: format %d, this daemon has %d", ErrForeign, s.version, Format)
	}
	if s.bootID == p.cfg.BootID && s.bytes == p.cfg.Bytes && s.slabBytes == p.cfg.SlabBytes && uint64(st.Size()) == p.cfg.Bytes {
		p.adopted, p.generation = true, s.generation
		return nil
	}
	return p.remake()
}

// remake puts a new file in the place of an outdated one. Truncating that would fault engines that still map it.
func (p *Pool) remake() error {
	if err := os.Remove(p.cfg.Path); err != nil {
		return err
	}
	_ = p.file.Close()
	var err error
	p.file, err = os.OpenFile(p.cfg.Path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	return err
}

// allocate reserves every page of the file.
func (p *Pool) allocate() error {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(p.file.Fd()), &fs); err != nil {
		return err
	}
	const hugetlbfs = 0x958458f6
	if fs.Type != unix.TMPFS_MAGIC && fs.Type != hugetlbfs {
		return fmt.Errorf("%w: pool.path must be on tmpfs or hugetlbfs; %s is not", ErrForeign, filepath.Dir(p.cfg.Path))
	}
	if p.adopted {
		return nil
	}
	if limit, name := memoryLimit(); limit > 0 && p.cfg.Bytes > limit {
		return fmt.Errorf("%w: pool.size %d bytes is above the limit %s = %d bytes", ErrNoSpace, p.cfg.Bytes, name, limit)
	}
	// On tmpfs a failing fallocate gives back what it took; but asking first names the limit and does not push other processes out.
	what := "the file system"
	if fs.Type == hugetlbfs {
		what = "the huge page reserve (vm.nr_hugepages)"
	}
	if free := fs.Bavail * uint64(fs.Bsize); fs.Blocks > 0 && free < p.cfg.Bytes {
		return fmt.Errorf("%w: pool.size is %d bytes, %s of %s has %d bytes free", ErrNoSpace, p.cfg.Bytes, what, filepath.Dir(p.cfg.Path), free)
	}
	if err := p.file.Truncate(int64(p.cfg.Bytes)); err != nil {
		return err
	}
	for {
		err := unix.Fallocate(int(p.file.Fd()), 0, 0, int64(p.cfg.Bytes))
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			_ = p.file.Truncate(0)
			return fmt.Errorf("%w: pool.size is %d bytes, %s of %s does not have them: %v", ErrNoSpace, p.cfg.Bytes, what, filepath.Dir(p.cfg.Path), err)
		}
		return nil
	}
}

// touch maps all pages now, on all cores, so that the first copies do not pay for it.
func (p *Pool) touch() error {
	n := runtime.GOMAXPROCS(0)
	part := (len(p.mem)/n + 2<<20) &^ (2<<20 - 1)
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		lo, hi := min(i*part, len(p.mem)), min((i+1)*part, len(p.mem))
		if lo == hi {
			continue
		}
		wg.Go(func() {
			err := unix.Madvise(p.mem[lo:hi], unix.MADV_POPULATE_WRITE)
			if err != nil && !errors.Is(err, unix.EINVAL) { // kernels before 5.14 do not know it
				errs[i] = fmt.Errorf("touch pages: %w", err)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// memoryLimit is the smallest limit of this process's memory control groups, 0 when there is none, and the file that it stands in.
func memoryLimit() (uint64, string) {
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return 0, ""
	}
	for line := range strings.Lines(string(b)) {
		path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::")
		if !ok {
			continue
		}
		var limit uint64
		var name string
		for dir := path; ; dir = filepath.Dir(dir) {
			f := filepath.Join("/sys/fs/cgroup", dir, "memory.max")
			if v, err := os.ReadFile(f); err == nil {
				if n, err := strconv.ParseUint(strings.TrimSpace(string(v)), 10, 64); err == nil && (limit == 0 || n < limit) {
					limit, name = n, f
				}
			}
			if dir == "/" || dir == "." {
				return limit, name
			}
		}
	}
	return 0, ""
}

// Close unmaps the pool and keeps the file for the next daemon.
func (p *Pool) Close() error {
	var errs []error
	if p.mem != nil {
		p.writeFloor()
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
