package replay

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/kvferry/kvferry"
	"github.com/kvferry/kvferry/tiers"
)

// Limits of what is read.
const (
	lineBytesMax = 64 << 20
	blocksMax    = 1 << 26
	lengthMax    = 1 << 40
	timestampMax = 1 << 53 // ms; up to there JSON's numbers are exact
)

// jitter is how much earlier than the one before it a request may be: several threads wrote the trace. It counts as of the same time.
const jitter = time.Second

// Trace is requests in the order of their time, and the blocks that they ask for.
type Trace struct {
	Requests    []Request
	BlockTokens int64
	Asked       int // blocks of all requests
	blocks      []block
}

// Request is a prompt.
type Request struct {
	At      time.Duration // since the epoch of the trace
	chain   []uint32      // its blocks, by number
	input   int64         // tokens
	partial bool          // the last block is shorter than a block
}

// block is one that differs from all others: what engines hash is the whole prefix, so an id names another block after another parent.
type block struct {
	hash   kvferry.Hash
	parent int32 // -1: first of its chain
}

// Unique is how many blocks differ.
func (t *Trace) Unique() int { return len(t.blocks) }

// Blocks are those of a request, in the order of its chain.
func (t *Trace) Blocks(q *Request) (out []tiers.Block) {
	for _, n := range q.chain {
		b := tiers.Block{Hash: t.blocks[n].hash}
		if p := t.blocks[n].parent; p >= 0 {
			b.Parent = t.blocks[p].hash
		}
		out = append(out, b)
	}
	return out
}

// Duration is from the first request to the last.
func (t *Trace) Duration() time.Duration {
	if len(t.Requests) == 0 {
		return 0
	}
	return t.Requests[len(t.Requests)-1].At - t.Requests[0].At
}

// LineError is a line of a trace that is not as it must be. A retry is useless.
type LineError struct {
	Line int // from 1 on
	Err  error
}

func (e *LineError) Error() string { return fmt.Sprintf("line %d: %v", e.Line, e.Err) }

func (e *LineError) Unwrap() error { return e.Err }

// Read reads a trace, gzipped or not: one JSON object a line, with timestamp (ms, not more than a second less than in a line before), input_length, output_length (tokens; may be missing) and hash_ids (one for each block
// of the input). Other fields and empty lines are skipped. blockTokens is the length of a block; 0: the one that all lines agree with.
func Read(r io.Reader, blockTokens int64) (*Trace, error) {
	b := bufio.NewReaderSize(r, 1<<16)
	if magic, _ := b.Peek(2); bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		z, err := gzip.NewReader(b)
		if err != nil {
			return nil, fmt.Errorf("gzip: %w", err)
		}
		defer z.Close()
		b = bufio.NewReaderSize(z, 1<<16)
	}
	p := parser{trace: &Trace{}, known: map[link]uint32{}, size: sizes{lo: 1, hi: lengthMax}}
	if blockTokens > 0 {
		p.size, p.fixed = sizes{blockTokens, blockTokens}, true
	}
	for line := 1; ; line++ {
		text, err := readLine(b)
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, &LineError{line, err}
		}
		if text = bytes.TrimSpace(text); len(text) > 0 {
			if err := p.line(text); err != nil {
				return nil, &LineError{line, err}
			}
		}
		if err != nil {
			break
		}
	}
	return p.end()
}

// readLine reads up to the next newline, however far that is, within lineBytesMax.
func readLine(b *bufio.Reader) (line []byte, err error) {
	for {
		part, err := b.ReadSlice('\n')
		if line = append(line, part...); len(line) > lineBytesMax {
			return nil, fmt.Errorf("longer than %d MiB", lineBytesMax>>20)
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return line, err
		}
	}
}

type link struct {
	parent int32
	id     uint64
}

type parser struct {
	trace *Trace
	known map[link]uint32
	size  sizes
	fixed bool // size was given
}

func (p *parser) line(text []byte) error {
	var l struct {
		Timestamp    json.RawMessage `json:"timestamp"`
		InputLength  json.RawMessage `json:"input_length"`
		OutputLength json.RawMessage `json:"output_length"`
		HashIDs      json.RawMessage `json:"hash_ids"`
	}
	if text[0] != '{' {
		return errors.New("must be a JSON object")
	}
	if err := json.Unmarshal(text, &l); err != nil {
		return fmt.Errorf("not JSON: %w", err)
	}
	at, err := number("timestamp", l.Timestamp, timestampMax)
	if err != nil {
		return err
	}
	r := Request{At: time.Duration(at * float64(time.Millisecond))}
	if at > math.MaxInt64/1e6 {
		return fmt.Errorf("timestamp: %s: must be milliseconds", l.Timestamp)
	}
	if n := len(p.trace.Requests); n > 0 && r.At < p.trace.Requests[n-1].At {
		if r.At < p.trace.Requests[n-1].At-jitter {
			return fmt.Errorf("timestamp: %s is less than in a request before: sort the trace by time", l.Timestamp)
		}
		r.At = p.trace.Requests[n-1].At
	}
	input, err := whole("input_length", l.InputLength)
	if err != nil {
		return err
	}
	r.input = input
	if l.OutputLength != nil {
		if _, err := whole("output_length", l.OutputLength); err != nil {
			return err
		}
	}
	ids, err := hashIDs(l.HashIDs)
	if err != nil {
		return err
	}
	if err := p.fit(input, int64(len(ids))); err != nil {
		return err
	}
	if p.trace.Asked += len(ids); p.trace.Asked > blocksMax {
		return fmt.Errorf("hash_ids: more than %d in all", blocksMax)
	}
	r.chain = p.chain(ids)
	p.trace.Requests = append(p.trace.Requests, r)
	return nil
}

// chain numbers the blocks of a request.
func (p *parser) chain(ids []uint64) []uint32 {
	out := make([]uint32, len(ids))
	parent := int32(-1)
	for i, id := range ids {
		k := link{parent, id}
		n, ok := p.known[k]
		if !ok {
			n = uint32(len(p.trace.blocks))
			p.known[k] = n
			p.trace.blocks = append(p.trace.blocks, block{p.hash(k), parent})
		}
		out[i] = n
		parent = int32(n)
	}
	return out
}

func (p *parser) hash(k link) kvferry.Hash {
	var b [kvferry.HashSize + 8]byte
	if k.parent >= 0 {
		copy(b[:], p.trace.blocks[k.parent].hash[:])
	}
	binary.LittleEndian.PutUint64(b[kvferry.HashSize:], k.id)
	return sha256.Sum256(b[:])
}

func (p *parser) end() (*Trace, error) {
	t := p.trace
	if len(t.Requests) == 0 {
		return nil, errors.New("no requests")
	}
	t.BlockTokens = p.size.choose()
	for i := range t.Requests {
		r := &t.Requests[i]
		r.partial = r.input%t.BlockTokens != 0 && int64(len(r.chain)) > r.input/t.BlockTokens
	}
	return t, nil
}
