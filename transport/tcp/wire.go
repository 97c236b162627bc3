package tcp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/kvferry/kvferry"
)

// Sizes and bounds of WIRE.md, "Data protocol".
const (
	version        = 1
	prefaceSize    = 64
	answerSize     = 64
	requestFixed   = 36 // header and CRC, without ranges
	rangeSize      = 16
	rangesMax      = 1024
	requestSizeMax = requestFixed + rangesMax*rangeSize
	responseSize   = 64
	payloadMax     = 64 << 20 // of one request, all ranges together

	prefaceMagic  = "KVFDATA1"
	requestMagic  = "KVRQ"
	responseMagic = "KVRS"
)

// status is a gRPC status code; only these are sent, any other one that comes counts as a refusal.
type status uint32

const (
	statusOK         status = 0
	statusNotFound   status = 5
	statusExhausted  status = 8
	statusOutOfRange status = 11
	statusVersion    status = 12 // UNIMPLEMENTED
	statusDown       status = 14 // UNAVAILABLE
)

func (s status) String() string {
	switch s {
	case statusOK:
		return "ok"
	case statusNotFound:
		return "key not found"
	case statusExhausted:
		return "too many connections"
	case statusOutOfRange:
		return "range not granted"
	case statusVersion:
		return "version not spoken"
	case statusDown:
		return "unavailable"
	}
	return fmt.Sprintf("status %d", uint32(s))
}

var (
	errShort  = errors.New("more bytes needed")
	errFormat = errors.New("malformed")

	castagnoli = crc32.MakeTable(crc32.Castagnoli)
	le         = binary.LittleEndian
)

// span is one range of the server's pool.
type span struct{ offset, length uint64 }

// request asks for spans under one claim's key. Each carries the key, so that a connection serves every claim between two daemons.
type request struct {
	id    uint64
	key   [16]byte
	spans []span
}

// size is what the response to r carries if it is granted.
func (r *request) size() uint64 {
	var n uint64
	for _, s := range r.spans {
		n += s.length
	}
	return n
}

func appendPreface(b []byte, epoch kvferry.Epoch) []byte {
	at := len(b)
	b = append(b, prefaceMagic...)
	b = le.AppendUint32(b, version)
	b = le.AppendUint32(b, 0)
	b = append(b, epoch[:]...)
	return seal(b, at, prefaceSize)
}

// parsePreface reads the first 64 bytes of a connection.
func parsePreface(b []byte) (kvferry.Epoch, status, error) {
	var epoch kvferry.Epoch
	if len(b) < prefaceSize {
		return epoch, 0, errShort
	}
	if string(b[:8]) != prefaceMagic {
		return epoch, 0, fmt.Errorf("%w preface: magic %x", errFormat, b[:8])
	}
	if crc32.Checksum(b[:prefaceSize-4], castagnoli) != le.Uint32(b[prefaceSize-4:]) {
		return epoch, 0, fmt.Errorf("%w preface: crc32c", errFormat)
	}
	if le.Uint32(b[8:]) != version {
		return epoch, statusVersion, nil
	}
	copy(epoch[:], b[16:32])
	return epoch, statusOK, nil
}

func appendAnswer(b []byte, s status) []byte {
	at := len(b)
	b = append(b, prefaceMagic...)
	b = le.AppendUint32(b, uint32(s))
	return seal(b, at, answerSize)
}

// seal pads what begins at b[at] with zeros and ends it with its CRC32C.
func seal(b []byte, at, size int) []byte {
	var zero [64]byte
	b = append(b, zero[:size-4-(len(b)-at)]...)
	return le.AppendUint32(b, crc32.Checksum(b[at:], castagnoli))
}

func parseAnswer(b []byte) (status, error) {
	if len(b) < answerSize {
		return 0, errShort
	}
	if string(b[:8]) != prefaceMagic || crc32.Checksum(b[:answerSize-4], castagnoli) != le.Uint32(b[answerSize-4:]) {
		return 0, fmt.Errorf("%w answer: %x", errFormat, b[:answerSize])
	}
	return status(le.Uint32(b[8:])), nil
}

func appendRequest(b []byte, r *request) []byte {
	at := len(b)
	b = append(b, requestMagic...)
	b = le.AppendUint32(b, uint32(len(r.spans)))
	b = le.AppendUint64(b, r.id)
	b = append(b, r.key[:]...)
	for _, s := range r.spans {
		b = le.AppendUint64(b, s.offset)
		b = le.AppendUint64(b, s.length)
	}
	return le.AppendUint32(b, crc32.Checksum(b[at:], castagnoli))
}

// parseRequest reads one request from the start of b into r, reusing r.spans, and returns its length in bytes.
// It answers errShort while b is only the start of a request.
func parseRequest(b []byte, r *request) (int, error) {
	if len(b) < 8 {
		return 0, errShort
	}
	if string(b[:4]) != requestMagic {
		return 0, fmt.Errorf("%w request: magic %x", errFormat, b[:4])
	}
	count := le.Uint32(b[4:])
	if count < 1 || count > rangesMax {
		return 0, fmt.Errorf("%w request: count %d", errFormat, count)
	}
	n := requestFixed + int(count)*rangeSize
	if len(b) < n {
		return 0, errShort
	}
	if crc32.Checksum(b[:n-4], castagnoli) != le.Uint32(b[n-4:]) {
		return 0, fmt.Errorf("%w request: crc32c", errFormat)
	}
	r.id = le.Uint64(b[8:])
	copy(r.key[:], b[16:32])
	r.spans = r.spans[:0]
	var total uint64
	for at := 32; at < n-4; at += rangeSize {
		s := span{le.Uint64(b[at:]), le.Uint64(b[at+8:])}
		if s.length > payloadMax || total+s.length > payloadMax {
			return 0, fmt.Errorf("%w request: longer than %d bytes", errFormat, payloadMax)
		}
		total += s.length
		r.spans = append(r.spans, s)
	}
	return n, nil
}

// response heads the bytes of one request.
type response struct {
	status status
	id     uint64
	length uint64
}

func appendResponse(b []byte, r response) []byte {
	at := len(b)
	b = append(b, responseMagic...)
	b = le.AppendUint32(b, uint32(r.status))
	b = le.AppendUint64(b, r.id)
	b = le.AppendUint64(b, r.length)
	return seal(b, at, responseSize)
}

func parseResponse(b []byte) (response, error) {
	if len(b) < responseSize {
		return response{}, errShort
	}
	if string(b[:4]) != responseMagic {
		return response{}, fmt.Errorf("%w response: magic %x", errFormat, b[:4])
	}
	if crc32.Checksum(b[:responseSize-4], castagnoli) != le.Uint32(b[responseSize-4:]) {
		return response{}, fmt.Errorf("%w response: crc32c", errFormat)
	}
	r := response{status(le.Uint32(b[4:])), le.Uint64(b[8:]), le.Uint64(b[16:])}
	if r.length > payloadMax || (r.status != statusOK && r.length != 0) {
		return response{}, fmt.Errorf("%w response: %d bytes with %v", errFormat, r.length, r.status)
	}
	return r, nil
}
