package daemon

// Probe goes through the locks that all work needs and returns. When one of them is stuck, so is Probe: whoever waits for it, a watchdog or the
// kubelet, ends the process. It may be called from Start to the end of the process.
func (d *Daemon) Probe() {
	d.sessions.Busy()
	d.ledger.Stats()
	d.registry.ActiveClaims()
	d.local.Stats()
}
