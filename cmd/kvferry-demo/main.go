// Command kvferry-demo shows kvferry at work: two daemons as two nodes, stand-in workers with real shared KV memory as processes of their own, driven by a
// trace of conversations. Prompts are prefilled on node a and handed over to node b over TCP; on the way a worker is killed and comes back. Every byte that
// arrives anywhere is compared with what it should be.
//
// It ends with 1 when a byte was wrong or something did not work, and leaves nothing behind; what a demo that was killed (SIGKILL) left, the next one
// removes.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"github.com/kvferry/kvferry/standin/process"
)

func main() {
	process.Main()
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "kvferry-demo:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	f := pflag.NewFlagSet("kvferry-demo", pflag.ContinueOnError)
	o := options{still: stillMax}
	f.StringVar(&o.daemon, "daemon", filepath.Join(filepath.Dir(self), "kvferryd"), "the daemon's executable")
	f.StringVar(&o.trace, "trace", "../shared/traces/conversation.jsonl.gz", "conversation trace, gzipped JSON lines; where it is not there, the part that is built in")
	f.IntVar(&o.requests, "requests", 1500, "how many requests of the trace")
	f.IntVar(&o.flight, "flight", 2, "requests under way at a time")
	f.BoolVar(&o.keep, "keep", false, "leave all of it running at the end, until ctrl-C")
	if err := f.Parse(args); err != nil {
		return err
	}
	if o.requests < 10 || o.flight < 1 || o.flight > 16 {
		return fmt.Errorf("--requests must be at least 10, --flight 1 to 16")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	bounded := ctx
	if !o.keep {
		var cancel context.CancelFunc
		bounded, cancel = context.WithTimeoutCause(ctx, 5*time.Minute, fmt.Errorf("the demo took longer than five minutes"))
		defer cancel()
	}
	return demo(bounded, o, os.Stdout)
}
