package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/csrc/copyshim"
	"github.com/kvferry/kvferry/tiers/nvme"
	"github.com/kvferry/kvferry/tiers/pool"
)

const (
	driveWindow  = 384 << 20 // bytes that one round writes, and reads
	driveDepth   = 32        // I/Os in flight, ours and fio's
	driveMovers  = 2         // that share it
	driveBatch   = 32 << 20  // bytes of one Write or Read
	driveRounds  = 9         // at least; before them one that does not count
	targetDrives = 0.9
)

// drives measures our drives against fio on a file of the same length beside ours.
func (b *bench) drives(ctx context.Context) error {
	if _, err := exec.LookPath("fio"); err != nil {
		fmt.Fprintf(os.Stderr, "nvme_* is left out: %v\n", err)
		return nil
	}
	if err := os.MkdirAll(b.driveDir, 0o755); err != nil {
		return err
	}
	dir, err := os.MkdirTemp(b.driveDir, "nvme-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	memory, err := unix.Mmap(-1, 0, 2*driveWindow, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	defer unix.Munmap(memory)
	random := rand.NewChaCha8([32]byte{1})
	for at := 0; at < driveWindow; at += 1 << 20 {
		_, _ = random.Read(memory[at : at+1<<20])
	}
	for _, size := range []struct {
		name  string
		bytes uint64
	}{{"64k", 64 << 10}, {"256k", 256 << 10}, {"2m", 2 << 20}} {
		if !b.wanted("nvme_write_"+size.name, "nvme_read_"+size.name) {
			continue
		}
		fmt.Fprintf(os.Stderr, "nvme, %s ...\n", size.name)
		if err := b.drive(ctx, dir, size.name, size.bytes, memory[:driveWindow], memory[driveWindow:]); err != nil {
			return fmt.Errorf("nvme, %s: %w", size.name, err)
		}
	}
	return nil
}

// driveRig is one size's set-up.
type driveRig struct {
	d            *nvme.Drive
	memory       *nvme.Memory
	slots        [][2]int
	headers      []pool.Header // by slot
	slotBytes    uint64
	source, into []byte
	crcs         []uint32 // of the source's blocks
	random       *rand.Rand
	wrong        int
}

func (b *bench) drive(ctx context.Context, dir, name string, slotBytes uint64, source, into []byte) error {
	r, err := newDriveRig(dir, slotBytes, source, into)
	if err != nil {
		return err
	}
	defer r.close()
	f := fio{path: filepath.Join(dir, "fio-"+name), blockBytes: slotBytes, depth: driveDepth}
	if err := f.prepare(ctx); err != nil {
		return err
	}
	defer os.Remove(f.path)
	rounds := max(b.rounds, driveRounds)
	var write, read, fioWrite, fioSync, fioRead []time.Duration
	for round := range rounds + 1 {
		syncs := r.d.Stats().Syncs
		tookWrite, err := r.write(ctx, round)
		if err != nil {
			return err
		}
		syncs = r.d.Stats().Syncs - syncs
		limit, err := f.run(ctx, "randwrite", 0)
		if err != nil {
			return err
		}
		synced, err := f.run(ctx, "randwrite", len(r.slots)/int(syncs))
		if err != nil {
			return err
		}
		tookRead, err := r.read(ctx, round)
		if err != nil {
			return err
		}
		limitRead, err := f.run(ctx, "randread", 0)
		if err != nil {
			return err
		}
		if round > 0 {
			write, fioWrite, fioSync = append(write, tookWrite), append(fioWrite, limit), append(fioSync, synced)
			read, fioRead = append(read, tookRead), append(fioRead, limitRead)
		}
	}
	s, ok := r.d.Stats(), r.wrong == 0
	_, lowSync := ratios(fioSync, write)
	how := fmt.Sprintf("fio, io_uring, O_DIRECT, depth %d", driveDepth)
	b.paired("nvme_write_"+name, driveWindow, write, fioWrite, fmt.Sprintf("%s; against fio with as many fdatasyncs: at least %.2f", how, lowSync), ok)
	b.paired("nvme_read_"+name, driveWindow, read, fioRead, how, ok)
	fmt.Fprintf(os.Stderr, "  %s, direct %v, registered memory %v %s\n", s.Engine, s.Direct, s.Registered, s.Why)
	return nil
}

func newDriveRig(dir string, slotBytes uint64, source, into []byte) (*driveRig, error) {
	n := driveWindow / int(slotBytes)
	mapped := make(chan struct{})
	close(mapped)
	memory := nvme.NewMemory(source[:2*driveWindow], mapped)
	cfg := nvme.Config{Path: filepath.Join(dir, "ours"), SlabBytes: 64 << 20, Depth: driveDepth / driveMovers, Memory: memory}
	perSlab := pool.SlotsIn(cfg.SlabBytes, slotBytes)
	slabs := (n + perSlab - 1) / perSlab
	cfg.Bytes = 2<<20 + uint64(slabs)*cfg.SlabBytes
	_ = os.Remove(cfg.Path)
	d, _, err := nvme.Open(cfg)
	if err != nil {
		memory.Close()
		return nil, err
	}
	if d.Stats().Engine == nvme.EngineUring {
		<-memory.Settled()
	}
	r := &driveRig{d: d, memory: memory, slotBytes: slotBytes, source: source, into: into, headers: make([]pool.Header, n), random: rand.New(rand.NewPCG(slotBytes, 1))}
	for slab := range slabs {
		for slot := range min(d.FormatSlab(slab, slotBytes), n-len(r.slots)) {
			r.slots = append(r.slots, [2]int{slab, slot})
		}
	}
	for i := range n {
		r.crcs = append(r.crcs, copyshim.Checksum(0, r.block(source, i)))
	}
	return r, nil
}

func (r *driveRig) close() {
	_ = r.d.Close()
	r.memory.Close()
}

func (r *driveRig) block(of []byte, i int) []byte {
	at := i * int(r.slotBytes)
	return of[at : at+int(r.slotBytes) : at+int(r.slotBytes)]
}

// inBatches gives slots in random order to movers, batch by batch.
func (r *driveRig) inBatches(move func(list []int) error) (time.Duration, error) {
	order := r.random.Perm(len(r.slots))
	batches := make(chan []int, len(order))
	for list := range slices.Chunk(order, max(1, driveBatch/int(r.slotBytes))) {
		batches <- list
	}
	close(batches)
	errs := make([]error, driveMovers)
	var wg sync.WaitGroup
	start := time.Now()
	for i := range errs {
		wg.Go(func() {
			for list := range batches {
				if err := move(list); err != nil {
					errs[i] = err
					return
				}
			}
		})
	}
	wg.Wait()
	return time.Since(start), errors.Join(errs...)
}

// write replaces what is in every slot: each round another block of the source. From the first change until all is durable.
func (r *driveRig) write(ctx context.Context, round int) (time.Duration, error) {
	return r.inBatches(func(list []int) error {
		batch := make([]nvme.WriteOp, len(list))
		for k, i := range list {
			slab, slot := r.slots[i][0], r.slots[i][1]
			from := (i + round) % len(r.slots)
			r.d.Clear(slab, slot)
			h := pool.Header{Length: r.slotBytes, CRC32C: r.crcs[from], Shards: 1, Generation: r.d.Fill(slab, slot)}
			h.Hash[0], h.Hash[1], h.Hash[2] = byte(i), byte(i>>8), byte(i>>16)
			r.headers[i] = h
			batch[k] = nvme.WriteOp{Slab: slab, Slot: slot, Header: h, Payload: r.block(r.source, from)}
		}
		r.d.Write(ctx, batch)
		for k := range batch {
			if batch[k].Err != nil {
				return batch[k].Err
			}
		}
		return nil
	})
}

// read reads every slot, with its checksum, and compares all bytes afterwards.
func (r *driveRig) read(ctx context.Context, round int) (time.Duration, error) {
	clear(r.into)
	took, err := r.inBatches(func(list []int) error {
		batch := make([]nvme.ReadOp, len(list))
		for k, i := range list {
			batch[k] = nvme.ReadOp{Slab: r.slots[i][0], Slot: r.slots[i][1], Into: r.block(r.into, i), CRC32C: r.headers[i].CRC32C}
		}
		r.d.Read(ctx, batch)
		for k := range batch {
			if batch[k].Err != nil {
				return batch[k].Err
			}
		}
		return nil
	})
	for i := range r.slots {
		if !bytes.Equal(r.block(r.into, i), r.block(r.source, (i+round)%len(r.slots))) {
			r.wrong++
		}
	}
	return took, err
}

// fio is the tool that says what the drive can do.
type fio struct {
	path       string
	blockBytes uint64
	depth      int // I/Os in flight
}

// prepare writes its file once: what was only allocated takes longer to be written.
func (f fio) prepare(ctx context.Context) error {
	_, err := f.run(ctx, "write", 0)
	return err
}

// run moves a window, every block of it once, with a fdatasync each so many writes.
func (f fio) run(ctx context.Context, how string, syncEach int) (time.Duration, error) {
	args := []string{"--name=x", "--filename=" + f.path, fmt.Sprintf("--size=%d", driveWindow), fmt.Sprintf("--bs=%d", f.blockBytes), "--rw=" + how, "--ioengine=io_uring", "--direct=1",
		fmt.Sprintf("--iodepth=%d", f.depth), "--output-format=json"}
	if syncEach > 0 {
		args = append(args, fmt.Sprintf("--fdatasync=%d", syncEach))
	}
	var errs bytes.Buffer
	cmd := exec.CommandContext(ctx, "fio", args...)
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		return 0, fmt.Errorf("fio: %w: %s", err, errs.String())
	}
	type direction struct {
		Bytes float64 `json:"io_bytes"`
		Speed float64 `json:"bw_bytes"` // a second
	}
	var answer struct {
		Jobs []struct{ Read, Write direction }
	}
	if at := bytes.IndexByte(out, '{'); at > 0 {
		out = out[at:] // it may begin with a note
	}
	if err := json.Unmarshal(out, &answer); err != nil {
		return 0, fmt.Errorf("fio: %w", err)
	}
	if len(answer.Jobs) != 1 {
		return 0, fmt.Errorf("fio: %d jobs", len(answer.Jobs))
	}
	d := answer.Jobs[0].Write
	if how == "randread" {
		d = answer.Jobs[0].Read
	}
	if d.Bytes != driveWindow || d.Speed == 0 {
		return 0, fmt.Errorf("fio moved %.0f bytes of %d", d.Bytes, driveWindow)
	}
	return time.Duration(d.Bytes / d.Speed * 1e9), nil
}
