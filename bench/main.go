// Command bench measures kvferry against what this machine can do at best, and writes bench/out/latest.json.
//
// Daemons and workers are processes of their own; ours and the limit are measured in turn, so that both see the same machine; medians are reported; the
// content of what was moved is compared, and only what succeeded counts. The memory that is moved is larger than the caches.
//
//	store_*, load_*    the fastest of {ordinary, non-temporal} x {1, 2 threads} memcpy with the same segments, without a checksum
//	handoff_local_*    from Accept to the last byte in the memory of another worker on the same node, out of the prefill worker's memory; the limit is that of load_*
//	handoff_pool_*     the same, out of the pool
//	handoff_direct_tcp_*  from Accept on node b to the last byte in the decode worker's memory, straight from node a's pool; the best of 1 to 4 plain TCP streams, memory to memory
//	handoff_lent_tcp_*    the same, out of the prefill worker's memory, of blocks that were never stored
//	handoff_tcp_*         the same as the first, by way of node b's pool
//	fetch_tcp_*           of that, the part until all lies in node b's pool
//	one_block_*        p50 of one block alone; the limit is the target
//	match_8192_*       p50 of a Match with 8,192 hits; the limit is the target
//	match_8192_ledger_10m, index_memory_10m  the ledger alone with ten million blocks: the same, and memory a block; the limits are the targets
//	nvme_*             random slots of a drive's file, until they are durable with their headers, or read and checked; the limit is fio with io_uring and O_DIRECT on
//	                   a file beside it, same block size, depth and amount, without a sync. Left out where fio is not installed
//	restore_*          from a Load whose blocks lie on a drive only to the last byte in the worker's memory; the limit is fio reading the same from a file beside it
//	peer_nixl_read_*   our handoff_local_* against NIXL on the same work; only with --nixl (make bench PEERS=1)
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"github.com/kvferry/kvferry/standin/process"
)

func main() {
	process.Main()
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	f := pflag.NewFlagSet("bench", pflag.ContinueOnError)
	b := bench{}
	f.StringVar(&b.daemon, "daemon", "bin/kvferryd", "the daemon's executable")
	f.StringVar(&b.python, "python", ".venv/bin/python", "interpreter that has the kvferry package, for match_8192_python; left out where it is not there")
	f.StringVar(&b.nixl, "nixl", "", "interpreter that has NIXL, for peer_nixl_*; left out where empty")
	f.IntVar(&b.rounds, "rounds", 9, "rounds of every throughput figure")
	f.StringVar(&b.only, "only", "", "only figures whose name contains this")
	f.StringVar(&b.want, "network", "auto", "between the nodes: netns (two network namespaces), loopback, or auto: netns where possible")
	f.StringVar(&b.driveDir, "drive-dir", "bench/out", "a directory on the drive that nvme_* measures; it takes 1 GB")
	out := f.String("out", "bench/out/latest.json", "where the figures are written")
	if err := f.Parse(args); err != nil {
		return err
	}
	if b.rounds < 1 || !slices.Contains([]string{"auto", "netns", "loopback"}, b.want) {
		return errors.New("--rounds must be at least 1, --network auto, netns or loopback")
	}
	path, err := filepath.Abs(b.daemon)
	if err != nil {
		return err
	}
	b.daemon = path
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeoutCause(ctx, 12*time.Minute, errors.New("the benchmark took longer than twelve minutes"))
	defer cancel()
	if err := b.all(ctx); err != nil {
		return err
	}
	if err := b.write(*out); err != nil {
		return err
	}
	b.table(os.Stdout)
	for _, r := range b.results {
		if !r.Verified {
			return fmt.Errorf("%s was not verified", r.Name)
		}
	}
	return nil
}

// connect makes the network between the nodes: two namespaces, or the loopback where they cannot be had or are not wanted.
func (b *bench) connect() (err error) {
	b.between = "loopback"
	if b.want == "loopback" {
		return nil
	}
	if b.network, err = process.NewNetwork(); err != nil {
		if b.want == "netns" {
			return err
		}
		fmt.Fprintln(os.Stderr, "no second network namespace, so the nodes share the loopback:", err)
		b.network = nil
		return nil
	}
	b.between = "veth"
	return nil
}

// bench is one run.
type bench struct {
	want     string           // network: auto, netns or loopback
	network  *process.Network // nil: the loopback
	between  string
	daemon   string
	python   string
	nixl     string
	rounds   int
	only     string
	driveDir string
	results  []result
}

func (b *bench) wanted(names ...string) bool {
	for _, n := range names {
		if strings.Contains(n, b.only) {
			return true
		}
	}
	return false
}

func (b *bench) all(ctx context.Context) error {
	if err := b.connect(); err != nil {
		return err
	}
	if b.network != nil {
		defer b.network.Close()
	}
	streams, err := newStreams(b.network)
	if err != nil {
		return err
	}
	defer streams.close()
	for _, c := range cases {
		if !b.wanted("store_"+c.name, "load_"+c.name, "handoff_local_"+c.name, "handoff_pool_"+c.name, "handoff_direct_tcp_"+c.name, "handoff_lent_tcp_"+c.name, "handoff_tcp_"+c.name,
			"fetch_tcp_"+c.name) {
			continue
		}
		fmt.Fprintf(os.Stderr, "%s ...\n", c.name)
		if err := b.throughput(ctx, c, streams); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	if b.nixl != "" {
		if err := b.peers(ctx); err != nil {
			return fmt.Errorf("peer_nixl_read: %w", err)
		}
	}
	for _, c := range []testCase{cases[0], cases[2]} {
		if b.wanted("one_block_store_"+c.name, "one_block_load_"+c.name, "one_block_handoff_local_"+c.name, "one_block_handoff_tcp_"+c.name,
			"one_block_handoff_direct_tcp_"+c.name) {
			fmt.Fprintf(os.Stderr, "one block of %s ...\n", c.name)
			if err := b.oneBlock(ctx, c); err != nil {
				return fmt.Errorf("one block of %s: %w", c.name, err)
			}
		}
	}
	if err := b.restores(ctx); err != nil {
		return err
	}
	if err := b.drives(ctx); err != nil {
		return err
	}
	if b.wanted("match_8192_ledger_10m", "index_memory_10m") {
		fmt.Fprintln(os.Stderr, "index ...")
		if err := b.index(); err != nil {
			return fmt.Errorf("index: %w", err)
		}
	}
	if b.wanted("match_8192_go", "match_8192_python") {
		fmt.Fprintln(os.Stderr, "match ...")
		if err := b.match(ctx); err != nil {
			return fmt.Errorf("match_8192: %w", err)
		}
	}
	return nil
}
