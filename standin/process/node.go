package process

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
)

// NodeConfig says how to run a daemon.
type NodeConfig struct {
	Daemon    string // path of kvferryd
	Name      string
	Dir       string // gets sockets/, kvferryd.yaml and kvferryd.log
	PoolPath  string // on tmpfs
	PoolBytes uint64
	SlabBytes uint64
	Listen    string   // host of peer and data ports
	Port      int      // of the Peer service, the next one is the data's; 0: both are chosen by the system
	Metrics   string   // host:port of /metrics; empty: none
	Network   *Network // where it is not nil, the node lives in the network's other namespace
	Extra     string   // more YAML
	// Supervise runs the daemon under a watchdog, which waits for a sign of life for so long; 0: without one.
	Supervise time.Duration
}

// Node is a running daemon.
type Node struct {
	NodeConfig
	cmd  *exec.Cmd
	once sync.Once
	dead chan struct{} // closed when the process has ended
}

// SocketsDir is where its sockets lie.
func (c NodeConfig) SocketsDir() string { return filepath.Join(c.Dir, "sockets") }

// AdminSocket is what kvferry --socket takes.
func (c NodeConfig) AdminSocket() string { return filepath.Join(c.SocketsDir(), "admin.sock") }

// LogPath is the daemon's log.
func (c NodeConfig) LogPath() string { return filepath.Join(c.Dir, "kvferryd.log") }

// StartNode starts a daemon and waits until it answers.
func StartNode(ctx context.Context, c NodeConfig) (*Node, error) {
	if err := os.MkdirAll(c.SocketsDir(), 0o755); err != nil {
		return nil, fmt.Errorf("start node %s: %w", c.Name, err)
	}
	data := 0
	if c.Port > 0 {
		data = c.Port + 1
	}
	config := fmt.Sprintf("node: %s\nsockets: {dir: %s}\npool: {path: %s, size: %d, slab: %d}\npeer: {listen: \"%s:%d\"}\ndata: {listen: \"%s:%d\"}\nmetrics: {listen: \"%s\"}\n%s",
		c.Name, c.SocketsDir(), c.PoolPath, c.PoolBytes, c.SlabBytes, c.Listen, c.Port, c.Listen, data, c.Metrics, c.Extra)
	path := filepath.Join(c.Dir, "kvferryd.yaml")
	if err := os.WriteFile(path, []byte(config), 0o644); err != nil {
		return nil, fmt.Errorf("start node %s: %w", c.Name, err)
	}
	log, err := os.OpenFile(c.LogPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("start node %s: %w", c.Name, err)
	}
	defer log.Close()
	args := []string{"--config", path}
	if c.Supervise > 0 {
		args = append(args, "--supervise", "--watchdog-timeout", c.Supervise.String())
	}
	n := &Node{NodeConfig: c, cmd: exec.Command(c.Daemon, args...), dead: make(chan struct{})}
	n.cmd.Env = append(os.Environ(), "TMPDIR="+c.Dir) // a watchdog that is killed leaves its socket there
	n.cmd.Stdout, n.cmd.Stderr = log, log
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	netns := ""
	if c.Network != nil {
		netns = c.Network.path
	}
	if err := inNetns(netns, n.cmd.Start); err != nil {
		return nil, fmt.Errorf("start node %s: %w", c.Name, err)
	}
	go func() {
		_ = n.cmd.Wait()
		close(n.dead)
	}()
	if err := n.Ready(ctx); err != nil {
		n.Kill()
		return nil, fmt.Errorf("start node %s: %w; its log ends:\n%s", c.Name, err, n.LogTail())
	}
	return n, nil
}

