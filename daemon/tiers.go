package daemon

import (
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/kvferry/kvferry/csrc/copyshim"
	"github.com/kvferry/kvferry/daemon/tiering"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/nvme"
	"github.com/kvferry/kvferry/tiers/policy"
	"github.com/kvferry/kvferry/tiers/pool"
	"github.com/kvferry/kvferry/transport"
)

// slotsGuess is the slot length that the policy's tables are sized for, before any model is known.
const slotsGuess = 64 << 10

// openTiers opens the drives, and makes the ledger over them and the pool out of what an earlier daemon has left there.
func (d *Daemon) openTiers(inPool []pool.Resident) error {
	var onDrives [][]pool.Resident
	cfg := tiers.Config{Pool: d.pool, Limits: tiers.DefaultLimits}
	blocks := uint64(d.cfg.Pool.Size) / slotsGuess
	for i, c := range d.cfg.NVMe.Drives {
		drive, found, err := nvme.Open(d.cfg.drive(c, d.pool.Bytes()))
		if err != nil {
			return fmt.Errorf("nvme.drives[%d]: %w", i, err)
		}
		d.drives = append(d.drives, drive)
		cfg.Drives = append(cfg.Drives, drive)
		onDrives = append(onDrives, found)
		blocks += uint64(c.Size) / slotsGuess
		st := drive.Stats()
		d.log.Info("drive is open", "path", c.Path, "size", c.Size.String(), "adopted", drive.Adopted(), "engine", st.Engine, "slots", len(found), "dropped_slots", st.Dropped, "duplicates", st.Duplicates)
		for _, note := range drive.Notes() {
			d.log.Warn("drive", "path", c.Path, "note", note)
		}
	}
	p, err := policy.New(d.cfg.Policy, int(min(blocks, policyBlocksMax)))
	if err != nil {
		return fmt.Errorf("policy: %w", err)
	}
	cfg.Policy = p
	d.ledger = tiers.New(cfg)
	d.adopt(inPool, onDrives)
	d.ledger.SetWriteBudget(time.Now(), uint64(d.cfg.NVMe.WriteBudget))
	return nil
}

// policyBlocksMax bounds the policy's memory of blocks that have left.
const policyBlocksMax = 1 << 22

// adopt takes over what was left, after as many checks as are configured.
func (d *Daemon) adopt(inPool []pool.Resident, onDrives [][]pool.Resident) {
	start := time.Now()
	if d.pool.Adopted() {
		found := d.checked(inPool)
		d.adopted = d.ledger.Adopt(time.Now(), 0, found)
		d.log.Info("pool adopted", "blocks", d.adopted, "dropped_slots", d.pool.Dropped()+len(inPool)-d.adopted, "took", time.Since(start))
	} else {
		d.log.Info("pool is new", "reason", d.pool.Cold())
	}
	for i, found := range onDrives {
		kept := d.ledger.Adopt(time.Now(), tiers.StoreID(i+1), found)
		d.log.Info("drive adopted", "path", d.cfg.NVMe.Drives[i].Path, "blocks", kept, "dropped_slots", len(found)-kept)
	}
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
	if len(d.drives) == 0 {
		return
	}
	var names []string
	for _, c := range d.cfg.NVMe.Drives {
		names = append(names, filepath.Clean(c.Path))
	}
	d.tiering = tiering.New(tiering.Config{
		Ledger: d.ledger, Pool: memory, Drives: d.drives, Names: names, Down: d.cfg.down(), Transfers: d.cfg.NVMe.Transfers, Queue: d.cfg.Copy.Queue, Counters: &d.counters, Log: log,
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
			d.log.Error("close drive", "path", d.cfg.NVMe.Drives[i].Path, "error", err)
		}
	}
}
