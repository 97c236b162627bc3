package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
	"github.com/kvferry/kvferry/tiers/replay"
)

// What is asked of the daemon is what was given, and goes on until all is done.
func TestAsked(t *testing.T) {
	for args, want := range map[string][]proto.Message{
		"evict 90ab --tier nvme": {
			&kvferryv1.EvictRequest{Blocks: &kvferryv1.BlockSelection{HashPrefix: []byte{0x90, 0xab}}, Tier: "nvme"},
			&kvferryv1.EvictRequest{Blocks: &kvferryv1.BlockSelection{HashPrefix: []byte{0x90, 0xab}}, Tier: "nvme", From: 7},
		},
		"demote --all --move --space 3e": {
			&kvferryv1.DemoteRequest{Blocks: &kvferryv1.BlockSelection{All: true, SpaceId: id(0x3e, 32)}, Move: true},
			&kvferryv1.DemoteRequest{Blocks: &kvferryv1.BlockSelection{All: true, SpaceId: id(0x3e, 32)}, Move: true, From: 1<<32 | 5},
		},
		"prefetch 90": {&kvferryv1.PrefetchBlocksRequest{Blocks: &kvferryv1.BlockSelection{HashPrefix: []byte{0x90}}}},
		"evict --all": nil, // without --yes
	} {
		c := node()
		kvferry(t, listen(t, c), strings.Fields(args)...)
		if len(c.asked) != len(want) {
			t.Errorf("%s: asked %v", args, c.asked)
			continue
		}
		for i := range want {
			if !proto.Equal(c.asked[i], want[i]) {
				t.Errorf("%s: asked %v, want %v", args, c.asked[i], want[i])
			}
		}
	}
}

func TestNoDrives(t *testing.T) {
	c := node()
	c.tiers = nil
	golden(t, "demote_no_drives", kvferry(t, listen(t, c), "demote", "90"))
}

// On a terminal a bar is drawn in one line, which is gone in the end.
func TestProgressBar(t *testing.T) {
	var out, errs bytes.Buffer
	code := run(t.Context(), []string{"verify"}, environment{socket: listen(t, node()), out: &out, err: &errs, terminal: true, now: time.Now})
	golden(t, "verify_terminal", strings.ReplaceAll(strings.ReplaceAll(errs.String(), "\r\x1b[K", "\n<clear>"), "\x1b", "<esc>")+"\n--- out\n"+out.String())
	if code != exitOK || !strings.HasSuffix(errs.String(), "\r\x1b[K") {
		t.Errorf("exit %d", code)
	}
}

// A daemon that dies in the middle is no success.
func TestVerifyCutShort(t *testing.T) {
	c := node()
	c.verify = c.verify[:3]
	golden(t, "verify_cut_short", kvferry(t, listen(t, c), "verify"))
}

func pack(ids ...byte) (out []byte) {
	for _, i := range ids {
		out = append(out, id(i, 32)...)
	}
	return out
}

// traced is a node whose engines look things up.
func traced() *canned {
	c := node()
	look := func(ms int64, space byte, request string, dropped uint64, ids ...byte) *kvferryv1.TraceResponse {
		return &kvferryv1.TraceResponse{AtUnixMs: before(0) + ms, SpaceId: id(space, 32), BlockTokens: 16, Hashes: pack(ids...), Dropped: dropped, RequestId: request, Instance: "prefill-0"}
	}
	c.trace = []*kvferryv1.TraceResponse{
		look(0, 0x3f, "a", 0, 1, 2, 3), look(4, 0x3e, "x", 0, 9), look(5, 0x3f, "a", 0, 1, 2, 3), look(6, 0x3f, "short", 0), look(70, 0x3f, "b", 2, 1, 2, 4, 5), look(69, 0x3f, "c", 0, 7), look(72, 0x3f, "d", 0, 7),
	}
	return c
}

