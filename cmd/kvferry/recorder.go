package main

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	kvferryv1 "github.com/kvferry/kvferry/proto/kvferry/v1"
)

// requestsSeen bounds the requests that are remembered so that their look-ups count once.
const requestsSeen = 1 << 16

// traceLine is one request of a trace.
type traceLine struct {
	Timestamp    int64    `json:"timestamp"` // ms from the first
	InputLength  uint64   `json:"input_length"`
	OutputLength uint64   `json:"output_length"` // 0: not known
	HashIDs      []uint64 `json:"hash_ids"`
}

// hashName is enough of a hash to tell it from all others of a trace, and half of its length.
type hashName [16]byte

// recorder writes a trace.
type recorder struct {
	name   string
	space  []byte // empty: of the first look-up
	limit  uint64 // requests; 0: none
	file   *os.File
	buf    *bufio.Writer
	zip    *gzip.Writer // nil: not compressed
	lines  *json.Encoder
	first  int64
	last   int64 // timestamp that was written
	ids    map[hashName]uint64
	seen   map[string]bool
	oldest []string // of seen, in the order of their coming

	requests, blocks, repeated, others, dropped uint64
}

func newRecorder(name string, space []byte, limit uint64) (*recorder, error) {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return nil, fmt.Errorf("--out: %w", err)
	}
	r := &recorder{name: name, space: space, limit: limit, file: f, buf: bufio.NewWriter(f), ids: map[hashName]uint64{}, seen: map[string]bool{}}
	var w io.Writer = r.buf
	if strings.HasSuffix(name, ".gz") {
		r.zip = gzip.NewWriter(r.buf)
		w = r.zip
	}
	r.lines = json.NewEncoder(w)
	return r, nil
}

// add writes a look-up. It answers errEnough after the last one that is wanted.
func (r *recorder) add(m *kvferryv1.TraceResponse) error {
	const hashBytes = 32
	r.dropped += m.Dropped
	if len(m.Hashes) < hashBytes {
		return nil // shorter than a block
	}
	if len(r.space) == 0 {
		r.space = m.SpaceId
	}
	switch {
	case !bytes.Equal(r.space, m.SpaceId):
		r.others++
		return nil
	case r.again(m.Instance + "\x00" + m.RequestId):
		r.repeated++
		return nil
	}
	if m.BlockTokens == 0 {
		return fmt.Errorf("the daemon does not know how many tokens a block of space %s has", shortID(m.SpaceId))
	}
	if r.requests == 0 {
		r.first = m.AtUnixMs
	}
	r.last = max(r.last, m.AtUnixMs-r.first) // look-ups that run side by side may be told the other way round
	n := len(m.Hashes) / hashBytes
	line := traceLine{Timestamp: r.last, InputLength: uint64(n) * uint64(m.BlockTokens), HashIDs: make([]uint64, n)}
	for i := range n {
		name := hashName(m.Hashes[i*hashBytes:])
		id, ok := r.ids[name]
		if !ok {
			id = uint64(len(r.ids))
			r.ids[name] = id
		}
		line.HashIDs[i] = id
	}
	if err := r.lines.Encode(line); err != nil {
		return fmt.Errorf("write %s: %w", r.name, err)
	}
	r.requests++
	r.blocks += uint64(n)
	if r.requests == r.limit {
		return errEnough
	}
	return nil
}

// again tells whether a request was seen, and remembers it.
func (r *recorder) again(request string) bool {
	if r.seen[request] {
		return true
	}
	if len(r.oldest) == requestsSeen {
		delete(r.seen, r.oldest[0])
		r.oldest = r.oldest[1:]
	}
	r.seen[request] = true
	r.oldest = append(r.oldest, request)
	return false
}

// close completes the file.
func (r *recorder) close() error {
	var errs []error
	if r.zip != nil {
		errs = append(errs, r.zip.Close())
	}
	errs = append(errs, r.buf.Flush(), r.file.Close())
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("write %s: %w", r.name, err)
	}
	return nil
}
