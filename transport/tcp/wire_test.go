package tcp

import (
	"bytes"
	"errors"
	"testing"

	"github.com/kvferry/kvferry"
)

func TestWireRoundTrip(t *testing.T) {
	epoch, s, err := parsePreface(appendPreface(nil, testEpoch))
	if epoch != testEpoch || s != statusOK || err != nil {
		t.Error("preface:", epoch, s, err)
	}
	if s, err := parseAnswer(appendAnswer(nil, statusExhausted)); s != statusExhausted || err != nil {
		t.Error("answer:", s, err)
	}
	want := request{id: 77, key: testKey, spans: []span{{0, 1}, {1 << 40, payloadMax - 1}}}
	b := appendRequest([]byte("before"), &want)[len("before"):]
	var got request
	n, err := parseRequest(append(b, "behind"...), &got)
	if err != nil || n != len(b) || got.id != want.id || got.key != want.key || len(got.spans) != 2 || got.spans[1] != want.spans[1] || got.size() != payloadMax {
		t.Errorf("request: %+v, %d, %v", got, n, err)
	}
	r := response{statusOK, 1 << 60, payloadMax}
	if got, err := parseResponse(appendResponse(nil, r)); got != r || err != nil {
		t.Error("response:", got, err)
	}
}

func TestWireRefuses(t *testing.T) {
	full := make([]span, rangesMax)
	for name, b := range map[string][]byte{
		"no ranges":       appendRequest(nil, &request{}),
		"too many ranges": appendRequest(nil, &request{spans: append(full, span{})}),
		"too long":        appendRequest(nil, &request{spans: []span{{0, payloadMax}, {0, 1}}}),
		"sum overflows":   appendRequest(nil, &request{spans: []span{{0, 1}, {0, ^uint64(0)}}}),
		"other magic":     append([]byte("KVRX"), make([]byte, 100)...),
	} {
		if _, err := parseRequest(b, new(request)); !errors.Is(err, errFormat) {
			t.Errorf("%s: %v", name, err)
		}
	}
	good := appendRequest(nil, &request{spans: full})
	if _, err := parseRequest(good, new(request)); err != nil {
		t.Error("as many ranges as allowed:", err)
	}
	for _, b := range [][]byte{appendPreface(nil, testEpoch), appendAnswer(nil, 0), appendResponse(nil, response{}), good} {
		for i := 0; i < len(b); i += 1 + len(b)/150 {
			damaged := bytes.Clone(b)
			damaged[i] ^= 4
			_, _, err1 := parsePreface(damaged)
			_, err2 := parseAnswer(damaged)
			_, err3 := parseResponse(damaged)
			_, err4 := parseRequest(damaged, new(request))
			if err1 == nil || err2 == nil || err3 == nil || err4 == nil {
				t.Fatalf("byte %d of %d damaged: not noticed", i, len(b))
			}
		}
	}
	newer := appendPreface(nil, kvferry.Epoch{})[:prefaceSize-4]
	newer[8] = version + 1
	newer = seal(newer[:60], 0, prefaceSize)
	if _, s, err := parsePreface(newer); s != statusVersion || err != nil {
		t.Error("newer version:", s, err)
	}
}

func FuzzRequest(f *testing.F) {
	f.Add(appendRequest(nil, &request{id: 1, key: testKey, spans: []span{{4096, 65536}}}))
	f.Add(appendRequest(nil, &request{spans: make([]span, rangesMax)}))
	f.Add([]byte("KVRQ\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var r request
		n, err := parseRequest(b, &r)
		if err != nil {
			return
		}
		if n > len(b) || len(r.spans) == 0 || len(r.spans) > rangesMax || r.size() > payloadMax {
			t.Fatalf("accepted %+v of %d bytes", r, n)
		}
		if !bytes.Equal(appendRequest(nil, &r), b[:n]) {
			t.Fatal("not what was parsed")
		}
	})
}

func FuzzResponse(f *testing.F) {
	f.Add(appendResponse(nil, response{statusOK, 3, 100}))
	f.Add(appendAnswer(nil, statusDown))
	f.Add(appendPreface(nil, testEpoch))
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := parseResponse(b); err == nil && (r.length > payloadMax || (r.status != statusOK && r.length > 0)) {
			t.Fatalf("accepted %+v", r)
		}
		if s, err := parseAnswer(b); err == nil && !bytes.Equal(appendAnswer(nil, s), b[:answerSize]) {
			// Bytes after the status are not looked at, for later versions.
			if s, _ := parseAnswer(b); s != status(le.Uint32(b[8:])) {
				t.Fatal("not what was parsed")
			}
		}
		_, _, _ = parsePreface(b)
	})
}
