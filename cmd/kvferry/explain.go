package main

import (
	"encoding/hex"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
)

func (a *app) explain() *cobra.Command {
	return &cobra.Command{
		Use:   "explain HASH|REQUEST",
		Short: "Why a block, or a request's look-up, was a hit or a miss",
		Long: "explain tells of the blocks whose hash begins with HASH whether a look-up finds them, where, or why not: also of those that have left lately. Of a REQUEST, as the engine calls it, it tells what its look-ups\n" +
			"found, where they ended and why; the last 4,096 look-ups are remembered. What it says of blocks is how it is now.",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 || args[0] == "" {
				return fmt.Errorf("give one hash, or its beginning, or one request id")
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			r := &kvferryv1.ExplainResponse{}
			if prefix, err := hashPrefix(args[0]); err == nil {
				if r, err = ask(c.Context(), a, kvferryv1.AdminClient.Explain, &kvferryv1.ExplainRequest{HashPrefix: prefix}); err != nil {
					return err
				}
			}
			if len(args[0]) <= 256 && len(args[0]) != 64 { // a request's id may look like the beginning of a hash
				lookups, err := ask(c.Context(), a, kvferryv1.AdminClient.Explain, &kvferryv1.ExplainRequest{RequestId: args[0]})
				if err != nil {
					return err
				}
				r.Lookups = lookups.Lookups
			}
			if len(r.Blocks)+len(r.Lookups) == 0 {
				return fmt.Errorf("nothing is known of %q: no block here begins with it, none that left lately did, and no look-up that is remembered was for it", args[0])
			}
			return a.show(r, func(w io.Writer) error { return a.explained(w, r) })
		},
	}
}

func (a *app) explained(w io.Writer, r *kvferryv1.ExplainResponse) error {
	for _, b := range r.Blocks {
		a.block(w, "", b)
	}
	for _, k := range r.Lookups {
		found := k.DramBlocks + k.NvmeBlocks + k.PeerBlocks
		fmt.Fprintf(w, "request %s of %s, %s ago: asked for %s of space %s\n", k.RequestId, k.Instance, a.ago(k.AtUnixMs), plural(uint64(k.AskedBlocks), "block", "blocks"), shortID(k.SpaceId))
		fmt.Fprintf(w, "  in dram %d, on nvme %d, at peers %d, missed %d\n", k.DramBlocks, k.NvmeBlocks, k.PeerBlocks, max(k.AskedBlocks, found)-found)
		fmt.Fprintf(w, "  why: %s\n", k.Reason)
		if k.FirstMissed != nil {
			fmt.Fprintln(w, "  the first that was missed, as it is now:")
			a.block(w, "    ", k.FirstMissed)
		}
	}
	return nil
}

func (a *app) block(w io.Writer, indent string, b *kvferryv1.BlockExplanation) {
	fmt.Fprintf(w, "%sblock %s of space %s\n%s  %s\n", indent, hex.EncodeToString(b.Hash), shortID(b.SpaceId), indent, b.Verdict)
	if i := b.Block; i != nil {
		fmt.Fprintf(w, "%s  tier %s, %s, %d shards, %d children, leases %d, pins %d, idle %s\n", indent, dash(i.Tier), size(i.Bytes), i.ShardsResident, i.Children, i.Leases, i.Pins, millis(i.IdleMs))
	}
	if b.RemovedReason != "" {
		fmt.Fprintf(w, "%s  last removed %s ago from %s: %s\n", indent, a.ago(b.RemovedUnixMs), b.RemovedTier, b.RemovedReason)
	}
}
