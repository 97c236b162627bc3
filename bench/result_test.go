package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/standin/process"
)

func TestMain(m *testing.M) {
	process.Main() // this executable is the workers' too
	os.Exit(m.Run())
}

func TestResults(t *testing.T) {
	b := &bench{}
	ms := func(list ...int) (d []time.Duration) {
		for _, n := range list {
			d = append(d, time.Duration(n)*time.Millisecond)
		}
		return d
	}
	best, limit := variants{"slow": ms(30, 10, 20), "fast": ms(5, 50, 10)}.fastest()
	if best != "fast" || median(limit) != 10*time.Millisecond {
		t.Errorf("fastest: %s, %v", best, limit)
	}
	b.speed("store_x", 1e7, ms(20, 12, 90), limit, best, true)
	b.latency("one_x", ms(2, 4, 1), time.Millisecond, "target", false)
	want := []result{
		{Name: "store_x", Value: 0.5, Unit: "GB/s", Limit: 1, Ratio: 0.5, Verified: true},
		{Name: "one_x", Value: 2, Unit: "ms", Limit: 1, Ratio: 0.5},
	}
	path := filepath.Join(t.TempDir(), "out", "latest.json")
	if err := b.write(path); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var got []result
	if err := json.Unmarshal(text, &got); err != nil || len(got) != 2 || got[0] != want[0] || got[1] != want[1] {
		t.Errorf("%+v, %v", got, err)
	}
	var table bytes.Buffer
	b.table(&table)
	if n := strings.Count(table.String(), "missed"); n != 2 {
		t.Errorf("%d missed targets in:\n%s", n, &table)
	}
}

func TestBatches(t *testing.T) {
	hashes, parents := chain(130, 3)
	list := batches(blockRange(5, 130), hashes, parents)
	if len(list) != 3 || len(list[2].Blocks) != 2 || list[2].Blocks[1] != 134 || list[1].Parents[0] != hashes[63] {
		t.Errorf("%d batches", len(list))
	}
}
