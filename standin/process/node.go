package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

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
	Listen    string   // host of peer and data ports; the ports are chosen by the system
	Network   *Network // where it is not nil, the node lives in the network's other namespace
	Extra     string   // more YAML
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
	config := fmt.Sprintf("node: %s\nsockets: {dir: %s}\npool: {path: %s, size: %d, slab: %d}\npeer: {listen: \"%s:0\"}\ndata: {listen: \"%s:0\"}\nmetrics: {listen: \"\"}\n%s",
		c.Name, c.SocketsDir(), c.PoolPath, c.PoolBytes, c.SlabBytes, c.Listen, c.Listen, c.Extra)
	path := filepath.Join(c.Dir, "kvferryd.yaml")
	if err := os.WriteFile(path, []byte(config), 0o644); err != nil {
		return nil, fmt.Errorf("start node %s: %w", c.Name, err)
	}
	log, err := os.OpenFile(c.LogPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("start node %s: %w", c.Name, err)
	}
	defer log.Close()
	n := &Node{NodeConfig: c, cmd: exec.Command(c.Daemon, "--config", path), dead: make(chan struct{})}
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
	if err := n.ready(ctx); err != nil {
		n.Kill()
		return nil, fmt.Errorf("start node %s: %w; its log ends:\n%s", c.Name, err, n.LogTail())
	}
	return n, nil
}

// ready waits until the daemon answers its Admin socket.
func (n *Node) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for {
		if _, err := n.Status(ctx); err == nil {
			return nil
		}
		select {
		case <-n.dead:
			return errors.New("the daemon has ended")
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// Status asks the daemon how it is.
func (n *Node) Status(ctx context.Context) (*kvferryv1.StatusResponse, error) {
	conn, err := grpc.NewClient("unix:"+n.AdminSocket(), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithNoProxy())
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return kvferryv1.NewAdminClient(conn).Status(ctx, &kvferryv1.StatusRequest{})
}

// Pid is the daemon's process id.
func (n *Node) Pid() int { return n.cmd.Process.Pid }

// Dead is closed when the daemon has ended.
func (n *Node) Dead() <-chan struct{} { return n.dead }

// Kill ends the daemon with SIGKILL.
func (n *Node) Kill() {
	_ = n.cmd.Process.Kill()
	<-n.dead
}

// Stop ends the daemon in order, and kills it when it takes more than ten seconds.
func (n *Node) Stop() {
	n.once.Do(func() {
		_ = n.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-n.dead:
		case <-time.After(10 * time.Second):
			n.Kill()
		}
	})
}

// LogTail is the end of the daemon's log.
func (n *Node) LogTail() string {
	b, _ := os.ReadFile(n.LogPath())
	if len(b) > 2000 {
		b = b[len(b)-2000:]
	}
	return string(b)
}
