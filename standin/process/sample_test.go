package process

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// sample is what a daemon takes: memory that is neither the pool nor lent, descriptors, goroutines.
type sample struct{ anonymous, descriptors, goroutines int }

func (s sample) String() string {
	return fmt.Sprintf("%.1f MiB, %d descriptors, %d goroutines", float64(s.anonymous)/(1<<20), s.descriptors, s.goroutines)
}

// take fails while the daemon is being started again.
func take(n *Node) (s sample, err error) {
	pid, err := n.DaemonPid()
	if err != nil {
		return s, err
	}
	rollup, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return s, err
	}
	if s.anonymous, err = number(string(rollup), "Anonymous:"); err != nil {
		return s, err
	}
	s.anonymous *= 1024
	open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return s, err
	}
	s.descriptors = len(open)
	client := http.Client{Timeout: time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	r, err := client.Get("http://" + n.Metrics + "/metrics")
	if err != nil {
		return s, err
	}
	defer r.Body.Close()
	metrics, err := io.ReadAll(r.Body)
	if err != nil {
		return s, err
	}
	s.goroutines, err = number(string(metrics), "go_goroutines")
	return s, err
}

// number is the one after a name at the beginning of a line.
func number(text, name string) (int, error) {
	for line := range strings.Lines(text) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == name {
			return strconv.Atoi(f[1])
		}
	}
	return 0, fmt.Errorf("%s is not told", name)
}

// sampler looks a hundred times while the soak goes on.
func (s *soak) sampler() {
	for t := time.NewTicker(*soakFor / 100); ; {
		select {
		case <-s.stop.Done():
			t.Stop()
			return
		case <-t.C:
		}
		for _, n := range s.nodes {
			if got, err := take(n.Node); err == nil {
				n.samples = append(n.samples, got)
			}
		}
	}
}

// fifth is the median of each figure in the k-th fifth of the samples.
func fifth(all []sample, k int) sample {
	part := all[len(all)*k/5 : len(all)*(k+1)/5]
	median := func(of func(sample) int) int {
		var list []int
		for _, s := range part {
			list = append(list, of(s))
		}
		slices.Sort(list)
		if len(list) == 0 {
			return 0
		}
		return list[len(list)/2]
	}
	return sample{median(func(s sample) int { return s.anonymous }), median(func(s sample) int { return s.descriptors }), median(func(s sample) int { return s.goroutines })}
}
