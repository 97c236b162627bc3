package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
)

func (a *app) status() *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "What is wrong, and how full and busy the node is",
		Long:  "status begins with a line for everything that is wrong: what, since when, why, and what to run next. It ends with 1 when there is one.",
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			r, err := ask(c.Context(), a, kvferryv1.AdminClient.Status, &kvferryv1.StatusRequest{})
			if err != nil {
				return err
			}
			sortStatus(r)
			if err := a.show(r, func(w io.Writer) error { return a.statusTable(w, r) }); err != nil {
				return err
			}
			if r.Health != kvferryv1.Health_HEALTH_OK || len(r.Problems) > 0 {
				return errDegraded
			}
			return nil
		},
	}
}

func sortStatus(r *kvferryv1.StatusResponse) {
	slices.SortStableFunc(r.Problems, func(x, y *kvferryv1.Problem) int {
		return cmp.Or(cmp.Compare(x.SinceUnixMs, y.SinceUnixMs), cmp.Compare(x.Component, y.Component), cmp.Compare(x.Reason, y.Reason))
	})
	slices.SortStableFunc(r.Counters, func(x, y *kvferryv1.Counter) int {
		return cmp.Or(cmp.Compare(x.Name, y.Name), cmp.Compare(x.Reason, y.Reason))
	})
}

func (a *app) statusTable(w io.Writer, r *kvferryv1.StatusResponse) error {
	for _, p := range r.Problems {
		fmt.Fprintf(w, "! %s: %s\n    since %s (%s)\n", p.Component, p.Reason, a.ago(p.SinceUnixMs), clock(p.SinceUnixMs))
		if p.NextCommand != "" {
			fmt.Fprintf(w, "    next  %s\n", p.NextCommand)
		}
	}
	if len(r.Problems) > 0 {
		fmt.Fprintln(w)
	}
	health := enumWord("Health", r.Health.String())
	if r.Draining {
		health += ", draining"
	}
	fmt.Fprintf(w, "%s: %s, up %s, version %s, epoch %s\n", r.Node, health, a.ago(r.StartedUnixMs), dash(r.Version), shortID(r.Epoch))
	fmt.Fprintf(w, "workers %d, schedulers %d, spaces %d, open offers %d; transfers: running %d, queued %d\n\n",
		r.Workers, r.Schedulers, r.Spaces, r.OffersOpen, r.TransfersRunning, r.TransfersQueued)
	rows := [][]string{{"TIER", "CAPACITY", "USED", "FREE", "FULL", "BLOCKS", "LEASED", "PINNED SLOTS"}}
	for _, t := range r.Tiers {
		rows = append(rows, []string{t.Tier, size(t.CapacityBytes), size(t.UsedBytes), size(t.FreeBytes), percent(t.UsedBytes, t.CapacityBytes),
			count(t.Blocks), count(t.LeasedBlocks), count(t.PinnedSlots)})
	}
	if err := table(w, rows); err != nil {
		return err
	}
	if len(r.Counters) == 0 {
		return nil
	}
	fmt.Fprintln(w)
	rows = [][]string{{"SINCE THE START", "REASON", "COUNT"}}
	last := ""
	for _, c := range r.Counters {
		name := c.Name
		if name == last {
			name = " "
		}
		last = c.Name
		value := count(c.Value)
		if strings.HasSuffix(c.Name, "_bytes") {
			value = size(c.Value)
		}
		rows = append(rows, []string{name, c.Reason, value})
	}
	return table(w, rows)
}
