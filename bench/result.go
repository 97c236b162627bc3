package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"text/tabwriter"
	"time"
)

// result is one figure. The ratio is better the higher it is: value/limit of a speed, limit/value of a time.
type result struct {
	Name     string  `json:"name"`
	Value    float64 `json:"value"`
	Unit     string  `json:"unit"`
	Limit    float64 `json:"limit"`
	Ratio    float64 `json:"ratio"`
	Verified bool    `json:"verified"` // contents were compared, successes were counted
	note     string
	target   float64 // that the ratio shall reach
}

func (b *bench) speed(name string, bytes uint64, ours, limit []time.Duration, note string, verified bool) {
	v, l := float64(bytes)/median(ours).Seconds()/1e9, float64(bytes)/median(limit).Seconds()/1e9
	b.results = append(b.results, result{Name: name, Value: v, Unit: "GB/s", Limit: l, Ratio: v / l, Verified: verified, note: note, target: 0.9})
}

func (b *bench) latency(name string, took []time.Duration, target time.Duration, note string, verified bool) {
	v, l := float64(median(took).Nanoseconds())/1e6, float64(target.Nanoseconds())/1e6
	b.results = append(b.results, result{Name: name, Value: v, Unit: "ms", Limit: l, Ratio: l / v, Verified: verified, note: note, target: 1})
}

func median(d []time.Duration) time.Duration {
	if len(d) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(d))
	return s[len(s)/2]
}

// variants are ways to do the same, and how long each took in each round.
type variants map[string][]time.Duration

// fastest is the one with the best median.
func (v variants) fastest() (name string, took []time.Duration) {
	for n, t := range v {
		if took == nil || median(t) < median(took) {
			name, took = n, t
		}
	}
	return name, took
}

func (b *bench) write(path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	text, err := json.MarshalIndent(b.results, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o644)
}

func (b *bench) table(out io.Writer) {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "NAME\tVALUE\tUNIT\tLIMIT\tRATIO\tTARGET\tVERIFIED\tLIMIT IS")
	for _, r := range b.results {
		met := "met"
		if r.Ratio < r.target {
			met = fmt.Sprintf("%.1f missed", r.target)
		}
		fmt.Fprintf(w, "%s\t%.3g\t%s\t%.3g\t%.2f\t%s\t%v\t%s\n", r.Name, r.Value, r.Unit, r.Limit, r.Ratio, met, r.Verified, r.note)
	}
	_ = w.Flush()
}
