package main

import (
	"bytes"
	"context"
	"flag"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
)

var update = flag.Bool("update", false, "write the golden files anew")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// kvferry runs the command and puts all that it prints, and how it ends, into one text.
func kvferry(t *testing.T, socket string, args ...string) string {
	t.Helper()
	var out, errs bytes.Buffer
	code := run(t.Context(), args, environment{socket: socket, build: "0.1.0", out: &out, err: &errs, now: func() time.Time { return now }})
	text := "$ kvferry " + strings.Join(args, " ") + "\n" + out.String()
	if errs.Len() > 0 {
		text += "--- stderr\n" + errs.String()
	}
	return strings.ReplaceAll(text, socket, "SOCKET") + "--- exit " + string(rune('0'+code)) + "\n"
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name+".golden")
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got; -update writes it anew):\n%s", path, diff)
	}
}

func TestGolden(t *testing.T) {
	well, sick := listen(t, node()), listen(t, ill())
	for name, args := range map[string][]string{
		"status":             {"status"},
		"status_json":        {"status", "-o", "json"},
		"workers":            {"workers"},
		"workers_json":       {"workers", "-o", "json"},
		"spaces":             {"spaces"},
		"spaces_json":        {"spaces", "-o", "json"},
		"spaces_diff":        {"spaces", "diff", "3f", "3E4f"},
		"spaces_diff_json":   {"spaces", "diff", "3f", "3e", "-o", "json"},
		"spaces_diff_same":   {"spaces", "diff", "3f", "3f50"},
		"spaces_diff_many":   {"spaces", "diff", "3f", "3"},
		"spaces_diff_none":   {"spaces", "diff", "3f", "77"},
		"spaces_diff_one":    {"spaces", "diff", "3f"},
		"blocks":             {"blocks"},
		"blocks_json":        {"blocks", "-o", "json", "--limit", "1"},
		"blocks_prefix":      {"blocks", "--prefix", "11", "--space", "3f"},
		"blocks_other_space": {"blocks", "--space", "3e"},
		"blocks_odd_prefix":  {"blocks", "--prefix", "111"},
		"blocks_wrong_limit": {"blocks", "--limit", "0"},
		"offers":             {"offers"},
		"offers_json":        {"offers", "-o", "json"},
		"tiers":              {"tiers"},
		"tiers_json":         {"tiers", "-o", "json"},
		"evict":              {"evict", "90", "--tier", "dram"},
		"evict_json":         {"evict", "--all", "--yes", "--space", "3f", "-o", "json"},
		"evict_all":          {"evict", "--all"},
		"evict_none":         {"evict"},
		"evict_both":         {"evict", "--all", "90"},
		"evict_odd":          {"evict", "901"},
		"evict_wrong_tier":   {"evict", "90", "--tier", "hbm"},
		"demote":             {"demote", "9011"},
		"demote_all":         {"demote", "--all", "--move"},
		"demote_json":        {"demote", "9011", "-o", "json"},
		"prefetch":           {"prefetch", "90"},
		"prefetch_all":       {"prefetch", "--all"},
		"prefetch_json":      {"prefetch", "90", "-o", "json"},
		"verify":             {"verify"},
		"verify_json":        {"verify", "--tier", "nvme", "-o", "json"},
		"verify_wrong_tier":  {"verify", "--tier", "hbm"},
		"explain":            {"explain", "90"},
		"explain_gone":       {"explain", "1122"},
		"explain_request":    {"explain", "cmpl-17"},
		"explain_json":       {"explain", "11", "-o", "json"},
		"explain_unknown":    {"explain", "77"},
		"explain_none":       {"explain"},
		"trace_no_file":      {"trace", "record"},
		"config":             {"config"},
		"config_json":        {"config", "-o", "json"},
		"version":            {"version"},
		"help":               {"--help"},
		"wrong_output":       {"status", "-o", "xml"},
		"wrong_timeout":      {"status", "--timeout", "0s"},
		"wrong_socket":       {"status", "--socket", ""},
		"extra_argument":     {"blocks", "zz"},
		"extra_argument_sub": {"status", "extra"},
		"extra_spaces":       {"spaces", "zz"},
		"wrong_command":      {"statsu"},
	} {
		t.Run(name, func(t *testing.T) { golden(t, name, kvferry(t, well, args...)) })
	}
	t.Run("degraded", func(t *testing.T) { golden(t, "degraded", kvferry(t, sick, "status")) })
	t.Run("tiers_degraded", func(t *testing.T) { golden(t, "tiers_degraded", kvferry(t, sick, "tiers")) })
	t.Run("verify_broken", func(t *testing.T) { golden(t, "verify_broken", kvferry(t, sick, "verify")) })
	t.Run("degraded_json", func(t *testing.T) { golden(t, "degraded_json", kvferry(t, sick, "status", "-o", "json")) })
}

