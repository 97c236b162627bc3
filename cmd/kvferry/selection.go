package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
)

// chosen are the blocks that a command is about: an argument, and its flags.
type chosen struct {
	space string
	all   bool
}

// selectionArg is for commands that take the beginning of a hash, or --all.
const selectionUse = " [HASH]"

func (k *chosen) flags(c *cobra.Command) {
	c.Args = cobra.MaximumNArgs(1)
	c.Flags().StringVar(&k.space, "space", "", "only of this space: its id, or the beginning of it")
	c.Flags().BoolVar(&k.all, "all", false, "all blocks, in place of HASH")
}

// selection is what the command was given.
func (k *chosen) selection(ctx context.Context, a *app, args []string) (*kvferryv1.BlockSelection, error) {
	sel := &kvferryv1.BlockSelection{All: k.all}
	switch {
	case len(args) == 0 && !k.all:
		return nil, errors.New("which blocks? Give the beginning of their hash (kvferry blocks shows it), or --all")
	case len(args) == 1 && k.all:
		return nil, errors.New("--all and a hash: give one of them")
	case len(args) == 1:
		var err error
		if sel.HashPrefix, err = hashPrefix(args[0]); err != nil {
			return nil, err
		}
	}
	var err error
	sel.SpaceId, err = a.spaceID(ctx, k.space)
	return sel, err
}

// hashPrefix reads the beginning of a hash.
func hashPrefix(text string) ([]byte, error) {
	b, err := hex.DecodeString(text)
	if err != nil || len(b) == 0 || len(b) > 32 {
		return nil, fmt.Errorf("%q: a hash, or its beginning, is an even number of hexadecimal digits, 2 to 64", text)
	}
	return b, nil
}

// spaceID is the id of the one space that begins with prefix; nil where that is empty.
func (a *app) spaceID(ctx context.Context, prefix string) ([]byte, error) {
	if prefix == "" {
		return nil, nil
	}
	r, err := a.askSpaces(ctx)
	if err != nil {
		return nil, err
	}
	found, err := findSpace(r.Spaces, prefix)
	if err != nil {
		return nil, err
	}
	return found.SpaceId, nil
}

// plural is a number and what there is of it.
func plural(n uint64, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return count(n) + " " + many
}
