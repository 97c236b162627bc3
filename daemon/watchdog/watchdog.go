// Package watchdog runs the daemon as a child process and ends it when it no longer answers: frozen (SIGSTOP, a cgroup's freezer) or stuck in a lock. Memory that engines lend for
// writing comes back only when nothing can write there any more, and of a daemon that is frozen only its death proves that.
//
// The child says that it lives by sd_notify's protocol: datagrams to NOTIFY_SOCKET, at least every WATCHDOG_USEC. So the same child works under systemd. The package owns the child
// process and the socket. It does not know what the child does, and reads no environment. One goroutine decides; the others only tell it what came.
package watchdog

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Config says what to run. Nothing of it is modified.
type Config struct {
	Path           string // of the child's executable
	Args           []string
	Env            []string
	Stdout, Stderr *os.File
	Timeout        time.Duration // so long the child may be silent
	StopTimeout    time.Duration // so long it may take to stop
	Dir            string        // gets a directory with the socket; not one that engines see
	Signals        <-chan os.Signal
	Log            *slog.Logger
}

// Exit is how the child ended, where that ends the watchdog too and was not in order. The child has said why.
type Exit int

func (e Exit) Error() string { return fmt.Sprintf("the daemon ended with code %d", int(e)) }

// supervisor is one Run.
type supervisor struct {
	Config
	socket *socket
	watch  watch
	child  *exec.Cmd
	gone   chan *os.ProcessState // one for each child that was started
}

// Run starts the child, and starts it again when it died, until it ends in order or one of Signals stops it. The first child must become ready: one that dies before ends Run.
func Run(c Config) error {
	// A child is killed with the thread that started it (Pdeathsig): this one, which lives until Run returns, or dies with the process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	sock, err := listen(c.Dir)
	if err != nil {
		return fmt.Errorf("watchdog: %w", err)
	}
	s := &supervisor{Config: c, socket: sock, gone: make(chan *os.ProcessState, 1), watch: watch{timeout: c.Timeout, stopTimeout: c.StopTimeout, jitter: rand.Float64}}
	defer func() { s.socket.close() }()
	if err := s.start(time.Now()); err != nil {
		return fmt.Errorf("watchdog: %w", err)
	}
	return s.run()
}

func (s *supervisor) run() error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		timer.Reset(s.watch.sleep(time.Now()))
		var do action
		select {
		case m := <-s.socket.messages:
			// Whoever may write to the socket could keep a frozen child alive: only its own word counts.
			if s.child != nil && int(m.pid) == s.child.Process.Pid && s.watch.heard(time.Now(), m.text) {
				s.Log.Info("the daemon is ready", "pid", m.pid)
			}
		case sig := <-s.Signals:
			if do = s.watch.signalled(time.Now()); do == pass {
				s.Log.Info("watchdog passes a signal on", "signal", sig, "pid", s.child.Process.Pid)
				_ = s.child.Process.Signal(sig)
			}
		case p := <-s.gone:
			do = s.ended(p)
		case <-timer.C:
		}
		if do == nothing {
			do = s.watch.tick(time.Now()) // here too: strangers' messages must not keep the time from being looked at
		}
		switch do {
		case kill:
			s.Log.Error("watchdog kills the daemon", "pid", s.child.Process.Pid, "reason", s.watch.reason)
			_ = s.child.Process.Kill() // by its pidfd
		case start:
			if err := s.start(time.Now()); err != nil {
				s.Log.Error("watchdog cannot start the daemon", "error", err)
				s.watch.wait(time.Now())
			}
		case end:
			if s.watch.code != 0 {
				return Exit(s.watch.code)
			}
			return nil
		}
	}
}

// start runs a child. The watch counts its time from now.
func (s *supervisor) start(now time.Time) error {
	if _, err := os.Stat(s.socket.path); err != nil { // somebody has cleaned up: no child would ever be heard again
		sock, err := listen(s.Dir)
		if err != nil {
			return err
		}
		s.socket.close()
		s.socket = sock
	}
	cmd := exec.Command(s.Path, s.Args...)
	cmd.Env = append(without(s.Env, "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"),
		"NOTIFY_SOCKET="+s.socket.path, "WATCHDOG_USEC="+strconv.FormatInt(s.Timeout.Microseconds(), 10))
	cmd.Stdout, cmd.Stderr = s.Stdout, s.Stderr
	// A group of its own: a terminal's SIGINT comes once, passed on, and not as the second one, which kills.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", s.Path, err)
	}
	s.child = cmd
	sock := s.socket
	go func() {
		_ = cmd.Wait()
		sock.settle() // its last words come before its end: whether it was ready decides what its end means
		s.gone <- cmd.ProcessState
	}()
	s.watch.started(now)
	s.Log.Info("watchdog has started the daemon", "pid", cmd.Process.Pid, "restarts", s.watch.restarts, "timeout", s.Timeout)
	return nil
}

func (s *supervisor) ended(p *os.ProcessState) action {
	s.child = nil
	do := s.watch.gone(time.Now(), exitCode(p))
	if do == end {
		s.Log.Info("the daemon has ended", "how", p.String())
	} else {
		s.Log.Error("the daemon has died", "how", p.String(), "restart_in", s.watch.delay)
	}
	return do
}

// exitCode is a shell's: 128 and the signal of what was killed.
func exitCode(p *os.ProcessState) int {
	if w, ok := p.Sys().(syscall.WaitStatus); ok && w.Signaled() {
		return 128 + int(w.Signal())
	}
	return p.ExitCode()
}

// without is an environment without some names. Those of a watchdog above this one are not the child's.
func without(env []string, names ...string) []string {
	var out []string
next:
	for _, e := range env {
		for _, n := range names {
			if strings.HasPrefix(e, n+"=") {
				continue next
			}
		}
		out = append(out, e)
	}
	return out
}
