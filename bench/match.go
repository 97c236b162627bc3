package main

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/standin"
	"github.com/kvferry/kvferry/standin/process"
)

//go:embed match.py
var matchScript string

const (
	matchBlocks  = 8192
	matchPrompts = 12 // in the ledger
	matchTimes   = 300
)

// match asks for 8,192 blocks that are all there, among many more, from Go and from Python.
func (b *bench) match(ctx context.Context) error {
	shape := standin.Shape{Blocks: matchBlocks, Planes: 1, PlaneBytes: 4 << 10}
	small := shape
	small.Blocks = 1
	p, err := b.newPair(ctx, pools, shape, small)
	if err != nil {
		return err
	}
	defer p.close()
	var hashes, parents []kvferry.Hash
	for k := range matchPrompts {
		hashes, parents = chain(matchBlocks, uint64(k)+1)
		r, err := p.prefill.Store(ctx, batches(blockRange(0, matchBlocks), hashes, parents)...)
		if err != nil {
			return err
		}
		if r.Stored != matchBlocks {
			return fmt.Errorf("store: %d of %d blocks: %s", r.Stored, matchBlocks, r.Reason)
		}
	}
	r, err := p.prefill.Match(ctx, process.MatchArgs{RequestID: "bench", Hashes: hashes, LeaseMs: 10_000, Times: matchTimes})
	if err != nil {
		return err
	}
	note := fmt.Sprintf("the target; p50 of %d, all hits, %d blocks in the ledger", matchTimes, matchBlocks*matchPrompts)
	b.latency("match_8192_go", r.Took, targetMatch, note, r.Blocks == matchBlocks)
	if _, err := os.Stat(b.python); err != nil {
		fmt.Fprintf(os.Stderr, "match_8192_python is left out: %v\n", err)
		return nil
	}
	blocks, took, err := b.matchPython(ctx, p, shape, hashes)
	if err != nil {
		return fmt.Errorf("match from Python: %w", err)
	}
	b.latency("match_8192_python", took, targetPython, note, blocks == matchBlocks)
	return nil
}

// matchPython does the same with the connector's client.
func (b *bench) matchPython(ctx context.Context, p *pair, shape standin.Shape, hashes []kvferry.Hash) (blocks int, took []time.Duration, err error) {
	space, err := protojson.Marshal(process.Space(shape))
	if err != nil {
		return 0, nil, err
	}
	var in, errs bytes.Buffer
	for i := range hashes {
		in.Write(hashes[i][:])
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, b.python, "-c", matchScript, p.a.SocketsDir(), string(space), fmt.Sprint(matchTimes))
	cmd.Stdin, cmd.Stderr = &in, &errs
	out, err := cmd.Output()
	if err != nil {
		return 0, nil, fmt.Errorf("%w: %s", err, errs.String())
	}
	var answer struct {
		Blocks int             `json:"blocks"`
		TookNs []time.Duration `json:"took_ns"`
	}
	if err := json.Unmarshal(out, &answer); err != nil {
		return 0, nil, err
	}
	return answer.Blocks, answer.TookNs, nil
}
