package nvme_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/tiers/nvme"
	"github.com/kvferry/kvferry/tiers/nvme/nvmetest"
)

// forbids is set in a child's environment: what its kernel is to refuse.
const forbids = "KVFERRY_TEST_NVME_FORBID"

// forbid has the kernel answer errno to one system call from now on, as containers' default profiles do for io_uring; with an argument, only where the second one is that.
func forbid(call uint32, errno unix.Errno, argument ...uint32) error {
	const load, jumpEqual, ret = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, unix.BPF_RET | unix.BPF_K
	refuse, allow := unix.SockFilter{Code: ret, K: unix.SECCOMP_RET_ERRNO | uint32(errno)}, unix.SockFilter{Code: ret, K: unix.SECCOMP_RET_ALLOW}
	filter := []unix.SockFilter{
		{Code: load, K: 0}, // the system call's number
		{Code: jumpEqual, Jt: 1, Jf: 0, K: call},
		allow,
	}
	for _, a := range argument {
		filter = append(filter, unix.SockFilter{Code: load, K: 24}, // the lower half of the second argument, where that comes first
			unix.SockFilter{Code: jumpEqual, Jt: 1, Jf: 0, K: a}, allow)
	}
	filter = append(filter, refuse)
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&program))); errno != 0 {
		return errno
	}
	return nil
}

// limitLocked has this process, which does not return, begin anew with so little memory that may be pinned, which root's may be without.
func limitLocked() error {
	runtime.LockOSThread()
	_ = unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_IPC_LOCK, 0, 0, 0) // only root may, and has it
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: 64 << 10, Max: 64 << 10}); err != nil {
		return err
	}
	if err := os.Setenv(forbids, "nothing"); err != nil {
		return err
	}
	return unix.Exec("/proc/self/exe", os.Args, os.Environ())
}

// forbidden is the child: it prints what drives a drive.
func forbidden(what string) error {
	var err error
	switch what {
	case "setup":
		err = forbid(unix.SYS_IO_URING_SETUP, unix.EPERM)
	case "register":
		err = forbid(unix.SYS_IO_URING_REGISTER, unix.EPERM)
	case "clone":
		err = forbid(unix.SYS_IO_URING_REGISTER, unix.EINVAL, 30)
	case "pin":
		err = limitLocked()
	}
	if err != nil {
		fmt.Println("SKIP", err)
		return nil
	}
	dir, err := os.MkdirTemp("", "nvme-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	cfg := nvmetest.Config
	memory := nvme.NewMemory(nvmetest.Aligned(1<<20), now)
	defer memory.Close()
	cfg.Path, cfg.Memory = filepath.Join(dir, "drive"), memory
	d, _, err := nvme.Open(cfg)
	if err != nil {
		return err
	}
	if d.Stats().Engine == nvme.EngineUring {
		<-memory.Settled()
	}
	d.FormatSlab(0, 64<<10)
	h, err := nvmetest.Write(context.Background(), d, 0, 0, nvmetest.NewBlock(1, 1, 64<<10))
	if err == nil {
		_, err = nvmetest.Read(context.Background(), d, 0, 0, h)
	}
	s := d.Stats()
	fmt.Printf("engine=%s registered=%v pinned=%d why=%q\n", s.Engine, s.Registered, pinnedKB(), s.Why)
	err = errors.Join(err, d.Close())
	cfg.Engine = nvme.EngineUring
	d, _, e := nvme.Open(cfg)
	if e == nil {
		e = d.Close()
	}
	fmt.Printf("uring: refused=%v %v\n", errors.Is(e, nvme.ErrEngine) && errors.Is(e, unix.EPERM), e)
	return err
}

// TestForbidden: where the kernel refuses io_uring, threads do the work, and that is said; where it does not register memory, share it between rings, or pin so much, they go without.
func TestForbidden(t *testing.T) {
	for what, want := range map[string][]string{
		"setup":    {"engine=threads registered=false", "no io_uring: io_uring_setup: operation not permitted", "refused=true"},
		"register": {"engine=uring registered=false pinned=0", "without registered memory: register memory: operation not permitted", "refused=false"},
		"clone":    {"engine=uring registered=false pinned=0", "without registered memory: take over registered memory: invalid argument", "refused=false"},
		"pin":      {"engine=uring registered=false pinned=0", "without registered memory: register memory: cannot allocate memory", "refused=false"},
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
		if what == "pin" && strings.Contains(string(out), "take over registered memory") {
			t.Logf("before Linux 6.12: %s", out)
			continue
		}
		for _, w := range want {
			if !strings.Contains(string(out), w) {
				t.Errorf("%s: %q is missing in:\n%s", what, w, out)
			}
		}
	}
}
