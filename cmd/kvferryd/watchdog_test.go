package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// asDaemon makes this executable kvferryd.
const asDaemon = "KVFERRY_TEST_DAEMON"

func TestMain(m *testing.M) {
	if os.Getenv(asDaemon) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// supervised is kvferryd --supervise, as a process, and the lines that it and its children log.
type supervised struct {
	t     *testing.T
	cmd   *exec.Cmd
	lines *bufio.Scanner
	all   []string
}

// daemonIn is a small kvferryd with all its files in a directory.
func daemonIn(t *testing.T, dir string, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, append([]string{"--pool-size=34MiB", "--pool-slab=8MiB", "--pool-path", filepath.Join(dir, "pool"),
		"--sockets-dir=" + filepath.Join(dir, "sockets"), "--peer-listen=127.0.0.1:0", "--data-listen=127.0.0.1:0", "--metrics-listen="}, args...)...)
	// With the race detector a process lies a second in its exit, silent.
	cmd.Env = append(os.Environ(), asDaemon+"=1", "GORACE=atexit_sleep_ms=0", "TMPDIR="+dir)
	return cmd
}

func startSupervised(t *testing.T, args ...string) *supervised {
	t.Helper()
	shm, err := os.MkdirTemp("/dev/shm", "kvferry-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(shm) })
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	s := &supervised{t: t, lines: bufio.NewScanner(r)}
	s.cmd = daemonIn(t, shm, append([]string{"--supervise", "--watchdog-timeout=1s"}, args...)...)
	s.cmd.Stderr = w
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	t.Cleanup(func() {
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
		_, _ = io.Copy(io.Discard, r) // until the child is dead too
		_ = r.Close()
	})
	return s
}

// next waits for a line with a message, and answers it.
func (s *supervised) next(message string) string {
	s.t.Helper()
	for s.lines.Scan() {
		s.all = append(s.all, s.lines.Text())
		if strings.Contains(s.lines.Text(), `msg="`+message) {
			return s.lines.Text()
		}
	}
	s.t.Fatalf("ended before it said %q:\n%s", message, strings.Join(s.all, "\n"))
	return ""
}

func (s *supervised) ready() (pid int) {
	s.t.Helper()
	line := s.next("the daemon is ready")
	_, after, _ := strings.Cut(line, " pid=")
	pid, err := strconv.Atoi(strings.Fields(after)[0])
	if err != nil {
		s.t.Fatal(line, err)
	}
	return pid
}

// end reads what is left, until no process writes any more, and waits.
func (s *supervised) end() error {
	for s.lines.Scan() {
		s.all = append(s.all, s.lines.Text())
	}
	return s.cmd.Wait()
}

func TestFrozenDaemonIsReplaced(t *testing.T) {
	s := startSupervised(t)
	first := s.ready()
	if err := syscall.Kill(first, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	s.next("watchdog kills the daemon")
	s.next("pool adopted")
	if second := s.ready(); second == first {
		t.Error("not another process")
	}
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := s.end(); err != nil {
		t.Errorf("%v:\n%s", err, strings.Join(s.all, "\n"))
	}
	if !slices.ContainsFunc(s.all, func(l string) bool { return strings.Contains(l, "kvferryd stopped") }) {
		t.Error("the daemon did not stop in order")
	}
}

// The child dies with its parent: the pipe ends only when both are dead.
func TestSupervisorKilled(t *testing.T) {
	s := startSupervised(t)
	s.ready()
	_ = s.cmd.Process.Kill()
	_ = s.end()
}

func TestErrorAtStart(t *testing.T) {
	s := startSupervised(t, "--peer-listen=203.0.113.1:1") // not an address of this machine
	err := s.end()
	if s.cmd.ProcessState.ExitCode() != 1 {
		t.Error(err)
	}
	if n := strings.Count(strings.Join(s.all, "\n"), "kvferryd: peer.listen:"); n != 1 {
		t.Errorf("said %d times:\n%s", n, strings.Join(s.all, "\n"))
	}
}

// The daemon without --supervise under somebody else's watchdog, such as systemd.
func TestNotifies(t *testing.T) {
	shm, err := os.MkdirTemp("/dev/shm", "kvferry-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(shm) })
	path := filepath.Join(shm, "notify")
	socket, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	var out bytes.Buffer
	cmd := daemonIn(t, shm)
	cmd.Env = append(cmd.Env, "NOTIFY_SOCKET="+path, "WATCHDOG_USEC=90000")
	cmd.Stderr = &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill() }()
	wait := func(want string) {
		t.Helper()
		b := make([]byte, 100)
		for {
			n, err := socket.Read(b)
			if err != nil {
				t.Fatal(err)
			}
			if got := string(b[:n]); got == want {
				return
			} else if got != "WATCHDOG=1" {
				t.Errorf("%q before %q", got, want)
			}
		}
	}
	wait("WATCHDOG=1")
	wait("READY=1")
	wait("WATCHDOG=1")
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	wait("STOPPING=1")
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v:\n%s", err, out.String())
	}
}

func TestWrongWatchdog(t *testing.T) {
	for env, want := range map[string]string{
		"WATCHDOG_USEC=x":       "kvferryd: WATCHDOG_USEC: ",
		"WATCHDOG_USEC=3000000": "kvferryd: NOTIFY_SOCKET: must be set",
		"WATCHDOG_USEC=3000000 NOTIFY_SOCKET=/nowhere/notify": "kvferryd: NOTIFY_SOCKET: dial",
	} {
		cmd := daemonIn(t, t.TempDir())
		cmd.Env = append(cmd.Env, strings.Fields(env)...)
		out, err := cmd.CombinedOutput()
		if err == nil || !strings.HasPrefix(string(out), want) {
			t.Errorf("%s: %v, %s", env, err, out)
		}
	}
}

func TestChildArguments(t *testing.T) {
	base := []string{"--pool-size", "1GiB", "--node=a b"}
	for _, c := range []struct {
		args []string
		want string // arguments, or an error
	}{
		{nil, ""},
		{[]string{"--supervise"}, "[--node=a b --pool-size=1GiB] 3s"},
		{[]string{"--supervise", "--watchdog-timeout", "5s"}, "[--node=a b --pool-size=1GiB] 5s"},
		{[]string{"--supervise=false"}, ""},
		{[]string{"--watchdog-timeout", "5s"}, "--watchdog-timeout: only with --supervise"},
		{[]string{"--supervise", "--watchdog-timeout", "1ms"}, "--watchdog-timeout: 1ms: must be 500ms to 1m0s"},
		{[]string{"--supervise", "--watchdog-timeout", "1h"}, "--watchdog-timeout: 1h0m0s: must be 500ms to 1m0s"},
	} {
		_, child, _, err := configure(append(c.args, base...), io.Discard)
		got := ""
		if err != nil {
			got = err.Error()
		} else if child != nil {
			got = fmt.Sprint(child.args, " ", child.timeout)
		}
		if got != c.want {
			t.Errorf("%v: %q, want %q", c.args, got, c.want)
		}
	}
}

// What hangs in the probe does not beat, and what cannot be told is said once.
func TestHeartbeat(t *testing.T) {
	var log bytes.Buffer
	sent, ticks, probing := make(chan string), make(chan time.Time), make(chan struct{})
	var failing atomic.Bool
	h := &heartbeat{log: slog.New(slog.NewTextHandler(&log, nil)), send: func(state string) error {
		sent <- state
		if failing.Load() {
			return os.ErrDeadlineExceeded
		}
		return nil
	}}
	done := make(chan struct{})
	go func() {
		defer close(done)
		h.run(ticks)
	}()
	beat := func() {
		t.Helper()
		ticks <- time.Time{}
		if got := <-sent; got != "WATCHDOG=1" {
			t.Error(got)
		}
	}
	beat() // before the daemon serves
	ready := make(chan struct{})
	go func() {
		defer close(ready)
		h.ready(func() { probing <- struct{}{} })
	}()
	if got := <-sent; got != "READY=1" {
		t.Error(got)
	}
	<-ready
	ticks <- time.Time{}
	select {
	case <-sent:
		t.Error("beats while the probe hangs")
	case <-probing:
	}
	failing.Store(true)
	<-sent
	for range 2 {
		ticks <- time.Time{}
		<-probing
		<-sent
	}
	close(ticks)
	<-done
	if n := strings.Count(log.String(), "cannot be told"); n != 1 {
		t.Errorf("said %d times: %s", n, log.String())
	}
}
