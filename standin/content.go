package standin

import (
	"crypto/sha256"
	"encoding/binary"
	"unsafe"

	"github.com/kvferry/kvferry"
)

// Chain hashes one more block of a prompt, named by what its tokens are.
func Chain(parent kvferry.Hash, tokens uint64) kvferry.Hash {
	var b [kvferry.HashSize + 8]byte
	copy(b[:], parent[:])
	binary.LittleEndian.PutUint64(b[kvferry.HashSize:], tokens)
	return sha256.Sum256(b[:])
}

// Write puts the content into a block that its hash stands for: so that whoever reads it anywhere can tell whether it is right.
func (m *Memory) Write(block uint32, h kvferry.Hash) {
	for p := range m.Planes {
		seed, w := planeSeed(h, p), words(m.Plane(block, p))
		for i := range w {
			w[i] = mix(seed + uint64(i))
		}
	}
}

// Wrong counts the bytes of a block, in words of eight, that are not what its hash stands for.
func (m *Memory) Wrong(block uint32, h kvferry.Hash) (bytes uint64) {
	for p := range m.Planes {
		seed := planeSeed(h, p)
		for i, w := range words(m.Plane(block, p)) {
			if w != mix(seed+uint64(i)) {
				bytes += 8
			}
		}
	}
	return bytes
}

const scribble = 0xdeadbeefdeadbeef

// Scribble overwrites a block, as an engine does that takes it for something else.
func (m *Memory) Scribble(block uint32) {
	for p := range m.Planes {
		w := words(m.Plane(block, p))
		for i := range w {
			w[i] = scribble
		}
	}
}

// Written counts the bytes of a block, in words of eight, that somebody has written since Scribble.
func (m *Memory) Written(block uint32) (bytes uint64) {
	for p := range m.Planes {
		for _, w := range words(m.Plane(block, p)) {
			if w != scribble {
				bytes += 8
			}
		}
	}
	return bytes
}

func planeSeed(h kvferry.Hash, plane int) uint64 {
	return binary.LittleEndian.Uint64(h[:]) ^ mix(uint64(plane)+1)
}

// mix is the finalizer of SplitMix64 (Steele, Lea, Flood 2014): each word of a block differs from every other.
func mix(v uint64) uint64 {
	v *= 0x9e3779b97f4a7c15
	v = (v ^ v>>30) * 0xbf58476d1ce4e5b9
	v = (v ^ v>>27) * 0x94d049bb133111eb
	return v ^ v>>31
}

// words sees b in words; planes are multiples of eight bytes and aligned as the mapping is.
func words(b []byte) []uint64 {
	return unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/8)
}
