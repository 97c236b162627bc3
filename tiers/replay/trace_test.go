package replay

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
)

const good = `{"timestamp": 5, "input_length": 17, "output_length": 3, "hash_ids": [1, 2]}`

func TestReadErrors(t *testing.T) {
	for text, want := range map[string]string{
		``:                       "no requests",
		"\n\n":                   "no requests",
		`[1]`:                    "line 1: must be a JSON object",
		good + "\n{":             "line 2: not JSON",
		good + "\n" + good + "x": "line 2: not JSON",
		good + "\n\n" + `{"input_length": 17, "hash_ids": [1, 2]}`:                                                                  "line 3: timestamp: missing",
		`{"timestamp": null, "input_length": 17, "hash_ids": [1, 2]}`:                                                               "line 1: timestamp: null: must be a number",
		`{"timestamp": -1, "input_length": 17, "hash_ids": [1, 2]}`:                                                                 "line 1: timestamp: -1: must be a number, not negative",
		`{"timestamp": 1e300, "input_length": 17, "hash_ids": [1, 2]}`:                                                              "line 1: timestamp: 1e300",
		`{"timestamp": "now", "input_length": 17, "hash_ids": [1, 2]}`:                                                              "line 1: timestamp: \"now\"",
		`{"timestamp": 1005, "input_length": 17, "hash_ids": [1]}` + "\n" + `{"timestamp": 4, "input_length": 17, "hash_ids": [1]}`: "line 2: timestamp: 4 is less than in a request before: sort the trace by time",
		`{"timestamp": 1, "hash_ids": [1, 2]}`:                                                                                      "line 1: input_length: missing",
		`{"timestamp": 1, "input_length": 1.5, "hash_ids": [1, 2]}`:                                                                 "line 1: input_length: 1.5: must be a whole number",
		`{"timestamp": 1, "input_length": 17, "output_length": -3, "hash_ids": [1, 2]}`:                                             "line 1: output_length: -3",
		`{"timestamp": 1, "input_length": 17}`:                                                                                      "line 1: hash_ids: missing",
		`{"timestamp": 1, "input_length": 17, "hash_ids": null}`:                                                                    "line 1: hash_ids: null",
		`{"timestamp": 1, "input_length": 17, "hash_ids": 7}`:                                                                       "line 1: hash_ids: 7: must be a list",
		`{"timestamp": 1, "input_length": 17, "hash_ids": [1, "a"]}`:                                                                "line 1: hash_ids[1]: \"a\"",
		`{"timestamp": 1, "input_length": 17, "hash_ids": [1.5]}`:                                                                   "line 1: hash_ids[0]: 1.5",
		`{"timestamp": 1, "input_length": 17, "hash_ids": [18446744073709551616]}`:                                                  "line 1: hash_ids[0]: 18446744073709551616",
		`{"timestamp": 1, "input_length": 17, "hash_ids": []}`:                                                                      "line 1: hash_ids: empty",
		`{"timestamp": 1, "input_length": 1, "hash_ids": [1, 2]}`:                                                                   "line 1: hash_ids: 2 of them for input_length 1",
		good + "\n" + `{"timestamp": 9, "input_length": 900, "hash_ids": [1, 2]}`:                                                   "line 2: hash_ids: 2 of them for input_length 900 do not agree with blocks of 9 to 16 tokens",
		"\x1f\x8bnot gzip": "gzip",
	} {
		_, err := Read(strings.NewReader(text), 0)
		if err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%.60q: %v, must be %q", text, err, want)
		}
		var line *LineError
		if strings.HasPrefix(want, "line") && !errors.As(err, &line) {
			t.Errorf("%.60q: no LineError", text)
		}
	}
}

func TestReadBlockTokens(t *testing.T) {
	two := good + "\n" + `{"timestamp": 5, "input_length": 25, "hash_ids": [1, 2], "model": "x"}`
	tr, err := Read(strings.NewReader(two), 0)
	if err != nil || tr.BlockTokens != 16 {
		t.Fatalf("%+v, %v", tr, err)
	}
	if tr, err = Read(strings.NewReader(two), 13); err != nil || tr.BlockTokens != 13 || !tr.Requests[0].partial {
		t.Errorf("13 tokens: %+v, %v", tr, err)
	}
	if _, err = Read(strings.NewReader(two), 8); err == nil {
		t.Error("25 tokens in 2 blocks of 8 are taken")
	}
	full := `{"timestamp": 0, "input_length": 25, "hash_ids": [1]}` // engines name full blocks only
	if tr, err = Read(strings.NewReader(full), 16); err != nil || tr.Requests[0].partial {
		t.Errorf("full blocks only: %+v, %v", tr, err)
	}
	if tr, err = Read(strings.NewReader(`{"timestamp": 0, "input_length": 9, "hash_ids": []}`), 16); err != nil || tr.Asked != 0 {
		t.Errorf("less than a block: %+v, %v", tr, err)
	}
}

// Several threads may have written a trace.
func TestReadJitter(t *testing.T) {
	tr, err := Read(strings.NewReader(good+"\n"+`{"timestamp": 4, "input_length": 17, "hash_ids": [1, 2]}`), 0)
	if err != nil || tr.Requests[1].At != tr.Requests[0].At {
		t.Errorf("%+v, %v", tr, err)
	}
}

func TestReadGzip(t *testing.T) {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	fmt.Fprintln(z, good)
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	whole := b.Bytes()
	if tr, err := Read(bytes.NewReader(whole), 0); err != nil || tr.Requests[0].At != 5*time.Millisecond || len(tr.Requests[0].chain) != 2 || !tr.Requests[0].partial {
		t.Errorf("%+v, %v", tr, err)
	}
	if _, err := Read(bytes.NewReader(whole[:len(whole)-6]), 0); err == nil {
		t.Error("a gzip file that is cut off is taken")
	}
}

func TestReadLongLine(t *testing.T) {
	ids := strings.Repeat("7, ", 200_000) + "7"
	text := fmt.Sprintf(`{"timestamp": 1, "input_length": %d, "hash_ids": [%s]}`, 16*200_001, ids)
	tr, err := Read(strings.NewReader(text), 0)
	if err != nil || tr.Unique() != 200_001 || tr.BlockTokens != 16 || tr.Requests[0].partial {
		t.Errorf("%v", err)
	}
}

func FuzzRead(f *testing.F) {
	f.Add([]byte(good), int64(0))
	f.Add([]byte(good+"\n"+`{"timestamp": 6.5, "input_length": 33, "hash_ids": [1, -2, 3]}`), int64(16))
	f.Add([]byte("\x1f\x8b"), int64(0))
	f.Fuzz(func(t *testing.T, b []byte, tokens int64) {
		tr, err := Read(bytes.NewReader(b), tokens)
		if err != nil {
			return
		}
		asked := 0
		for i, r := range tr.Requests {
			asked += len(r.chain)
			if i > 0 && r.At < tr.Requests[i-1].At {
				t.Fatal("time goes back")
			}
		}
		if tr.BlockTokens < 1 || asked != tr.Asked || tr.Unique() > asked {
			t.Fatalf("%d tokens, %d asked, %d unique", tr.BlockTokens, tr.Asked, tr.Unique())
		}
		if asked < 1000 {
			if r, err := Run(tr, Config{DRAM: 5, NVMe: 7, Policy: "reuse", Down: down}); err != nil || r.DRAM+r.NVMe > Unlimited(tr) {
				t.Fatalf("%+v, %v", r, err)
			}
		}
	})
}
