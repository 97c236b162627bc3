package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"

	"github.com/spf13/cobra"

	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
)

func (a *app) workers() *cobra.Command {
	return &cobra.Command{
		Use:   "workers",
		Short: "The processes that are attached, and what each holds",
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			r, err := ask(c.Context(), a, kvferryv1.AdminClient.Workers, &kvferryv1.WorkersRequest{})
			if err != nil {
				return err
			}
			slices.SortStableFunc(r.Workers, func(x, y *kvferryv1.Worker) int {
				return cmp.Or(cmp.Compare(x.Instance, y.Instance), -cmp.Compare(x.Role, y.Role), cmp.Compare(x.Rank, y.Rank), cmp.Compare(x.SessionId, y.SessionId))
			})
			return a.show(r, func(w io.Writer) error { return a.workersTable(w, r.Workers) })
		},
	}
}

func (a *app) workersTable(w io.Writer, workers []*kvferryv1.Worker) error {
	rows := [][]string{{"INSTANCE", "ROLE", "RANK", "PID", "ENGINE", "SPACE", "LENT", "MODE", "ATTACHED", "OPERATIONS", "PINS", "LEASES", "STORED", "LOADED"}}
	for _, k := range workers {
		rank := "-"
		if k.Role == kvferryv1.Role_ROLE_WORKER {
			rank = fmt.Sprintf("%d/%d", k.Rank, k.Ranks)
		}
		engine := k.Engine
		if k.EngineVersion != "" {
			engine += " " + k.EngineVersion
		}
		rows = append(rows, []string{k.Instance, enumWord("Role", k.Role.String()), rank, fmt.Sprint(k.Pid), engine, shortID(k.SpaceId), size(k.LentBytes), k.Mode,
			a.ago(k.AttachedUnixMs), count(uint64(k.Operations)), count(uint64(k.PinnedSlots)), count(uint64(k.Leases)), count(k.StoredBlocks), count(k.LoadedBlocks)})
	}
	return table(w, rows)
}
