package replay

import (
	"compress/gzip"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/tiers"
)

var traceFile = flag.String("requests", "", "a conversation trace; what needs one is left out without")

var down = tiers.Down{Idle: 5 * time.Minute, High: 0.95, Low: 0.90}

func run1(t *testing.T, tr *Trace, dram, nvme int, policy string) Result {
	t.Helper()
	r, err := Run(tr, Config{DRAM: dram, NVMe: nvme, Policy: policy, Down: down})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func mustRead(t *testing.T, text string) *Trace {
	t.Helper()
	tr, err := Read(strings.NewReader(text), 0)
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

// Small enough to be counted by hand.
func TestByHand(t *testing.T) {
	tr := mustRead(t, `{"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [1, 2, 3]}
{"timestamp": 10, "input_length": 32, "output_length": 1, "hash_ids": [4, 2]}
{"timestamp": 20, "input_length": 48, "output_length": 1, "hash_ids": [1, 2, 5]}
`)
	if tr.Unique() != 6 || tr.Asked != 8 || tr.BlockTokens != 16 { // the 2 after 4 is another block than the one after 1
		t.Fatalf("%d blocks differ of %d, of %d tokens", tr.Unique(), tr.Asked, tr.BlockTokens)
	}
	if got := Unlimited(tr); got != 2 {
		t.Errorf("unlimited: %d", got)
	}
	for capacity, want := range []int{0, 1, 2, 2} {
		if got := Optimum(tr, capacity); got != want {
			t.Errorf("optimum of %d blocks: %d hits, want %d", capacity, got, want)
		}
	}
	for _, c := range []struct{ dram, nvme, hits, stored, left int }{{8, 0, 2, 6, 0}, {3, 0, 1, 7, 4}, {4, 0, 2, 6, 2}} {
		r := run1(t, tr, c.dram, c.nvme, "lru")
		if r.DRAM != c.hits || r.Stored != c.stored || r.Evicted != c.left || r.NotStored != 0 {
			t.Errorf("%d blocks: %+v", c.dram, r)
		}
	}
	if r := run1(t, tr, 2, 0, "lru"); r.NotStored == 0 || r.Stored+r.NotStored+r.DRAM != r.Asked {
		t.Errorf("2 blocks for prompts of 3: %+v", r)
	}
}

// What must hold for every policy and size.
func TestBounds(t *testing.T) {
	tr := excerpt(t)
	most := Unlimited(tr)
	for _, part := range []int{50, 5} {
		n := tr.Unique() / part
		best := Optimum(tr, n)
		if best > most {
			t.Errorf("the optimum finds %d, all there is %d", best, most)
		}
		for _, p := range []string{"lru", "s3fifo", "reuse"} {
			r := run1(t, tr, n, 0, p)
			if r.DRAM > best || r.NVMe != 0 || r.Stored != r.Asked-r.DRAM || r.Evicted != max(r.Stored-n, 0) {
				t.Errorf("%s, %d blocks: %+v, optimum %d", p, n, r, best)
			}
		}
	}
	if r := run1(t, tr, tr.Unique(), 0, "reuse"); r.DRAM != most {
		t.Errorf("with room for all %d found, of %d", r.DRAM, most)
	}
}

// DRAM and NVMe together are near what one tier of both sizes finds.
func TestTwoTiers(t *testing.T) {
	tr := excerpt(t)
	n := tr.Unique() / 40
	for _, p := range []string{"lru", "s3fifo", "reuse"} {
		one, two := run1(t, tr, 5*n, 0, p), run1(t, tr, n, 4*n, p)
		if two.NVMe == 0 || two.Promoted != two.NVMe || two.Demoted == 0 || two.Released == 0 {
			t.Errorf("%s: nothing went down or came up: %+v", p, two)
		}
		if two.Demoted > 2*two.Stored { // blocks that take each other's place on the drive
			t.Errorf("%s: %d blocks written for %d stored", p, two.Demoted, two.Stored)
		}
		if two.HitRatio() < 0.88*one.HitRatio() {
			t.Errorf("%s: %d+%d blocks %.4f, as one tier %.4f", p, n, 4*n, two.HitRatio(), one.HitRatio())
		}
		if again := run1(t, tr, n, 4*n, p); again != two {
			t.Errorf("%s: %+v and %+v", p, two, again)
		}
	}
}

// Where almost everything fits, what is idle is written once.
func TestIdleSettles(t *testing.T) {
	tr := excerpt(t)
	for _, p := range []string{"lru", "s3fifo", "reuse"} {
		r, err := Run(tr, Config{DRAM: tr.Unique() / 5, NVMe: tr.Unique() * 7 / 10, Policy: p, Down: tiers.Down{Idle: 30 * time.Second, High: down.High, Low: down.Low}})
		if err != nil {
			t.Fatal(err)
		}
		if r.Demoted > r.Stored*3/2 {
			t.Errorf("%s: %d blocks written for %d stored", p, r.Demoted, r.Stored)
		}
	}
}

// Idle blocks go down though there is room.
func TestIdle(t *testing.T) {
	tr := mustRead(t, `{"timestamp": 0, "input_length": 48, "hash_ids": [1, 2, 3]}
{"timestamp": 400000, "input_length": 17, "hash_ids": [4, 5]}
`)
	if r := run1(t, tr, 100, 100, "lru"); r.Demoted != 3 || r.Released != 0 {
		t.Errorf("%+v", r)
	}
}

func TestRunRefuses(t *testing.T) {
	tr := mustRead(t, `{"timestamp": 0, "input_length": 48, "hash_ids": [1]}`)
	for _, c := range []Config{{DRAM: 0, Policy: "lru"}, {DRAM: 1, NVMe: -1, Policy: "lru"}, {DRAM: 1, Policy: "fifo"}} {
		if _, err := Run(tr, c); err == nil {
			t.Errorf("%+v is taken", c)
		}
	}
}

// excerpt is the beginning of the conversation trace, with times of its own: it has none.
func excerpt(t *testing.T) *Trace {
	t.Helper()
	f, err := os.Open("../../cmd/kvferry-demo/testdata/conversation.jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	all, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for i, line := range strings.Split(strings.TrimSpace(string(all)), "\n") {
		fmt.Fprintf(&b, "{\"timestamp\": %d, %s\n", i*300, line[1:])
	}
	return mustRead(t, b.String())
}

// The conversation trace against the figures that are known of it.
func TestConversation(t *testing.T) {
	if *traceFile == "" {
		t.Skip("no -requests")
	}
	f, err := os.Open(*traceFile)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	tr, err := Read(f, 0)
	if err != nil {
		t.Fatal(err)
	}
	if tr.Unique() != 182_790 || tr.BlockTokens != 512 {
		t.Fatalf("%d blocks of %d tokens", tr.Unique(), tr.BlockTokens)
	}
	lruKnown := map[int]float64{2: 0.0793, 5: 0.1958, 10: 0.2789, 20: 0.3453}
	for _, percent := range []int{1, 2, 5, 10, 20, 40} {
		n := tr.Unique() * percent / 100
		lru, ours, both, bothLRU := run1(t, tr, n, 0, "lru").HitRatio(), run1(t, tr, n, 0, "reuse"), run1(t, tr, n, 4*n, "reuse"), run1(t, tr, n, 4*n, "lru")
		t.Logf("%2d %%: lru %.4f s3fifo %.4f ours %.4f (x%.3f) optimum %.4f; with 4x nvme: lru %.4f s3fifo %.4f ours %.4f (dram %.4f) optimum %.4f, written %d of %d stored; one tier of both: lru %.4f ours %.4f", percent, lru,
			run1(t, tr, n, 0, "s3fifo").HitRatio(), ours.HitRatio(), ours.HitRatio()/lru, Ratio(Optimum(tr, n), tr.Asked), bothLRU.HitRatio(), run1(t, tr, n, 4*n, "s3fifo").HitRatio(), both.HitRatio(),
			Ratio(both.DRAM, both.Asked), Ratio(Optimum(tr, 5*n), tr.Asked), both.Demoted, both.Stored, run1(t, tr, 5*n, 0, "lru").HitRatio(), run1(t, tr, 5*n, 0, "reuse").HitRatio())
		if k, ok := lruKnown[percent]; ok && (lru < k-0.001 || lru > k+0.001) {
			t.Errorf("%d %%: LRU %.4f, known is %.4f", percent, lru, k)
		}
		if ours.HitRatio() < 0.99*lru {
			t.Errorf("%d %%: ours %.4f, LRU %.4f", percent, ours.HitRatio(), lru)
		}
	}
}
