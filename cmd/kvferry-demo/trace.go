package main

import (
	"bufio"
	"bytes"
	"compress/gzip"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/standin"
)

// excerpt is the beginning of the conversation trace that Mooncake published (FAST'25), without the fields that are not used here.
//
//go:embed testdata/conversation.jsonl.gz
var excerpt []byte

// prompt is one request: the chain of its blocks.
type prompt struct {
	id      string
	tokens  uint32
	hashes  []kvferry.Hash
	parents []kvferry.Hash
}

// readTrace reads the first n requests, of the excerpt where the file is not there.
func readTrace(path string, n int) (prompts []prompt, source string, err error) {
	var r io.Reader = bytes.NewReader(excerpt)
	source = "the part of the trace that is built in"
	if path != "" {
		f, err := os.Open(path)
		switch {
		case err == nil:
			defer f.Close()
			r, source = f, path
		case !errors.Is(err, fs.ErrNotExist):
			return nil, "", fmt.Errorf("open trace: %w", err)
		}
	}
	unzipped, err := gzip.NewReader(r)
	if err != nil {
		return nil, "", fmt.Errorf("read trace: %w", err)
	}
	lines := bufio.NewScanner(unzipped)
	lines.Buffer(nil, 1<<20)
	for len(prompts) < n && lines.Scan() {
		var line struct {
			InputLength uint32   `json:"input_length"`
			HashIDs     []uint64 `json:"hash_ids"`
		}
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			return nil, "", fmt.Errorf("read trace: request %d: %w", len(prompts), err)
		}
		p := prompt{id: fmt.Sprintf("req-%d", len(prompts)), tokens: max(1, line.InputLength)}
		var parent kvferry.Hash
		for _, id := range line.HashIDs[:min(len(line.HashIDs), promptBlocksMax)] {
			h := standin.Chain(parent, id)
			p.hashes, p.parents = append(p.hashes, h), append(p.parents, parent)
			parent = h
		}
		prompts = append(prompts, p)
	}
	if err := lines.Err(); err != nil {
		return nil, "", fmt.Errorf("read trace: %w", err)
	}
	if len(prompts) == 0 {
		return nil, "", errors.New("read trace: it is empty")
	}
	return prompts, source, nil
}

// reuse is what a cache without bounds would have hit: blocks of prefixes that were there before.
func reuse(prompts []prompt) (hits, asked int) {
	seen := map[kvferry.Hash]bool{}
	for _, p := range prompts {
		asked += len(p.hashes)
		for _, h := range p.hashes {
			if seen[h] {
				hits++
			}
			seen[h] = true
		}
	}
	return hits, asked
}
