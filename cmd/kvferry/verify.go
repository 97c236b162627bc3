package main

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
)

func (a *app) verify() *cobra.Command {
	var tier string
	c := &cobra.Command{
		Use:   "verify",
		Short: "Read everything back, and remove what is broken",
		Long: "verify reads every block of the pool and of the drives, behind all other traffic, and compares its checksum with the one it was stored with. What is broken is removed: engines compute it. What a drive cannot\n" +
			"read stays; a drive that fails again and again is skipped. It ends with 1 when something was broken, unreadable or skipped.",
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := tierFlag(tier); err != nil {
				return err
			}
			p := progress{w: a.err, terminal: a.terminal}
			var last *kvferryv1.VerifyResponse
			err := listenTo(c.Context(), a, kvferryv1.AdminClient.Verify, &kvferryv1.VerifyRequest{Tier: tier}, false, func(r *kvferryv1.VerifyResponse) error {
				last = r
				if !r.Done {
					p.show(r)
				}
				return nil
			})
			p.end()
			if c.Context().Err() != nil {
				err = errors.New("interrupted")
			}
			if last == nil {
				return err
			}
			if shown := a.show(last, func(w io.Writer) error { return verified(w, last) }); err == nil {
				err = shown
			}
			if err == nil && !last.Done {
				err = fmt.Errorf("the daemon at %s has ended before the verification did", a.path)
			}
			if err == nil && last.Broken+last.Unreadable+last.Skipped > 0 {
				return errDegraded
			}
			return err
		},
	}
	c.Flags().StringVar(&tier, "tier", "", "dram or nvme: only that")
	return c
}

func verified(w io.Writer, r *kvferryv1.VerifyResponse) error {
	fmt.Fprintf(w, "read %s, %s", plural(r.Slots, "slot", "slots"), size(r.Bytes))
	if !r.Done {
		fmt.Fprintf(w, ", of about %s", count(r.SlotsTotal))
	}
	fmt.Fprintln(w)
	if r.Broken == 0 {
		_, err := fmt.Fprintln(w, "none of them was broken")
		return errors.Join(err, unread(w, r))
	}
	fmt.Fprintf(w, "! %s broken, and removed\n", was(r.Broken))
	return unread(w, r)
}

func unread(w io.Writer, r *kvferryv1.VerifyResponse) error {
	if r.Unreadable > 0 {
		fmt.Fprintf(w, "! %s not to be read: the drive failed: kvferry tiers\n", was(r.Unreadable))
	}
	if r.Skipped > 0 {
		fmt.Fprintf(w, "! %s skipped: on a drive that is in trouble: kvferry tiers\n", was(r.Skipped))
	}
	return nil
}

func was(n uint64) string {
	if n == 1 {
		return "1 was"
	}
	return count(n) + " were"
}

// progress shows how far it is: a bar that is drawn over and over on a terminal, else a line for each tenth.
type progress struct {
	w        io.Writer
	terminal bool
	drawn    bool
	tenths   uint64
}

const barCells = 30

func (p *progress) show(r *kvferryv1.VerifyResponse) {
	total := max(r.SlotsTotal, r.Slots+r.Unreadable+r.Skipped, 1) // blocks come and go meanwhile
	done := r.Slots + r.Unreadable + r.Skipped
	what := fmt.Sprintf("%s of about %s slots, %s, broken %s", count(done), count(total), size(r.Bytes), count(r.Broken))
	if p.terminal {
		full := int(done * barCells / total)
		fmt.Fprintf(p.w, "\r\x1b[K[%s%s] %s", strings.Repeat("#", full), strings.Repeat(".", barCells-full), what)
		p.drawn = true
		return
	}
	if tenths := done * 10 / total; tenths > p.tenths {
		p.tenths = tenths
		fmt.Fprintf(p.w, "verify: %d %%: %s\n", tenths*10, what)
	}
}

// end clears the bar.
func (p *progress) end() {
	if p.drawn {
		fmt.Fprint(p.w, "\r\x1b[K")
	}
}