// Ready waits until the daemon answers its Admin socket.
func (n *Node) Ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for {
		if _, err := n.Status(ctx); err == nil {
			return nil
		}
		select {
		case <-n.dead:
			return fmt.Errorf("kvferryd %s", n.Ended())
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// Status asks the daemon how it is.
func (n *Node) Status(ctx context.Context) (r *kvferryv1.StatusResponse, err error) {
	err = n.Admin(func(c kvferryv1.AdminClient) error {
		r, err = c.Status(ctx, &kvferryv1.StatusRequest{})
		return err
	})
	return r, err
}

// Admin is for the daemon's Admin service.
func (n *Node) Admin(use func(kvferryv1.AdminClient) error) error {
	conn, err := grpc.NewClient("unix:"+n.AdminSocket(), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithNoProxy())
	if err != nil {
		return err
	}
	defer conn.Close()
	return use(kvferryv1.NewAdminClient(conn))
}

// Pid is the process id of what was started: the daemon, or its watchdog.
func (n *Node) Pid() int { return n.cmd.Process.Pid }

// DaemonPid is the process id of the daemon that serves, under a watchdog or not: the kernel tells who listens.
func (n *Node) DaemonPid() (int, error) {
	c, err := net.Dial("unix", n.AdminSocket())
	if err != nil {
		return 0, fmt.Errorf("find daemon: %w", err)
	}
	defer c.Close()
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, fmt.Errorf("find daemon: %w", err)
	}
	var who *unix.Ucred
	var serr error
	if err := raw.Control(func(fd uintptr) { who, serr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return 0, fmt.Errorf("find daemon: %w", err)
	}
	if serr != nil {
		return 0, fmt.Errorf("find daemon: %w", serr)
	}
	return int(who.Pid), nil
}

// Freeze stops the daemon (SIGSTOP), and returns when it has stopped.
func (n *Node) Freeze() error {
	pid, err := n.DaemonPid()
	if err != nil {
		return err
	}
	if err := freeze(pid); err != nil {
		return fmt.Errorf("freeze daemon: %w", err)
	}
	return nil
}

// Thaw lets a frozen daemon go on.
func (n *Node) Thaw() error {
	pid, err := n.DaemonPid()
	if err != nil {
		return err
	}
	return syscall.Kill(pid, syscall.SIGCONT)
}

// Dead is closed when the daemon has ended.
func (n *Node) Dead() <-chan struct{} { return n.dead }

// Ended says how the daemon has ended; it is empty while it runs.
func (n *Node) Ended() string {
	select {
	case <-n.dead:
	default:
		return ""
	}
	if w, ok := n.cmd.ProcessState.Sys().(syscall.WaitStatus); ok && w.Signaled() {
		return fmt.Sprintf("ended (killed by signal %d)", int(w.Signal()))
	}
	return fmt.Sprintf("ended (exit code %d)", n.cmd.ProcessState.ExitCode())
}

// Kill ends the daemon with SIGKILL.
func (n *Node) Kill() {
	_ = n.cmd.Process.Kill()
	<-n.dead
}

// Stop ends the daemon in order, and kills it when it takes more than ten seconds.
func (n *Node) Stop() { n.StopWithin(10 * time.Second) }

// StopWithin ends the daemon in order, and kills it when it takes longer. A daemon that is stopped (SIGSTOP) is killed too.
func (n *Node) StopWithin(limit time.Duration) {
	n.once.Do(func() {
		_ = n.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-n.dead:
		case <-time.After(limit):
			n.Kill()
		}
	})
}

// What LogTail reads at most, and tells.
const (
	logTailBytes = 64 << 10
	logTailLines = 15
)

// LogTail is the last lines of the daemon's log, without the configuration that it begins with.
func (n *Node) LogTail() string {
	b, _ := os.ReadFile(n.LogPath())
	return logTail(string(b[max(0, len(b)-logTailBytes):]))
}

func logTail(log string) string {
	var lines []string
	configuration := false
	for line := range strings.Lines(log) {
		line = strings.TrimSuffix(line, "\n")
		if line == "# effective configuration" {
			configuration = true
			continue
		}
		if configuration = configuration && ofConfiguration(line); !configuration {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines[max(0, len(lines)-logTailLines):], "\n")
}

// ofConfiguration: the node's name, a section, or what stands in one.
func ofConfiguration(line string) bool {
	return strings.HasPrefix(line, "node: ") || strings.HasPrefix(line, " ") || strings.HasSuffix(line, ":")
}
