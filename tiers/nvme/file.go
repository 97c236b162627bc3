package nvme

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// engine runs batches on a descriptor.
type engine interface {
	run(ctx context.Context, write bool, batch []IO, done func(i int))
	describe(info *Info) // sets what is the engine's to say
	close()
}

// fileDevice is a file: metadata through the page cache on one descriptor, payloads past it on another.
type fileDevice struct {
	meta   *os.File
	data   *os.File
	engine engine
	info   Info
	size   int64
}

// newFileDevice opens the second descriptor and the engine. It takes meta only when it succeeds.
func newFileDevice(meta *os.File, cfg Config) (dev *fileDevice, err error) {
	st, err := meta.Stat()
	if err != nil {
		return nil, err
	}
	f := &fileDevice{meta: meta, size: st.Size(), info: Info{Depth: cfg.Depth}}
	if f.data, f.info.Direct, err = openDirect(meta, cfg.Path); err != nil {
		return nil, err
	}
	// What a failed sync has left in the page cache, clean and not on the drive, must not be adopted: clean pages are dropped, and what is dirty is synced first.
	if err = f.Sync(); err == nil {
		err = unix.Fadvise(int(meta.Fd()), 0, 0, unix.FADV_DONTNEED)
	}
	if err == nil {
		f.engine, err = newEngine(f.data, cfg, &f.info)
	}
	if err != nil {
		_ = f.data.Close()
		return nil, err
	}
	return f, nil
}

// openDirect opens the file that meta is once more, past the page cache where the file system allows it.
func openDirect(meta *os.File, path string) (*os.File, bool, error) {
	name := fmt.Sprintf("/proc/self/fd/%d", meta.Fd())
	data, err := os.OpenFile(name, os.O_RDWR|unix.O_DIRECT, 0)
	if err == nil {
		if _, err = data.ReadAt(alignedBuffer(Align), 0); err == nil {
			return data, true, nil
		}
		_ = data.Close()
	}
	if !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EOPNOTSUPP) {
		return nil, false, fmt.Errorf("open past the page cache: %w", err)
	}
	data, err = os.OpenFile(name, os.O_RDWR, 0)
	return data, false, err
}

// newEngine is the configured engine, or for "auto" the first that works here.
func newEngine(data *os.File, cfg Config, info *Info) (engine, error) {
	if cfg.Engine != EngineThreads {
		e, err := newUring(data, cfg)
		if err == nil {
			return e, nil
		}
		if cfg.Engine == EngineUring {
			return nil, fmt.Errorf("%w: nvme.engine: uring: %w", ErrEngine, err)
		}
		info.Why = fmt.Sprintf("no io_uring: %v", err)
	}
	return newThreads(data, cfg.Depth), nil
}

// Run is Device.
func (f *fileDevice) Run(ctx context.Context, write bool, batch []IO, done func(i int)) {
	if done == nil {
		done = func(int) {}
	}
	if len(batch) > 0 {
		f.engine.run(ctx, write, batch, done)
	}
}

// ReadAt is Device.
func (f *fileDevice) ReadAt(p []byte, off int64) error {
	_, err := f.meta.ReadAt(p, off) // as long as p, or an error
	return err
}

// WriteAt is Device.
func (f *fileDevice) WriteAt(p []byte, off int64) error {
	_, err := f.meta.WriteAt(p, off)
	return err
}

// Sync is Device.
func (f *fileDevice) Sync() error {
	for {
		err := unix.Fdatasync(int(f.meta.Fd()))
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// Size is Device.
func (f *fileDevice) Size() int64 { return f.size }

// Info is Device.
func (f *fileDevice) Info() Info {
	info := f.info
	f.engine.describe(&info)
	return info
}

// Close is Device.
func (f *fileDevice) Close() error {
	if f.engine != nil {
		f.engine.close()
	}
	err := f.meta.Close()
	if f.data != nil {
		err = errors.Join(err, f.data.Close())
	}
	return err
}
