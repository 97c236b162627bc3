// Package gpu opens memory that a worker lends: today host memory in a memfd, which is the first kind of device memory and stands beside those of
// GPUs. It owns the mappings that it made, until they are closed. It copies nothing and knows no blocks.
package gpu

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Errors of Open. Nothing stays mapped.
var (
	// ErrNotSupported is returned for a kind of memory that this build or machine cannot open.
	ErrNotSupported = errors.New("gpu: not supported")
	// ErrDescriptor is returned when a descriptor is not what was declared: not a memfd, too small, or it could still shrink.
	ErrDescriptor = errors.New("gpu: descriptor does not fit")
)

// Access is what a mapping is for.
type Access int

// The accesses.
const (
	Read      Access = unix.PROT_READ
	ReadWrite Access = unix.PROT_READ | unix.PROT_WRITE
)

// Mapping is lent memory.
type Mapping struct {
	mem []byte
}

// OpenHost maps bytes of a memfd. The file must be sealed against shrinking: else its owner could make the daemon fault by truncating it.
// The descriptor stays the caller's.
func OpenHost(fd *os.File, bytes uint64, access Access) (*Mapping, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(fd.Fd()), &st); err != nil {
		return nil, fmt.Errorf("%w: %v", ErrDescriptor, err)
	}
	if uint64(st.Size) < bytes {
		return nil, fmt.Errorf("%w: it has %d bytes, %d were declared", ErrDescriptor, st.Size, bytes)
	}
	seals, err := unix.FcntlInt(fd.Fd(), unix.F_GET_SEALS, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: not a memfd: %v", ErrDescriptor, err)
	}
	if seals&unix.F_SEAL_SHRINK == 0 {
		return nil, fmt.Errorf("%w: not sealed with F_SEAL_SHRINK", ErrDescriptor)
	}
	mem, err := unix.Mmap(int(fd.Fd()), 0, int(bytes), int(access), unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", bytes, err)
	}
	return &Mapping{mem: mem}, nil
}

// WriteProtected tells whether a process of another uid that gets a descriptor of this memfd for reading can only read: a memfd's mode is 0777 at first, and its owner has to take that back.
func WriteProtected(fd *os.File) bool {
	var st unix.Stat_t
	return unix.Fstat(int(fd.Fd()), &st) == nil && st.Mode&0o222 == 0
}

// SealedForOthers tells whether nobody but those who have mapped it so already can write to a memfd.
func SealedForOthers(fd *os.File) bool {
	seals, err := unix.FcntlInt(fd.Fd(), unix.F_GET_SEALS, 0)
	return err == nil && seals&unix.F_SEAL_FUTURE_WRITE != 0
}

// ReadOnly opens a memfd once more, to be handed to others, who may map it for reading.
func ReadOnly(fd *os.File) (*os.File, error) {
	f, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", fd.Fd()), os.O_RDONLY, 0)
	if err != nil {
		return nil, fmt.Errorf("open memory for reading: %w", err)
	}
	return f, nil
}

// Bytes is the memory. It must not be used after Close, and be written only where it was opened for that.
func (m *Mapping) Bytes() []byte { return m.mem }

// Close unmaps.
func (m *Mapping) Close() error {
	if m.mem == nil {
		return nil
	}
	err := unix.Munmap(m.mem)
	m.mem = nil
	return err
}
