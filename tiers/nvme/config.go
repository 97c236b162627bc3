package nvme

import (
	"errors"
	"fmt"

	"github.com/kvferry/kvferry/tiers/pool"
)

// Errors. They are found with errors.Is; the errno behind one, where there is one, with errors.As or errors.Is too.
var (
	// ErrForeign is returned by Open when the path holds something that is not a drive file of ours, or one of a newer format. It is never changed. A retry is useless.
	ErrForeign = errors.New("nvme: not a drive file of this version")
	// ErrLocked is returned by Open when another daemon has the file open. A retry may succeed when that one is gone.
	ErrLocked = errors.New("nvme: in use by another daemon")
	// ErrNoSpace is returned by Open when the file system has not the configured size, or not with the reserve. A retry may succeed.
	ErrNoSpace = errors.New("nvme: not enough space")
	// ErrEngine is returned by Open when the configured engine cannot be had here.
	ErrEngine = errors.New("nvme: engine not available")
	// ErrDevice is returned when the device, or the file system, fails. What was to be written is not believed; a retry may succeed after Flush does.
	ErrDevice = errors.New("nvme: device error")
	// ErrCorrupt is returned by Read when the bytes are not those that were written. A retry is of little use: the block is lost.
	ErrCorrupt = errors.New("nvme: checksum does not hold")
	// ErrCleared is returned by Write for a slot that was cleared meanwhile.
	ErrCleared = errors.New("nvme: slot was cleared")
	// ErrArgument is returned for an operation that does not fit its slot. A retry is useless.
	ErrArgument = errors.New("nvme: operation does not fit")
	// ErrClosed is returned after Close.
	ErrClosed = errors.New("nvme: closed")
)

// Bounds of a configuration.
const (
	slabBytesMin = 2 << 20
	slabBytesMax = 1 << 30
	depthDefault = 32
	depthMax     = 1024
)

// Engines.
const (
	EngineAuto    = "auto" // uring, or threads where that cannot be had
	EngineUring   = "uring"
	EngineThreads = "threads"
)

// Config says where a drive's file lies, how large it is and how it is driven.
type Config struct {
	Path      string  // the file; made if it is missing, mode 0600
	Bytes     uint64  // of the file; rounded down to whole slabs; never more than this on disk
	SlabBytes uint64  // a power of two, 2 MiB .. 1 GiB; a file that is there keeps what it has
	Reserve   uint64  // bytes of the file system that stay free when the file is made or grows
	Engine    string  // EngineAuto (also ""), EngineUring, EngineThreads
	Depth     int     // I/Os in flight per batch; 0: 32
	Memory    *Memory // where most payloads lie; may be nil. It is closed after the drive
}

// Validate names the first key that is wrong.
func (c Config) Validate() error {
	if c.Path == "" {
		return errors.New("nvme.path: must be set")
	}
	return c.validateGeometry()
}

func (c Config) validateGeometry() error {
	if c.SlabBytes < slabBytesMin || c.SlabBytes > slabBytesMax || c.SlabBytes&(c.SlabBytes-1) != 0 {
		return fmt.Errorf("nvme.slab: %d bytes: must be a power of two from 2 MiB to 1 GiB", c.SlabBytes)
	}
	if c.Bytes < slabsAt+2*c.SlabBytes {
		return fmt.Errorf("nvme.size: %d bytes: must hold at least two slabs of %d bytes and 2 MiB", c.Bytes, c.SlabBytes)
	}
	if c.Bytes > slabsAt+pool.SlabsMax*c.SlabBytes {
		return fmt.Errorf("nvme.size: %d bytes: at most %d slabs of %d bytes", c.Bytes, pool.SlabsMax, c.SlabBytes)
	}
	switch c.Engine {
	case "", EngineAuto, EngineUring, EngineThreads:
	default:
		return fmt.Errorf("nvme.engine: %q: must be auto, uring or threads", c.Engine)
	}
	if c.Depth < 0 || c.Depth > depthMax {
		return fmt.Errorf("nvme.depth: %d: must be 1 to %d, or 0 for %d", c.Depth, depthMax, depthDefault)
	}
	return nil
}

func (c Config) withDefaults() Config {
	if c.Engine == "" {
		c.Engine = EngineAuto
	}
	if c.Depth == 0 {
		c.Depth = depthDefault
	}
	return c
}

// slabsIn is how many slabs a file of so many bytes has.
func slabsIn(bytes, slabBytes uint64) int {
	if bytes < slabsAt {
		return 0
	}
	return int(min((bytes-slabsAt)/slabBytes, pool.SlabsMax))
}

// fileBytes is the length of a file of so many slabs.
func fileBytes(slabs int, slabBytes uint64) uint64 { return slabsAt + uint64(slabs)*slabBytes }
