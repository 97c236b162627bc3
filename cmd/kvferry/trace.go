package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
)

func (a *app) trace() *cobra.Command {
	c := &cobra.Command{
		Use:   "trace",
		Short: "Record the look-ups of engines, for kvferry simulate",
		Args:  noArgs,
		RunE:  func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(a.traceRecord())
	return c
}

func (a *app) traceRecord() *cobra.Command {
	var file, space string
	var long time.Duration
	var requests uint64
	c := &cobra.Command{
		Use:   "record --out FILE",
		Short: "Write each look-up from now on to a file",
		Long: "record writes one line for each request that engines look up from now on: {timestamp (ms from the first), input_length, output_length (0: not known), hash_ids}, which is what kvferry simulate reads. Numbers\n" +
			"stand for hashes, from 0 in the order of their coming: nothing of a prompt can be told from them. Only full blocks are looked up, so input_length is without the rest of a prompt. A request that is looked up again\n" +
			"while it waits counts once. It goes on until ctrl-C, --for or --requests; the file is complete then.",
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if file == "" {
				return errors.New("--out FILE: must be given; compressed where it ends in .gz")
			}
			if long < 0 {
				return fmt.Errorf("--for %s: must not be negative", long)
			}
			id, err := a.spaceID(c.Context(), space)
			if err != nil {
				return err
			}
			rec, err := newRecorder(file, id, requests)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithCancel(c.Context())
			defer cancel()
			if long > 0 { // no deadline, which the daemon would know of and could answer with
				defer time.AfterFunc(long, cancel).Stop()
			}
			err = listenTo(ctx, a, kvferryv1.AdminClient.Trace, &kvferryv1.TraceRequest{}, true, rec.add)
			if ctx.Err() != nil && errors.Is(err, ctx.Err()) { // that is how it ends
				err = nil
			}
			if closed := rec.close(); err == nil {
				err = closed
			}
			if err != nil && rec.requests == 0 {
				_ = os.Remove(file)
				return err
			}
			if shown := a.recorded(rec); err == nil {
				err = shown
			}
			return err
		},
	}
	f := c.Flags()
	f.StringVar(&file, "out", "", "the file to write; compressed where it ends in .gz")
	f.StringVar(&space, "space", "", "of this space: its id, or the beginning of it; else that of the first look-up")
	f.DurationVar(&long, "for", 0, "so long, such as 10m; else until ctrl-C")
	f.Uint64Var(&requests, "requests", 0, "so many requests at most")
	return c
}

// recorded says what was recorded.
func (a *app) recorded(r *recorder) error {
	if a.output == "json" {
		return writeJSON(a.out, map[string]any{"file": r.name, "requests": r.requests, "blocks": r.blocks, "unique_blocks": len(r.ids), "repeated": r.repeated, "other_spaces": r.others, "dropped": r.dropped})
	}
	w := a.out
	fmt.Fprintf(w, "recorded %s with %s, %s different, in %s\n", plural(r.requests, "request", "requests"), plural(r.blocks, "block", "blocks"), count(uint64(len(r.ids))), r.name)
	return errors.Join(
		note(w, r.repeated, "look-up", "look-ups", "repeated one of the same request, and is not counted again", "repeated one of the same request, and are not counted again"),
		note(w, r.others, "look-up", "look-ups", "was of another space: kvferry trace record --space", "were of other spaces: kvferry trace record --space"),
		note(w, r.dropped, "look-up", "look-ups", "was dropped: they came faster than they could be written", "were dropped: they came faster than they could be written"))
}

func note(w io.Writer, n uint64, one, many, text, texts string) error {
	switch n {
	case 0:
		return nil
	case 1:
		many, texts = one, text
	}
	_, err := fmt.Fprintf(w, "! %s %s %s\n", count(n), many, texts)
	return err
}
