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
	descriptorTimeout = 5 * time.Second
)

// exchange passes this process's pidfd and the regions' descriptors, and returns those of the pool and of the operation words.
func exchange(ctx context.Context, path string, token []byte, regions map[uint32]*os.File) (pool, words *os.File, err error) {
	ctx, cancel := context.WithTimeout(ctx, descriptorTimeout)
	defer cancel()
	dialed, err := (&net.Dialer{}).DialContext(ctx, "unixpacket", path)
	if err != nil {
		return nil, nil, fmt.Errorf("dial descriptor socket: %w", err)
	}
	conn := dialed.(*net.UnixConn)
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	_ = conn.SetDeadline(deadline)
	pidfd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return nil, nil, fmt.Errorf("open own pidfd: %w", err)
	}
	defer unix.Close(pidfd)

	packet := make([]byte, descriptorPacket)
	le := binary.LittleEndian
	le.PutUint32(packet, descriptorMagic)
	le.PutUint16(packet[4:], 1)
	le.PutUint16(packet[6:], uint16(1+len(regions)))
	copy(packet[8:24], token)
	le.PutUint32(packet[24:], entryPidfd)
	fds := []int{pidfd}
	for id, f := range regions {
		le.PutUint32(packet[24+4*len(fds):], id)
		fds = append(fds, int(f.Fd()))
	}
	if _, _, err := conn.WriteMsgUnix(packet, unix.UnixRights(fds...), nil); err != nil {
		return nil, nil, fmt.Errorf("pass descriptors: %w", err)
	}
	return receive(conn)
}

func receive(conn *net.UnixConn) (pool, words *os.File, err error) {
	packet, control := make([]byte, descriptorPacket+descriptorText), make([]byte, unix.CmsgSpace(4*15))
	n, nc, _, _, err := conn.ReadMsgUnix(packet, control)
	if err != nil {
		return nil, nil, fmt.Errorf("receive descriptors: %w", err)
	}
	files, err := filesOf(control[:nc])
	defer func() {
		if err != nil {
			for _, f := range files {
				_ = f.Close()
			}
		}
	}()
	if err != nil {
		return nil, nil, err
	}
	le := binary.LittleEndian
	if n < descriptorPacket || le.Uint32(packet) != descriptorMagic {
		return nil, nil, errors.New("receive descriptors: malformed answer")
	}
	if code := le.Uint32(packet[8:]); code != 0 {
		text := packet[descriptorPacket:n]
		return nil, nil, fmt.Errorf("receive descriptors: refused with code %d: %s", code, text[:min(len(text), int(le.Uint16(packet[12:])))])
	}
	if int(le.Uint16(packet[6:])) != len(files) {
		return nil, nil, fmt.Errorf("receive descriptors: %d came", len(files))
	}
	for i, f := range files {
		switch le.Uint32(packet[24+4*i:]) {
		case entryPool:
			pool = f
		case entryWords:
			words = f
		}
	}
	if pool == nil || words == nil || len(files) != 2 {
		return nil, nil, errors.New("receive descriptors: want the pool and the words")
	}
	return pool, words, nil
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

// mapFile maps all of f and closes it.
func mapFile(f *os.File, protection int) ([]byte, error) {
	defer f.Close()
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
