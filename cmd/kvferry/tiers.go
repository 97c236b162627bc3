package main

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
)

func (a *app) tiers() *cobra.Command {
	return &cobra.Command{
		Use:   "tiers",
		Short: "The pool and each drive: how full, how fast, how worn, and what is wrong",
		Long: "tiers shows the pool and each drive. READ, WRITTEN and the errors are since the daemon's start, WEAR is what was written in the file's life. The latencies are those of single slots, half of which\n" +
			"were faster than the first figure and 99 % than the second. It ends with 1 when a drive is not used because of errors.",
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			r, err := ask(c.Context(), a, kvferryv1.AdminClient.Tiers, &kvferryv1.TiersRequest{})
			if err != nil {
				return err
			}
			if err := a.show(r, func(w io.Writer) error { return a.tiersTable(w, r) }); err != nil {
				return err
			}
			for _, s := range r.Stores {
				if s.Health != kvferryv1.Health_HEALTH_OK {
					return errDegraded
				}
			}
			return nil
		},
	}
}

func (a *app) tiersTable(w io.Writer, r *kvferryv1.TiersResponse) error {
	for _, s := range r.Stores {
		switch {
		case s.Health != kvferryv1.Health_HEALTH_OK:
			fmt.Fprintf(w, "! %s: %s: %s\n    since %s (%s): nothing is read from it or written to it; it comes back by itself\n", s.Name, enumWord("Health", s.Health.String()), s.Reason, a.ago(s.SinceUnixMs), clock(s.SinceUnixMs))
		case s.Slow != "":
			fmt.Fprintf(w, "! %s: %s\n    it is left alone where computing is faster, and tried again by itself\n", s.Name, s.Slow)
		}
	}
	rows := [][]string{{"TIER", "NAME", "CAPACITY", "USED", "FREE", "FULL", "BLOCKS", "STATE", "READS AT", "QUEUED", "RUNNING"}}
	for _, s := range r.Stores {
		state := enumWord("Health", s.Health.String())
		if s.Slow != "" && s.Health == kvferryv1.Health_HEALTH_OK {
			state = "slow"
		}
		rate := "-"
		if s.ReadRate > 0 {
			rate = size(uint64(s.ReadRate)) + "/s"
		}
		rows = append(rows, []string{s.Tier, s.Name, size(s.CapacityBytes), size(s.UsedBytes), size(s.FreeBytes), percent(s.UsedBytes, s.CapacityBytes), count(s.Blocks), state, rate,
			fmt.Sprint(s.Queued), fmt.Sprint(s.Running)})
	}
	if err := table(w, rows); err != nil {
		return err
	}
	rows = [][]string{{"DRIVE", "READ", "WRITTEN", "READ ERRORS", "WRITE ERRORS", "CORRUPT", "READ P50/P99", "WRITE P50/P99", "WEAR", "ENGINE"}}
	for _, s := range r.Stores {
		if s.Tier == "nvme" {
			rows = append(rows, []string{s.Name, size(s.ReadBytes), size(s.WrittenBytes), count(s.ReadErrors), count(s.WriteErrors), count(s.Corrupt), quantiles(s.ReadP50Us, s.ReadP99Us),
				quantiles(s.WriteP50Us, s.WriteP99Us), size(s.LifetimeWrittenBytes), s.Engine})
		}
	}
	if len(rows) > 1 {
		fmt.Fprintln(w)
		if err := table(w, rows); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(w, "\npolicy %s; demoted %s, promoted %s; not admitted to a drive for want of write budget: %s\n", r.Policy, plural(r.DemotedShards, "shard", "shards"),
		plural(r.PromotedShards, "shard", "shards"), plural(r.NotAdmittedBlocks, "block", "blocks"))
	return err
}

func quantiles(p50, p99 uint32) string {
	if p50 == 0 && p99 == 0 {
		return "-"
	}
	return micros(p50) + "/" + micros(p99)
}

func micros(us uint32) string {
	switch {
	case us < 1000:
		return fmt.Sprintf("%dµs", us)
	case us < 10_000:
		return fmt.Sprintf("%.1fms", float64(us)/1000)
	}
	return span(time.Duration(us) * time.Microsecond)
}
