package nvme_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/tiers/nvme"
	"github.com/kvferry/kvferry/tiers/nvme/nvmetest"
)

// forbids is set in a child's environment: "setup" or "register", which its kernel is to refuse.
const forbids = "KVFERRY_TEST_NVME_FORBID"

// forbid has the kernel answer EPERM to one system call from now on, as containers' default profiles do for io_uring.
func forbid(call uint32) error {
	const load, jumpEqual, ret = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, unix.BPF_RET | unix.BPF_K
	filter := []unix.SockFilter{
		{Code: load, K: 0}, // the system call's number
		{Code: jumpEqual, Jt: 0, Jf: 1, K: call},
		{Code: ret, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)},
		{Code: ret, K: unix.SECCOMP_RET_ALLOW},
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&program))); errno != 0 {
		return errno
	}
	return nil
}

// forbidden is the child: it prints what drives a drive.
func forbidden(what string) error {
	call := uint32(unix.SYS_IO_URING_SETUP)
	if what == "register" {
		call = unix.SYS_IO_URING_REGISTER
	}
	if err := forbid(call); err != nil {
		fmt.Println("SKIP", err)
		return nil
	}
	dir, err := os.MkdirTemp("", "nvme-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	cfg := nvmetest.Config
	cfg.Path, cfg.Memory = filepath.Join(dir, "drive"), nvmetest.Aligned(1<<20)
	d, _, err := nvme.Open(cfg)
	if err != nil {
		return err
	}
	d.FormatSlab(0, 64<<10)
	h, err := nvmetest.Write(context.Background(), d, 0, 0, nvmetest.NewBlock(1, 1, 64<<10))
	if err == nil {
		_, err = nvmetest.Read(context.Background(), d, 0, 0, h)
	}
	s := d.Stats()
	fmt.Printf("engine=%s registered=%v why=%q\n", s.Engine, s.Registered, s.Why)
	err = errors.Join(err, d.Close())
	cfg.Engine = nvme.EngineUring
	d, _, e := nvme.Open(cfg)
	if e == nil {
		e = d.Close()
	}
	fmt.Printf("uring: refused=%v %v\n", errors.Is(e, nvme.ErrEngine) && errors.Is(e, unix.EPERM), e)
	return err
}

// TestForbidden: where the kernel refuses io_uring, threads do the work, and that is said; where it does not register memory, it goes without.
func TestForbidden(t *testing.T) {
	for what, want := range map[string][]string{
		"setup":    {"engine=threads registered=false", "no io_uring: io_uring_setup: operation not permitted", "refused=true"},
		"register": {"engine=uring registered=false", "without registered memory", "refused=false"},
	} {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), forbids+"="+what)
		out, err := cmd.CombinedOutput()
		if strings.HasPrefix(string(out), "SKIP") {
			t.Skip(string(out))
		}
		if err != nil {
			t.Fatalf("%s: %v: %s", what, err, out)
		}
		for _, w := range want {
			if !strings.Contains(string(out), w) {
				t.Errorf("%s: %q is missing in:\n%s", what, w, out)
			}
		}
	}
}
