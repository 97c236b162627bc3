package replay

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/bits"
	"strconv"
)

// number is a field that must be a number from 0 to a bound.
func number(name string, raw json.RawMessage, limit float64) (float64, error) {
	if raw == nil {
		return 0, fmt.Errorf("%s: missing", name)
	}
	var v *float64
	if err := json.Unmarshal(raw, &v); err != nil || v == nil || !(*v >= 0 && *v <= limit) {
		return 0, fmt.Errorf("%s: %s: must be a number, not negative", name, short(raw))
	}
	return *v, nil
}

// whole is a field that must be a count of tokens.
func whole(name string, raw json.RawMessage) (int64, error) {
	v, err := number(name, raw, lengthMax)
	if err == nil && v != float64(int64(v)) {
		err = fmt.Errorf("%s: %s: must be a whole number", name, short(raw))
	}
	return int64(v), err
}

func hashIDs(raw json.RawMessage) ([]uint64, error) {
	if raw == nil {
		return nil, errors.New("hash_ids: missing")
	}
	var list []json.RawMessage
	if err := json.Unmarshal(raw, &list); err != nil || list == nil {
		return nil, fmt.Errorf("hash_ids: %s: must be a list of whole numbers", short(raw))
	}
	out := make([]uint64, len(list))
	for i, r := range list {
		v, err := strconv.ParseUint(string(r), 10, 64)
		if err != nil {
			n, bad := strconv.ParseInt(string(r), 10, 64) // some engines write 64-bit hashes as signed
			if bad != nil {
				return nil, fmt.Errorf("hash_ids[%d]: %s: must be a whole number of 64 bits", i, short(r))
			}
			v = uint64(n)
		}
		out[i] = v
	}
	return out, nil
}

// short is a value as it may stand in an error.
func short(raw []byte) string {
	const most = 40
	if len(raw) > most {
		return string(raw[:most]) + "..."
	}
	return string(raw)
}

// sizes are the block lengths that agree with what was read, in tokens.
type sizes struct{ lo, hi int64 }

// fit holds a request's length against its number of blocks: the last one may be partial. Where the length of blocks was given, the tail may also have no id.
func (p *parser) fit(input, blocks int64) error {
	if blocks == 0 {
		if p.fixed && input < p.size.lo || input == 0 {
			return nil
		}
		return fmt.Errorf("hash_ids: empty, for input_length %d", input)
	}
	if input < blocks {
		return fmt.Errorf("hash_ids: %d of them for input_length %d", blocks, input)
	}
	if p.fixed && input/p.size.lo == blocks {
		return nil
	}
	s := sizes{max(p.size.lo, (input+blocks-1)/blocks), p.size.hi}
	if blocks > 1 {
		s.hi = min(s.hi, (input-1)/(blocks-1))
	}
	if s.lo > s.hi {
		return fmt.Errorf("hash_ids: %d of them for input_length %d do not agree with blocks of %s", blocks, input, p.size)
	}
	if !p.fixed {
		p.size = s
	}
	return nil
}

func (s sizes) String() string {
	if s.lo == s.hi {
		return fmt.Sprintf("%d tokens", s.lo)
	}
	return fmt.Sprintf("%d to %d tokens, as the lines before have", s.lo, s.hi)
}

// choose is the length that engines would have: a power of two where there is one.
func (s sizes) choose() int64 {
	if p := int64(1) << bits.Len64(uint64(s.lo-1)); p <= s.hi {
		return p
	}
	return s.lo
}