const tracedLines = `{"timestamp":0,"input_length":48,"output_length":0,"hash_ids":[0,1,2]}
{"timestamp":70,"input_length":64,"output_length":0,"hash_ids":[0,1,3,4]}
{"timestamp":70,"input_length":16,"output_length":0,"hash_ids":[5]}
`

func TestTraceRecord(t *testing.T) {
	dir := t.TempDir()
	record := func(c *canned, args ...string) string {
		return strings.ReplaceAll(kvferry(t, listen(t, c), append([]string{"trace", "record"}, args...)...), dir, "DIR")
	}
	text := record(traced(), "--out", filepath.Join(dir, "a.jsonl"), "--requests", "3")
	text += record(traced(), "--out", filepath.Join(dir, "a.jsonl")) // is there
	text += record(traced(), "--out", filepath.Join(dir, "b.jsonl"), "--space", "3e")
	text += record(traced(), "--out", filepath.Join(dir, "c.jsonl.gz"), "--requests", "3", "-o", "json")
	golden(t, "trace_record", text)
	if b, err := os.ReadFile(filepath.Join(dir, "a.jsonl")); err != nil || string(b) != tracedLines {
		t.Errorf("%s %v", b, err)
	}
	f, err := os.Open(filepath.Join(dir, "c.jsonl.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if trace, err := replay.Read(f, 0); err != nil || len(trace.Requests) != 3 || trace.Unique() != 6 || trace.BlockTokens != 16 || trace.Asked != 8 { // as simulate does
		t.Errorf("%+v %v", trace, err)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(z); err != nil || string(b) != tracedLines {
		t.Errorf("%s %v", b, err)
	}
	if text := record(traced(), "--out", filepath.Join(dir, "none", "x")); !strings.Contains(text, "no such file") {
		t.Error(text)
	}
}

// The file is complete after ctrl-C, and after its time is over.
func TestTraceRecordUntilStopped(t *testing.T) {
	for _, name := range []string{"ctrl-C", "time"} {
		c := traced()
		c.trace, c.traced = c.trace[:6], make(chan struct{})
		socket, file := listen(t, c), filepath.Join(t.TempDir(), "t.jsonl.gz")
		args := []string{"trace", "record", "--out", file, "--timeout", "10s"}
		ctx, cancel := context.WithCancel(t.Context())
		if name == "time" {
			args = append(args, "--for", "500ms")
		} else {
			go func() {
				<-c.traced
				time.Sleep(200 * time.Millisecond) // until what is on its way has come
				cancel()
			}()
		}
		var out, errs bytes.Buffer
		if code := run(ctx, args, environment{socket: socket, out: &out, err: &errs, now: time.Now}); code != exitOK || !strings.HasPrefix(out.String(), "recorded 3 requests with 8 blocks, 6 different, in ") {
			t.Errorf("%s: exit %d: %s%s", name, code, &out, &errs)
		}
		cancel()
		f, err := os.Open(file)
		if err != nil {
			t.Fatal(err)
		}
		z, err := gzip.NewReader(f)
		if err != nil {
			t.Fatal(err)
		}
		d := json.NewDecoder(z)
		n := 0
		for ; ; n++ {
			var l traceLine
			if err := d.Decode(&l); err != nil {
				if err != io.EOF {
					t.Error(err)
				}
				break
			}
		}
		_ = f.Close()
		if n != 3 {
			t.Errorf("%s: %d lines", name, n)
		}
	}
}

// A daemon that is not there leaves no empty file behind.
func TestTraceRecordDown(t *testing.T) {
	dir := t.TempDir()
	if text := kvferry(t, filepath.Join(dir, "no.sock"), "trace", "record", "--out", filepath.Join(dir, "f")); !strings.Contains(text, "exit 2") {
		t.Error(text)
	}
	if _, err := os.Stat(filepath.Join(dir, "f")); err == nil {
		t.Error("a file is left")
	}
}
