package main

import (
	"fmt"
	"net/http"
	"sync/atomic"
)

// way is how a request was served.
type way uint8

const (
	handoff    way = iota // prefill, then decode with what it gave
	overlap               // both at once
	decodeOnly            // the prefill leg failed, or gave nothing
	refused               // a wrong request
	ways
)

func (w way) String() string {
	return [...]string{"handoff", "overlap", "decode_only", "refused"}[min(w, refused)]
}

// counts are requests by way, and prefill legs that failed.
type counts struct {
	requests      [ways]atomic.Uint64
	prefillFailed atomic.Uint64
	clientsGone   atomic.Uint64
	answersCut    atomic.Uint64
}

// serve is /metrics.
func (c *counts) serve(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; version=0.0.4")
	for i := range c.requests {
		_, _ = fmt.Fprintf(w, "pd_proxy_requests_total{path=%q} %d\n", way(i), c.requests[i].Load())
	}
	_, _ = fmt.Fprintf(w, "pd_proxy_prefill_failures_total %d\n", c.prefillFailed.Load())
	_, _ = fmt.Fprintf(w, "pd_proxy_clients_gone_total %d\n", c.clientsGone.Load())
	_, _ = fmt.Fprintf(w, "pd_proxy_answers_cut_total %d\n", c.answersCut.Load())
}
