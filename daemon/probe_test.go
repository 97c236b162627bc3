package daemon

import "testing"

// A watchdog probes while the daemon serves, and until the process ends.
func TestProbe(t *testing.T) {
	n := newNode(t)
	n.Probe()
	n.Stop()
	n.Probe()
	n.start()
}
