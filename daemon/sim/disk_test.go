package sim

import (
	"context"
	"errors"
	"os"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/daemon/session"
	"github.com/kvferry/kvferry/tiers"
	"github.com/kvferry/kvferry/tiers/nvme"
	"github.com/kvferry/kvferry/tiers/nvme/nvmetest"
	"github.com/kvferry/kvferry/tiers/policy"
	"github.com/kvferry/kvferry/tiers/pool"
	"github.com/kvferry/kvferry/tiers/tierstest"
)

const (
	diskSlabs = 2 // 62 slots on each of a node's drives
	diskBytes = 2<<20 + diskSlabs*(2<<20)
)

// trouble is what a disk suffers from.
type trouble int

const (
	healthy trouble = iota
	badReads
	badWrites
	badSyncs
	slow
	hanging
	numTroubles
)

func (t trouble) String() string {
	return [...]string{"healthy", "reads fail", "writes fail", "syncs fail", "slow", "hangs"}[t]
}

// disk is a drive of a node, over all incarnations of its daemon.
type disk struct {
	node    *node
	name    string
	content *nvmetest.Device

	mu      sync.Mutex
	trouble trouble
	healed  chan struct{} // closed when the trouble is over
	harmed  bool          // something happened that may lose what was acknowledged: bits flipped, a sync failed
}

func (d *disk) harm() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.harmed = true
}

func (d *disk) now() (trouble, chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.trouble, d.healed
}

func (d *disk) set(t trouble) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.healed != nil {
		close(d.healed)
		d.healed = nil
	}
	d.trouble = t
	if t != healthy {
		d.healed = make(chan struct{})
	}
	d.harmed = d.harmed || t == badSyncs
}

// lies is how many syncs a lying disk lets pass before it writes.
const lies = 6

// handle is a disk as one daemon has it open. It takes simulated time for everything, and is dead with the daemon.
type handle struct {
	d     *disk
	to    *nvmetest.Device
	owner *daemon

	mu      sync.Mutex
	delayed [lies][]nvme.IO // that a lying disk has not written yet, by how many syncs it still waits
}

// wait is the time that an operation takes. It answers why it fails instead.
func (h *handle) wait(what string, bad trouble) error {
	r := h.d.node.w.roll(h.d.name + " " + what)
	t, healed := h.d.now()
	took := time.Duration(r.Int64N(int64(800 * time.Microsecond)))
	switch t {
	case slow:
		took *= 200
	case hanging:
		select {
		case <-healed:
		case <-h.owner.ctx.Done():
		}
	}
	_ = h.owner.pause(context.Background(), took+time.Duration(r.IntN(1000)))
	if h.owner.ctx.Err() != nil {
		return errDead
	}
	if t == bad {
		h.d.node.w.saw("disk: "+bad.String(), 1)
		return unix.EIO
	}
	return nil
}

// Run is nvme.Device.
func (h *handle) Run(ctx context.Context, write bool, batch []nvme.IO, done func(i int)) {
	what, bad := "read", badReads
	if write {
		what, bad = "write", badWrites
	}
	if !write {
		defer h.writing(h.offsets(batch))()
	}
	for i := range batch {
		err := h.wait(what, bad)
		if ctx.Err() != nil && err == nil {
			err = context.Cause(ctx)
		}
		switch {
		case err != nil:
			batch[i].Err = err
		case write && h.d.node.w.mutation == lyingDisk:
			h.delay(batch[i])
		default:
			h.to.Run(ctx, write, batch[i:i+1], nil)
		}
		for _, at := range h.offsets(batch[i : i+1]) {
			if write && h.d.node.flipped.has(at) { // since it was looked at
				h.d.harm()
			}
		}
		if done != nil {
			done(i)
		}
	}
}

// delay keeps a write for later.
func (h *handle) delay(io nvme.IO) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.delayed[lies-1] = append(h.delayed[lies-1], nvme.IO{Offset: io.Offset, Buf: append([]byte{}, io.Buf...)})
}

