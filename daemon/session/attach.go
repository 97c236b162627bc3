package session

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/gpu"
	"github.com/kvferry/kvferry/transport"
)

// Attach maps the descriptors that a process passed and makes its session ready. fds run beside entries; all of them stay the caller's.
// It answers the descriptors that the process gets: the pool (read-only), which stays the daemon's, and the operation words, which the caller closes.
func (m *Manager) Attach(token [16]byte, cred Credentials, entries []uint32, fds []*os.File) (pool, wordsFile *os.File, err error) {
	s := m.takeToken(token)
	if s == nil {
		return nil, nil, fieldErr(ErrNotFound, "token", "unknown, used or expired")
	}
	if cred.UID != s.cred.UID {
		s.cancel(fmt.Errorf("%w: descriptors came from uid %d", ErrDenied, cred.UID))
		return nil, nil, fieldErr(ErrDenied, "uid", "%d is not the session's (%d)", cred.UID, s.cred.UID)
	}
	if err := s.attach(cred, entries, fds); err != nil {
		s.cancel(fmt.Errorf("attach: %w", err))
		return nil, nil, err
	}
	if wordsFile, err = s.dupWords(); err != nil {
		s.cancel(fmt.Errorf("attach: %w", err))
		return nil, nil, err
	}
	s.log.Info("session attached")
	s.send(Attached{})
	return m.cfg.PoolFile, wordsFile, nil
}

func (s *Session) attach(cred Credentials, entries []uint32, fds []*os.File) error {
	if len(entries) != len(fds) {
		return invalid("count", "%d entries, %d descriptors", len(entries), len(fds))
	}
	byEntry := map[uint32]*os.File{}
	for i, e := range entries {
		if byEntry[e] != nil {
			return invalid("entries", "%#x stands twice", e)
		}
		byEntry[e] = fds[i]
	}
	pidfd := byEntry[entryPidfd]
	if pidfd == nil {
		return invalid("entries", "no pidfd")
	}
	if len(entries) != len(s.hello.Regions)+1 {
		return invalid("entries", "%d descriptors: must be a pidfd and one for each of the %d regions", len(entries), len(s.hello.Regions))
	}
	if err := checkPidfd(pidfd, cred.PID); err != nil {
		return err
	}
	regions := map[uint32]*region{}
	for _, spec := range s.hello.Regions {
		fd := byEntry[spec.ID]
		if fd == nil {
			closeRegions(regions)
			return invalid("entries", "no descriptor for region %d", spec.ID)
		}
		r, err := s.openRegion(spec, fd)
		if err != nil {
			closeRegions(regions)
			return err
		}
		regions[spec.ID] = r
	}
	if err := s.watch(pidfd); err != nil {
		closeRegions(regions)
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		closeRegions(regions)
		return fmt.Errorf("attach: %w: the session is closing", ErrState)
	}
	s.expiry.Stop()
	s.regions, s.ready = regions, true
	return nil
}

func closeRegions(rs map[uint32]*region) {
	for _, r := range rs {
		_ = r.mapping.Close()
	}
}

func (s *Session) openRegion(spec RegionSpec, fd *os.File) (*region, error) {
	m, err := gpu.OpenHost(fd, spec.Bytes)
	if err != nil {
		kind := ErrInvalid
		if errors.Is(err, gpu.ErrNotSupported) {
			kind = ErrUnsupported
		}
		return nil, &FieldError{Field: fmt.Sprintf("regions[%d]", spec.ID), Reason: err.Error(), kind: kind}
	}
	mem := transport.Memory{ID: s.m.newRegionID(), Bytes: m.Bytes()}
	return &region{spec: spec, mapping: m, memory: mem, copier: s.m.cfg.NewCopier(s.m.cfg.Pool, mem)}, nil
}

// dupWords is a descriptor of the words that outlives the session.
func (s *Session) dupWords() (*os.File, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		return nil, fmt.Errorf("%w: the session is closing", ErrState)
	}
	fd, err := unix.FcntlInt(s.wordsMap.file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate operation words: %w", err)
	}
	return os.NewFile(uintptr(fd), "kvferry-words"), nil
}

// segments are where a block's planes lie.
func (r *region) segments(block uint32) []kvferry.Segment {
	out := make([]kvferry.Segment, len(r.spec.Planes))
	for i, p := range r.spec.Planes {
		out[i] = kvferry.Segment{Region: r.memory.ID, Offset: p.Base + uint64(block)*p.Stride, Length: p.Bytes}
	}
	return out
}

// checkPidfd proves that a descriptor is the pidfd of the process at the other end of the socket.
func checkPidfd(f *os.File, pid int32) error {
	b, err := os.ReadFile("/proc/self/fdinfo/" + strconv.Itoa(int(f.Fd())))
	if err != nil {
		return invalid("pidfd", "read fdinfo: %v", err)
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "Pid:"); ok {
			if got, err := strconv.Atoi(strings.TrimSpace(v)); err != nil || int32(got) != pid {
				return fieldErr(ErrDenied, "pidfd", "is of process %s, the socket's peer is %d", strings.TrimSpace(v), pid)
			}
			return nil
		}
	}
	return invalid("pidfd", "not a pidfd")
}

// watch ends the session when the process is dead, whatever still holds its sockets open.
func (s *Session) watch(pidfd *os.File) error {
	if !s.begin() {
		return fmt.Errorf("watch process: %w: the session is closing", ErrState)
	}
	err := s.m.cfg.Watch(s.ctx, pidfd, func() { s.cancel(ErrProcessGone) }, s.quiet.Done)
	if err != nil {
		s.quiet.Done()
		return fmt.Errorf("watch process: %w", err)
	}
	return nil
}

// WatchProcess waits in the runtime's poller: it costs no thread. pidfd stays the caller's.
func WatchProcess(ctx context.Context, pidfd *os.File, gone, done func()) error {
	fd, err := unix.FcntlInt(pidfd.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return err
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	raw, err := f.SyscallConn()
	if err != nil {
		_ = f.Close()
		return err
	}
	context.AfterFunc(ctx, func() { _ = f.Close() })
	go func() {
		defer done()
		if err := raw.Read(func(fd uintptr) bool { return exited(int(fd)) }); err == nil {
			gone()
		}
	}()
	return nil
}

// exited tells whether the process of a pidfd is dead.
func exited(fd int) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(p, 0)
		if err == syscall.EINTR {
			continue
		}
		return err == nil && n == 1
	}
}

func (s *Session) attachExpired() {
	s.cancel(fmt.Errorf("%w: no descriptors came within %v", ErrLimit, s.m.cfg.Limits.AttachTimeout))
}
