package main

import (
	"bytes"
	"compress/gzip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry"
)

func TestBuiltInTrace(t *testing.T) {
	prompts, source, err := readTrace(filepath.Join(t.TempDir(), "not there.gz"), 1500)
	if err != nil || len(prompts) != 1500 || !strings.Contains(source, "built in") {
		t.Fatal(len(prompts), source, err)
	}
	for _, p := range prompts {
		var parent kvferry.Hash
		for i, h := range p.hashes {
			if p.parents[i] != parent || h.IsZero() {
				t.Fatalf("%s: block %d is not chained", p.id, i)
			}
			parent = h
		}
		if len(p.hashes) == 0 || len(p.hashes) > promptBlocksMax || p.tokens == 0 {
			t.Fatalf("%s: %d blocks, %d tokens", p.id, len(p.hashes), p.tokens)
		}
	}
	if hits, asked := reuse(prompts); hits*100/asked != 26 {
		t.Errorf("%d of %d blocks come again", hits, asked)
	}
}

func TestTraceErrors(t *testing.T) {
	write := func(name string, gz bool, text string) string {
		path := filepath.Join(t.TempDir(), name)
		var b bytes.Buffer
		if gz {
			z := gzip.NewWriter(&b)
			_, _ = z.Write([]byte(text))
			_ = z.Close()
		} else {
			b.WriteString(text)
		}
		if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for name, path := range map[string]string{
		"not gzip": write("a", false, "{}"),
		"empty":    write("b", true, ""),
		"not JSON": write("c", true, "{\"hash_ids\":[1]}\n{\"hash_ids\":\n"),
	} {
		if _, _, err := readTrace(path, 10); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if p, _, err := readTrace(write("d", true, "{\"input_length\":600,\"hash_ids\":[1,2]}\n"), 10); err != nil || len(p) != 1 || len(p[0].hashes) != 2 || p[0].tokens != 600 {
		t.Error(p, err)
	}
}

func TestBarWithoutTerminal(t *testing.T) {
	var out bytes.Buffer
	b := newBar(&out, 20)
	var c tally
	for range 20 {
		c.add(func(t *tally) { t.done++ })
		b.draw(&c)
	}
	if lines := strings.Count(out.String(), "\n"); lines != 10 || !strings.Contains(out.String(), "100 %") {
		t.Errorf("%d lines:\n%s", lines, &out)
	}
}

func TestMovement(t *testing.T) {
	var m movement
	first, second := m.begin(), m.begin()
	first(10, 3*time.Millisecond)
	second(0, 9*time.Millisecond) // moved nothing: no time of a movement
	s := m.sums()
	if s.blocks != 10 || s.times != 1 || s.p50 != 3*time.Millisecond || s.busy <= 0 {
		t.Errorf("%+v", s)
	}
}
