package process

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

func TestLogTail(t *testing.T) {
	const configuration = "# effective configuration\nnode: \"n\"\nsockets:\n  dir: /tmp\n  allowUIDs: []\ndrain:\n  timeout: 20s\n"
	for log, want := range map[string]string{
		"": "",
		configuration + "kvferryd: open pool: no space left\n":              "kvferryd: open pool: no space left",
		configuration + "time=1 msg=serves\ntime=2 msg=drains\n":            "time=1 msg=serves\ntime=2 msg=drains",
		"time=1 msg=before\n" + configuration + "panic: x\n\ngoroutine 1\n": "time=1 msg=before\npanic: x\n\ngoroutine 1",
	} {
		if got := logTail(log); got != want {
			t.Errorf("of %q: %q, want %q", log, got, want)
		}
	}
	var long strings.Builder
	for i := range 100 {
		fmt.Fprintf(&long, "line %d\n", i)
	}
	if got := strings.Split(logTail(long.String()), "\n"); len(got) != logTailLines || got[logTailLines-1] != "line 99" {
		t.Error(got)
	}
}

func TestNodeSaysHowItEnded(t *testing.T) {
	n := startNode(t, "a", 74<<20)
	if got := n.Ended(); got != "" {
		t.Error(got)
	}
	n.Kill()
	if got := n.Ended(); got != "ended (killed by signal 9)" {
		t.Error(got)
	}
	n = startNode(t, "b", 74<<20)
	n.Stop()
	if got := n.Ended(); got != "ended (exit code 0)" {
		t.Error(got)
	}
}

// A daemon that is frozen, and a worker that waits for it, end all the same.
func TestFrozenEnds(t *testing.T) {
	n := startNode(t, "a", 74<<20)
	w, err := StartWorker("e")
	if err != nil {
		t.Fatal(err)
	}
	defer w.Kill()
	if err := w.Attach(t.Context(), AttachArgs{SocketsDir: n.SocketsDir(), Instance: "e", Shape: small}); err != nil {
		t.Fatal(err)
	}
	if err := n.Freeze(); err != nil {
		t.Fatal(err)
	}
	hashes, _ := promptOf(4, 1)
	matched := make(chan error, 1)
	go func() {
		_, err := w.Match(t.Context(), MatchArgs{RequestID: "r", Hashes: hashes})
		matched <- err
	}()
	time.Sleep(50 * time.Millisecond)
	begin := time.Now()
	w.CloseWithin(300 * time.Millisecond)
	n.StopWithin(300 * time.Millisecond)
	if took := time.Since(begin); took > 3*time.Second {
		t.Errorf("took %s", took)
	}
	if err := <-matched; err == nil {
		t.Error("a frozen daemon answers")
	}
}
