package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvferry/kvferry/standin/process"
)

func TestMain(m *testing.M) {
	process.Main() // this executable is the workers' too
	os.Exit(m.Run())
}

// pidOf answers what a demo prints of a node's daemon, once it has attached the workers.
type pidOf struct {
	mu   sync.Mutex
	text bytes.Buffer
	node string
	pid  chan int
}

var nodeLine = regexp.MustCompile(`(node-[ab]): kvferryd \(pid (\d+)\)`)

func (p *pidOf) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.text.Write(b)
	if strings.Contains(string(b), "decode worker") {
		for _, m := range nodeLine.FindAllStringSubmatch(p.text.String(), -1) {
			if m[1] == p.node {
				pid, _ := strconv.Atoi(m[2])
				p.pid <- pid
			}
		}
	}
	return len(b), nil
}

// Whatever happens to a daemon, the demo says so first, ends soon and leaves nothing behind.
func TestDaemonInTrouble(t *testing.T) {
	if testing.Short() {
		t.Skip("runs demos")
	}
	daemon := filepath.Join(t.TempDir(), "kvferryd")
	if out, err := exec.Command("go", "build", "-o", daemon, "github.com/kvferry/kvferry/cmd/kvferryd").CombinedOutput(); err != nil {
		t.Fatalf("build kvferryd: %v\n%s", err, out)
	}
	for _, c := range []struct {
		name, node string
		signal     syscall.Signal
		interrupt  bool
		want       string // %d is the daemon's pid
	}{
		{"killed", "node-a", syscall.SIGKILL, false, "kvferryd of node-a ended (killed by signal 9)"},
		{"ended", "node-b", syscall.SIGTERM, false, "kvferryd of node-b ended (exit code 0)"},
		{"frozen", "node-b", syscall.SIGSTOP, false, "nothing has moved for 2 s: node-b does not answer its Admin socket (kvferryd, pid %d)"},
		{"interrupted", "node-a", syscall.SIGSTOP, true, "interrupted"},
	} {
		t.Run(c.name, func(t *testing.T) {
			tmp := t.TempDir()
			t.Setenv("TMPDIR", tmp)
			ctx, interrupt := context.WithCancel(t.Context())
			defer interrupt()
			out := &pidOf{node: c.node, pid: make(chan int, 1)}
			done := make(chan error, 1)
			go func() {
				done <- demo(ctx, options{daemon: daemon, requests: 100_000, flight: 2, still: 2 * time.Second}, out)
			}()
			var pid int
			select {
			case pid = <-out.pid:
			case err := <-done:
				t.Fatal(err)
			}
			time.Sleep(200 * time.Millisecond)
			if err := syscall.Kill(pid, c.signal); err != nil {
				t.Fatal(err)
			}
			time.Sleep(200 * time.Millisecond)
			begin := time.Now()
			if c.interrupt {
				interrupt()
			}
			err := <-done
			if took := time.Since(begin); c.interrupt && took > 5*time.Second {
				t.Errorf("took %s", took)
			}
			want := c.want
			if strings.Contains(want, "%d") {
				want = fmt.Sprintf(want, pid)
			}
			if err == nil {
				t.Fatal("no error")
			}
			if first, _, _ := strings.Cut(err.Error(), "\n"); first != want {
				t.Errorf("the first line is %q, want %q", first, want)
			}
			if strings.Contains(err.Error(), "effective configuration") || strings.Count(err.Error(), "log ends") > 1 {
				t.Error(err)
			}
			if left, _ := filepath.Glob(filepath.Join(tmp, dirPrefix+"*")); len(left) > 0 {
				t.Error(left)
			}
		})
	}
}
