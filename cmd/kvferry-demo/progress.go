package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"
)

// bar shows how far the demo is: one line that is drawn again on a terminal, a line for every tenth elsewhere.
type bar struct {
	out      io.Writer
	terminal bool
	total    int
	tenth    int
	drawn    bool
}

func newBar(out io.Writer, total int) *bar {
	b := &bar{out: out, total: total}
	if f, ok := out.(*os.File); ok {
		info, err := f.Stat()
		b.terminal = err == nil && info.Mode()&os.ModeCharDevice != 0
	}
	return b
}

// watch draws until stop is closed.
func (b *bar) watch(t *tally, stop <-chan struct{}) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-stop:
			b.draw(t)
			if b.drawn {
				fmt.Fprintln(b.out)
			}
			return
		case <-tick.C:
			b.draw(t)
		}
	}
}

func (b *bar) draw(t *tally) {
	done, blocks, wrong := t.progress()
	text := fmt.Sprintf("%4d/%d prompts, %s moved, %d wrong bytes", done, b.total, size(blocks), wrong)
	if !b.terminal {
		if tenth := 10 * done / b.total; tenth > b.tenth {
			b.tenth = tenth
			fmt.Fprintf(b.out, "  %3d %%  %s\n", 10*tenth, text)
		}
		return
	}
	const width = 30
	full := width * done / b.total
	fmt.Fprintf(b.out, "\r  [%s%s] %s\x1b[K", strings.Repeat("#", full), strings.Repeat(".", width-full), text)
	b.drawn = true
}

func size(blocks int) string {
	v := float64(blocks) * float64(shape.ShardBytes())
	if v >= 1e9 {
		return fmt.Sprintf("%.2f GB", v/1e9)
	}
	return fmt.Sprintf("%.0f MB", v/1e6)
}
