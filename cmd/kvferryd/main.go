// Command kvferryd is the node daemon: see README.md.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"github.com/kvferry/kvferry/daemon"
	"github.com/kvferry/kvferry/daemon/watchdog"
)

func main() {
	if err := run(os.Args[1:], os.Stdout, os.Stderr); err != nil {
		var exit watchdog.Exit
		if errors.As(err, &exit) { // the child has said why
			os.Exit(int(exit))
		}
		fmt.Fprintln(os.Stderr, "kvferryd:", err)
		os.Exit(1)
	}
}

func run(args []string, stdout, stderr *os.File) error {
	cfg, child, check, err := configure(args, stdout)
	if err != nil || check {
		if errors.Is(err, pflag.ErrHelp) {
			return nil
		}
		return err
	}
	log := newLogger(cfg.Log, stderr)
	if child != nil {
		return supervise(*child, cfg, stdout, stderr, log)
	}
	beats, err := startHeartbeat(log)
	if err != nil {
		return err
	}
	cfg.Supervised = beats.watched()
	_, _ = fmt.Fprintf(stderr, "# effective configuration\n%s", cfg.YAML())
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	d, err := daemon.Start(cfg, log)
	if err != nil {
		return err
	}
	defer d.Stop()
	beats.ready(d.Probe)
	select {
	case err := <-d.Failed():
		return err
	case <-ctx.Done():
	}
	stop() // a second signal ends the process at once
	beats.stopping()
	log.Info("kvferryd drains", "timeout", cfg.Drain.Timeout)
	d.Drain(context.Background())
	return nil
}

// configure reads the file and the flags, which win. The child is nil where none is asked for. It answers true when there was only something to print.
func configure(args []string, stdout io.Writer) (daemon.Config, *child, bool, error) {
	f := pflag.NewFlagSet("kvferryd", pflag.ContinueOnError)
	f.SetOutput(stdout)
	file := f.String("config", "", "configuration file (YAML)")
	check := f.Bool("check", false, "check the configuration, print the effective one, and exit")
	version := f.Bool("version", false, "print the version and exit")
	supervised := f.Bool("supervise", false, "run the daemon as a child, and kill and restart it when it is frozen or stuck")
	timeout := f.Duration("watchdog-timeout", 3*time.Second, "with --supervise: so long the child may be silent")
	node := f.String("node", "", "node: name of this node")
	dir := f.String("sockets-dir", "", "sockets.dir: directory of the unix sockets")
	poolPath := f.String("pool-path", "", "pool.path: file on tmpfs or hugetlbfs")
	poolSize := f.String("pool-size", "", "pool.size: such as 64GiB; no default")
	slab := f.String("pool-slab", "", "pool.slab: power of two, 2MiB to 64MiB; a small pool wants small slabs")
	drives := f.StringArray("nvme-drive", nil, "nvme.drives: FILE=SIZE of a drive, such as /mnt/nvme0/kvferry=800GiB; may be repeated")
	peer := f.String("peer-listen", "", "peer.listen: host:port for other daemons (control)")
	peerAdvertise := f.String("peer-advertise", "", "peer.advertise: host:port that other daemons are told")
	data := f.String("data-listen", "", "data.listen: host:port for other daemons (bytes)")
	dataAdvertise := f.String("data-advertise", "", "data.advertise: host:port that other daemons are told")
	metrics := f.String("metrics-listen", "", "metrics.listen: host:port for /metrics, /healthz, /readyz")
	level := f.String("log-level", "", "log.level: debug, info, warn, error")
	if err := f.Parse(args); err != nil {
		return daemon.Config{}, nil, false, err
	}
	if f.NArg() > 0 {
		return daemon.Config{}, nil, false, fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	if *version {
		_, _ = fmt.Fprintln(stdout, "kvferryd", daemon.Version)
		return daemon.Config{}, nil, true, nil
	}
	process, err := childOf(f, *supervised, *timeout)
	if err != nil {
		return daemon.Config{}, nil, false, err
	}
	var text []byte
	if *file != "" {
		if text, err = os.ReadFile(*file); err != nil {
			return daemon.Config{}, nil, false, fmt.Errorf("--config: %w", err)
		}
	}
	cfg, err := daemon.ParseConfig(text)
	if err != nil {
		return daemon.Config{}, nil, false, fmt.Errorf("--config %s: %w", *file, err)
	}
	for flag, to := range map[string]struct {
		value string
		key   *string
	}{
		"node": {*node, &cfg.Node}, "sockets-dir": {*dir, &cfg.Sockets.Dir}, "pool-path": {*poolPath, &cfg.Pool.Path}, "peer-listen": {*peer, &cfg.Peer.Listen},
		"peer-advertise": {*peerAdvertise, &cfg.Peer.Advertise}, "data-listen": {*data, &cfg.Data.Listen}, "data-advertise": {*dataAdvertise, &cfg.Data.Advertise},
		"metrics-listen": {*metrics, &cfg.Metrics.Listen}, "log-level": {*level, &cfg.Log.Level},
	} {
		if f.Changed(flag) {
			*to.key = to.value
		}
	}
	for flag, to := range map[string]struct {
		value string
		key   *daemon.Bytes
	}{"pool-size": {*poolSize, &cfg.Pool.Size}, "pool-slab": {*slab, &cfg.Pool.Slab}} {
		if f.Changed(flag) {
			if *to.key, err = daemon.ParseBytes(to.value); err != nil {
				return daemon.Config{}, nil, false, fmt.Errorf("--%s: %w", flag, err)
			}
		}
	}
	if f.Changed("nvme-drive") {
		if cfg.NVMe.Drives, err = daemon.ParseDrives(*drives); err != nil {
			return daemon.Config{}, nil, false, fmt.Errorf("--nvme-drive: %w", err)
		}
	}
	if err := cfg.Validate(); err != nil {
		return daemon.Config{}, nil, false, err
	}
	if *check {
		_, _ = fmt.Fprint(stdout, cfg.YAML())
	}
	return cfg, process, *check, nil
}

func newLogger(c daemon.LogConfig, w io.Writer) *slog.Logger {
	var level slog.Level
	_ = level.UnmarshalText([]byte(c.Level)) // validated before
	o := &slog.HandlerOptions{Level: level}
	if c.Format == "json" {
		return slog.New(slog.NewJSONHandler(w, o))
	}
	return slog.New(slog.NewTextHandler(w, o))
}
