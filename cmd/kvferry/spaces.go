package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
)

func (a *app) spaces() *cobra.Command {
	list := &cobra.Command{
		Use:   "spaces",
		Short: "The namespaces of blocks: whose bytes may be exchanged",
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			r, err := a.askSpaces(c.Context())
			if err != nil {
				return err
			}
			return a.show(r, func(w io.Writer) error { return spacesTable(w, r.Spaces) })
		},
	}
	list.AddCommand(&cobra.Command{
		Use:   "diff A B",
		Short: "Name the fields in which two spaces differ",
		Long:  "diff names the fields because of which two spaces do not share blocks. A and B are ids or beginnings of ids, as the list shows them.",
		Args:  cobra.ExactArgs(2),
		RunE:  func(c *cobra.Command, args []string) error { return a.spacesDiff(c.Context(), args[0], args[1]) },
	})
	return list
}

func (a *app) askSpaces(ctx context.Context) (*kvferryv1.SpacesResponse, error) {
	r, err := ask(ctx, a, kvferryv1.AdminClient.Spaces, &kvferryv1.SpacesRequest{})
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(r.Spaces, func(x, y *kvferryv1.SpaceInfo) int {
		return cmp.Or(cmp.Compare(x.Space.GetModel(), y.Space.GetModel()), bytes.Compare(x.SpaceId, y.SpaceId))
	})
	return r, nil
}

func spacesTable(w io.Writer, spaces []*kvferryv1.SpaceInfo) error {
	rows := [][]string{{"SPACE", "MODEL", "DTYPE", "ATTENTION", "LAYOUT", "TP", "BLOCK TOKENS", "SHARD", "SHARDS", "BLOCKS", "IN DRAM", "ON NVME", "BYTES"}}
	for _, s := range spaces {
		p := s.Space
		rows = append(rows, []string{shortID(s.SpaceId), p.GetModel(), p.GetKvDtype(), p.GetAttention(), p.GetLayout(), fmt.Sprint(p.GetTp()), fmt.Sprint(p.GetBlockTokens()),
			size(s.ShardBytes), fmt.Sprint(s.Shards), count(s.Blocks), count(s.DramBlocks), count(s.NvmeBlocks), size(s.Bytes)})
	}
	return table(w, rows)
}

// findSpace is the one space whose id begins with prefix.
func findSpace(spaces []*kvferryv1.SpaceInfo, prefix string) (*kvferryv1.SpaceInfo, error) {
	prefix = strings.ToLower(prefix)
	if prefix == "" {
		return nil, fmt.Errorf("an empty id names no space")
	}
	var found []*kvferryv1.SpaceInfo
	for _, s := range spaces {
		if strings.HasPrefix(hex.EncodeToString(s.SpaceId), prefix) {
			found = append(found, s)
		}
	}
	switch len(found) {
	case 0:
		return nil, fmt.Errorf("no space begins with %q: see kvferry spaces", prefix)
	case 1:
		return found[0], nil
	}
	return nil, fmt.Errorf("%d spaces begin with %q (%s, %s, ...): give more digits", len(found), prefix, shortID(found[0].SpaceId), shortID(found[1].SpaceId))
}

// difference is one field in which two spaces differ, values as in the preimage.
type difference struct {
	Field string `json:"field"`
	A     string `json:"a"`
	B     string `json:"b"`
}

func (a *app) spacesDiff(ctx context.Context, x, y string) error {
	r, err := a.askSpaces(ctx)
	if err != nil {
		return err
	}
	first, err := findSpace(r.Spaces, x)
	if err != nil {
		return err
	}
	second, err := findSpace(r.Spaces, y)
	if err != nil {
		return err
	}
	diff := differences(first.Preimage, second.Preimage)
	if a.output == "json" {
		return writeJSON(a.out, map[string]any{"a": hex.EncodeToString(first.SpaceId), "b": hex.EncodeToString(second.SpaceId), "differences": diff})
	}
	if len(diff) == 0 {
		_, err := fmt.Fprintln(a.out, "the same space: blocks are shared")
		return err
	}
	rows := [][]string{{"FIELD", shortID(first.SpaceId), shortID(second.SpaceId)}}
	for _, d := range diff {
		rows = append(rows, []string{d.Field, d.A, d.B})
	}
	return table(a.out, rows)
}

// differences compares two preimages line by line; a field that one lacks is empty there.
func differences(x, y string) []difference {
	out := []difference{}
	left, order := preimageFields(x)
	right, more := preimageFields(y)
	for _, name := range more {
		if _, ok := left[name]; !ok {
			order = append(order, name)
		}
	}
	for _, name := range order {
		if left[name] != right[name] {
			out = append(out, difference{name, left[name], right[name]})
		}
	}
	return out
}

func preimageFields(text string) (map[string]string, []string) {
	fields, order := map[string]string{}, []string{}
	for line := range strings.Lines(text) {
		name, value, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
		if !ok {
			name, value = "version", name
		}
		fields[name] = value
		order = append(order, name)
	}
	return fields, order
}
