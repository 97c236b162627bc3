package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/standin"
	"github.com/kvferry/kvferry/standin/process"
)

const (
	restoreWindow    = driveWindow // of one round; as much as fio moves, of which the durations are compared
	restoreDepth     = 32          // of each transfer; fio has as many I/Os in flight as all of them
	restoreTransfers = 2
)

// restores measures how long a Load takes whose blocks lie on a drive only: drive, pool, worker. The limit is its slowest device, which is the drive: fio on a file beside it, in pairs.
func (b *bench) restores(ctx context.Context) error {
	if _, err := exec.LookPath("fio"); err != nil {
		return nil // drives has said so
	}
	for _, c := range cases[:3] {
		if !b.wanted("restore_" + c.name) {
			continue
		}
		fmt.Fprintf(os.Stderr, "restore, %s ...\n", c.name)
		if err := b.restore(ctx, c); err != nil {
			return fmt.Errorf("restore, %s: %w", c.name, err)
		}
	}
	return nil
}

func (b *bench) restore(ctx context.Context, c testCase) error {
	if err := os.MkdirAll(b.driveDir, 0o755); err != nil {
		return err
	}
	dir, err := os.MkdirTemp(b.driveDir, "restore-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if dir, err = filepath.Abs(dir); err != nil {
		return err
	}
	poolPath := filepath.Join("/dev/shm", filepath.Base(dir)+".pool")
	defer os.Remove(poolPath + ".lock")
	defer os.Remove(poolPath)
	n, err := process.StartNode(ctx, process.NodeConfig{
		Daemon: b.daemon, Name: "bench-restore", Dir: filepath.Join(dir, "node"), PoolPath: poolPath, PoolBytes: pools, SlabBytes: 64 << 20, Listen: "127.0.0.1",
		Extra: fmt.Sprintf("nvme: {depth: %d, transfers: %d, reserve: 0, drives: [{path: %s, size: 768MiB}]}\ndram: {idle: 0s}\n", restoreDepth, restoreTransfers, filepath.Join(dir, "drive")),
	})
	if err != nil {
		return err
	}
	defer n.Stop()
	w, err := process.StartWorker("restore")
	if err != nil {
		return err
	}
	defer w.Close()
	blocks := int(restoreWindow / c.shape.ShardBytes())
	shape := c.shape
	shape.Blocks = uint32(blocks)
	if err := w.Attach(ctx, process.AttachArgs{SocketsDir: n.SocketsDir(), Instance: "restore", Shape: shape}); err != nil {
		return err
	}
	hashes, parents := chain(blocks, 9)
	all := blockRange(0, blocks)
	if err := w.Write(ctx, all, hashes); err != nil {
		return err
	}
	if s, err := w.Store(ctx, batches(all, hashes, parents)...); err != nil || s.Stored != blocks {
		return fmt.Errorf("stored %d of %d blocks: %s %w", s.Stored, blocks, s.Reason, err)
	}
	f := fio{path: filepath.Join(dir, "fio"), blockBytes: c.shape.ShardBytes(), depth: restoreDepth * restoreTransfers}
	if err := f.prepare(ctx); err != nil {
		return err
	}
	var ours, limit []time.Duration
	verified := true
	for round := range max(b.rounds, driveRounds) + 1 {
		if err := leaveDRAM(ctx, n); err != nil {
			return err
		}
		if err := w.Scribble(ctx, all); err != nil {
			return err
		}
		r, err := w.Load(ctx, standin.LoadRequest{RequestID: "bench", Blocks: all, Hashes: hashes, DeadlineMs: 30_000})
		if err != nil {
			return err
		}
		wrong, err := w.Check(ctx, all, hashes)
		if err != nil {
			return err
		}
		verified = verified && wrong == 0 && r.Report.Loaded == blocks
		took, err := f.run(ctx, "randread", 0)
		if err != nil {
			return err
		}
		if round > 0 {
			ours, limit = append(ours, r.Took), append(limit, took)
		}
	}
	b.paired("restore_"+c.name, restoreWindow, ours, limit, fmt.Sprintf("the drive: fio randread, io_uring, O_DIRECT, depth %d", restoreDepth*restoreTransfers), verified)
	return nil
}

// leaveDRAM has every block copied to the drive, and leave the pool.
func leaveDRAM(ctx context.Context, n *process.Node) error {
	return n.Admin(func(c kvferryv1.AdminClient) error {
		for range 100 { // a call does a part, and blocks that are being moved leave with the next one
			q := &kvferryv1.DemoteRequest{Blocks: &kvferryv1.BlockSelection{All: true}, Move: true}
			for {
				a, err := c.Demote(ctx, q)
				if err != nil {
					return err
				}
				if a.Failed > 0 || a.NoRoom > 0 {
					return fmt.Errorf("%d blocks did not go down, for %d was no room", a.Failed, a.NoRoom)
				}
				if a.Next == 0 {
					break
				}
				q.From = a.Next
			}
			t, err := c.Tiers(ctx, &kvferryv1.TiersRequest{})
			if err != nil {
				return err
			}
			if t.Stores[0].Blocks == 0 {
				return nil
			}
		}
		return errors.New("blocks stay in DRAM")
	})
}
