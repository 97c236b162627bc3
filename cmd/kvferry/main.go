// Command kvferry looks into the daemon of this node over its Admin socket: what is wrong, who is attached, what lies where. It changes nothing.
//
// It ends with 0 when the daemon is well, 1 when it is degraded (status only), 2 when it cannot be reached, 3 when the request was wrong.
package main

import (
	"context"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], environment{
		socket: os.Getenv("KVFERRY_ADMIN_SOCKET"),
		build:  build(),
		out:    os.Stdout,
		err:    os.Stderr,
		now:    time.Now,
	})
	stop()
	os.Exit(code)
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
