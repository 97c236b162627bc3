package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	dirPrefix = "kvferry-demo-"
	lockName  = "lock"
	shm       = "/dev/shm"
)

// dirName is what os.MkdirTemp makes of dirPrefix.
var dirName = regexp.MustCompile("^" + dirPrefix + "[0-9]+$")

// unlockedAge is how old a directory without a lock file must be to be a leftover: a younger one may be about to get its file.
const unlockedAge = time.Minute

// newDir makes a directory of a demo. It is in use as long as the lock is held, which the end of the process gives back, however it ends.
func newDir(parent string) (dir string, lock *os.File, err error) {
	for range 10 {
		if dir, err = os.MkdirTemp(parent, dirPrefix); err != nil {
			return "", nil, err
		}
		if lock, err = lockFile(filepath.Join(dir, lockName), os.O_CREATE); err == nil {
			return dir, lock, nil
		}
		// A demo that starts at this moment took it for a leftover.
		_ = os.RemoveAll(dir)
	}
	return "", nil, fmt.Errorf("lock %s: %w", dir, err)
}

// lockFile locks the file at path, and makes sure that it is still the one that lies there.
func lockFile(path string, flags int) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW|flags, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		return nil, err
	}
	locked, err := f.Stat()
	if err == nil {
		var there os.FileInfo
		if there, err = os.Lstat(path); err == nil && !os.SameFile(locked, there) {
			err = errors.New("it was replaced")
		}
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// removeLeftovers removes what demos left in parent, and their pools, when they were killed. It tells how many there were.
func removeLeftovers(parent, pools string) int {
	entries, _ := os.ReadDir(parent)
	removed := 0
	for _, e := range entries {
		if dirName.MatchString(e.Name()) && removeLeftover(filepath.Join(parent, e.Name()), pools) {
			removed++
		}
	}
	return removed
}

func removeLeftover(dir, pools string) bool {
	info, err := os.Lstat(dir)
	if err != nil || !info.IsDir() {
		return false
	}
	if owner, ok := info.Sys().(*syscall.Stat_t); !ok || int(owner.Uid) != os.Geteuid() {
		return false
	}
	lock, err := lockFile(filepath.Join(dir, lockName), 0)
	switch {
	case err == nil:
		defer lock.Close()
	case !errors.Is(err, os.ErrNotExist) || time.Since(info.ModTime()) < unlockedAge:
		return false
	}
	removeDir(dir, pools)
	return true
}

func poolPath(dir, pools, node string) string {
	return filepath.Join(pools, filepath.Base(dir)+"-"+node+".pool")
}

// removeDir removes the pools first: without the directory nobody would find them.
func removeDir(dir, pools string) {
	for _, node := range []string{"a", "b"} {
		_ = os.Remove(poolPath(dir, pools, node))
		_ = os.Remove(poolPath(dir, pools, node) + ".lock")
	}
	_ = os.RemoveAll(dir)
}
