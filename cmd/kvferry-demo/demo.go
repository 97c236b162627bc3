package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvferry/kvferry/standin"
	"github.com/kvferry/kvferry/standin/process"
)

const (
	promptBlocksMax = 256 // longer prompts are cut
	poolBytes       = 1536 << 20
	slabBytes       = 64 << 20
)

// shape is the KV memory of the workers, but for the number of blocks: 8 layers of 8 KiB a block, where a real model has megabytes.
var shape = standin.Shape{Planes: 8, PlaneBytes: 8 << 10}

type options struct {
	daemon   string
	trace    string
	requests int
	flight   int
	keep     bool
	still    time.Duration // after which the demo fails when nothing moves
}

// stage is everything that the demo runs on.
type stage struct {
	options
	out     io.Writer
	dir     string
	lock    *os.File // held while dir is in use
	prompts []prompt
	tally   tally
	// attached counts workers.
	attached atomic.Int64
	nodeA    *process.Node
	nodeB    *process.Node
	decode   *process.Worker
	prefill  atomic.Pointer[process.Worker] // replaced when it is killed
	restart  restart
}

// restart is what happened when the prefill worker was killed.
type restart struct {
	at       int // prompts done
	attached time.Duration
	resident int // blocks in the pool right after it
}

func demo(ctx context.Context, o options, out io.Writer) (err error) {
	s := &stage{options: o, out: out}
	var source string
	if s.prompts, source, err = readTrace(o.trace, o.requests); err != nil {
		return err
	}
	shape.Blocks = uint32(o.flight * promptBlocksMax)
	fmt.Fprintf(out, "kvferry demo: %d prompts of %s, blocks of %d KiB\n", len(s.prompts), source, shape.ShardBytes()>>10)
	if n := removeLeftovers(os.TempDir(), shm); n > 0 {
		fmt.Fprintf(out, "removed what demos left that had been killed: %d\n", n)
	}
	defer s.cleanUp()
	begin, err := s.perform(ctx)
	if err != nil {
		return err
	}
	if err := s.report(ctx, time.Since(begin)); err != nil {
		return err
	}
	if o.keep {
		fmt.Fprintln(out, "\nAll of it is left running. Ctrl-C ends it.")
		s.linger(ctx)
	}
	return nil
}

// perform sets up and plays, while the daemons are watched.
func (s *stage) perform(ctx context.Context) (begin time.Time, err error) {
	ctx, fail := context.WithCancelCause(ctx)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer fail(nil)
	if err := s.startNodes(ctx); err != nil {
		if errors.Is(ctx.Err(), context.Canceled) {
			return begin, errInterrupted
		}
		return begin, err // it has the log
	}
	watching.Go(func() { s.watch(ctx, fail) })
	if err := s.startWorkers(ctx); err != nil {
		return begin, s.explain(ctx, err)
	}
	begin = time.Now()
	if err := s.play(ctx); err != nil {
		return begin, s.explain(ctx, err)
	}
	return begin, nil
}

func (s *stage) startNodes(ctx context.Context) (err error) {
	if s.dir, s.lock, err = newDir(os.TempDir()); err != nil {
		return err
	}
	for _, n := range []struct {
		name, host string
		node       **process.Node
	}{{"a", "127.0.0.1", &s.nodeA}, {"b", "127.0.0.2", &s.nodeB}} {
		*n.node, err = process.StartNode(ctx, process.NodeConfig{Daemon: s.daemon, Name: "node-" + n.name, Dir: filepath.Join(s.dir, n.name), PoolPath: poolPath(s.dir, shm, n.name),
			PoolBytes: poolBytes, SlabBytes: slabBytes, Listen: n.host})
		if err != nil {
			return err
		}
		fmt.Fprintf(s.out, "node-%s: kvferryd (pid %d), pool of %d MiB\n", n.name, (*n.node).Pid(), poolBytes>>20)
	}
	return nil
}

func (s *stage) startWorkers(ctx context.Context) error {
	prefill, err := s.startWorker(ctx, "prefill", s.nodeA)
	if err != nil {
		return err
	}
	s.prefill.Store(prefill)
	s.decode, err = s.startWorker(ctx, "decode", s.nodeB)
	return err
}

