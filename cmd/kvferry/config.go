package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
)

func (a *app) config() *cobra.Command {
	return &cobra.Command{
		Use:   "config",
		Short: "The configuration in effect",
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			r, err := ask(c.Context(), a, kvferryv1.AdminClient.Config, &kvferryv1.ConfigRequest{})
			if err != nil {
				return err
			}
			return a.show(r, func(w io.Writer) error {
				_, err := fmt.Fprintln(w, strings.TrimRight(r.Yaml, "\n"))
				return err
			})
		},
	}
}

func (a *app) version() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "The versions of this command and of the daemon",
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			r, err := ask(c.Context(), a, kvferryv1.AdminClient.Version, &kvferryv1.VersionRequest{})
			if err != nil {
				fmt.Fprintln(a.err, "command", a.build) // the daemon need not be there for that
				return err
			}
			return a.show(r, func(w io.Writer) error {
				return table(w, [][]string{{"command", a.build}, {"daemon", r.Version}, {"wire version", fmt.Sprint(r.WireVersion)}, {"pool format", fmt.Sprint(r.PoolFormat)}, {"built with", r.GoVersion}})
			})
		},
	}
}
