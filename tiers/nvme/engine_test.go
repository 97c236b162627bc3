package nvme_test

import (
	"errors"
	"path/filepath"
	"testing"

	"github.com/kvferry/kvferry/tiers/nvme"
	"github.com/kvferry/kvferry/tiers/nvme/nvmetest"
	"github.com/kvferry/kvferry/tiers/pool"
)

// onFile opens a file of the test's own with one engine.
func onFile(engine string) func(t *testing.T) nvmetest.Opener {
	return func(t *testing.T) nvmetest.Opener {
		path := filepath.Join(t.TempDir(), "drive")
		return func(cfg nvme.Config) (*nvme.Drive, []pool.Resident, error) {
			cfg.Path, cfg.Engine = path, engine
			return nvme.Open(cfg)
		}
	}
}

// inMemory opens a device of nvmetest.
func inMemory(*testing.T) nvmetest.Opener {
	var dev *nvmetest.Device
	return func(cfg nvme.Config) (*nvme.Drive, []pool.Resident, error) {
		if dev == nil {
			dev = nvmetest.New(int64(cfg.Bytes))
		} else {
			dev = dev.Restart(0)
		}
		return nvme.OpenDevice(cfg, dev)
	}
}

func TestThreads(t *testing.T) { nvmetest.Suite(t, onFile(nvme.EngineThreads)) }

func TestUring(t *testing.T) {
	cfg := nvmetest.Config
	cfg.Path, cfg.Engine = filepath.Join(t.TempDir(), "drive"), nvme.EngineUring
	d, _, err := nvme.Open(cfg)
	if errors.Is(err, nvme.ErrEngine) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	_ = d.Close()
	nvmetest.Suite(t, onFile(nvme.EngineUring))
}

func TestMemoryDevice(t *testing.T) { nvmetest.Suite(t, inMemory) }
