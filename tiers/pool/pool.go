// Package pool is the DRAM tier's file: a superblock, slabs of equally long slots, and beside the slots a table of headers. WIRE.md
// gives the bytes. The file lies on tmpfs or hugetlbfs, so that its pages outlive the daemon, and is mapped read-only by workers.
//
// The package owns the mapping and writes the headers; payloads are written by copiers, and which slot holds what is decided by the ledger of
// package tiers. Calls on different slots may run concurrently; calls on one slot, and those that format slabs, are serialised by the caller.
// It does not know leases, pins or policy.
package pool

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"strings"
	"sync/atomic"
	"unsafe"

	"github.com/kvferry/kvferry"
)

// Format is the version of the file's layout.
const Format = 1

const (
	superMagic = 0x314c4f4f5046564b // "KVFPOOL1"
	slabMagic  = 0x3142414c5346564b // "KVFSLAB1"

	superBytes = 4096
	superCRCAt = 80
	floorAt    = 96
	slabsAt    = 2 << 20
	// SlabHeaderBytes is the room of a slab's header: the table of slots' headers begins after it.
	SlabHeaderBytes = 4096
	slabHeaderBytes = SlabHeaderBytes
	// HeaderBytes is the length of a slot's header.
	HeaderBytes = 256
	headerUsed  = 136 // of these
	fromDriveAt = headerUsed
	// SlotAlign is what every slot's offset and length are multiples of.
	SlotAlign = 4096
	// SlotsPerSlabMax bounds the slots of a slab, so that a slot's number fits into 32 bits beside its slab's.
	SlotsPerSlabMax = 1 << 14
	// SlabsMax bounds the slabs of a pool for the same reason.
	SlabsMax = 1 << 18
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func crcOf(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

// Errors of Open. None of them changes the file.
var (
	// ErrForeign is returned when the file exists and is not a pool of ours, or of a newer format.
	ErrForeign = errors.New("pool: not a pool file of this version")
	// ErrPath is returned when the path is not on tmpfs or hugetlbfs.
	ErrPath = errors.New("pool: not a place for a pool")
	// ErrLocked is returned when another daemon has the pool open. A retry may succeed when that one is gone.
	ErrLocked = errors.New("pool: in use by another daemon")
	// ErrNoSpace is returned when the file system, a memory limit or the huge page reserve does not allow the configured size.
	ErrNoSpace = errors.New("pool: not enough memory")
)

// Config says where the pool lies and how large it is.
type Config struct {
	Path      string // the file; its directory exists and is on tmpfs or hugetlbfs
	Bytes     uint64 // of the file; rounded down to whole slabs
	SlabBytes uint64 // a power of two, 2 MiB .. 64 MiB
	BootID    string // of this boot of the machine: a file of another boot is made anew

	populate func(part []byte) error // nil: the kernel's; of an adopted pool, for tests
}

// Validate names the first key that is wrong.
func (c Config) Validate() error {
	if c.Path == "" {
		return errors.New("pool.path: must be set")
	}
	if c.SlabBytes < 2<<20 || c.SlabBytes > 64<<20 || c.SlabBytes&(c.SlabBytes-1) != 0 {
		return fmt.Errorf("pool.slab: %d bytes: must be a power of two from 2 MiB to 64 MiB", c.SlabBytes)
	}
	if c.Bytes < slabsAt+2*c.SlabBytes {
		return fmt.Errorf("pool.size: %d bytes: must hold at least two slabs of %d bytes and 2 MiB", c.Bytes, c.SlabBytes)
	}
	if c.Bytes > slabsAt+SlabsMax*c.SlabBytes {
		return fmt.Errorf("pool.size: %d bytes: at most %d slabs of %d bytes", c.Bytes, SlabsMax, c.SlabBytes)
	}
	return nil
}

// Pool is an open pool file.
type Pool struct {
	cfg      Config
	mem      []byte
	file     *os.File
	readOnly *os.File
	lock     *os.File
	slabs    []slab
	adopted  bool
	cold     string // why nothing was adopted
	dropped  int    // slots of an adopted file that were not worth keeping
	touching *touching
	// generation is at least as high as any that a slot of this file ever had.
	generation uint64
}

type slab struct {
	slotBytes uint64 // 0: free
	slots     uint32
	headersAt uint64
	slotsAt   uint64
}

// Header is what a slot says of its content.
type Header struct {
	Generation kvferry.Generation
	State      uint32
	Hash       kvferry.Hash
	Space      kvferry.SpaceID
	Parent     kvferry.Hash
	Length     uint64
	CRC32C     uint32
	Shard      uint16
	Shards     uint16
	StoredMs   uint64
	FromDrive  bool // while it is filled: a device writes the payload, and may go on when the daemon is dead
}

// States of a slot as they stand in its header; they are those of tiers.SlotState.
const (
	StateFree     = 0
	StateFilling  = 1
	StateResident = 2
)

// Bytes is the whole mapping. Its length is a multiple of 2 MiB.
func (p *Pool) Bytes() []byte { return p.mem }

// ReadOnly is a descriptor of the file that was opened for reading: the one that workers get. It stays the pool's.
func (p *Pool) ReadOnly() *os.File { return p.readOnly }

// Slabs is the number of slabs.
func (p *Pool) Slabs() int { return len(p.slabs) }

// SlabBytes is the length of a slab.
func (p *Pool) SlabBytes() uint64 { return p.cfg.SlabBytes }

// Adopted tells whether the file was there already and was taken over.
func (p *Pool) Adopted() bool { return p.adopted }

// Cold tells why nothing was adopted; empty where the file was.
func (p *Pool) Cold() string { return p.cold }

// Dropped is how many slots of an adopted file were torn, or being filled, when the daemon before ended.
func (p *Pool) Dropped() int { return p.dropped }

// SlotBytes is the slot length that holds length bytes of payload.
func SlotBytes(length uint64) uint64 { return (length + SlotAlign - 1) &^ (SlotAlign - 1) }

// SlotsPerSlab is how many slots of slotBytes a slab holds.
func (p *Pool) SlotsPerSlab(slotBytes uint64) int { return SlotsIn(p.cfg.SlabBytes, slotBytes) }

// SlotsIn is how many slots of slotBytes, with their headers, fit into a slab of slabBytes; 0 where slotBytes is no slot length.
func SlotsIn(slabBytes, slotBytes uint64) int {
	if slotBytes == 0 || slotBytes%SlotAlign != 0 {
		return 0
	}
	n := (slabBytes - slabHeaderBytes) / (slotBytes + HeaderBytes)
	for n > 0 && slabHeaderBytes+TableBytes(n)+n*slotBytes > slabBytes {
		n--
	}
	return int(min(n, SlotsPerSlabMax-1))
}

// TableBytes is the room of the headers of so many slots.
func TableBytes(slots uint64) uint64 { return (slots*HeaderBytes + SlotAlign - 1) &^ (SlotAlign - 1) }

func (p *Pool) slabAt(i int) uint64 { return slabsAt + uint64(i)*p.cfg.SlabBytes }

// SlabInUse is the slot length and count of a slab, or zeros when it is free.
func (p *Pool) SlabInUse(i int) (slotBytes uint64, slots int) {
	return p.slabs[i].slotBytes, int(p.slabs[i].slots)
}

// FormatSlab makes a free slab into one of slots of slotBytes, all free, and returns how many there are.
// Their generations start above all that this file ever had: a reader of what lay there before finds no generation that it knows.
func (p *Pool) FormatSlab(i int, slotBytes uint64) int {
	n := p.SlotsPerSlab(slotBytes)
	s := &p.slabs[i]
	if s.slotBytes != 0 || n == 0 {
		panic(fmt.Sprintf("pool: format slab %d (slots of %d) with slots of %d", i, s.slotBytes, slotBytes))
	}
	*s = p.geometry(i, slotBytes, n)
	for k := range n {
		h := p.header(i, k)
		g := (*uint64)(unsafe.Pointer(&h[0]))
		atomic.StoreUint64(g, p.generation)
		clear(h[8:])
		sealHeader(h, p.generation)
	}
	b := p.mem[p.slabAt(i):][:slabHeaderBytes]
	binary.LittleEndian.PutUint64(b[8:], slotBytes)
	binary.LittleEndian.PutUint64(b[16:], uint64(n))
	binary.LittleEndian.PutUint64(b[0:], slabMagic)
	binary.LittleEndian.PutUint32(b[24:], crcOf(b[:24]))
	return n
}

// FreeSlab gives a slab back. None of its slots is in use.
func (p *Pool) FreeSlab(i int) {
	p.writeFloor()
	clear(p.mem[p.slabAt(i):][:slabHeaderBytes])
	p.slabs[i] = slab{}
}

func (p *Pool) geometry(i int, slotBytes uint64, n int) slab {
	at := p.slabAt(i) + slabHeaderBytes
	return slab{slotBytes: slotBytes, slots: uint32(n), headersAt: at, slotsAt: at + TableBytes(uint64(n))}
}

// HeaderOffset is where in the file the header of a slot lies.
func (p *Pool) HeaderOffset(slab, slot int) uint64 {
	return p.slabs[slab].headersAt + uint64(slot)*HeaderBytes
}

// SlotOffset is where in the file a slot's payload lies.
func (p *Pool) SlotOffset(slab, slot int) uint64 {
	s := &p.slabs[slab]
	return s.slotsAt + uint64(slot)*s.slotBytes
}

func (p *Pool) header(slab, slot int) []byte {
	if slot >= int(p.slabs[slab].slots) {
		panic(fmt.Sprintf("pool: slot %d of slab %d, which has %d", slot, slab, p.slabs[slab].slots))
	}
	at := p.HeaderOffset(slab, slot)
	return p.mem[at : at+HeaderBytes : at+HeaderBytes]
}

// Fill marks a slot as being filled and returns the generation that it will have when it is published. It is called before the first payload byte is written.
func (p *Pool) Fill(slab, slot int) kvferry.Generation {
	h := p.header(slab, slot)
	g := (*uint64)(unsafe.Pointer(&h[0]))
	gen := atomic.LoadUint64(g)
	if gen&1 == 0 {
		gen++
	} // else: a fill that was given up
	atomic.StoreUint64(g, gen)
	binary.LittleEndian.PutUint32(h[8:], StateFilling)
	h[fromDriveAt] = 0
	sealHeader(h, gen)
	p.generation = max(p.generation, gen+1)
	return kvferry.Generation(gen + 1)
}

// Publish writes what the slot holds now, its generation last. The payload is complete and fenced.
func (p *Pool) Publish(slab, slot int, hd Header) {
	h := p.header(slab, slot)
	hd.State = StateResident
	putHeader(h, hd)
	sealHeader(h, uint64(hd.Generation))
	atomic.StoreUint64((*uint64)(unsafe.Pointer(&h[0])), uint64(hd.Generation))
}

// Clear marks a slot as free. Its bytes stay, and with them its generation: a reader that was sent here before still finds the right ones.
func (p *Pool) Clear(slab, slot int) {
	h := p.header(slab, slot)
	binary.LittleEndian.PutUint32(h[8:], StateFree)
	h[fromDriveAt] = 0
	sealHeader(h, binary.LittleEndian.Uint64(h))
}

// Generation is the one that stands in the slot's header.
func (p *Pool) Generation(slab, slot int) kvferry.Generation {
	h := p.header(slab, slot)
	return kvferry.Generation(atomic.LoadUint64((*uint64)(unsafe.Pointer(&h[0]))))
}

// EncodeHeader writes a whole header into the HeaderBytes at h, with tail behind the last field, and seals it. Only for memory that nobody reads
// meanwhile: a pool's slots are written in another order.
func EncodeHeader(h []byte, hd Header, tail []byte) {
	putHeader(h, hd)
	if copy(h[headerUsed:HeaderBytes], tail) < len(tail) {
		panic("pool: a tail that does not fit into the header")
	}
	binary.LittleEndian.PutUint64(h, uint64(hd.Generation))
	sealHeader(h[:HeaderBytes], uint64(hd.Generation))
}

// HeaderTail is what EncodeHeader was given as tail, and zeros.
func HeaderTail(h []byte) []byte { return h[headerUsed:HeaderBytes] }

func putHeader(h []byte, hd Header) {
	binary.LittleEndian.PutUint32(h[8:], hd.State)
	copy(h[16:48], hd.Hash[:])
	copy(h[48:80], hd.Space[:])
	copy(h[80:112], hd.Parent[:])
	binary.LittleEndian.PutUint64(h[112:], hd.Length)
	binary.LittleEndian.PutUint32(h[120:], hd.CRC32C)
	binary.LittleEndian.PutUint16(h[124:], hd.Shard)
	binary.LittleEndian.PutUint16(h[126:], hd.Shards)
	binary.LittleEndian.PutUint64(h[128:], hd.StoredMs)
	clear(h[headerUsed:HeaderBytes])
	if hd.FromDrive {
		h[fromDriveAt] = 1
	}
}

// MarkFromDrive notes that a device fills the slot, and since when: a later daemon must not use it before the device is done.
func (p *Pool) MarkFromDrive(slab, slot int, nowMs uint64) {
	h := p.header(slab, slot)
	h[fromDriveAt] = 1
	binary.LittleEndian.PutUint64(h[128:], nowMs)
	sealHeader(h, binary.LittleEndian.Uint64(h))
}

// sealHeader sets the header's checksum as it will be once its generation is gen.
func sealHeader(h []byte, gen uint64) {
	binary.LittleEndian.PutUint32(h[12:], headerCRC(h, gen))
}

func headerCRC(h []byte, gen uint64) uint32 {
	var b [HeaderBytes]byte
	copy(b[8:], h[8:])
	binary.LittleEndian.PutUint64(b[:], gen)
	binary.LittleEndian.PutUint32(b[12:], 0)
	return crcOf(b[:])
}

// ParseHeader reads a slot's header. It answers false when the checksum does not hold.
func ParseHeader(h []byte) (Header, bool) {
	if len(h) < HeaderBytes {
		return Header{}, false
	}
	gen := binary.LittleEndian.Uint64(h)
	if binary.LittleEndian.Uint32(h[12:]) != headerCRC(h[:HeaderBytes], gen) {
		return Header{}, false
	}
	hd := Header{
		Generation: kvferry.Generation(gen),
		State:      binary.LittleEndian.Uint32(h[8:]),
		Length:     binary.LittleEndian.Uint64(h[112:]),
		CRC32C:     binary.LittleEndian.Uint32(h[120:]),
		Shard:      binary.LittleEndian.Uint16(h[124:]),
		Shards:     binary.LittleEndian.Uint16(h[126:]),
		StoredMs:   binary.LittleEndian.Uint64(h[128:]),
		FromDrive:  h[fromDriveAt] == 1,
	}
	copy(hd.Hash[:], h[16:48])
	copy(hd.Space[:], h[48:80])
	copy(hd.Parent[:], h[80:112])
	return hd, true
}

// Resident is a slot that the scan found to be worth keeping, or one that must not be used yet.
type Resident struct {
	Slab, Slot int
	Header     Header
	Aside      bool // a device may still be writing into it
}

// scan rebuilds the slabs of an adopted file. Every generation is raised above the old maximum, so that whoever still maps the file from before finds none that it was given.
func (p *Pool) scan() ([]Resident, error) {
	var keep []Resident
	highest := p.generation
	for i := range p.slabs {
		b := p.mem[p.slabAt(i):][:slabHeaderBytes]
		slotBytes, n := binary.LittleEndian.Uint64(b[8:]), binary.LittleEndian.Uint64(b[16:])
		if binary.LittleEndian.Uint64(b) != slabMagic || binary.LittleEndian.Uint32(b[24:]) != crcOf(b[:24]) ||
			n == 0 || n != uint64(p.SlotsPerSlab(slotBytes)) {
			clear(b)
			continue
		}
		p.slabs[i] = p.geometry(i, slotBytes, int(n))
		if err := populate(p.mem[p.slabs[i].headersAt:][:TableBytes(n)]); err != nil { // at once: a fault for each page takes longer
			return nil, err
		}
		for k := range int(n) {
			h, ok := ParseHeader(p.header(i, k))
			// A torn header's generation may be anything; it is not trusted, and the slot gets a new one below.
			if ok {
				highest = max(highest, uint64(h.Generation))
			}
			if ok && h.State == StateResident && !h.Generation.Filling() && h.Length > 0 && h.Length <= slotBytes {
				keep = append(keep, Resident{Slab: i, Slot: k, Header: h})
			} else if ok && h.State == StateFilling && h.FromDrive {
				keep = append(keep, Resident{Slab: i, Slot: k, Header: h, Aside: true})
			} else if !ok || h.State != StateFree {
				p.dropped++
			}
		}
	}
	p.generation = (highest + 4) &^ 1
	kept := 0
	for i := range p.slabs {
		for k := range int(p.slabs[i].slots) {
			hd := Header{State: StateFree, Generation: kvferry.Generation(p.generation)}
			if kept < len(keep) && keep[kept].Slab == i && keep[kept].Slot == k {
				keep[kept].Header.Generation = hd.Generation
				hd = keep[kept].Header
				kept++
			}
			h := p.header(i, k)
			putHeader(h, hd)
			sealHeader(h, p.generation)
			atomic.StoreUint64((*uint64)(unsafe.Pointer(&h[0])), p.generation)
		}
	}
	return keep, nil
}

// firstGeneration is random, so that the bytes of a payload are no generation even where a slab was formatted differently.
func firstGeneration() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand aborts the program instead
	return binary.LittleEndian.Uint64(b[:])>>2&^1 | 1<<48
}

// writeSuper writes the superblock, its magic last.
func (p *Pool) writeSuper() {
	b := make([]byte, superCRCAt+4)
	binary.LittleEndian.PutUint64(b[0:], superMagic)
	binary.LittleEndian.PutUint32(b[8:], Format)
	binary.LittleEndian.PutUint64(b[16:], p.cfg.Bytes)
	binary.LittleEndian.PutUint64(b[24:], p.cfg.SlabBytes)
	binary.LittleEndian.PutUint64(b[32:], uint64(len(p.slabs)))
	copy(b[40:76], p.cfg.BootID)
	binary.LittleEndian.PutUint32(b[superCRCAt:], crcOf(b[:superCRCAt]))
	p.writeFloor()
	copy(p.mem[8:], b[8:])
	atomic.StoreUint64((*uint64)(unsafe.Pointer(&p.mem[0])), superMagic)
}

// writeFloor keeps the highest generation where no slab's end can lose it.
func (p *Pool) writeFloor() {
	atomic.StoreUint64((*uint64)(unsafe.Pointer(&p.mem[floorAt])), p.generation)
}

type super struct {
	version    uint32
	bytes      uint64
	slabBytes  uint64
	slabs      uint64
	bootID     string
	generation uint64
}

func parseSuper(b []byte) (super, bool) {
	if len(b) < floorAt+8 || binary.LittleEndian.Uint64(b) != superMagic ||
		binary.LittleEndian.Uint32(b[superCRCAt:]) != crcOf(b[:superCRCAt]) {
		return super{}, false
	}
	return super{
		version:    binary.LittleEndian.Uint32(b[8:]),
		bytes:      binary.LittleEndian.Uint64(b[16:]),
		slabBytes:  binary.LittleEndian.Uint64(b[24:]),
		slabs:      binary.LittleEndian.Uint64(b[32:]),
		bootID:     strings.TrimRight(string(b[40:76]), "\x00"),
		generation: binary.LittleEndian.Uint64(b[floorAt:]),
	}, true
}
