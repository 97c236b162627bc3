package session

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// The descriptor socket (WIRE.md).
const (
	descriptorMagic   = 0x4446564b // "KVFD"
	descriptorVersion = 1
	descriptorsMax    = 15
	requestBytes      = 84
	answerTextMax     = 256
	entryPidfd        = 0xffffffff
	entryPool         = 0xfffffffe
	entryWords        = 0xfffffffd
	entryGenerations  = 0xfffffffc // of a scheduler's blocks
	entryDaemon       = 0xfffffffb // our own pidfd
	entryLent         = 0xfffffffa // memory of another worker
	entryFirst        = entryLent  // no region has a number from here on

	descriptorTimeout = 5 * time.Second
	descriptorConns   = 64
)

type descriptorRequest struct {
	token   [16]byte
	entries []uint32
}

// parseDescriptorRequest reads the one packet that a client sends.
func parseDescriptorRequest(b []byte) (descriptorRequest, error) {
	var r descriptorRequest
	if len(b) != requestBytes {
		return r, invalid("length", "%d bytes: must be %d", len(b), requestBytes)
	}
	if m := binary.LittleEndian.Uint32(b); m != descriptorMagic {
		return r, invalid("magic", "%#x", m)
	}
	if v := binary.LittleEndian.Uint16(b[4:]); v != descriptorVersion {
		return r, fieldErr(ErrUnsupported, "version", "%d: this daemon speaks %d", v, descriptorVersion)
	}
	n := binary.LittleEndian.Uint16(b[6:])
	if n > descriptorsMax {
		return r, invalid("count", "%d: must be 0 to %d", n, descriptorsMax)
	}
	copy(r.token[:], b[8:24])
	for i := range int(n) {
		r.entries = append(r.entries, binary.LittleEndian.Uint32(b[24+4*i:]))
	}
	return r, nil
}

func descriptorAnswer(code uint32, text string, entries ...uint32) []byte {
	if len(text) > answerTextMax {
		text = text[:answerTextMax]
	}
	b := make([]byte, requestBytes, requestBytes+len(text))
	binary.LittleEndian.PutUint32(b, descriptorMagic)
	binary.LittleEndian.PutUint16(b[4:], descriptorVersion)
	binary.LittleEndian.PutUint16(b[6:], uint16(len(entries)))
	binary.LittleEndian.PutUint32(b[8:], code)
	binary.LittleEndian.PutUint16(b[12:], uint16(len(text)))
	for i, e := range entries {
		binary.LittleEndian.PutUint32(b[24+4*i:], e)
	}
	return append(b, text...)
}

// ServeDescriptors answers the descriptor socket until ctx ends. code translates an error to a gRPC status code.
func (m *Manager) ServeDescriptors(ctx context.Context, l *net.UnixListener, code func(error) uint32) error {
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	slots := make(chan struct{}, descriptorConns)
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return nil
		}
		c, err := l.AcceptUnix()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			<-slots
			if !errors.Is(err, unix.EMFILE) && !errors.Is(err, unix.ENFILE) && !errors.Is(err, unix.ECONNABORTED) {
				return fmt.Errorf("accept on descriptor socket: %w", err)
			}
			m.cfg.Log.Warn("accept on descriptor socket", "error", err)
			select { // descriptors have run out; others are being closed
			case <-time.After(50 * time.Millisecond):
			case <-ctx.Done():
			}
			continue
		}
		if cred, err := PeerCredentials(c); err != nil || !m.cfg.Allowed(cred.UID) { // before it can take a place from others
			m.cfg.Counters.Add("attach", "foreign_uid", 1)
			_ = c.Close()
			<-slots
			continue
		}
		wg.Go(func() {
			defer func() { <-slots }()
			defer func() { _ = c.Close() }()
			m.serveDescriptors(c, code, m.cfg.Log)
		})
	}
}

func (m *Manager) serveDescriptors(c *net.UnixConn, code func(error) uint32, log *slog.Logger) {
	_ = c.SetDeadline(time.Now().Add(descriptorTimeout))
	d, err := m.receiveDescriptors(c)
	if err != nil {
		m.cfg.Counters.Add("attach", "refused", 1)
		log.Warn("descriptors refused", "error", err)
		_, _ = c.Write(descriptorAnswer(code(err), err.Error()))
		return
	}
	defer d.Close()
	m.cfg.Counters.Add("attach", "ok", 1)
	b := descriptorAnswer(0, "", d.Entries...)
	var fds []int
	for _, f := range d.Files {
		fds = append(fds, int(f.Fd()))
	}
	rights := unix.UnixRights(fds...)
	if _, _, err := c.WriteMsgUnix(b, rights, nil); err != nil {
		log.Warn("answer descriptors", "error", err) // the session's stream ends, or its token expires
	}
}

func (m *Manager) receiveDescriptors(c *net.UnixConn) (Descriptors, error) {
	cred, err := PeerCredentials(c)
	if err != nil {
		return Descriptors{}, err
	}
	b := make([]byte, requestBytes+1)
	oob := make([]byte, unix.CmsgSpace(4*(descriptorsMax+1)))
	n, oobn, flags, _, err := c.ReadMsgUnix(b, oob)
	fds, ferr := parseRights(oob[:max(oobn, 0)])
	defer func() {
		for _, f := range fds {
			_ = f.Close()
		}
	}()
	if err != nil {
		return Descriptors{}, fmt.Errorf("read descriptors: %w", err)
	}
	if ferr != nil {
		return Descriptors{}, ferr
	}
	if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		return Descriptors{}, invalid("length", "packet was cut: %d bytes or more, %d descriptors or more", n, len(fds))
	}
	r, err := parseDescriptorRequest(b[:n])
	if err != nil {
		return Descriptors{}, err
	}
	if len(r.entries) == 0 {
		return m.LentDescriptors(r.token, cred)
	}
	return m.Attach(r.token, cred, r.entries, fds)
}

func parseRights(oob []byte) ([]*os.File, error) {
	var out []*os.File
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, invalid("control", "%v", err)
	}
	for i := range msgs {
		fds, err := unix.ParseUnixRights(&msgs[i])
		if errors.Is(err, unix.EINVAL) {
			continue // not descriptors
		}
		if err != nil {
			return out, invalid("control", "%v", err)
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			out = append(out, os.NewFile(uintptr(fd), "received"))
		}
	}
	return out, nil
}

// PeerCredentials asks the kernel who is at the other end.
func PeerCredentials(c *net.UnixConn) (Credentials, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return Credentials{}, fmt.Errorf("peer credentials: %w", err)
	}
	var u *unix.Ucred
	var uerr error
	if err := raw.Control(func(fd uintptr) { u, uerr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return Credentials{}, fmt.Errorf("peer credentials: %w", err)
	}
	if uerr != nil {
		return Credentials{}, fmt.Errorf("peer credentials: %w", uerr)
	}
	return Credentials{PID: u.Pid, UID: u.Uid}, nil
}
