package daemon

import (
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/health"
	"github.com/kvferry/kvferry/daemon/tiering"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/policy"
)

func driveDesc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("kvferry_drive_"+name, help, append([]string{"drive"}, labels...), nil)
}

var (
	driveBytes    = driveDesc("bytes", "Bytes of a drive's file by state; used + free is its capacity.", "state")
	driveBlocks   = driveDesc("blocks", "Blocks that have a part on the drive.")
	driveRead     = driveDesc("read_bytes_total", "Payload read, and right.")
	driveWritten  = driveDesc("written_bytes_total", "Payload written, and durable.")
	driveErrors   = driveDesc("errors_total", "Slots that could not be read or written, by the device's fault.", "operation")
	driveCorrupt  = driveDesc("corrupt_total", "Slots whose checksum did not hold.")
	driveLatency  = driveDesc("latency_seconds", "Time from a call to a slot's end since the daemon's start, by quantile, within a factor of 1.2.", "operation", "quantile")
	driveLifetime = driveDesc("lifetime_written_bytes", "Payload written in the file's life: wear.")
	driveRate     = driveDesc("read_bytes_per_second", "How fast the drive reads, smoothed; what a look-up counts with.")
	driveState    = driveDesc("state", "1 for the state that the drive is in; slow: it reads slower than engines compute; absent: it could not be opened.", "state")
	driveDescs    = []*prometheus.Desc{driveBytes, driveBlocks, driveRead, driveWritten, driveErrors, driveCorrupt, driveLatency, driveLifetime, driveRate, driveState}
)

// driveStates are all that a drive can be in, so that a series does not vanish with a state.
var driveStates = []string{"ok", "slow", "degraded", "probing", "absent"}

func stateOf(d tiering.DriveView) string {
	switch {
	case d.State == health.Degraded:
		return "degraded"
	case d.State == health.Probing:
		return "probing"
	case d.Slow != "":
		return "slow"
	}
	return "ok"
}

// drives tells of the NVMe tier as a whole and of each drive.
func (c collector) drives(ch chan<- prometheus.Metric, st tiers.Stats) {
	absent := map[string]bool{}
	for _, d := range c.d.absentDrives() {
		absent[filepath.Clean(d.Path)] = true
	}
	drives := c.d.tiering.Drives()
	if len(drives) == 0 && len(absent) == 0 {
		return
	}
	put := func(d *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, kind, v, labels...)
	}
	state := func(drive, is string) {
		for _, s := range driveStates {
			one := 0.0
			if s == is {
				one = 1
			}
			put(driveState, prometheus.GaugeValue, one, drive, s)
		}
	}
	var used, free uint64
	for i, d := range drives {
		if i >= len(st.Drives) {
			break // came since
		}
		s, v := st.Drives[i], d.Device
		used, free = used+s.UsedBytes, free+s.FreeBytes
		put(driveBytes, prometheus.GaugeValue, float64(s.UsedBytes), d.Name, "used")
		put(driveBytes, prometheus.GaugeValue, float64(s.FreeBytes), d.Name, "free")
		put(driveBlocks, prometheus.GaugeValue, float64(s.Blocks), d.Name)
		put(driveRead, prometheus.CounterValue, float64(v.ReadBytes), d.Name)
		put(driveWritten, prometheus.CounterValue, float64(v.WrittenBytes), d.Name)
		put(driveErrors, prometheus.CounterValue, float64(v.ReadErrors), d.Name, "read")
		put(driveErrors, prometheus.CounterValue, float64(v.WriteErrors), d.Name, "write")
		put(driveCorrupt, prometheus.CounterValue, float64(v.Corrupt), d.Name)
		for _, q := range []struct {
			operation, quantile string
			took                time.Duration
		}{{"read", "0.5", v.ReadP50}, {"read", "0.99", v.ReadP99}, {"write", "0.5", v.WriteP50}, {"write", "0.99", v.WriteP99}} {
			put(driveLatency, prometheus.GaugeValue, q.took.Seconds(), d.Name, q.operation, q.quantile)
		}
		put(driveLifetime, prometheus.GaugeValue, float64(v.LifetimeWritten), d.Name)
		put(driveRate, prometheus.GaugeValue, d.Rate, d.Name)
		state(d.Name, stateOf(d))
		delete(absent, d.Name) // one that has come a moment ago
		put(queued, prometheus.GaugeValue, float64(d.Link.Queued), d.Name, "queued")
		put(queued, prometheus.GaugeValue, float64(d.Link.Running), d.Name, "running")
		for class, n := range d.Link.Bytes {
			if class := kvferry.Class(class); class == kvferry.ClassLoad || class == kvferry.ClassPrefetch || class == kvferry.ClassDemote { // no other is moved there
				put(copied, prometheus.CounterValue, float64(n), d.Name, class.String())
			}
		}
	}
	for drive := range absent {
		state(drive, "absent")
	}
	nvme := kvferry.NVMe.String()
	put(tierBytes, prometheus.GaugeValue, float64(used), nvme, "used")
	put(tierBytes, prometheus.GaugeValue, float64(free), nvme, "free")
	put(tierCount, prometheus.GaugeValue, float64(st.InTier[policy.NVMe]), nvme)
}
