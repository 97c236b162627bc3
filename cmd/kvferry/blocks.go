package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"slices"

	"github.com/spf13/cobra"

	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
)

func (a *app) blocks() *cobra.Command {
	var space, prefix string
	var limit uint32
	c := &cobra.Command{
		Use:   "blocks",
		Short: "The blocks that lie on this node",
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			q, err := a.blocksRequest(c.Context(), space, prefix, limit)
			if err != nil {
				return err
			}
			r, err := ask(c.Context(), a, kvferryv1.AdminClient.Blocks, q)
			if err != nil {
				return err
			}
			slices.SortStableFunc(r.Blocks, func(x, y *kvferryv1.BlockInfo) int {
				return cmp.Or(bytes.Compare(x.SpaceId, y.SpaceId), bytes.Compare(x.Hash, y.Hash), cmp.Compare(x.Tier, y.Tier))
			})
			return a.show(r, func(w io.Writer) error { return blocksTable(w, r) })
		},
	}
	c.Flags().StringVar(&space, "space", "", "only of this space: its id, or the beginning of it")
	c.Flags().StringVar(&prefix, "prefix", "", "only hashes that begin with these hexadecimal digits, an even number of them")
	c.Flags().Uint32Var(&limit, "limit", 100, "at most so many, 1 to 10000")
	return c
}

func (a *app) blocksRequest(ctx context.Context, space, prefix string, limit uint32) (*kvferryv1.BlocksRequest, error) {
	if limit < 1 || limit > 10000 {
		return nil, fmt.Errorf("--limit %d: must be 1 to 10000", limit)
	}
	hash, err := hex.DecodeString(prefix)
	if err != nil || len(hash) > 32 {
		return nil, fmt.Errorf("--prefix %q: must be an even number of hexadecimal digits, at most 64", prefix)
	}
	id, err := a.spaceID(ctx, space)
	return &kvferryv1.BlocksRequest{SpaceId: id, HashPrefix: hash, Limit: limit}, err
}

func blocksTable(w io.Writer, r *kvferryv1.BlocksResponse) error {
	rows := [][]string{{"HASH", "PARENT", "SPACE", "TIER", "BYTES", "SHARDS", "MATCHABLE", "CHILDREN", "LEASES", "PINS", "IDLE"}}
	for _, b := range r.Blocks {
		parent, matchable := shortID(b.Parent), "no"
		if len(bytes.Trim(b.Parent, "\x00")) == 0 {
			parent = "-"
		}
		if b.Matchable {
			matchable = "yes"
		}
		rows = append(rows, []string{shortID(b.Hash), parent, shortID(b.SpaceId), b.Tier, size(b.Bytes), fmt.Sprint(b.ShardsResident), matchable,
			fmt.Sprint(b.Children), fmt.Sprint(b.Leases), fmt.Sprint(b.Pins), millis(b.IdleMs)})
	}
	if err := table(w, rows); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "%s of %s blocks\n", count(uint64(len(r.Blocks))), count(r.Total))
	return err
}
