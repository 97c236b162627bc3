package rpc

import (
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers"
)

// Every reason for which a block leaves is told in words.
func TestGone(t *testing.T) {
	for r := tiers.Evicted; !strings.HasPrefix(r.String(), "reason("); r++ {
		if s := gone(&tiers.Change{Reason: r, Tier: kvferry.DRAM, At: 1e18}, time.Unix(1e9, 0)); strings.HasPrefix(s, "it ,") {
			t.Errorf("%v: %q", r, s)
		}
	}
}