// offsets are the slots of the pool that a batch reads or writes.
func (h *handle) offsets(batch []nvme.IO) (at []uint64) {
	memory := h.owner.memory.Bytes
	for i := range batch {
		offset := uint64(uintptr(unsafe.Pointer(&batch[i].Buf[0])) - uintptr(unsafe.Pointer(&memory[0])))
		if offset < uint64(len(memory)) {
			at = append(at, offset)
		}
	}
	return at
}

// writing says that the disk may write into these slots of the pool from now on, until the answer is called.
func (h *handle) writing(at []uint64) (end func()) {
	h.owner.slots.beginAt(at)
	return func() { h.owner.slots.endAt(at) }
}

// ReadAt is nvme.Device.
func (h *handle) ReadAt(p []byte, off int64) error { return h.to.ReadAt(p, off) } // at Open only, which nothing waits for

// WriteAt is nvme.Device. It goes to the page cache and takes no time: the drive's metadata is written under a mutex, behind which no simulated clock goes on.
func (h *handle) WriteAt(p []byte, off int64) error {
	if h.owner.ctx.Err() != nil {
		return errDead
	}
	if t, _ := h.d.now(); t == badWrites {
		return unix.EIO
	}
	return h.to.WriteAt(p, off)
}

// Sync is nvme.Device.
func (h *handle) Sync() error {
	err := h.wait("sync", badSyncs)
	if errors.Is(err, unix.EIO) {
		h.to.Inject(func(nvmetest.Op, int64, int) error { return unix.EIO })
		defer h.to.Inject(nil)
		return h.to.Sync()
	}
	if err != nil {
		return err
	}
	if err := h.to.Sync(); err != nil {
		return err
	}
	h.mu.Lock()
	late := h.delayed[0]
	copy(h.delayed[:], h.delayed[1:])
	h.delayed[lies-1] = nil
	h.mu.Unlock()
	h.to.Run(context.Background(), true, late, nil)
	return nil
}

// Size is nvme.Device.
func (h *handle) Size() int64 { return h.to.Size() }

// Info is nvme.Device.
func (h *handle) Info() nvme.Info { return nvme.Info{Engine: "sim", Direct: true, Depth: 1} }

// Close is nvme.Device.
func (h *handle) Close() error { return nil }

// openDisks opens the drives of a node for an incarnation. One of whose superblock both copies are damaged is refused, and the operator gives the node a new one.
func (n *node) openDisks(d *daemon) (found [][]pool.Resident) {
	for _, k := range n.disks {
		drive, keep, err := n.openDisk(d, k)
		if errors.Is(err, nvme.ErrForeign) && k.harmed {
			n.w.saw("disks replaced", 1)
			k.content = nvmetest.New(diskBytes)
			drive, keep, err = n.openDisk(d, k)
		}
		if err != nil {
			n.w.fatalf("open %v: %v", k, err)
		}
		if strings.Contains(strings.Join(drive.Notes(), " "), "superblock") {
			n.w.saw("superblocks written anew", 1)
		}
		d.drives, found = append(d.drives, drive), append(found, keep)
	}
	return found
}

func (n *node) openDisk(d *daemon, k *disk) (*nvme.Drive, []pool.Resident, error) {
	return nvme.OpenDevice(nvme.Config{Bytes: diskBytes, SlabBytes: 2 << 20, Depth: 4}, &handle{d: k, to: k.content, owner: d})
}

// checkDisks is done when the daemon is there, to be closed whatever is found.
func (n *node) checkDisks(found [][]pool.Resident) {
	for i, keep := range found {
		if !n.disks[i].harmed {
			n.checkDisk(n.disks[i], n.daemon.drives[i], keep)
		}
	}
}

// checkDisk: what a header says is durable is there.
func (n *node) checkDisk(k *disk, drive *nvme.Drive, keep []pool.Resident) {
	got := make([]byte, shardBytes)
	for _, r := range keep {
		k.content.Peek(got, int64(drive.SlotOffset(r.Slab, r.Slot)))
		if string(got) != string(content(r.Header.Hash, uint32(r.Header.Shards), uint32(r.Header.Shard))) {
			n.w.fatalf("%v has a header of block %v, and not its bytes", k, r.Header.Hash)
		}
	}
}

