// Command pd-proxy is a small reference proxy for disaggregated prefill: it sends every completion to a prefill engine first, then with the kv_transfer_params of its answer
// to a decode engine, as llm-d's sidecar does. What is in the parameters it does not know, but for the ids that it makes itself with --overlap.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/pflag"
)

func main() {
	if err := run(os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "pd-proxy:", err)
		os.Exit(1)
	}
}

// drainTimeout is for the requests that are under way when the proxy is to end.
const drainTimeout = 20 * time.Second

func run(args []string, stdout, stderr io.Writer) error {
	cfg, listen, err := configure(args, stdout)
	if err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			return nil
		}
		return err
	}
	cfg.Log = slog.New(slog.NewTextHandler(stderr, nil))
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	l, err := net.Listen("tcp", listen)
	if err != nil {
		return fmt.Errorf("--listen: %w", err)
	}
	s := &http.Server{Handler: newProxy(cfg), ReadHeaderTimeout: 10 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 64 << 10}
	failed := make(chan error, 1)
	go func() { failed <- s.Serve(l) }()
	cfg.Log.Info("pd-proxy serves", "address", l.Addr().String(), "prefill", len(cfg.Prefill), "decode", len(cfg.Decode), "overlap", cfg.Overlap)
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	stop() // a second signal ends the process at once
	ctx, cancel := context.WithTimeout(context.Background(), drainTimeout)
	defer cancel()
	return s.Shutdown(ctx)
}

func configure(args []string, stdout io.Writer) (config, string, error) {
	f := pflag.NewFlagSet("pd-proxy", pflag.ContinueOnError)
	f.SetOutput(stdout)
	listen := f.String("listen", "127.0.0.1:8000", "host:port")
	prefill := f.StringArray("prefill", nil, "URL[,peer=HOST:PORT] of a prefill engine, and of the Peer service on its node; may be repeated")
	decode := f.StringArray("decode", nil, "URL[,peer=HOST:PORT] of a decode engine; may be repeated")
	c := config{}
	f.BoolVar(&c.Overlap, "overlap", false, "send both legs at once, with an id that both carry; every --prefill needs its peer")
	f.DurationVar(&c.PrefillTimeout, "prefill-timeout", 2*time.Minute, "then the decode engine computes the prompt")
	f.Int64Var(&c.BodyMax, "body-max", 32<<20, "bytes of a request's body")
	if err := f.Parse(args); err != nil {
		return config{}, "", err
	}
	if f.NArg() > 0 {
		return config{}, "", fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	for _, g := range []struct {
		flag string
		from []string
		to   *[]*engine
	}{{"prefill", *prefill, &c.Prefill}, {"decode", *decode, &c.Decode}} {
		if len(g.from) == 0 {
			return config{}, "", fmt.Errorf("--%s: at least one must be given", g.flag)
		}
		for _, s := range g.from {
			e, err := parseEngine(s)
			if err != nil {
				return config{}, "", fmt.Errorf("--%s %s: %w", g.flag, s, err)
			}
			if g.flag == "prefill" && c.Overlap && e.peer == "" {
				return config{}, "", fmt.Errorf("--prefill %s: --overlap needs ,peer=HOST:PORT: the decode side has to be told where the KV will be", s)
			}
			*g.to = append(*g.to, e)
		}
	}
	if c.PrefillTimeout <= 0 {
		return config{}, "", fmt.Errorf("--prefill-timeout: %v: must be above 0", c.PrefillTimeout)
	}
	if c.BodyMax <= 0 {
		return config{}, "", fmt.Errorf("--body-max: %d: must be above 0", c.BodyMax)
	}
	return c, *listen, nil
}
