package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"time"

	"github.com/kvferry/kvferry/csrc/copyshim"
	"github.com/kvferry/kvferry/daemon/rpc"
	"github.com/kvferry/kvferry/daemon/tiering"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/nvme"
	"github.com/kvferry/kvferry/tiers/policy"
	"github.com/kvferry/kvferry/tiers/pool"
	"github.com/kvferry/kvferry/transport"
)

// slotsGuess is the slot length that the policy's tables are sized for, before any model is known.
const slotsGuess = 64 << 10

// absentDrive is one that could not be opened. It is tried again now and then: a drive that fails stops nobody.
type absentDrive struct {
	DriveConfig
	err   error
	since time.Time
}

// openTiers opens the drives, and makes the ledger over them and the pool out of what an earlier daemon has left there.
func (d *Daemon) openTiers(inPool []pool.Resident) error {
	blocks := uint64(d.cfg.Pool.Size) / slotsGuess
	for _, c := range d.cfg.NVMe.Drives {
		blocks += uint64(c.Size) / slotsGuess
	}
	p, err := policy.New(d.cfg.Policy, int(min(blocks, policyBlocksMax)))
	if err != nil {
		return fmt.Errorf("policy: %w", err)
	}
	d.ledger = tiers.New(tiers.Config{Pool: d.pool, Policy: p, Limits: tiers.DefaultLimits})
	d.ledger.SetWriteBudget(time.Now(), uint64(d.cfg.NVMe.WriteBudget))
	d.adoptPool(inPool)
	for i, c := range d.cfg.NVMe.Drives {
		err := d.openDrive(c)
		if errors.Is(err, nvme.ErrLocked) { // another daemon has it: that is no trouble of the drive's
			return fmt.Errorf("nvme.drives[%d]: %w", i, err)
		}
		if err != nil {
			d.log.Error("drive is not used: it could not be opened", "path", c.Path, "error", err)
			d.counters.Add("drives", "absent", 1)
			d.absent = append(d.absent, absentDrive{c, err, time.Now()})
		}
	}
	return nil
}

// driveOpenTimeout is how long the daemon waits for a drive to be opened and scanned: some hundred million slots, or one that hangs.
const driveOpenTimeout = 30 * time.Second

// opened is what has become of opening a drive.
type opened struct {
	drive *nvme.Drive
	found []pool.Resident
	err   error
}

// awaitDrive opens a drive, and gives up waiting when it takes too long: a drive that hangs stops nobody. It is opened by one goroutine at a time, whose result the next call takes.
func (d *Daemon) awaitDrive(c DriveConfig) opened {
	d.drivesMu.Lock()
	result := d.opening[c.Path]
	if result == nil {
		result = make(chan opened, 1)
		if d.opening == nil {
			d.opening = map[string]chan opened{}
		}
		d.opening[c.Path] = result
		go func() { // not waited for: only the device can end it
			drive, found, err := nvme.Open(d.cfg.drive(c, d.memory))
			if err == nil && d.ctx.Err() != nil { // nobody takes it any more
				err = errors.Join(context.Cause(d.ctx), drive.Close())
			}
			result <- opened{drive, found, err}
		}()
	}
	d.drivesMu.Unlock()
	timeout := time.NewTimer(driveOpenTimeout)
	defer timeout.Stop()
	select {
	case o := <-result:
		d.drivesMu.Lock()
		delete(d.opening, c.Path)
		d.drivesMu.Unlock()
		return o
	case <-timeout.C:
		return opened{err: fmt.Errorf("it does not answer: %v were not enough to open it", driveOpenTimeout)}
	case <-d.ctx.Done():
		return opened{err: context.Cause(d.ctx)}
	}
}

// openDrive opens a drive and takes over what is on it.
func (d *Daemon) openDrive(c DriveConfig) error {
	start := time.Now()
	o := d.awaitDrive(c)
	drive, found := o.drive, o.found
	if o.err != nil {
		return o.err
	}
	id, err := d.ledger.AddDrive(drive)
	if err != nil {
		_ = drive.Close()
		return err
	}
	kept := d.ledger.Adopt(time.Now(), id, found)
	st := drive.Stats()
	d.log.Info("drive is open", "path", c.Path, "size", c.Size.String(), "adopted", drive.Adopted(), "engine", st.Engine, "slots", kept, "dropped_slots", st.Dropped+len(found)-kept, "duplicates", st.Duplicates, "took", time.Since(start))
	for _, note := range drive.Notes() {
		d.log.Warn("drive", "path", c.Path, "note", note)
	}
	d.drivesMu.Lock()
	defer d.drivesMu.Unlock()
	d.drives, d.driveNames = append(d.drives, drive), append(d.driveNames, filepath.Clean(c.Path))
	if d.tiering != nil {
		d.tiering.Add(id, filepath.Clean(c.Path), drive)
	}
	d.ledger.SetOpen(id, true)
	return nil
}

