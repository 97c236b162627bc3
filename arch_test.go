package kvferry_test

import (
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/kvferry/kvferry"

// allowed says what each part may import of this module, tests aside. A package that is not named here may import nothing of it.
var allowed = map[string][]string{
	"":                        {},
	"csrc/copyshim":           {},
	"csrc/uringshim":          {},
	"proto/kvferry/v1":        {},
	"gpu":                     {""},
	"transport":               {"", "csrc/copyshim"},
	"transport/tcp":           {"", "transport", "csrc/copyshim"},
	"tiers/pool":              {""},
	"tiers/policy":            {},
	"tiers":                   {"", "tiers/pool", "tiers/policy"},
	"tiers/nvme":              {"", "tiers/pool", "csrc/copyshim", "csrc/uringshim"}, // the slots' headers are the pool's; the two shims check and move what it reads
	"tiers/nvme/nvmetest":     {"", "tiers/nvme", "tiers/pool"},                      // a disk and a suite for it
	"tiers/tierstest":         {"", "tiers", "tiers/pool"},
	"tiers/replay":            {"", "tiers", "tiers/pool", "tiers/policy"}, // a trace through the ledger itself, over slots without memory
	"daemon/counters":         {},
	"daemon/health":           {},
	"daemon/watchdog":         {},
	"daemon/mover":            {"", "transport"},
	"daemon/handoff":          {"", "csrc/copyshim", "tiers", "transport", "transport/tcp", "daemon/counters", "daemon/health", "daemon/mover"},
	"daemon/tiering":          {"", "csrc/copyshim", "tiers", "tiers/policy", "tiers/nvme", "transport", "daemon/counters", "daemon/health", "daemon/mover"},
	"daemon/session":          {"", "csrc/copyshim", "gpu", "tiers", "tiers/policy", "transport", "daemon/counters", "daemon/handoff", "daemon/mover", "daemon/tiering"},
	"daemon/rpc":              {"*"},
	"daemon/sim":              {"*"},
	"daemon":                  {"*"},
	"standin":                 {"", "proto/kvferry/v1", "transport", "csrc/copyshim"},
	"standin/process":         {"*"},
	"transport/transporttest": {"", "transport", "csrc/copyshim"},
	"cmd/kvferryd":            {"daemon", "daemon/watchdog"},
	"examples/pd-proxy":       {},
	"cmd/kvferry":             {"*"},
	"cmd/kvferry-demo":        {"*"},
	"bench":                   {"*"},
}

// forbidden says who must not import what, and why. "*" in allowed does not lift it.
var forbidden = []struct{ from, imports, why string }{
	{"transport", "tiers", "a copier moves segments and knows nothing of blocks"},
	{"tiers", "transport", "the ledger plans and moves no byte"},
	{"tiers", "daemon", "the ledger is below the daemon"},
	{"transport", "daemon", "transports are below the daemon"},
	{"daemon/session", "proto", "only rpc translates messages: the rest of the daemon does not change with the wire"},
	{"daemon/handoff", "proto", "only rpc translates messages: the rest of the daemon does not change with the wire"},
	{"daemon/mover", "tiers", "the mover copies; who submits a transfer keeps the book"},
	{"daemon/mover", "proto", "only rpc translates messages: the rest of the daemon does not change with the wire"},
	{"daemon", "standin", "the daemon is not built from what tests it"},
	{"cmd/kvferry", "tiers", "the CLI sees what the Admin API tells"},
	{"cmd/kvferry", "transport", "the CLI sees what the Admin API tells"},
}

type importLine struct{ dir, path, file string }

func imports(t *testing.T) []importLine {
	t.Helper()
	var out []importLine
	err := filepath.WalkDir(".", func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if e.IsDir() && (strings.HasPrefix(e.Name(), ".") && e.Name() != "." || e.Name() == "testdata" || e.Name() == "python" || e.Name() == "bin") {
			return filepath.SkipDir
		}
		if e.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		dir := filepath.ToSlash(filepath.Dir(path))
		if dir == "." {
			dir = ""
		}
		for _, i := range f.Imports {
			p, err := strconv.Unquote(i.Path.Value)
			if err != nil {
				return err
			}
			out = append(out, importLine{dir, p, path})
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// below tells whether dir is part or in it.
func below(dir, part string) bool { return dir == part || strings.HasPrefix(dir, part+"/") }

// TestImports holds the dependency order of ARCHITECTURE.md.
func TestImports(t *testing.T) {
	for _, i := range imports(t) {
		if i.path == "C" && i.dir != "csrc/copyshim" && i.dir != "csrc/uringshim" {
			t.Errorf("%s: import \"C\" outside of csrc/: C stays behind a shim", i.file)
		}
		rest, ours := strings.CutPrefix(i.path, module)
		if !ours {
			continue
		}
		rest = strings.TrimPrefix(rest, "/")
		list, known := allowed[i.dir]
		if !known {
			t.Errorf("%s: package %q is not in arch_test.go: say what it may import", i.file, i.dir)
		}
		ok := false
		for _, a := range list {
			ok = ok || a == "*" || a == rest
		}
		if !ok {
			t.Errorf("%s: %s may not import %s", i.file, i.dir, rest)
		}
		for _, f := range forbidden {
			if i.dir == "cmd/kvferry" && rest == "tiers/replay" { // simulate asks no daemon: it runs a trace here
				continue
			}
			if below(i.dir, f.from) && below(rest, f.imports) && !strings.HasSuffix(i.dir, "test") {
				t.Errorf("%s: %s must not import %s: %s", i.file, i.dir, rest, f.why)
			}
		}
	}
}

// TestEnvironment: the environment is read in cmd only; what a test or a benchmark reads is its own affair.
func TestEnvironment(t *testing.T) {
	for _, i := range imports(t) {
		if below(i.dir, "cmd") || below(i.dir, "bench") || below(i.dir, "standin") {
			continue
		}
		b, err := os.ReadFile(i.file)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(b), "os.Getenv(") || strings.Contains(string(b), "os.LookupEnv(") {
			t.Errorf("%s reads the environment: pass it in as configuration", i.file)
		}
	}
}

// TestPackageDocs: exactly one package comment each.
func TestPackageDocs(t *testing.T) {
	docs := map[string]int{}
	for _, i := range imports(t) {
		docs[i.dir] += 0
	}
	seen := map[string]bool{}
	for dir := range docs {
		files, err := filepath.Glob(filepath.Join(dir, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if seen[file] || strings.HasSuffix(file, "_test.go") || strings.HasSuffix(file, ".pb.go") {
				continue
			}
			seen[file] = true
			f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.PackageClauseOnly|parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			if f.Doc != nil {
				docs[dir]++
			}
		}
	}
	for dir, n := range docs {
		if n != 1 && dir != "proto/kvferry/v1" {
			t.Errorf("package %q has %d package comments: must have one", dir, n)
		}
	}
}
