package tcp

import (
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// scatter reads from a connection into several places with one system call. Deadlines and Close of the connection hold for it.
type scatter struct {
	raw  syscall.RawConn
	to   [][]byte
	got  int
	err  error
	step func(fd uintptr) bool // made once: it would escape on every read
}

func newScatter(conn *net.TCPConn) (*scatter, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	s := &scatter{raw: raw}
	s.step = func(fd uintptr) bool {
		for {
			if len(s.to) == 1 {
				s.got, s.err = unix.Read(int(fd), s.to[0])
			} else {
				s.got, s.err = unix.Readv(int(fd), s.to)
			}
			if s.err != unix.EINTR {
				return s.err != unix.EAGAIN
			}
		}
	}
	return s, nil
}

// read fills rooms in order. It returns 0 and no error at the end of the stream.
func (s *scatter) read(rooms [][]byte) (int, error) {
	s.to = rooms
	err := s.raw.Read(s.step)
	s.to = nil
	if err != nil {
		return 0, err
	}
	if s.err != nil {
		return 0, os.NewSyscallError("read", s.err)
	}
	return s.got, nil
}
