package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
)

const defaultSocket = "/run/kvferry/admin.sock"

// What the process ends with.
const (
	exitOK = iota
	exitDegraded
	exitDown
	exitWrong
)

// environment is what a run takes from the process.
type environment struct {
	socket   string // KVFERRY_ADMIN_SOCKET
	build    string // version of this command
	out, err io.Writer
	terminal bool // err is one
	now      func() time.Time
}

// errDegraded ends a command that has printed all it has to say.
var errDegraded = errors.New("degraded")

func run(ctx context.Context, args []string, env environment) int {
	a := &app{environment: env}
	root := a.root()
	root.SetArgs(args)
	root.SetOut(env.out)
	root.SetErr(env.err)
	err := root.ExecuteContext(ctx)
	var down *downError
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errDegraded):
		return exitDegraded
	case errors.As(err, &down):
		fmt.Fprintln(env.err, down.text())
		return exitDown
	}
	fmt.Fprintln(env.err, "kvferry:", plain(err.Error()))
	return exitWrong
}

// app is one run's flags.
type app struct {
	environment
	path    string
	output  string
	timeout time.Duration
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "kvferry",
		Short: "Look into the kvferry daemon of this node",
		Long: "kvferry looks into the kvferry daemon of this node. It changes nothing, but for four commands that say so: evict removes blocks, demote and prefetch move them between DRAM and the drives, and verify\n" +
			"removes those that it finds broken. trace record writes a file of its own.\n\n" +
			"It ends with 0 when all is well, 1 when the daemon is degraded (status, tiers), something was broken (verify) or not everything could be done (demote, prefetch), 2 when the daemon cannot be reached,\n" +
			"3 when the request was wrong.",
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.NoArgs,
		RunE:          func(c *cobra.Command, _ []string) error { return c.Help() },
		PersistentPreRunE: func(*cobra.Command, []string) error {
			if a.output != "table" && a.output != "json" {
				return fmt.Errorf("--output %q: must be table or json", a.output)
			}
			if a.timeout <= 0 {
				return fmt.Errorf("--timeout %s: must be more than 0, such as 5s", a.timeout)
			}
			if a.path == "" {
				return errors.New("--socket \"\": must be the path of the daemon's Admin socket")
			}
			return nil
		},
	}
	path := a.socket
	if path == "" {
		path = defaultSocket
	}
	f := root.PersistentFlags()
	f.StringVar(&a.path, "socket", path, "the daemon's Admin socket; $KVFERRY_ADMIN_SOCKET where that is set")
	f.StringVarP(&a.output, "output", "o", "table", "table or json")
	f.DurationVar(&a.timeout, "timeout", 5*time.Second, "how long the daemon may take to answer")
	root.AddCommand(a.status(), a.workers(), a.spaces(), a.blocks(), a.offers(), a.fetches(), a.tiers(), a.evict(), a.demote(), a.prefetch(), a.verify(), a.explain(), a.trace(), a.simulate(), a.size(),
		a.config(), a.version())
	root.CompletionOptions.HiddenDefaultCmd = true
	return root
}

// noArgs is for commands that take no arguments. Cobra's own would call one an unknown command.
func noArgs(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("unexpected argument %q", args[0])
	}
	return nil
}

// ask dials, and runs one question under the timeout.
func ask[Q, R any](ctx context.Context, a *app, call func(kvferryv1.AdminClient, context.Context, Q, ...grpc.CallOption) (R, error), q Q) (R, error) {
	var none R
	ctx, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	client, closeConn, err := dial(ctx, a.path)
	if err != nil {
		return none, a.undialled(err)
	}
	defer closeConn()
	r, err := call(client, ctx, q)
	if err != nil {
		return none, a.failed(err)
	}
	a.scrubbed(r)
	return r, nil
}
