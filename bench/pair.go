package main

import (
	"context"
	"os"
	"path/filepath"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/standin"
	"github.com/kvferry/kvferry/standin/process"
)

// pair is two nodes with a worker each, and a second worker on the first.
type pair struct {
	dir                   string
	a, b                  *process.Node
	prefill, decode, near *process.Worker // decode is on b; near decodes too, but beside prefill
}

// newPair starts two nodes with pools of so many bytes, and the workers.
func (b *bench) newPair(ctx context.Context, pool uint64, prefill, decode standin.Shape) (p *pair, err error) {
	p = &pair{}
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	if p.dir, err = os.MkdirTemp("", "kvferry-bench-"); err != nil {
		return nil, err
	}
	here, there := "127.0.0.1", "127.0.0.2"
	if b.network != nil {
		here, there = b.network.Here, b.network.There
	}
	for _, n := range []struct {
		name, host string
		network    *process.Network
		to         **process.Node
	}{{"a", here, nil, &p.a}, {"b", there, b.network, &p.b}} {
		*n.to, err = process.StartNode(ctx, process.NodeConfig{Daemon: b.daemon, Name: "bench-" + n.name, Dir: filepath.Join(p.dir, n.name), PoolPath: p.poolPath(n.name),
			PoolBytes: pool, SlabBytes: 64 << 20, Listen: n.host, Network: n.network,
			Extra: "handoff: {direct: on}\n"}) // nothing freezes a benchmark's daemon
		if err != nil {
			return nil, err
		}
	}
	for _, w := range []struct {
		name  string
		to    **process.Worker
		node  *process.Node
		shape standin.Shape
	}{{"prefill", &p.prefill, p.a, prefill}, {"decode", &p.decode, p.b, decode}, {"near", &p.near, p.a, decode}} {
		if *w.to, err = process.StartWorker(w.name); err != nil {
			return nil, err
		}
		if err = (*w.to).Attach(ctx, process.AttachArgs{SocketsDir: w.node.SocketsDir(), Instance: w.name, Shape: w.shape}); err != nil {
			return nil, err
		}
	}
	return p, nil
}

func (p *pair) poolPath(node string) string {
	return filepath.Join("/dev/shm", filepath.Base(p.dir)+"-"+node+".pool")
}

func (p *pair) close() {
	for _, w := range []*process.Worker{p.prefill, p.decode, p.near} {
		if w != nil {
			w.Close()
		}
	}
	for _, n := range []*process.Node{p.a, p.b} {
		if n != nil {
			n.Stop()
		}
	}
	for _, name := range []string{"a", "b"} {
		_ = os.Remove(p.poolPath(name))
		_ = os.Remove(p.poolPath(name) + ".lock")
	}
	_ = os.RemoveAll(p.dir)
}

// chain is a prompt of n blocks that nobody has had before.
func chain(n int, seed uint64) (hashes, parents []kvferry.Hash) {
	var parent kvferry.Hash
	for i := range n {
		h := standin.Chain(parent, seed<<32|uint64(i))
		hashes, parents = append(hashes, h), append(parents, parent)
		parent = h
	}
	return hashes, parents
}

func blockRange(first, n int) []uint32 {
	list := make([]uint32, n)
	for i := range list {
		list[i] = uint32(first + i)
	}
	return list
}

// batches cuts a Store to what one operation may carry.
func batches(blocks []uint32, hashes, parents []kvferry.Hash) (list []standin.StoreRequest) {
	const most = 64
	for at := 0; at < len(blocks); at += most {
		to := min(at+most, len(blocks))
		list = append(list, standin.StoreRequest{RequestID: "bench", Blocks: blocks[at:to], Hashes: hashes[at:to], Parents: parents[at:to], DeadlineMs: 30_000})
	}
	return list
}
