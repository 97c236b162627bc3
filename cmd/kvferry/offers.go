package main

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"slices"

	"github.com/spf13/cobra"

	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
)

func (a *app) offers() *cobra.Command {
	return &cobra.Command{
		Use:   "offers",
		Short: "Prompts offered to other workers: those that live, and the last that ended",
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			r, err := ask(c.Context(), a, kvferryv1.AdminClient.Offers, &kvferryv1.OffersRequest{})
			if err != nil {
				return err
			}
			// Those that live come first, then the youngest.
			slices.SortStableFunc(r.Offers, func(x, y *kvferryv1.OfferInfo) int {
				return cmp.Or(cmp.Compare(offerOrder(x.State), offerOrder(y.State)), cmp.Compare(x.AgeMs, y.AgeMs), bytes.Compare(x.OfferId, y.OfferId))
			})
			return a.show(r, func(w io.Writer) error { return offersTable(w, r.Offers) })
		},
	}
}

func offerOrder(state string) int { return slices.Index([]string{"open", "claimed", "ended"}, state) }

func offersTable(w io.Writer, offers []*kvferryv1.OfferInfo) error {
	rows := [][]string{{"OFFER", "REQUEST", "FROM", "STATE", "BLOCKS", "LENT", "TOKENS", "AGE", "EXPIRES IN", "CLAIMED BY", "PATH", "REASON"}}
	for _, o := range offers {
		expires := "-"
		if o.State != "ended" {
			expires = millis(o.ExpiresInMs)
		}
		state, lent := o.State, "no"
		if o.OpenEnded && state != "ended" {
			state += ", computing"
		}
		if o.Lent {
			lent = "yes"
		}
		rows = append(rows, []string{shortID(o.OfferId), o.RequestId, o.Instance, state, fmt.Sprint(o.Blocks), lent, fmt.Sprint(o.Tokens), millis(o.AgeMs), expires,
			o.ClaimedBy, o.Path, o.Reason})
	}
	return table(w, rows)
}
