package watchdog

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// modeVariable makes this executable a child: what it does then.
const modeVariable = "KVFERRY_TEST_CHILD"

func TestMain(m *testing.M) {
	if mode := os.Getenv(modeVariable); mode != "" {
		child(mode)
	}
	goleak.VerifyTestMain(m)
}

// child beats and does not return.
func child(mode string) {
	every, err := strconv.Atoi(os.Getenv("WATCHDOG_USEC"))
	c, dialErr := net.Dial("unixgram", os.Getenv("NOTIFY_SOCKET"))
	if err := errors.Join(err, dialErr); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	term := make(chan os.Signal, 2)
	signal.Notify(term, syscall.SIGTERM)
	say := func(text string) { _, _ = c.Write([]byte(text)) }
	if mode == "wrong" {
		os.Exit(3)
	}
	say("READY=1")
	if mode == "crash" {
		os.Exit(4)
	}
	for {
		select {
		case <-time.After(time.Duration(every) * time.Microsecond / 3):
			say("WATCHDOG=1")
		case <-term:
			say("STOPPING=1")
			if mode != "stays" {
				os.Exit(0)
			}
		}
	}
}

// run is a supervisor in this process, and what it logs.
type run struct {
	t       *testing.T
	dir     string
	signals chan os.Signal
	records chan slog.Record
	ended   chan error
}

func supervise(t *testing.T, mode string) *run {
	t.Helper()
	r := &run{t: t, dir: t.TempDir(), signals: make(chan os.Signal, 2), records: make(chan slog.Record, 1000), ended: make(chan error, 1)}
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// With the race detector a process lies a second in its exit, silent.
	env := append(os.Environ(), modeVariable+"="+mode, "GORACE=atexit_sleep_ms=0", "WATCHDOG_PID=1")
	go func() {
		r.ended <- Run(Config{
			Path: path, Env: env, Stdout: os.Stdout, Stderr: os.Stderr,
			Timeout: time.Second, StopTimeout: time.Minute, Dir: r.dir, Signals: r.signals, Log: slog.New(recorder{r.records}),
		})
	}()
	return r
}

// record waits for a message.
func (r *run) record(message string) map[string]slog.Value {
	r.t.Helper()
	for {
		select {
		case rec := <-r.records:
			if rec.Message != message {
				continue
			}
			attrs := map[string]slog.Value{}
			rec.Attrs(func(a slog.Attr) bool {
				attrs[a.Key] = a.Value
				return true
			})
			return attrs
		case err := <-r.ended:
			r.t.Fatalf("ended (%v) before it said %q", err, message)
		}
	}
}

// next waits for a message and answers the pid in it, or 0.
func (r *run) next(message string) int {
	r.t.Helper()
	if pid, ok := r.record(message)["pid"]; ok {
		return int(pid.Int64())
	}
	return 0
}

func (r *run) nextDelay() time.Duration {
	r.t.Helper()
	return r.record(hasDied)["restart_in"].Duration()
}

func (r *run) stop() {
	r.t.Helper()
	r.signals <- syscall.SIGTERM
	if err := <-r.ended; err != nil {
		r.t.Error(err)
	}
	if left, _ := os.ReadDir(r.dir); len(left) > 0 {
		r.t.Errorf("left behind: %v", left)
	}
}

const (
	isReady  = "the daemon is ready"
	passesOn = "watchdog passes a signal on"
	kills    = "watchdog kills the daemon"
	hasDied  = "the daemon has died"
)

type recorder struct{ to chan<- slog.Record }

func (recorder) Enabled(context.Context, slog.Level) bool { return true }
func (r recorder) Handle(_ context.Context, rec slog.Record) error {
	r.to <- rec
	return nil
}
func (r recorder) WithAttrs([]slog.Attr) slog.Handler { return r }
func (r recorder) WithGroup(string) slog.Handler      { return r }

func TestFrozenChild(t *testing.T) {
	r := supervise(t, "beats")
	pid := r.next(isReady)
	_ = syscall.Kill(pid, syscall.SIGSTOP)
	begin := time.Now()
	if got := r.next(kills); got != pid {
		t.Errorf("killed %d, not %d", got, pid)
	}
	if again := r.next(isReady); again == pid {
		t.Error("not another process")
	}
	if took := time.Since(begin); took > 10*time.Second {
		t.Errorf("took %v", took)
	}
	r.stop()
}

// What others send to the socket keeps no frozen child alive.
func TestForeignBeats(t *testing.T) {
	r := supervise(t, "beats")
	pid := r.next(isReady)
	_ = syscall.Kill(pid, syscall.SIGSTOP)
	found, err := filepath.Glob(filepath.Join(r.dir, "*", "notify"))
	if err != nil || len(found) != 1 {
		t.Fatal(found, err)
	}
	c, err := net.Dial("unixgram", found[0])
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			if _, err := c.Write([]byte("WATCHDOG=1")); err != nil {
				return
			}
		}
	}()
	if got := r.next(kills); got != pid {
		t.Errorf("killed %d, not %d", got, pid)
	}
	_ = c.Close()
	<-done
	r.next(isReady)
	r.stop()
}

// Somebody has cleaned up the directory of temporary files: the next child is heard all the same.
func TestSocketIsRemoved(t *testing.T) {
	r := supervise(t, "beats")
	pid := r.next(isReady)
	all, err := filepath.Glob(filepath.Join(r.dir, "*"))
	if err != nil || len(all) != 1 {
		t.Fatalf("%v %v", all, err)
	}
	if err := os.RemoveAll(all[0]); err != nil {
		t.Fatal(err)
	}
	_ = syscall.Kill(pid, syscall.SIGKILL)
	r.next(isReady)
	r.stop()
}

func TestKilledChild(t *testing.T) {
	r := supervise(t, "beats")
	pid := r.next(isReady)
	_ = syscall.Kill(pid, syscall.SIGKILL)
	r.next(hasDied)
	if again := r.next(isReady); again == pid {
		t.Error("not another process")
	}
	r.stop()
}

// A child that dies again and again is started at once first, then later and later; a signal ends the waiting.
func TestCrashLoop(t *testing.T) {
	r := supervise(t, "crash")
	var delays []time.Duration
	for range 4 {
		delays = append(delays, r.nextDelay())
	}
	if delays[0] != 0 {
		t.Error(delays)
	}
	for i, d := range delays[1:] {
		if most := backoffMin << i; d > most || d < most/2 {
			t.Errorf("delay %d is %v: must be %v to %v", i+1, d, most/2, most)
		}
	}
	r.stop()
}

func TestWrongAtStart(t *testing.T) {
	r := supervise(t, "wrong")
	var code Exit
	if err := <-r.ended; !errors.As(err, &code) || code != 3 {
		t.Error(err)
	}
}

func TestNoExecutable(t *testing.T) {
	err := Run(Config{Path: "/nowhere/kvferryd", Timeout: time.Second, Dir: t.TempDir(), Log: slog.New(slog.DiscardHandler)})
	if !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

func TestSecondSignalKills(t *testing.T) {
	r := supervise(t, "stays")
	r.next(isReady)
	r.signals <- syscall.SIGTERM
	r.next(passesOn)
	r.signals <- syscall.SIGTERM
	var code Exit
	if err := <-r.ended; !errors.As(err, &code) || code != 128+9 {
		t.Error(err)
	}
}
