package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
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
	Low      float64 `json:"ratio_low95,omitempty"` // of figures in pairs: what the ratio is at least, with 95 % confidence
	Verified bool    `json:"verified"`              // contents were compared, successes were counted
	note     string
	target   float64 // that the ratio shall reach
}

func (b *bench) speed(name string, bytes uint64, ours, limit []time.Duration, note string, verified bool) {
	v, l := float64(bytes)/median(ours).Seconds()/1e9, float64(bytes)/median(limit).Seconds()/1e9
	b.results = append(b.results, result{Name: name, Value: v, Unit: "GB/s", Limit: l, Ratio: v / l, Verified: verified, note: note, target: 0.9})
}

// paired is speed of figures that were measured in pairs: the ratio is the median of the pairs'. Its lower bound is what shall reach the target.
func (b *bench) paired(name string, bytes uint64, ours, limit []time.Duration, note string, verified bool) {
	b.speed(name, bytes, ours, limit, note, verified)
	r := &b.results[len(b.results)-1]
	r.Ratio, r.Low = ratios(limit, ours)
}

// ratios is the median of the ratios of pairs, and the lower end of its one-sided 95 % confidence interval, which assumes nothing of their distribution: the
// k-th smallest, with the largest k for which fewer than k of so many fair coins show heads in at most 5 % of all cases. 0 where there are too few pairs.
func ratios(above, below []time.Duration) (middle, low float64) {
	var list []float64
	for i := range above {
		list = append(list, above[i].Seconds()/below[i].Seconds())
	}
	slices.Sort(list)
	n := len(list)
	if n == 0 {
		return 0, 0
	}
	chance, sum := math.Pow(0.5, float64(n)), 0.0
	for k := range n {
		if sum += chance; sum > 0.05 {
			break
		}
		low = list[k]
		chance *= float64(n-k) / float64(k+1)
	}
	return (list[n/2] + list[(n-1)/2]) / 2, low
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
		reached := r.Ratio
		if r.Low > 0 {
			reached, r.note = r.Low, fmt.Sprintf("%s; the ratio is at least %.2f (95 %%)", r.note, r.Low)
		}
		if reached < r.target {
			met = fmt.Sprintf("%.1f missed", r.target)
		}
		fmt.Fprintf(w, "%s\t%.3g\t%s\t%.3g\t%.2f\t%s\t%v\t%s\n", r.Name, r.Value, r.Unit, r.Limit, r.Ratio, met, r.Verified, r.note)
	}
	_ = w.Flush()
}
