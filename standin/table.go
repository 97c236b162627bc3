package standin

import (
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Table is a block generation table (WIRE.md): the daemon and other workers read it, this process writes it.
type Table struct {
	Blocks uint32
	data   []byte
	file   *os.File
}

// NewTable makes one of zeros. Nobody else can map it for writing.
func NewTable(blocks uint32) (*Table, error) {
	fd, err := unix.MemfdCreate("kvferry-generations", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("create memfd: %w", err)
	}
	t := &Table{Blocks: blocks, file: os.NewFile(uintptr(fd), "kvferry-generations")}
	err = t.file.Truncate(8 * int64(blocks))
	if err == nil {
		t.data, err = unix.Mmap(fd, 0, 8*int(blocks), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_FUTURE_WRITE)
	}
	if err != nil {
		_ = t.Close()
		return nil, fmt.Errorf("make generation table: %w", err)
	}
	return t, nil
}

// Bump tells that these blocks are about to be written.
func (t *Table) Bump(blocks ...uint32) {
	for _, b := range blocks {
		atomic.AddUint64(generationAt(t.data, b), 1)
	}
}

// Generations are those of these blocks now.
func (t *Table) Generations(blocks []uint32) []uint64 {
	out := make([]uint64, len(blocks))
	for i, b := range blocks {
		out[i] = atomic.LoadUint64(generationAt(t.data, b))
	}
	return out
}

func generationAt(table []byte, block uint32) *uint64 {
	return (*uint64)(unsafe.Pointer(&table[8*uint64(block)]))
}

// Close unmaps the table. No session may use it any more.
func (t *Table) Close() error {
	var err error
	if t.data != nil {
		err = unix.Munmap(t.data)
		t.data = nil
	}
	if e := t.file.Close(); err == nil {
		err = e
	}
	return err
}
