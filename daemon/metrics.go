package daemon

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/daemon/rpc"
	"github.com/kvferry/kvferry/tiers/policy"
)

// collector makes metrics of the daemon's counters when it is scraped, so that nothing is counted twice.
type collector struct{ d *Daemon }

var (
	tierBytes  = prometheus.NewDesc("kvferry_tier_bytes", "Bytes of a tier by state; used + free is its capacity.", []string{"tier", "state"}, nil)
	tierCount  = prometheus.NewDesc("kvferry_tier_blocks", "Blocks that a tier has whole. Many are in several.", []string{"tier"}, nil)
	nodeBlocks = prometheus.NewDesc("kvferry_blocks", "Blocks that a lookup can find, in whatever tiers.", nil, nil)
	held       = prometheus.NewDesc("kvferry_held", "Leases on blocks and pins on slots.", []string{"kind"}, nil)
	sessions   = prometheus.NewDesc("kvferry_sessions", "Attached processes.", nil, nil)
	copied     = prometheus.NewDesc("kvferry_copied_bytes_total", "Bytes copied, by link and traffic class.", []string{"link", "class"}, nil)
	queued     = prometheus.NewDesc("kvferry_transfers", "Transfers by link and state.", []string{"link", "state"}, nil)
)

// Describe is prometheus.Collector. The counters' names are those of the code: they are told with their values.
func (c collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range append([]*prometheus.Desc{tierBytes, tierCount, nodeBlocks, held, sessions, copied, queued}, driveDescs...) {
		ch <- d
	}
}

// Collect is prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	st := c.d.ledger.Stats()
	dram := kvferry.DRAM.String()
	gauge(tierBytes, float64(st.UsedBytes), dram, "used")
	gauge(tierBytes, float64(st.FreeBytes), dram, "free")
	gauge(tierCount, float64(st.InTier[policy.DRAM]), dram)
	gauge(nodeBlocks, float64(st.Blocks))
	c.drives(ch, st)
	gauge(held, float64(st.Leases), "lease")
	gauge(held, float64(st.Pins), "pin")
	gauge(sessions, float64(len(c.d.sessions.All())))
	link := c.d.local.Stats()
	gauge(queued, float64(link.Queued), "local", "queued")
	gauge(queued, float64(link.Running), "local", "running")
	for class, n := range link.Bytes {
		ch <- prometheus.MustNewConstMetric(copied, prometheus.CounterValue, float64(n), "local", kvferry.Class(class).String())
	}
	var peers float64
	for _, p := range c.d.fetcher.Peers() {
		peers += float64(p.Bytes)
	}
	ch <- prometheus.MustNewConstMetric(copied, prometheus.CounterValue, peers, "peers", kvferry.ClassHandoff.String())
	for _, n := range append(c.d.counters.All(), rpc.LedgerCounters(st.Counts)...) {
		desc := prometheus.NewDesc("kvferry_"+n.Name+"_total", "Events by reason: see OPERATIONS.md.", []string{"reason"}, nil)
		ch <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(n.Value), n.Reason)
	}
}

// serveMetrics serves /metrics, /healthz (the process answers and is not stuck) and /readyz (engines may attach).
func (d *Daemon) serveMetrics() error {
	if d.cfg.Metrics.Listen == "" {
		return nil
	}
	l, err := net.Listen("tcp", d.cfg.Metrics.Listen)
	if err != nil {
		return fmt.Errorf("metrics.listen: %w", err)
	}
	reg := prometheus.NewRegistry()
	reg.MustRegister(collector{d}, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{MaxRequestsInFlight: 4, Timeout: 10 * time.Second}))
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) {
		d.Probe()
		_, _ = fmt.Fprintln(w, "ok")
	})
	mux.HandleFunc("/readyz", func(w http.ResponseWriter, _ *http.Request) {
		if d.draining.Load() > 0 {
			http.Error(w, "draining", http.StatusServiceUnavailable)
			return
		}
		_, _ = fmt.Fprintln(w, "ok")
	})
	s := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second, IdleTimeout: time.Minute}
	context.AfterFunc(d.ctx, func() { _ = s.Close() })
	d.run("metrics", func() error { return s.Serve(l) })
	return nil
}
