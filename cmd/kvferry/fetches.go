package main

import (
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"

	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
)

func (a *app) fetches() *cobra.Command {
	return &cobra.Command{
		Use:   "fetches",
		Short: "Blocks that other nodes had: whether they were fetched or computed, and the estimates that decided it",
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			r, err := ask(c.Context(), a, kvferryv1.AdminClient.Fetches, &kvferryv1.FetchesRequest{})
			if err != nil {
				return err
			}
			slices.Reverse(r.Decisions) // the youngest first
			return a.show(r, func(w io.Writer) error { return a.fetchesTable(w, r.Decisions) })
		},
	}
}

func (a *app) fetchesTable(w io.Writer, decisions []*kvferryv1.FetchDecision) error {
	rows := [][]string{{"AGE", "REQUEST", "BY", "PEER", "BLOCKS", "SIZE", "RATE", "FETCH", "COMPUTE", "DECISION"}}
	us := func(n int64) string {
		if n == 0 {
			return "-"
		}
		return span(time.Duration(n) * time.Microsecond)
	}
	for _, d := range decisions {
		rate := "-"
		if d.BytesPerSecond > 0 {
			rate = size(uint64(d.BytesPerSecond)) + "/s"
			if !d.Measured {
				rate += " (assumed)"
			}
		}
		rows = append(rows, []string{a.ago(d.AtUnixMs), d.RequestId, d.Instance, dash(d.Peer), fmt.Sprint(d.Blocks), size(d.Bytes), rate, us(d.FetchUs), us(d.ComputeUs), d.Reason})
	}
	return table(w, rows)
}
