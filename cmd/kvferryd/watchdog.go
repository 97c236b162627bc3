package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"

	systemd "github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/pflag"

	"github.com/kvferry/kvferry/daemon"
	"github.com/kvferry/kvferry/daemon/watchdog"
)

// Bounds of --watchdog-timeout: below, a busy machine looks like a frozen daemon; above, memory that was lent stays away for too long.
const (
	timeoutMin = 500 * time.Millisecond
	timeoutMax = time.Minute
)

// stopSlack is what a daemon may take to stop after its drain.timeout.
const stopSlack = 30 * time.Second

// child is how this program runs itself under --supervise.
type child struct {
	args    []string
	timeout time.Duration
}

func childOf(f *pflag.FlagSet, supervise bool, timeout time.Duration) (*child, error) {
	if !supervise {
		if f.Changed("watchdog-timeout") {
			return nil, errors.New("--watchdog-timeout: only with --supervise")
		}
		return nil, nil
	}
	if timeout < timeoutMin || timeout > timeoutMax {
		return nil, fmt.Errorf("--watchdog-timeout: %v: must be %v to %v", timeout, timeoutMin, timeoutMax)
	}
	c := &child{timeout: timeout}
	f.Visit(func(f *pflag.Flag) {
		if f.Name != "supervise" && f.Name != "watchdog-timeout" {
			c.args = append(c.args, "--"+f.Name+"="+f.Value.String())
		}
	})
	return c, nil
}

// supervise runs the daemon as a child of this process until it ends.
func supervise(c child, cfg daemon.Config, stdout, stderr *os.File, log *slog.Logger) error {
	path, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this executable: %w", err)
	}
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	defer signal.Stop(signals)
	return watchdog.Run(watchdog.Config{
		Path: path, Args: c.args, Env: os.Environ(), Stdout: stdout, Stderr: stderr, Timeout: c.timeout, StopTimeout: time.Duration(cfg.Drain.Timeout) + stopSlack,
		Dir: os.TempDir(), Signals: signals, Log: log.With("component", "watchdog"),
	})
}

// heartbeat tells a watchdog that this process lives: ours, or systemd's with WatchdogSec. Where there is none it does nothing.
type heartbeat struct {
	every time.Duration // zero: no watchdog
	log   *slog.Logger
	probe atomic.Pointer[func()]
	send  func(state string) error
}

// startHeartbeat begins before the daemon starts: adopting a large pool takes longer than a watchdog waits.
func startHeartbeat(log *slog.Logger) (*heartbeat, error) {
	within, err := systemd.SdWatchdogEnabled(true)
	if err != nil {
		return nil, fmt.Errorf("WATCHDOG_USEC: %w", err)
	}
	h := &heartbeat{every: within / 3, log: log, send: func(state string) error {
		_, err := systemd.SdNotify(false, state)
		return err
	}}
	if !h.watched() {
		return h, nil
	}
	// A watchdog that cannot be told would kill this daemon again and again, or is none.
	if sent, err := systemd.SdNotify(false, systemd.SdNotifyWatchdog); err != nil {
		return nil, fmt.Errorf("NOTIFY_SOCKET: %w", err)
	} else if !sent {
		return nil, errors.New("NOTIFY_SOCKET: must be set where WATCHDOG_USEC is")
	}
	t := time.NewTicker(h.every)
	go h.run(t.C)
	return h, nil
}

func (h *heartbeat) watched() bool { return h.every > 0 }

// run beats at every tick. What hangs in the probe does not beat.
func (h *heartbeat) run(ticks <-chan time.Time) {
	failing := false
	for range ticks {
		if probe := h.probe.Load(); probe != nil {
			(*probe)()
		}
		err := h.send(systemd.SdNotifyWatchdog)
		if err != nil && !failing {
			h.log.Warn("the watchdog cannot be told that the daemon lives", "error", err)
		}
		failing = err != nil
	}
}

// ready: the daemon serves. From now on its locks are probed.
func (h *heartbeat) ready(probe func()) {
	h.probe.Store(&probe)
	h.say(systemd.SdNotifyReady)
}

// stopping does not wait: a supervisor that is stopped itself reads nothing, and the daemon drains all the same.
func (h *heartbeat) stopping() { go h.say(systemd.SdNotifyStopping) }

func (h *heartbeat) say(state string) {
	if err := h.send(state); err != nil {
		h.log.Warn("the service manager cannot be told", "state", state, "error", err)
	}
}
