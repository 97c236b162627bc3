// Package process runs daemons and stand-in workers as processes of their own, which can be killed and measured like real ones.
//
// A worker is this executable started again: its main calls Main first. Parent and worker speak net/rpc over the worker's standard input and output; the
// worker ends when its input does, so that none is left behind. Times that a Worker reports were taken in the worker.
package process

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/rpc"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// workerArg as the first argument makes an executable a worker.
const workerArg = "standin-worker"

// Main does not return in a process that was started as a worker.
func Main() {
	if len(os.Args) != 2 || os.Args[1] != workerArg {
		return
	}
	server := rpc.NewServer()
	service := &Service{}
	if err := server.RegisterName("Worker", service); err != nil {
		fmt.Fprintln(os.Stderr, "standin worker:", err)
		os.Exit(1)
	}
	server.ServeConn(pipes{os.Stdin, os.Stdout})
	service.close()
	os.Exit(0)
}

// pipes is both ends of standard streams as one.
type pipes struct {
	io.ReadCloser
	io.WriteCloser
}

func (p pipes) Close() error { return errors.Join(p.ReadCloser.Close(), p.WriteCloser.Close()) }

// Worker is a worker process, seen from its parent. It is safe for concurrent use.
type Worker struct {
	Name   string
	cmd    *exec.Cmd
	client *rpc.Client
	once   sync.Once
	ended  chan struct{}
}

// StartWorker starts this executable as a worker.
func StartWorker(name string) (*Worker, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("start worker %s: %w", name, err)
	}
	cmd := exec.Command(self, workerArg)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a ctrl-C goes to the parent, which ends it in order
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("start worker %s: %w", name, err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start worker %s: %w", name, err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start worker %s: %w", name, err)
	}
	w := &Worker{Name: name, cmd: cmd, client: rpc.NewClient(pipes{out, in}), ended: make(chan struct{})}
	return w, nil
}

// Pid is the worker's process id.
func (w *Worker) Pid() int { return w.cmd.Process.Pid }

// call asks the worker, until ctx ends.
func call[Q, R any](ctx context.Context, w *Worker, method string, q Q) (R, error) {
	var r R
	c := w.client.Go("Worker."+method, q, &r, make(chan *rpc.Call, 1))
	select {
	case <-c.Done:
		if c.Error != nil {
			return r, fmt.Errorf("worker %s: %s: %w", w.Name, method, c.Error)
		}
		return r, nil
	case <-ctx.Done():
		var none R // r may still be written
		return none, fmt.Errorf("worker %s: %s: %w", w.Name, method, context.Cause(ctx))
	}
}

// Kill ends the process with SIGKILL, in whatever it is doing.
func (w *Worker) Kill() {
	_ = w.cmd.Process.Kill()
	w.wait()
}

// Close ends the process in order, and kills it when it takes more than ten seconds.
func (w *Worker) Close() { w.CloseWithin(10 * time.Second) }

// CloseWithin ends the process in order, and kills it when it takes longer, as one that waits for a frozen daemon does.
func (w *Worker) CloseWithin(limit time.Duration) {
	kill := time.AfterFunc(limit, func() { _ = w.cmd.Process.Kill() })
	defer kill.Stop()
	_ = w.client.Close()
	w.wait()
}

func (w *Worker) wait() {
	w.once.Do(func() {
		_ = w.client.Close()
		_ = w.cmd.Wait()
		close(w.ended)
	})
	<-w.ended
}

// Freeze stops the process (SIGSTOP), and returns when it has stopped.
func (w *Worker) Freeze() error { return freeze(w.Pid()) }

// Thaw lets a frozen process go on.
func (w *Worker) Thaw() error { return syscall.Kill(w.Pid(), syscall.SIGCONT) }
