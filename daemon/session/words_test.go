package session

import (
	"math"
	"sync/atomic"
	"testing"
	"unsafe"
)

// A process whose session has ended must learn that an operation is quiet which never reached the daemon.
func TestAllQuiet(t *testing.T) {
	w, err := newWords()
	if err != nil {
		t.Fatal(err)
	}
	defer w.close()
	atomic.StoreUint64(w.at(7), packWord(12, WordPending))
	w.allQuiet()
	for i := range uint32(WordsPerSession) {
		if got := atomic.LoadUint64((*uint64)(unsafe.Pointer(&w.mem[i*wordBytes+16]))); got != math.MaxUint64 {
			t.Fatalf("quiet of word %d is %d", i, got)
		}
	}
	if !w.pending(7, 12) {
		t.Fatal("the word itself has changed")
	}
}
