package standin

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// The descriptor socket, as in WIRE.md.
const (
	descriptorMagic   = 0x4446564b
	descriptorPacket  = 84
	descriptorText    = 256
	entryPidfd        = 0xffffffff
	entryPool         = 0xfffffffe
	entryWords        = 0xfffffffd
	entryGenerations  = 0xfffffffc
	entryDaemon       = 0xfffffffb
	entryLent         = 0xfffffffa
	descriptorTimeout = 5 * time.Second
)

// files are what the daemon passes; what is not taken out is closed.
type files struct{ pool, words, daemon, memory, table *os.File }

func (f *files) close() {
	for _, f := range []*os.File{f.pool, f.words, f.daemon, f.memory, f.table} {
		if f != nil {
			_ = f.Close()
		}
	}
}

func ownPidfd() (*os.File, error) {
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return nil, fmt.Errorf("open own pidfd: %w", err)
	}
	return os.NewFile(uintptr(fd), "pidfd"), nil
}

// exchange passes this process's pidfd, which may be nil, and the descriptors of its memory, and returns those that come back.
func exchange(ctx context.Context, path string, token []byte, pidfd *os.File, regions map[uint32]*os.File) (*files, error) {
	ctx, cancel := context.WithTimeout(ctx, descriptorTimeout)
	defer cancel()
	dialed, err := (&net.Dialer{}).DialContext(ctx, "unixpacket", path)
	if err != nil {
		return nil, fmt.Errorf("dial descriptor socket: %w", err)
	}
	conn := dialed.(*net.UnixConn)
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	_ = conn.SetDeadline(deadline)
	packet := make([]byte, descriptorPacket)
	le := binary.LittleEndian
	le.PutUint32(packet, descriptorMagic)
	le.PutUint16(packet[4:], 1)
	copy(packet[8:24], token)
	var fds []int
	if pidfd != nil {
		le.PutUint32(packet[24:], entryPidfd)
		fds = append(fds, int(pidfd.Fd()))
	}
	for id, f := range regions {
		le.PutUint32(packet[24+4*len(fds):], id)
		fds = append(fds, int(f.Fd()))
	}
	le.PutUint16(packet[6:], uint16(len(fds)))
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	if _, _, err := conn.WriteMsgUnix(packet, rights, nil); err != nil {
		return nil, fmt.Errorf("pass descriptors: %w", err)
	}
	return receive(conn)
}

func receive(conn *net.UnixConn) (_ *files, err error) {
	packet, control := make([]byte, descriptorPacket+descriptorText), make([]byte, unix.CmsgSpace(4*15))
	n, nc, _, _, err := conn.ReadMsgUnix(packet, control)
	if err != nil {
		return nil, fmt.Errorf("receive descriptors: %w", err)
	}
	came, err := filesOf(control[:nc])
	defer func() {
		if err != nil {
			for _, f := range came {
				_ = f.Close()
			}
		}
	}()
	if err != nil {
		return nil, err
	}
	le := binary.LittleEndian
	if n < descriptorPacket || le.Uint32(packet) != descriptorMagic {
		return nil, errors.New("receive descriptors: malformed answer")
	}
	if code := le.Uint32(packet[8:]); code != 0 {
		text := packet[descriptorPacket:n]
		return nil, fmt.Errorf("receive descriptors: refused with code %d: %s", code, text[:min(len(text), int(le.Uint16(packet[12:])))])
	}
	if int(le.Uint16(packet[6:])) != len(came) {
		return nil, fmt.Errorf("receive descriptors: %d came", len(came))
	}
	out := &files{}
	to := map[uint32]**os.File{entryPool: &out.pool, entryWords: &out.words, entryDaemon: &out.daemon, entryLent: &out.memory, entryGenerations: &out.table}
	for i, f := range came {
		p := to[le.Uint32(packet[24+4*i:])]
		if p == nil || *p != nil {
			return nil, fmt.Errorf("receive descriptors: entry %#x", le.Uint32(packet[24+4*i:]))
		}
		*p = f
	}
	return out, nil
}

func filesOf(control []byte) (files []*os.File, err error) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil, fmt.Errorf("receive descriptors: %w", err)
	}
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return files, fmt.Errorf("receive descriptors: %w", err)
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			files = append(files, os.NewFile(uintptr(fd), "kvferry"))
		}
	}
	return files, nil
}

// mapFile maps all of f.
func mapFile(f *os.File, protection int) ([]byte, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	b, err := unix.Mmap(int(f.Fd()), 0, int(info.Size()), protection, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", info.Size(), err)
	}
	return b, nil
}