// retryDrives tries to open what could not be opened before.
func (d *Daemon) retryDrives() {
	if !d.retrying.TryLock() {
		return // the last time goes on
	}
	defer d.retrying.Unlock()
	d.drivesMu.Lock()
	absent := slices.Clone(d.absent)
	d.drivesMu.Unlock()
	var still []absentDrive
	for _, a := range absent {
		if err := d.openDrive(a.DriveConfig); err != nil {
			a.err = err
			still = append(still, a)
		}
	}
	d.drivesMu.Lock()
	defer d.drivesMu.Unlock()
	d.absent = still
}

// absentDrives are those that could not be opened, for people.
func (d *Daemon) absentDrives() (out []rpc.AbsentDrive) {
	d.drivesMu.Lock()
	defer d.drivesMu.Unlock()
	for _, a := range d.absent {
		out = append(out, rpc.AbsentDrive{Path: a.Path, Reason: a.err.Error(), Since: a.since})
	}
	return out
}

// policyBlocksMax bounds the policy's memory of blocks that have left.
const policyBlocksMax = 1 << 22

// adoptPool takes over what was left in the pool, after as many checks as are configured.
func (d *Daemon) adoptPool(inPool []pool.Resident) {
	if !d.pool.Adopted() {
		d.log.Info("pool is new", "reason", d.pool.Cold())
		return
	}
	start := time.Now()
	d.adopted = d.ledger.Adopt(time.Now(), 0, d.checked(inPool))
	d.log.Info("pool adopted", "blocks", d.adopted, "dropped_slots", d.pool.Dropped()+len(inPool)-d.adopted, "took", time.Since(start))
}

// sampleOne is of how many blocks one is read with adopt.check: sample.
const sampleOne = 64

// checked reads pool slots and drops those whose bytes are not what was stored. What is on a drive is checked whenever it is read.
func (d *Daemon) checked(found []pool.Resident) []pool.Resident {
	every := map[string]int{"headers": 0, "sample": sampleOne, "all": 1}[d.cfg.Adopt.Check]
	if every == 0 {
		return found
	}
	kept, broken := found[:0:0], 0
	for i, r := range found {
		if !r.Aside && i%every == 0 {
			payload := d.pool.Bytes()[d.pool.SlotOffset(r.Slab, r.Slot):][:r.Header.Length]
			if copyshim.Checksum(0, payload) != r.Header.CRC32C {
				d.pool.Clear(r.Slab, r.Slot)
				broken++
				continue
			}
		}
		kept = append(kept, r)
	}
	if broken > 0 {
		d.log.Error("blocks of the pool were broken, and dropped", "blocks", broken, "check", d.cfg.Adopt.Check)
		d.counters.Add("broken_blocks", "pool", broken)
	}
	return kept
}

func (d *Daemon) makeTiering(memory transport.Memory, log *slog.Logger) {
	d.manual = &tiering.Manual{Ledger: d.ledger, Pool: memory, Counters: &d.counters, Log: log}
	if len(d.cfg.NVMe.Drives) == 0 {
		return
	}
	d.tiering = tiering.New(tiering.Config{
		Ledger: d.ledger, Pool: memory, Drives: d.drives, Names: d.driveNames, Down: d.cfg.down(), Transfers: d.cfg.NVMe.Transfers, Queue: d.cfg.Copy.Queue, Counters: &d.counters, Log: log,
	})
	d.manual.Tiering = d.tiering
}

// promote is how claims of other nodes get what is on a drive.
func (d *Daemon) promote() func(tiers.SpaceRef, uint16, []byte) {
	if d.tiering == nil {
		return nil
	}
	return d.tiering.Prefetch
}

func (d *Daemon) closeTiers() {
	if d.tiering != nil {
		d.tiering.Close()
	}
	if d.manual != nil {
		d.manual.Close()
	}
	for i, drive := range d.drives {
		if err := drive.Close(); err != nil {
			d.log.Error("close drive", "path", d.driveNames[i], "error", err)
		}
	}
	if d.memory != nil {
		d.memory.Close()
	}
}