// durable are the blocks that must be on the node's disks after whatever has happened to the daemon.
func (d *daemon) durable() (out []tiers.BlockView) {
	all, _ := d.ledger.Blocks(time.Now(), nil, nil, 1<<20)
	for _, v := range all {
		if v.InTier[policy.NVMe] > 0 && !d.node.disks[v.Drive-1].harmed {
			out = append(out, v)
		}
	}
	return out
}

// checkDurable: a block that a daemon had on an unharmed disk is there for the next one.
func (n *node) checkDurable() {
	for _, v := range n.left {
		if n.disks[v.Drive-1].harmed { // since, while nobody was there
			continue
		}
		ref, _, ok := n.daemon.ledger.FindSpace(v.Space)
		if !ok {
			n.w.fatalf("%s: the space of block %v, which was on a disk, is forgotten", n.name, v.Hash)
		}
		now, _ := n.daemon.ledger.Blocks(time.Now(), &v.Space, v.Hash[:], 1)
		if len(now) == 0 || now[0].InTier[policy.NVMe] < v.InTier[policy.NVMe] {
			n.w.fatalf("%s: block %v of space %d had %d shards on a disk, and now there is %+v", n.name, v.Hash, ref, v.InTier[policy.NVMe], now)
		}
		n.w.saw("durable blocks", 1)
	}
	n.left = nil
}

// diskTrouble begins or ends something with a disk of the node.
func (n *node) diskTrouble() {
	if len(n.disks) == 0 {
		return
	}
	k := n.disks[n.w.r.IntN(len(n.disks))]
	if t, _ := k.now(); t != healthy {
		k.set(healthy)
		return
	}
	t := badReads + trouble(n.w.r.IntN(int(numTroubles-badReads)))
	if t == badSyncs && !n.w.harms() {
		t = slow
	}
	k.set(t)
	n.w.saw("disk trouble", 1)
}

// harms tells whether the seed's disks lose what they have acknowledged: then nothing is checked but that no wrong byte is served.
func (w *world) harms() bool { return w.seed%2 == 0 }

// diskFlip turns bits of a disk over, wherever they are.
func (n *node) diskFlip() {
	if len(n.disks) == 0 || !n.w.harms() {
		return
	}
	k := n.disks[n.w.r.IntN(len(n.disks))]
	k.harm()
	for range 1 + n.w.r.IntN(16) {
		at := n.w.r.Int64N(diskBytes)
		switch n.w.r.IntN(8) { // headers are a small part of it, and the worst
		case 0, 1:
			at = 2<<20 + n.w.r.Int64N(diskSlabs)*(2<<20) + n.w.r.Int64N(16<<10)
		case 2:
			at = n.w.r.Int64N(64) // the superblock: one of its copies, or both
			if n.w.r.IntN(2) == 0 {
				k.content.Flip(12288+at, 0)
			}
		}
		k.content.Flip(at, uint(n.w.r.IntN(8)))
	}
	n.w.saw("disk flips", 1)
}

// powerFails has a node lose its memory and what its disks had not written durably.
func (n *node) powerFails() {
	if n.daemon == nil {
		return
	}
	n.power = true
	n.w.saw("power failures", 1)
	n.crash()
}

// nextDisks are the disks as the next daemon finds them.
func (n *node) nextDisks() {
	for _, k := range n.disks {
		if n.power {
			k.content.Crash()
		}
		k.content = k.content.Restart(n.w.r.Uint64())
		k.set(healthy)
	}
	if n.power {
		_ = os.Remove(n.path)
	}
	n.power = false
}

// down has blocks go to the disks soon.
var down = tiers.Down{Idle: 2 * time.Second, High: 0.8, Low: 0.6}

// prefetch asks for blocks that a process may load soon.
func (w *world) prefetch(n *node) {
	p := w.pick(n, session.Worker)
	if p == nil {
		return
	}
	blocks := chain(w.r)
	p.tell(func(s *session.Session) { s.Prefetch(p.space, tierstest.Pack(blocks)) })
	w.saw("prefetches", 1)
}

func (k *disk) String() string { return "disk " + k.name }
