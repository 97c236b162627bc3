package pool

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

const hugetlbfs = 0x958458f6 // HUGETLBFS_MAGIC

// checkFileSystem refuses directories whose files are not memory.
func checkFileSystem(dir string) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return err
	}
	if fs.Type != unix.TMPFS_MAGIC && fs.Type != hugetlbfs {
		return fmt.Errorf("%w: %s is not on tmpfs or hugetlbfs", ErrPath, dir)
	}
	return nil
}

// allocate makes the file as long as configured and reserves every page of it.
func (p *Pool) allocate() error {
	st, err := p.file.Stat()
	if err != nil {
		return err
	}
	return p.reserve(st)
}

// reserve takes the pages that the file does not have yet.
func (p *Pool) reserve(st os.FileInfo) error {
	var has uint64
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		has = uint64(sys.Blocks) * 512
	}
	if has >= p.cfg.Bytes {
		return nil
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(p.file.Fd()), &fs); err != nil {
		return err
	}
	dir := filepath.Dir(p.cfg.Path)
	if limit, name := memoryLimit(); limit > 0 && p.cfg.Bytes > limit {
		return fmt.Errorf("%w: pool.size %d bytes is above the limit %s = %d bytes", ErrNoSpace, p.cfg.Bytes, name, limit)
	}
	// On tmpfs a failing fallocate gives back what it took; but asking first names the limit and does not push other processes out.
	what := "the file system"
	if fs.Type == hugetlbfs {
		what = "the huge page reserve (vm.nr_hugepages)"
	}
	if free := fs.Bavail * uint64(fs.Bsize); fs.Blocks > 0 && free < p.cfg.Bytes-has {
		return fmt.Errorf("%w: pool.size is %d bytes, %s of %s has %d bytes free", ErrNoSpace, p.cfg.Bytes, what, dir, free)
	}
	for {
		err := unix.Fallocate(int(p.file.Fd()), 0, 0, int64(p.cfg.Bytes))
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("%w: pool.size is %d bytes, %s of %s does not have them: %v", ErrNoSpace, p.cfg.Bytes, what, dir, err)
		}
		return nil
	}
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
