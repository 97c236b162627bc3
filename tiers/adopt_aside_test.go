package tiers_test

import (
	"testing"
	"time"

	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/pool"
	"github.com/kvferry/kvferry/tiers/tierstest"
)

// A slot that a drive was writing when a daemon was killed is out of use for 30 s from then, and not from each start of those that come after it.
func TestAside(t *testing.T) {
	killed := time.Unix(1e9, 0)
	for _, c := range []struct {
		after time.Duration // of the start
		used  bool
	}{{0, true}, {29 * time.Second, true}, {31 * time.Second, false}, {-time.Hour, true}} { // the clock was put back: the whole time again
		slots := tierstest.NewSlots(2, 1<<20)
		slots.FormatSlab(0, 64<<10)
		now := killed.Add(c.after)
		l := tiers.New(tiers.Config{Pool: slots, Limits: tiers.DefaultLimits})
		l.Adopt(now, 0, []pool.Resident{{Slab: 0, Slot: 3, Aside: true, Header: pool.Header{StoredMs: uint64(killed.UnixMilli()), FromDrive: true}}})
		if got := l.Stats().UsedBytes > 0; got != c.used {
			t.Errorf("%v after the kill: in use %v", c.after, got)
		}
		if err := l.Check(); err != nil {
			t.Error(err)
		}
		l.Expire(now.Add(30 * time.Second))
		if st := l.Stats(); st.UsedBytes != 0 {
			t.Errorf("%v after the kill, and 30 s later: %d bytes in use", c.after, st.UsedBytes)
		}
		if err := l.Check(); err != nil {
			t.Error(err)
		}
	}
}
