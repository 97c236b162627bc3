package main

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

//go:embed nixl.py
var nixlScript string

// targetNIXL is how many times faster than NIXL a handoff on one node shall be.
const targetNIXL = 2.5

// peers moves the same windows of blocks between two processes with NIXL, right after ours: the ratio is ours over theirs.
func (b *bench) peers(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "kvferry-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	script := filepath.Join(dir, "nixl.py") // it starts itself again for the other process, which -c cannot
	if err := os.WriteFile(script, []byte(nixlScript), 0o644); err != nil {
		return err
	}
	for _, c := range cases {
		ours, ok := b.find("handoff_local_" + c.name)
		if !ok || c.shape.Planes > 1 {
			continue
		}
		fmt.Fprintf(os.Stderr, "NIXL, %s ...\n", c.name)
		took, wrong, err := b.runNIXL(ctx, script, c.shape.PlaneBytes)
		if err != nil {
			return fmt.Errorf("NIXL, %s: %w", c.name, err)
		}
		theirs := float64(window) / median(took).Seconds() / 1e9
		b.results = append(b.results, result{
			Name: "peer_nixl_read_" + c.name, Value: ours.Value, Unit: "GB/s", Limit: theirs, Ratio: ours.Value / theirs, Verified: ours.Verified && wrong == 0,
			note: "NIXL READ (UCX) between two processes; the value is ours, handoff_local", target: targetNIXL,
		})
	}
	return nil
}

func (b *bench) find(name string) (result, bool) {
	for _, r := range b.results {
		if r.Name == name {
			return r, true
		}
	}
	return result{}, false
}

func (b *bench) runNIXL(ctx context.Context, script string, blockBytes uint64) (took []time.Duration, wrong int, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	var errs bytes.Buffer
	cmd := exec.CommandContext(ctx, b.nixl, script, fmt.Sprint(blockBytes), fmt.Sprint(window/int(blockBytes)*int(blockBytes)), fmt.Sprint(b.rounds))
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		return nil, 0, fmt.Errorf("%w: %s", err, errs.String())
	}
	var answer struct {
		TookNs []time.Duration `json:"took_ns"`
		Wrong  int             `json:"wrong"`
	}
	if err := json.Unmarshal(out, &answer); err != nil {
		return nil, 0, err
	}
	return answer.TookNs, answer.Wrong, nil
}
