package session

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/gpu"
	"github.com/kvferry/kvferry/transport"
)

// Attach maps the descriptors that a process passed and makes its session ready. fds run beside entries; all of them stay the caller's.
// It answers the descriptors that the process gets, which the caller closes.
func (m *Manager) Attach(token [16]byte, cred Credentials, entries []uint32, fds []*os.File) (Descriptors, error) {
	s := m.takeToken(token)
	if s == nil {
		return Descriptors{}, fieldErr(ErrNotFound, "token", "unknown, used or expired")
	}
	if cred.UID != s.cred.UID {
		s.cancel(fmt.Errorf("%w: descriptors came from uid %d", ErrDenied, cred.UID))
		return Descriptors{}, fieldErr(ErrDenied, "uid", "%d is not the session's (%d)", cred.UID, s.cred.UID)
	}
	d, err := Descriptors{}, s.attach(cred, entries, fds)
	if err == nil {
		d, err = s.descriptors()
	}
	if err != nil {
		s.cancel(fmt.Errorf("attach: %w", err))
		return Descriptors{}, err
	}
	s.log.Info("session attached")
	s.send(Attached{})
	if within, yes := m.drains(); yes { // it was not told before
		s.send(Draining{within})
	}
	return d, nil
}

// Descriptors are handed to a process, and closed after that.
type Descriptors struct {
	Entries []uint32
	Files   []*os.File
}

func (d *Descriptors) add(entry uint32, open func() (*os.File, error)) error {
	f, err := open()
	if err != nil {
		d.Close()
		return err
	}
	d.Entries, d.Files = append(d.Entries, entry), append(d.Files, f)
	return nil
}

// Close closes them here.
func (d *Descriptors) Close() {
	for _, f := range d.Files {
		_ = f.Close()
	}
	d.Files = nil
}

// descriptors are what the process gets: the pool (read-only), its operation words, and where it lends memory to be written, our pidfd, which tells it when nobody can write any more.
func (s *Session) descriptors() (d Descriptors, err error) {
	err = d.add(entryPool, func() (*os.File, error) { return dup(s.m.cfg.PoolFile) })
	if err == nil {
		err = d.add(entryWords, s.dupWords)
	}
	if err == nil && s.m.cfg.Direct && slices.ContainsFunc(s.hello.Regions, func(r RegionSpec) bool { return r.Writable }) {
		err = d.add(entryDaemon, ownPidfd)
	}
	return d, err
}

func ownPidfd() (*os.File, error) {
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return nil, fmt.Errorf("open own pidfd: %w", err)
	}
	return os.NewFile(uintptr(fd), "pidfd"), nil
}

func dup(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate descriptor: %w", err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
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
	wanted := len(s.hello.Regions) + 1
	if s.hello.Generations > 0 {
		wanted++
	}
	if len(entries) != wanted {
		return invalid("entries", "%d descriptors: must be a pidfd, one for each of the %d regions, and the generation table that hello.generations tells of", len(entries), len(s.hello.Regions))
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
	table, err := s.openTable(byEntry[entryGenerations])
	if err != nil {
		closeRegions(regions)
		return err
	}
	if err := s.watch(pidfd); err != nil {
		closeRegions(regions)
		table.close()
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		closeRegions(regions)
		table.close()
		return fmt.Errorf("attach: %w: the session is closing", ErrState)
	}
	s.expiry.Stop()
	s.regions, s.table, s.ready = regions, table, true
	return nil
}

func closeRegions(rs map[uint32]*region) {
	for _, r := range rs {
		r.lent.close()
		r.target.close()
	}
}

func (s *Session) openRegion(spec RegionSpec, fd *os.File) (*region, error) {
	field := fmt.Sprintf("regions[%d]", spec.ID)
	l, err := openLent(field, fd, spec.Bytes, gpu.Read)
	if err != nil {
		return nil, err
	}
	r := &region{spec: spec, lent: l, memory: transport.Memory{ID: s.m.newRegionID(), Bytes: l.mapping.Bytes()}}
	r.copier = s.m.cfg.NewCopier(s.m.cfg.Pool, r.memory)
	if spec.Writable && s.m.cfg.Direct {
		if r.target, err = openLent(field, fd, spec.Bytes, gpu.ReadWrite); err != nil {
			l.close()
			return nil, err
		}
	}
	return r, nil
}

// dupWords is a descriptor of the words that outlives the session.
func (s *Session) dupWords() (*os.File, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		return nil, fmt.Errorf("%w: the session is closing", ErrState)
	}
	return dup(s.wordsMap.file)
}

// segments are where a block's planes lie.
func (r *region) segments(block uint32) []kvferry.Segment {
	out := make([]kvferry.Segment, len(r.spec.Planes))
	for i, p := range r.spec.Planes {
		out[i] = p.Segment(r.memory.ID, block)
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
