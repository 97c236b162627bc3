package daemon

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/nvme"
	"github.com/kvferry/kvferry/tiers/policy"
	"github.com/kvferry/kvferry/tiers/pool"
)

// drivesMax bounds the drives of a node.
const drivesMax = 64

func (c *Config) validateTiers() error {
	if d := c.DRAM.OnIdle; d != "copy" && d != "move" {
		return fmt.Errorf("dram.onIdle: %q: must be copy or move", d)
	}
	if d := time.Duration(c.DRAM.Idle); d != 0 && (d < time.Second || d > 24*time.Hour) {
		return fmt.Errorf("dram.idle: %v: must be 0, or 1s to 24h", d)
	}
	if !(c.DRAM.High > 0 && c.DRAM.High <= 1) {
		return fmt.Errorf("dram.high: %v: must be above 0, at most 1", c.DRAM.High)
	}
	if !(c.DRAM.Low > 0 && c.DRAM.Low <= c.DRAM.High) {
		return fmt.Errorf("dram.low: %v: must be above 0, at most dram.high", c.DRAM.Low)
	}
	if _, err := policy.New(c.Policy, 1); err != nil {
		return fmt.Errorf("policy: %w", err)
	}
	if k := c.Adopt.Check; k != "headers" && k != "sample" && k != "all" {
		return fmt.Errorf("adopt.check: %q: must be headers, sample or all", k)
	}
	if n := c.NVMe.Transfers; n < 1 || n > 64 {
		return fmt.Errorf("nvme.transfers: %d: must be 1 to 64", n)
	}
	if b := c.NVMe.WriteBudget; b != 0 && b < 1<<20 {
		return fmt.Errorf("nvme.writeBudget: %d bytes a day: must be 0, or at least 1MiB", uint64(b))
	}
	return c.validateDrives()
}

func (c *Config) validateDrives() error {
	if len(c.NVMe.Drives) > drivesMax {
		return fmt.Errorf("nvme.drives: %d: at most %d", len(c.NVMe.Drives), drivesMax)
	}
	paths, slabs := map[string]bool{}, uint64(c.Pool.Size/c.Pool.Slab)
	for i, d := range c.NVMe.Drives {
		key := fmt.Sprintf("nvme.drives[%d]", i)
		switch {
		case !filepath.IsAbs(d.Path):
			return fmt.Errorf("%s.path: %q: must be an absolute path", key, d.Path)
		case paths[filepath.Clean(d.Path)] || filepath.Clean(d.Path) == filepath.Clean(c.Pool.Path):
			return fmt.Errorf("%s.path: %q stands twice", key, d.Path)
		case d.Size == 0:
			return errors.New(key + ".size: must be set: there is no default")
		}
		paths[filepath.Clean(d.Path)] = true
		if slabs += uint64(d.Size / max(c.NVMe.Slab, 1)); slabs > pool.SlabsMax {
			return fmt.Errorf("nvme.slab: %v: pool and drives have more than %d slabs: make it larger", c.NVMe.Slab, pool.SlabsMax)
		}
		if err := c.drive(d, nil).Validate(); err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
	}
	return nil
}

// drive is a drive's configuration. memory is the pool.
func (c *Config) drive(d DriveConfig, memory *nvme.Memory) nvme.Config {
	return nvme.Config{
		Path: d.Path, Bytes: uint64(d.Size), SlabBytes: uint64(c.NVMe.Slab), Reserve: uint64(c.NVMe.Reserve), Engine: c.NVMe.Engine, Depth: c.NVMe.Depth, Memory: memory,
	}
}

// down is what goes from DRAM to the drives.
func (c *Config) down() tiers.Down {
	return tiers.Down{Idle: time.Duration(c.DRAM.Idle), Move: c.DRAM.OnIdle == "move", High: c.DRAM.High, Low: c.DRAM.Low}
}

// ParseDrives reads drives that are written as FILE=SIZE.
func ParseDrives(list []string) (out []DriveConfig, err error) {
	for _, s := range list {
		i := strings.LastIndexByte(s, '=')
		if i < 0 {
			return nil, fmt.Errorf("%q is not FILE=SIZE", s)
		}
		d := DriveConfig{Path: s[:i]}
		if d.Size, err = ParseBytes(s[i+1:]); err != nil {
			return nil, fmt.Errorf("%q: %w", s, err)
		}
		out = append(out, d)
	}
	return out, nil
}
