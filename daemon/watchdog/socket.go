package watchdog

import (
	"fmt"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// messageBytes is more than anybody has to say; the rest of a longer one is cut off.
const messageBytes = 4096

// message is a datagram and the process that sent it, as the kernel tells.
type message struct {
	pid  int32
	text string
}

// socket is where children report to.
type socket struct {
	dir, path string
	conn      *net.UnixConn
	messages  chan message
	settled   chan struct{}
	closed    chan struct{}
}

// mark is what this process sends itself.
const mark = "MARK"

// listen makes a socket in a new directory that only this user may enter: a stranger could fill the queue, and no beat would come through.
func listen(dir string) (*socket, error) {
	dir, err := os.MkdirTemp(dir, "kvferryd-")
	if err != nil {
		return nil, fmt.Errorf("make socket: %w", err)
	}
	s := &socket{dir: dir, path: filepath.Join(dir, "notify"), messages: make(chan message), settled: make(chan struct{}), closed: make(chan struct{})}
	if s.conn, err = net.ListenUnixgram("unixgram", &net.UnixAddr{Name: s.path, Net: "unixgram"}); err != nil {
		_ = os.RemoveAll(dir)
		return nil, fmt.Errorf("make socket: %w", err)
	}
	if err := s.askCredentials(); err != nil {
		_ = s.conn.Close()
		_ = os.RemoveAll(dir)
		return nil, err
	}
	go s.receive()
	return s, nil
}

// askCredentials has the kernel put the sender's to every message.
func (s *socket) askCredentials() error {
	raw, err := s.conn.SyscallConn()
	if err != nil {
		return fmt.Errorf("make socket: %w", err)
	}
	var opt error
	if err := raw.Control(func(fd uintptr) { opt = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PASSCRED, 1) }); err != nil {
		return fmt.Errorf("make socket: %w", err)
	}
	if opt != nil {
		return fmt.Errorf("make socket: SO_PASSCRED: %w", opt)
	}
	return nil
}

func (s *socket) receive() {
	b, oob := make([]byte, messageBytes), make([]byte, unix.CmsgSpace(unix.SizeofUcred))
	for {
		n, on, _, _, err := s.conn.ReadMsgUnix(b, oob)
		if err != nil {
			return // closed: there is no other error of a datagram socket that is bound
		}
		pid, ok := sender(oob[:on])
		if !ok {
			continue
		}
		m := message{pid, string(b[:n])}
		if m.text == mark && int(pid) == os.Getpid() {
			select {
			case s.settled <- struct{}{}:
			case <-s.closed:
			}
			continue
		}
		select {
		case s.messages <- m:
		case <-s.closed:
			return
		}
	}
}

// settle returns when all that was sent before is taken from messages. Only one call at a time.
func (s *socket) settle() {
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: s.path, Net: "unixgram"})
	if err != nil {
		return
	}
	defer c.Close()
	if _, err := c.Write([]byte(mark)); err != nil {
		return
	}
	select {
	case <-s.settled:
	case <-s.closed:
	}
}

// sender is the process that the credentials name.
func sender(oob []byte) (pid int32, ok bool) {
	all, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return 0, false
	}
	for i := range all {
		if c, err := unix.ParseUnixCredentials(&all[i]); err == nil {
			return c.Pid, true
		}
	}
	return 0, false
}

func (s *socket) close() {
	close(s.closed)
	_ = s.conn.Close()
	_ = os.RemoveAll(s.dir)
}
