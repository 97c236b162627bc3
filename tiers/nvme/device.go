package nvme

import "context"

// Align is what offsets, lengths and addresses of a Device's payload I/O are multiples of.
const Align = 4096

// IO is one payload read or write of a batch: aligned in offset, length and address.
type IO struct {
	Offset int64
	Buf    []byte
	Err    error // why it failed; nil when all of Buf was read or written. Set by Run
}

// Device is the one door to a disk. Two kinds of access never touch the same range between two syncs: payloads by Run, past the page cache where that is
// possible, and metadata by ReadAt and WriteAt, through it. Everything may be called concurrently.
type Device interface {
	// Run reads or writes a batch and returns when nothing of it is in flight any more. For each I/O it sets Err and calls done with its index, once, unless
	// done is nil; done may be called concurrently, and the rest of the batch goes on meanwhile. When ctx ends, nothing new is issued: what was not has the
	// cause of ctx as its Err.
	Run(ctx context.Context, write bool, batch []IO, done func(i int))
	// ReadAt and WriteAt move metadata. Short ones are errors.
	ReadAt(p []byte, off int64) error
	WriteAt(p []byte, off int64) error
	// Sync returns when everything whose write had returned before it was called is durable. After an error nothing of it is known to be.
	Sync() error
	// Size is the device's length in bytes.
	Size() int64
	// Info says what drives it.
	Info() Info
	// Close releases it. Nothing is in flight.
	Close() error
}

// Info is how a device does its work.
type Info struct {
	Engine     string // "uring", "threads", or a name of a test's
	Why        string // why it is not what "auto" would rather have; empty otherwise
	Direct     bool   // payloads bypass the page cache
	Registered bool   // the pool's memory is registered with the kernel, for batches that begin from now on, but those whose ring is refused
	Depth      int    // I/Os in flight per batch
}
