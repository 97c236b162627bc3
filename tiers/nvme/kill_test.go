package nvme_test

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/tiers/nvme"
	"github.com/kvferry/kvferry/tiers/nvme/nvmetest"
)

var kills = flag.Int("kills", 20, "rounds of the kill -9 test")

// killed is set in the child's environment: the drive's path.
const killed = "KVFERRY_TEST_NVME_CHILD"

func TestMain(m *testing.M) {
	if path := os.Getenv(killed); path != "" {
		if err := loadDrive(path); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if what := os.Getenv(forbids); what != "" {
		if err := forbidden(what); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// event is what the child tells before, and after, it did something.
type event struct {
	What       string // "writing", "written", "clearing", "cleared"
	Slab, Slot int
	Name       uint64
	Version    uint64
	Length     int
}

var killConfig = nvme.Config{Bytes: 34 << 20, SlabBytes: 4 << 20, Depth: 16}

// loadDrive writes and clears until it is killed, and tells of it on standard output.
func loadDrive(path string) error {
	cfg := killConfig
	cfg.Path = path
	d, keep, err := nvme.Open(cfg)
	if err != nil {
		return err
	}
	out := json.NewEncoder(os.Stdout)
	var mu sync.Mutex
	tell := func(e event) {
		mu.Lock()
		defer mu.Unlock()
		_ = out.Encode(e)
	}
	used := make([]map[int]bool, d.Slabs())
	for slab := range used {
		used[slab] = map[int]bool{}
		if bytes, _ := d.SlabInUse(slab); bytes == 0 {
			d.FormatSlab(slab, []uint64{16 << 10, 64 << 10, 256 << 10}[slab%3])
		}
	}
	for _, r := range keep {
		used[r.Slab][r.Slot] = true
	}
	seed := uint64(os.Getpid())
	var wg sync.WaitGroup
	for worker := range 4 { // each has slabs of its own
		wg.Go(func() {
			random := rand.New(rand.NewPCG(seed, uint64(worker)))
			version := uint64(time.Now().UnixNano())
			for {
				slab := worker + 4*random.IntN(len(used)/4)
				bytes, n := d.SlabInUse(slab)
				var batch []nvme.WriteOp
				var events []event
				for _, slot := range random.Perm(min(n, 12))[:1+random.IntN(6)] {
					if used[slab][slot] {
						tell(event{What: "clearing", Slab: slab, Slot: slot})
						d.Clear(slab, slot)
						delete(used[slab], slot)
						if random.IntN(3) == 0 && d.Flush(context.Background()) == nil {
							tell(event{What: "cleared", Slab: slab, Slot: slot})
							continue
						}
					}
					version++
					e := event{What: "writing", Slab: slab, Slot: slot, Name: uint64(slab*1000 + slot), Version: version, Length: int(bytes) - random.IntN(2)*100}
					b := nvmetest.NewBlock(e.Name, e.Version, e.Length)
					b.Header.Generation = d.Fill(slab, slot)
					tell(e)
					used[slab][slot] = true
					batch = append(batch, nvme.WriteOp{Slab: slab, Slot: slot, Header: b.Header, Payload: b.Payload})
					events = append(events, e)
				}
				d.Write(context.Background(), batch)
				for i, e := range events {
					if batch[i].Err == nil {
						e.What = "written"
						tell(e)
					}
				}
			}
		})
	}
	wg.Wait()
	return nil
}

// TestKill kills a process that writes to a real file, again and again, and looks at what is there.
func TestKill(t *testing.T) {
	cfg := killConfig
	cfg.Path = filepath.Join(t.TempDir(), "drive")
	known := map[spot]event{} // acknowledged as written
	random := rand.New(rand.NewPCG(7, 7))
	acked, back := 0, 0
	for round := range max(1, *kills/(slower/2+1)) {
		maybe := map[spot][]event{} // might be found
		for at, e := range known {
			maybe[at] = []event{e}
		}
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), killed+"="+cfg.Path)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewReader(out)
		stop := 50 + random.IntN(400)
		for n := 0; ; n++ {
			line, err := lines.ReadBytes('\n')
			if err != nil {
				if err != io.EOF || n <= stop {
					t.Fatalf("the child ended by itself: %v", err)
				}
				break
			}
			if n == stop {
				_ = cmd.Process.Kill()
			}
			var e event
			if err := json.Unmarshal(line, &e); err != nil {
				break // cut off by the kill
			}
			at := spot{e.Slab, e.Slot}
			switch e.What {
			case "clearing":
				delete(known, at)
			case "cleared":
				delete(maybe, at)
			case "writing":
				delete(known, at)
				maybe[at] = append(maybe[at], e)
			case "written":
				known[at], maybe[at] = e, []event{e}
				acked++
			}
		}
		_ = cmd.Wait()
		d, keep, err := nvme.Open(cfg)
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		found := map[spot]event{}
		for _, r := range keep {
			at := spot{r.Slab, r.Slot}
			for _, e := range maybe[at] {
				if e.Version == r.Header.StoredMs {
					found[at] = e
				}
			}
			e, ok := found[at]
			if !ok {
				t.Fatalf("round %d: slab %d, slot %d: version %d is there, possible are %+v", round, r.Slab, r.Slot, r.Header.StoredMs, maybe[at])
			}
			want := nvmetest.NewBlock(e.Name, e.Version, e.Length)
			got, err := nvmetest.Read(context.Background(), d, r.Slab, r.Slot, r.Header)
			if err != nil || string(got) != string(want.Payload) {
				t.Fatalf("round %d: slab %d, slot %d: %v, or wrong bytes", round, r.Slab, r.Slot, err)
			}
		}
		for at, e := range known {
			if found[at] != e {
				t.Fatalf("round %d: slab %d, slot %d: version %d was acknowledged and is gone", round, at[0], at[1], e.Version)
			}
		}
		back += len(found) - len(known)
		known = found
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d rounds, %d writes acknowledged, %d found that were not", *kills, acked, back)
}
