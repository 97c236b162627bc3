package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
)

// Evict, demote and prefetch are asked again until all is done: each answer says where to go on. Its time is that of one answer.

func (a *app) evict() *cobra.Command {
	var k chosen
	var tier string
	var yes bool
	c := &cobra.Command{
		Use:   "evict" + selectionUse,
		Short: "Remove blocks, by force",
		Long: "evict removes blocks whose hash begins with HASH from both tiers, or from one, also those that somebody holds. What is removed from a drive does not come back. What descends from a removed block cannot be\n" +
			"found from then on. Engines compute what they miss.",
		RunE: func(c *cobra.Command, args []string) error {
			if err := tierFlag(tier); err != nil {
				return err
			}
			sel, err := k.selection(c.Context(), a, args)
			if err != nil {
				return err
			}
			if k.all && !yes {
				return errors.New("evict --all removes everything: add --yes if that is meant")
			}
			sum := &kvferryv1.EvictResponse{}
			return a.untilDone(c.Context(), sum, func(ctx context.Context, from uint64) (uint64, error) {
				r, err := ask(ctx, a, kvferryv1.AdminClient.Evict, &kvferryv1.EvictRequest{Blocks: sel, Tier: tier, From: from})
				sum.Blocks += r.GetBlocks()
				return r.GetNext(), err
			}, func() bool { return true }, func(w io.Writer) error {
				where := map[string]string{"": "", "dram": " from DRAM", "nvme": " from the drives"}[tier]
				_, err := fmt.Fprintf(w, "evicted %s%s\n", plural(sum.Blocks, "block", "blocks"), where)
				return err
			})
		},
	}
	k.flags(c)
	c.Flags().StringVar(&tier, "tier", "", "dram or nvme: only from there")
	c.Flags().BoolVar(&yes, "yes", false, "with --all: yes, everything")
	return c
}

func (a *app) demote() *cobra.Command {
	var k chosen
	var move bool
	c := &cobra.Command{
		Use:   "demote" + selectionUse,
		Short: "Copy blocks to the drives, now",
		Long: "demote copies blocks whose hash begins with HASH to the drives, and what they descend from before them, however lately they were used. It ends when they are there. With --move they leave DRAM, unless something\n" +
			"holds them or descends from them there.",
		RunE: func(c *cobra.Command, args []string) error {
			sel, err := k.selection(c.Context(), a, args)
			if err != nil {
				return err
			}
			sum := &kvferryv1.DemoteResponse{}
			return a.untilDone(c.Context(), sum, func(ctx context.Context, from uint64) (uint64, error) {
				r, err := ask(ctx, a, kvferryv1.AdminClient.Demote, &kvferryv1.DemoteRequest{Blocks: sel, Move: move, From: from})
				sum.Blocks, sum.Failed, sum.Present = sum.Blocks+r.GetBlocks(), sum.Failed+r.GetFailed(), sum.Present+r.GetPresent()
				sum.Left, sum.NoRoom, sum.UnderWay = sum.Left+r.GetLeft(), sum.NoRoom+r.GetNoRoom(), sum.UnderWay+r.GetUnderWay()
				return r.GetNext(), err
			}, func() bool { return sum.Failed == 0 && sum.NoRoom == 0 }, func(w io.Writer) error {
				fmt.Fprintf(w, "copied %s to the drives; %s there already, or came there before a descendant\n", plural(sum.Blocks, "shard", "shards"), are(sum.Present, "block"))
				if move {
					fmt.Fprintf(w, "%s left DRAM", plural(sum.Left, "block", "blocks"))
					if sum.Left < sum.Present { // blocks of several shards count more than once among the copies
						fmt.Fprint(w, "; what is leased, or has descendants there, stays")
					}
					fmt.Fprintln(w)
				}
				return failures(w, sum.Failed, sum.NoRoom, sum.UnderWay, "the drives have no room for", "block", "blocks")
			})
		},
	}
	k.flags(c)
	c.Flags().BoolVar(&move, "move", false, "and let them leave DRAM")
	return c
}

func (a *app) prefetch() *cobra.Command {
	var k chosen
	c := &cobra.Command{
		Use:   "prefetch" + selectionUse,
		Short: "Bring blocks up from the drives, now",
		Long:  "prefetch brings blocks whose hash begins with HASH from the drives into DRAM, no more than the pool holds. It ends when they are there.",
		RunE: func(c *cobra.Command, args []string) error {
			sel, err := k.selection(c.Context(), a, args)
			if err != nil {
				return err
			}
			sum := &kvferryv1.PrefetchBlocksResponse{}
			return a.untilDone(c.Context(), sum, func(ctx context.Context, from uint64) (uint64, error) {
				r, err := ask(ctx, a, kvferryv1.AdminClient.PrefetchBlocks, &kvferryv1.PrefetchBlocksRequest{Blocks: sel, From: from})
				sum.Blocks, sum.Failed, sum.NoRoom, sum.UnderWay = sum.Blocks+r.GetBlocks(), sum.Failed+r.GetFailed(), sum.NoRoom+r.GetNoRoom(), sum.UnderWay+r.GetUnderWay()
				return r.GetNext(), err
			}, func() bool { return sum.Failed == 0 && sum.NoRoom == 0 }, func(w io.Writer) error {
				fmt.Fprintf(w, "brought %s into DRAM\n", plural(sum.Blocks, "shard", "shards"))
				return failures(w, sum.Failed, sum.NoRoom, sum.UnderWay, "the pool has no room for", "shard", "shards")
			})
		},
	}
	k.flags(c)
	return c
}

func tierFlag(tier string) error {
	if tier != "" && tier != "dram" && tier != "nvme" {
		return fmt.Errorf("--tier %q: must be dram or nvme", tier)
	}
	return nil
}

func are(n uint64, one string) string {
	if n == 1 {
		return "1 " + one + " was"
	}
	return count(n) + " " + one + "s were"
}

// failures say what was not done.
func failures(w io.Writer, failed, noRoom, underWay uint64, noRoomText, one, many string) error {
	if noRoom > 0 {
		fmt.Fprintf(w, "! %s %s\n", noRoomText, plural(noRoom, one, many))
	}
	if failed > 0 {
		fmt.Fprintf(w, "! %s could not be copied: kvferry tiers\n", plural(failed, "shard", "shards"))
	}
	if underWay > 0 {
		fmt.Fprintf(w, "! still under way: %s; the drives are slow: kvferry tiers\n", plural(underWay, "shard", "shards"))
	}
	return nil
}

// untilDone calls again until there is nothing to go on with, and shows what was done: also what was done before something failed. Where not all could be, it ends with errDegraded.
func (a *app) untilDone(ctx context.Context, sum proto.Message, call func(ctx context.Context, from uint64) (next uint64, err error), all func() bool, asTable func(io.Writer) error) error {
	for from := uint64(0); ; {
		next, err := call(ctx, from)
		if err == nil && next != 0 {
			from = next
			continue
		}
		if err != nil && from == 0 { // nothing was done
			return err
		}
		if shown := a.show(sum, asTable); err == nil {
			err = shown
		}
		if err == nil && !all() {
			return errDegraded
		}
		return err
	}
}