// No string of the daemon reaches the terminal as it is.
func TestHostile(t *testing.T) {
	socket := listen(t, hostile())
	var all strings.Builder
	for _, args := range [][]string{{"status"}, {"workers"}, {"spaces"}, {"spaces", "diff", "3f", "3e"}, {"blocks"}, {"offers"}, {"config"}, {"version"}, {"tiers"}, {"explain", "90"}, {"explain", "cmpl-17"},
		{"status", "-o", "json"}, {"offers", "-o", "json"}, {"config", "-o", "json"}} {
		all.WriteString(kvferry(t, socket, args...))
	}
	c := node()
	c.blocks = func(*kvferryv1.BlocksRequest) (*kvferryv1.BlocksResponse, error) {
		return nil, status.Error(codes.InvalidArgument, evil)
	}
	all.WriteString(kvferry(t, listen(t, c), "blocks"))
	golden(t, "hostile", all.String())
	for _, r := range all.String() {
		if r != '\n' && (unprintable(r) || r == '\uFFFD') {
			t.Errorf("%U is printed", r)
		}
	}
	if strings.Contains(all.String(), "\nfake line") || !strings.Contains(all.String(), "größe 模型") {
		t.Error("a line of its own, or letters that are gone")
	}
}

func TestOtherSockets(t *testing.T) {
	dir := t.TempDir()
	engine, err := net.Listen("unix", filepath.Join(dir, "engine.sock"))
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(engine) }()
	defer func() { s.Stop(); <-done }()
	descriptors, err := net.Listen("unixpacket", filepath.Join(dir, "descriptors.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer descriptors.Close()
	text := kvferry(t, filepath.Join(dir, "engine.sock"), "status") + kvferry(t, filepath.Join(dir, "descriptors.sock"), "version")
	golden(t, "other_sockets", strings.ReplaceAll(text, dir, "DIR"))
}

func TestRefusedByDaemon(t *testing.T) {
	c := node()
	c.blocks = func(*kvferryv1.BlocksRequest) (*kvferryv1.BlocksResponse, error) { return nil, errNoSpace }
	golden(t, "refused", kvferry(t, listen(t, c), "blocks"))
}

func TestDown(t *testing.T) {
	dir := t.TempDir()
	golden(t, "down_missing", kvferry(t, filepath.Join(dir, "no.sock"), "status"))

	golden(t, "down_version", kvferry(t, filepath.Join(dir, "no.sock"), "version"))

	left := filepath.Join(dir, "left.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: left, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	_ = l.Close()
	golden(t, "down_ended", kvferry(t, left, "workers", "-o", "json"))

	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	golden(t, "down_file", kvferry(t, file, "status"))
}

func TestDownFrozen(t *testing.T) {
	c := node()
	c.hang = make(chan struct{})
	golden(t, "down_frozen", kvferry(t, listen(t, c), "config", "--timeout", "100ms"))
	<-c.hang
}

func TestInterrupted(t *testing.T) {
	c := node()
	c.hang = make(chan struct{})
	socket := listen(t, c)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-c.hang
		cancel()
	}()
	var out bytes.Buffer
	if code := run(ctx, []string{"config"}, environment{socket: socket, out: &out, err: &out, now: time.Now}); code != exitWrong || out.String() != "kvferry: interrupted\n" {
		t.Errorf("exit %d: %s", code, &out)
	}
}

func TestFormats(t *testing.T) {
	for n, want := range map[uint64]string{0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB", 1<<20 - 1: "1 MiB", 5 << 30: "5 GiB", 1 << 62: "4096 PiB"} {
		if got := size(n); got != want {
			t.Errorf("size(%d) = %q, want %q", n, got, want)
		}
	}
	for d, want := range map[time.Duration]string{
		-time.Second: "0ms", 12 * time.Millisecond: "12ms", 90 * time.Second: "1m30s", 59900 * time.Millisecond: "59.9s", 3 * time.Hour: "3h0m", 49 * time.Hour: "2d1h",
	} {
		if got := span(d); got != want {
			t.Errorf("span(%v) = %q, want %q", d, got, want)
		}
	}
	for n, want := range map[uint64]string{0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567"} {
		if got := count(n); got != want {
			t.Errorf("count(%d) = %q, want %q", n, got, want)
		}
	}
	if got := enumWord("ShardKind", "SHARD_KIND_SHARDED"); got != "sharded" {
		t.Errorf("enum word %q", got)
	}
}
