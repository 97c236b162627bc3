package session

import (
	"fmt"
	"math"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Operation words (WIRE.md): one cache line an operation, shared for writing with one process.

const (
	wordBytes = 64
	// WordsPerSession is how many operations a session may have at a time.
	WordsPerSession = 1024
	// OperationMax is the highest operation number: 56 bits.
	OperationMax = 1<<56 - 1
)

// WordState is the lower byte of a word.
type WordState uint8

// The states.
const (
	WordFree WordState = iota
	WordPending
	WordCommitted
	WordRevoked
	WordFailed
)

// words is the session's mapping. Everything in it may be written by the process at any moment: nothing that is read from it is trusted beyond a comparison.
type words struct {
	file *os.File
	mem  []byte
}

func newWords() (*words, error) {
	fd, err := unix.MemfdCreate("kvferry-words", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("create operation words: %w", err)
	}
	w := &words{file: os.NewFile(uintptr(fd), "kvferry-words")}
	err = w.file.Truncate(WordsPerSession * wordBytes)
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
	}
	if err == nil {
		w.mem, err = unix.Mmap(fd, 0, WordsPerSession*wordBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		w.close()
		return nil, fmt.Errorf("create operation words: %w", err)
	}
	return w, nil
}

func (w *words) at(i uint32) *uint64 {
	return (*uint64)(unsafe.Pointer(&w.mem[int(i)*wordBytes]))
}

func packWord(operation uint64, s WordState) uint64 { return operation<<8 | uint64(s) }

// pending tells whether the worker has put the operation into its word as it must before it sends it.
func (w *words) pending(i uint32, operation uint64) bool { return w.is(i, operation, WordPending) }

func (w *words) is(i uint32, operation uint64, s WordState) bool {
	return atomic.LoadUint64(w.at(i)) == packWord(operation, s)
}

// decide swaps a pending word. It answers false when the worker was first.
func (w *words) decide(i uint32, operation uint64, s WordState, reason Outcome, done uint32) bool {
	atomic.StoreUint32((*uint32)(unsafe.Pointer(&w.mem[int(i)*wordBytes+8])), done)
	atomic.StoreUint32((*uint32)(unsafe.Pointer(&w.mem[int(i)*wordBytes+12])), uint32(reason))
	return atomic.CompareAndSwapUint64(w.at(i), packWord(operation, WordPending), packWord(operation, s))
}

// quiet tells the process that nothing of the operation touches its memory any more.
func (w *words) quiet(i uint32, operation uint64) {
	atomic.StoreUint64((*uint64)(unsafe.Pointer(&w.mem[int(i)*wordBytes+16])), operation)
}

// allQuiet tells that of every operation, also of one that never came: nothing is taken any more.
func (w *words) allQuiet() {
	for i := range uint32(WordsPerSession) {
		w.quiet(i, math.MaxUint64)
	}
}

func (w *words) close() {
	if w.mem != nil {
		_ = unix.Munmap(w.mem)
		w.mem = nil
	}
	_ = w.file.Close()
}
