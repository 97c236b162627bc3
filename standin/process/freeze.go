package process

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// freezeTimeout is more than a process takes to stop on a busy machine.
const freezeTimeout = 10 * time.Second

// freeze stops a process (SIGSTOP), which need not be a child, and returns when each of its threads has stopped.
func freeze(pid int) error {
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		return err
	}
	for deadline := time.Now().Add(freezeTimeout); !stopped(pid); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			return fmt.Errorf("process %d does not stop", pid)
		}
	}
	return nil
}

func stopped(pid int) bool {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	for _, t := range tasks {
		b, err := os.ReadFile(t)
		if err != nil {
			continue // the thread has ended
		}
		// After the name, which may hold anything, comes the state.
		if rest := string(b[strings.LastIndexByte(string(b), ')')+1:]); !strings.HasPrefix(rest, " T") {
			return false
		}
	}
	return len(tasks) > 0
}
