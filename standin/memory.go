package standin

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry"
	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
)

// Shape is how KV memory is laid out: for every layer one array of blocks, as engines have it.
type Shape struct {
	Blocks     uint32
	Planes     int
	PlaneBytes uint64 // of one block in one plane
}

// ShardBytes is the length of a block.
func (s Shape) ShardBytes() uint64 { return uint64(s.Planes) * s.PlaneBytes }

// Bytes is the size of the memory.
func (s Shape) Bytes() uint64 { return uint64(s.Blocks) * s.ShardBytes() }

// Memory is KV memory in a sealed memfd: the daemon reads it, this process writes it.
type Memory struct {
	Shape
	Data []byte
	file *os.File
}

// NewMemory maps zeroed memory. Its pages come when they are first written.
func NewMemory(s Shape) (*Memory, error) {
	fd, err := unix.MemfdCreate("kvferry-standin", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("create memfd: %w", err)
	}
	m := &Memory{Shape: s, file: os.NewFile(uintptr(fd), "kvferry-standin")}
	err = m.file.Truncate(int64(s.Bytes()))
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK)
	}
	if err == nil {
		err = m.file.Chmod(0o444) // whoever it is lent to shall not open it for writing
	}
	if err == nil {
		m.Data, err = unix.Mmap(fd, 0, int(s.Bytes()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		_ = m.file.Close()
		return nil, fmt.Errorf("map %d bytes of memfd: %w", s.Bytes(), err)
	}
	return m, nil
}

// Chmod sets the memfd's mode: who may open it once more, and how. NewMemory lets nobody open it for writing.
func (m *Memory) Chmod(mode os.FileMode) error { return m.file.Chmod(mode) }

// Close unmaps the memory. No session may use it any more.
func (m *Memory) Close() error {
	if m.Data == nil {
		return nil
	}
	err := unix.Munmap(m.Data)
	m.Data = nil
	if e := m.file.Close(); err == nil {
		err = e
	}
	return err
}

// Plane is one layer's part of a block.
func (m *Memory) Plane(block uint32, plane int) []byte {
	at := uint64(plane)*uint64(m.Blocks)*m.PlaneBytes + uint64(block)*m.PlaneBytes
	return m.Data[at : at+m.PlaneBytes : at+m.PlaneBytes]
}

// segments adds a block's planes in order to list.
func (m *Memory) segments(list []kvferry.Segment, block uint32) []kvferry.Segment {
	for p := range uint64(m.Planes) {
		list = append(list, kvferry.Segment{Region: regionID, Offset: p*uint64(m.Blocks)*m.PlaneBytes + uint64(block)*m.PlaneBytes, Length: m.PlaneBytes})
	}
	return list
}

// Region describes the memory for Hello.
func (m *Memory) Region(id uint32, kind kvferryv1.RegionKind) *kvferryv1.Region {
	r := &kvferryv1.Region{Id: id, Kind: kind, Bytes: m.Bytes(), Blocks: m.Blocks}
	for p := range m.Planes {
		r.Planes = append(r.Planes, &kvferryv1.Plane{Base: uint64(p) * uint64(m.Blocks) * m.PlaneBytes, Stride: m.PlaneBytes, Bytes: m.PlaneBytes})
	}
	return r
}
