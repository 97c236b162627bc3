package main

import (
	"context"
	"fmt"
	"path/filepath"
	"text/tabwriter"
	"time"
)

// report prints what was done. Its error is wrong bytes.
func (s *stage) report(ctx context.Context, took time.Duration) error {
	t := &s.tally
	w := tabwriter.NewWriter(s.out, 0, 0, 3, ' ', tabwriter.AlignRight)
	fmt.Fprintln(s.out)
	fmt.Fprintln(w, "\tBLOCKS\tBYTES\tTIMES\tP50\tGB/s WHILE BUSY\t")
	for _, row := range []struct {
		name string
		sums sums
	}{
		{"stored: prefill worker to pool of a", t.stored.sums()},
		{"loaded: pool of a to prefill worker", t.loaded.sums()},
		{"handed over: a to decode worker on b, by TCP", t.handed.sums()},
	} {
		speed := "-"
		if row.sums.busy > 0 {
			speed = fmt.Sprintf("%.2f", float64(row.sums.blocks)*float64(shape.ShardBytes())/row.sums.busy.Seconds()/1e9)
		}
		fmt.Fprintf(w, "%s\t%d\t%s\t%d\t%.2f ms\t%s\t\n", row.name, row.sums.blocks, size(row.sums.blocks), row.sums.times, float64(row.sums.p50.Microseconds())/1e3, speed)
	}
	_ = w.Flush()
	hits, asked := reuse(s.prompts)
	fmt.Fprintf(s.out, "\nhit ratio      %.1f %% of %d blocks (with a pool without bounds: %.1f %%)\n", 100*float64(t.hit)/float64(max(1, t.asked)), t.asked, 100*float64(hits)/float64(asked))
	fmt.Fprintf(s.out, "decode side    %d blocks were there already, %d handed over, %d did not come and were computed\n", t.here, t.handed.sums().blocks, t.recomputed)
	fmt.Fprintf(s.out, "worker         killed (SIGKILL) after %d prompts with %d under way; attached again after %d ms; %d blocks had stayed in the pool\n",
		s.restart.at, t.retried, s.restart.attached.Milliseconds(), s.restart.resident)
	if t.refused > 0 {
		fmt.Fprintf(s.out, "stores         %d blocks refused: the pool was full of blocks in use\n", t.refused)
	}
	fmt.Fprintf(s.out, "compared       %s, every byte of what was loaded and handed over\n", size(t.checked.sums().blocks))
	fmt.Fprintf(s.out, "took           %.1f s\n", took.Seconds())
	fmt.Fprintf(s.out, "\n%d wrong bytes\n", t.wrong)
	if t.wrong > 0 {
		return fmt.Errorf("%d wrong bytes", t.wrong)
	}
	if t.handed.sums().blocks == 0 || t.loaded.sums().blocks == 0 {
		return fmt.Errorf("nothing was handed over or loaded")
	}
	s.commands()
	return nil
}

// commands tells how to look further.
func (s *stage) commands() {
	if !s.keep {
		fmt.Fprintln(s.out, "\nTo look further: make demo KEEP=1 leaves all of it running and prints the commands, such as kvferry status, workers, spaces, blocks and offers.")
		return
	}
	cli := filepath.Join(filepath.Dir(s.daemon), "kvferry")
	fmt.Fprintln(s.out, "\nLook further:")
	for _, args := range []string{"status", "workers", "spaces", "blocks --limit 10", "offers", "config"} {
		fmt.Fprintf(s.out, "  %s --socket %s %s\n", cli, s.nodeA.AdminSocket(), args)
	}
	fmt.Fprintf(s.out, "  %s --socket %s status     # node b\n", cli, s.nodeB.AdminSocket())
	fmt.Fprintf(s.out, "  tail %s %s\n", s.nodeA.LogPath(), s.nodeB.LogPath())
}
