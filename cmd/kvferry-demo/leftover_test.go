package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestLeftovers(t *testing.T) {
	parent, pools := t.TempDir(), t.TempDir()
	touch := func(path string) string {
		t.Helper()
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	made := func() (dir, pool string, lock *os.File) {
		t.Helper()
		dir, lock, err := newDir(parent)
		if err != nil {
			t.Fatal(err)
		}
		touch(poolPath(dir, pools, "a") + ".lock")
		return dir, touch(poolPath(dir, pools, "b")), lock
	}
	used, usedPool, lock := made()
	defer lock.Close()
	left, leftPool, gone := made()
	_ = gone.Close() // as the end of its process does
	plain := func(name string, age time.Duration) string {
		t.Helper()
		path := filepath.Join(parent, name)
		if err := os.Mkdir(path, 0o700); err != nil {
			t.Fatal(err)
		}
		at := time.Now().Add(-age)
		if err := os.Chtimes(path, at, at); err != nil {
			t.Fatal(err)
		}
		return path
	}
	old, young, other := plain("kvferry-demo-1", time.Hour), plain("kvferry-demo-2", 0), plain("kvferry-demo-vllm-3", time.Hour)
	target := t.TempDir()
	file := touch(filepath.Join(target, "file"))
	link := filepath.Join(parent, "kvferry-demo-4")
	if err := os.Symlink(target, link); err != nil {
		t.Fatal(err)
	}

	if n := removeLeftovers(parent, pools); n != 2 {
		t.Errorf("%d were removed", n)
	}
	for path, want := range map[string]bool{used: true, usedPool: true, left: false, leftPool: false, poolPath(left, pools, "a") + ".lock": false, old: false, young: true, other: true,
		file: true, link: true} {
		if _, err := os.Lstat(path); (err == nil) != want {
			t.Errorf("%s is there: %v", path, !want)
		}
	}
}