func (s *stage) startWorker(ctx context.Context, name string, n *process.Node) (*process.Worker, error) {
	w, err := process.StartWorker(name)
	if err != nil {
		return nil, err
	}
	if err := w.Attach(ctx, process.AttachArgs{SocketsDir: n.SocketsDir(), Instance: name, Shape: shape}); err != nil {
		w.Kill()
		return nil, err
	}
	s.attached.Add(1)
	fmt.Fprintf(s.out, "%s: %s worker (pid %d), %d MiB of shared KV memory\n", n.Name, name, w.Pid(), shape.Bytes()>>20)
	return w, nil
}

// play runs all prompts, some at a time, and kills the prefill worker in the middle.
func (s *stage) play(ctx context.Context) error {
	stop := make(chan struct{})
	var drawing sync.WaitGroup
	drawing.Go(func() { newBar(s.out, len(s.prompts)).watch(&s.tally, stop) })
	defer drawing.Wait()
	defer close(stop)

	half := len(s.prompts) / 2
	if err := s.flights(ctx, s.prompts[:half], nil); err != nil {
		return err
	}
	// The worker dies while prompts are under way; who had one begins it again with the new worker.
	killed := make(chan struct{})
	var killing errgroup.Group
	reached := make(chan struct{})
	killing.Go(func() error {
		defer close(killed)
		select {
		case <-reached:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		return s.killPrefill(ctx)
	})
	err := s.flights(ctx, s.prompts[half:], &interruption{after: int64(s.flight * 2), reached: reached, over: killed})
	return errors.Join(err, killing.Wait())
}

// interruption tells flights about the killing: reached is closed with the request that has this number; over is closed when there is a new worker.
type interruption struct {
	after   int64
	begun   atomic.Int64
	reached chan struct{}
	over    chan struct{}
}

// flights runs prompts, each in a part of the memory of its own.
func (s *stage) flights(ctx context.Context, prompts []prompt, in *interruption) error {
	next := make(chan *prompt)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		defer close(next)
		for i := range prompts {
			select {
			case next <- &prompts[i]:
			case <-ctx.Done():
				return nil
			}
		}
		return nil
	})
	for part := range s.flight {
		g.Go(func() error {
			for p := range next {
				if err := s.one(ctx, p, uint32(part*promptBlocksMax), in); err != nil {
					return err
				}
				s.tally.add(func(t *tally) { t.done++ })
			}
			return nil
		})
	}
	return g.Wait()
}

// one runs a prompt, once more if the worker was killed under it.
func (s *stage) one(ctx context.Context, p *prompt, first uint32, in *interruption) error {
	if in != nil && in.begun.Add(1) == in.after {
		close(in.reached)
	}
	w := s.prefill.Load()
	err := s.request(ctx, w, p, first)
	if err == nil || in == nil {
		return err
	}
	select {
	case <-in.over:
	case <-ctx.Done():
		return err
	}
	if again := s.prefill.Load(); again != w {
		s.tally.add(func(t *tally) { t.retried++ })
		return s.request(ctx, again, p, first)
	}
	return err
}

// killPrefill kills the worker with SIGKILL and starts it again.
func (s *stage) killPrefill(ctx context.Context) error {
	s.prefill.Load().Kill()
	begin := time.Now()
	done, _, _ := s.tally.progress()
	w, err := process.StartWorker("prefill")
	if err != nil {
		return err
	}
	if err := w.Attach(ctx, process.AttachArgs{SocketsDir: s.nodeA.SocketsDir(), Instance: "prefill", Shape: shape}); err != nil {
		w.Kill()
		return err
	}
	s.attached.Add(1)
	s.restart = restart{at: done, attached: time.Since(begin)}
	s.prefill.Store(w)
	status, err := s.nodeA.Status(ctx)
	if err != nil {
		return err
	}
	for _, t := range status.Tiers {
		s.restart.resident += int(t.Blocks)
	}
	return nil
}

// cleanUp ends everything and removes what was made, whatever state the demo and its daemons are in.
func (s *stage) cleanUp() {
	var ending sync.WaitGroup
	for _, w := range []*process.Worker{s.prefill.Load(), s.decode} {
		if w != nil {
			ending.Go(func() { w.CloseWithin(closeWithin) })
		}
	}
	ending.Wait()
	for _, n := range []*process.Node{s.nodeA, s.nodeB} {
		if n != nil {
			ending.Go(func() { n.StopWithin(stopWithin) })
		}
	}
	ending.Wait()
	if s.dir != "" {
		removeDir(s.dir, shm)
		_ = s.lock.Close()
	}
}
