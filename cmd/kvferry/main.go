// Command kvferry looks into the daemon of this node over its Admin socket: what is wrong, who is attached, what lies where and why. Four commands change something: evict, demote, prefetch and verify.
//
// It ends with 0 when all is well, 1 when the daemon is degraded, something was broken or not everything could be done, 2 when the daemon cannot be reached, 3 when the request was wrong.
package main

import (
	"context"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], environment{
		socket: os.Getenv("KVFERRY_ADMIN_SOCKET"),
		build:  build(),
		out:    os.Stdout,
		err:    os.Stderr,

		terminal: isTerminal(os.Stderr),
		now:      time.Now,
	})
	stop()
	os.Exit(code)
}

// isTerminal tells whether somebody looks at a file as it is written.
func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// version is set by the linker (make build).
var version string

// build is this command's version, as the linker or the module says.
func build() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}
