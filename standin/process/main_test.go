package process

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"
)

// daemonPath is a kvferryd that was built for these tests.
var daemonPath string

func TestMain(m *testing.M) {
	Main() // this executable is the workers' too
	flag.Parse()
	_ = flag.Set("test.parallel", "6") // most of what these tests do is to wait
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "kvferry-process-test-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		daemonPath = filepath.Join(dir, "kvferryd")
		if out, err := exec.Command("go", "build", "-o", daemonPath, "github.com/kvferry/kvferry/cmd/kvferryd").CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "build kvferryd: %v\n%s", err, out)
			return 1
		}
		code := m.Run()
		if code == 0 {
			// The thread that starts daemons lives as long as the process.
			if err := goleak.Find(goleak.IgnoreAnyFunction("github.com/kvferry/kvferry/standin/process.init.func1.1")); err != nil {
				fmt.Fprintln(os.Stderr, err)
				return 1
			}
		}
		return code
	}())
}

// startNode runs a daemon until the test ends.
func startNode(t *testing.T, name string, pool uint64) *Node {
	t.Helper()
	dir := t.TempDir()
	shm, err := os.MkdirTemp("/dev/shm", "kvferry-process-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(shm) })
	n, err := StartNode(t.Context(), NodeConfig{Daemon: daemonPath, Name: name, Dir: dir, PoolPath: filepath.Join(shm, "pool"), PoolBytes: pool, SlabBytes: 8 << 20, Listen: "127.0.0.1"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.Stop)
	return n
}
