package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"maps"
	"mime"
	"net/http"
)

// forEngines are the headers of a client that its request has for the engines too.
func forEngines(from http.Header) http.Header {
	return pick(from, "Authorization", "X-Request-Id", "Traceparent", "Tracestate", "Accept")
}

func pick(from http.Header, names ...string) http.Header {
	out := http.Header{}
	for _, n := range names {
		if v := from.Values(n); len(v) > 0 {
			out[n] = v
		}
	}
	return out
}

// pass gives an engine's answer to the client, without transfer parameters. Events go at once. It answers false when nothing was sent.
func pass(w http.ResponseWriter, answer *http.Response) (begun bool, err error) {
	header := pick(answer.Header, "Content-Type", "X-Request-Id", "Retry-After", "Www-Authenticate", "Cache-Control")
	if kind, _, _ := mime.ParseMediaType(answer.Header.Get("Content-Type")); kind == "text/event-stream" {
		maps.Copy(w.Header(), header)
		w.WriteHeader(answer.StatusCode)
		return true, passEvents(w, answer.Body)
	}
	b, err := io.ReadAll(io.LimitReader(answer.Body, answerMax+1))
	if err == nil && len(b) > answerMax {
		err = fmt.Errorf("more than %d bytes", answerMax)
	}
	if err != nil {
		return false, fmt.Errorf("read answer: %w", err)
	}
	maps.Copy(w.Header(), header)
	w.WriteHeader(answer.StatusCode)
	if _, err := w.Write(withoutParams(b)); err != nil {
		return true, fmt.Errorf("write answer: %w", err)
	}
	return true, nil
}

func passEvents(w http.ResponseWriter, from io.Reader) error {
	c := http.NewResponseController(w)
	_ = c.Flush() // the client may see the headers before the first token
	lines := bufio.NewScanner(from)
	lines.Buffer(make([]byte, 0, 64<<10), answerMax)
	lines.Split(wholeLines)
	for lines.Scan() {
		line := lines.Bytes()
		if data, ok := bytes.CutPrefix(line, []byte("data:")); ok {
			if less := withoutParams(data); !bytes.Equal(less, data) {
				line = append(append([]byte("data: "), less...), '\n')
			}
		}
		if _, err := w.Write(line); err != nil {
			return fmt.Errorf("write event: %w", err)
		}
		if len(bytes.TrimRight(line, "\r\n")) == 0 { // the event's end
			if err := c.Flush(); err != nil {
				return fmt.Errorf("write event: %w", err)
			}
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("read event: %w", err)
	}
	return nil
}

// wholeLines is bufio.ScanLines that leaves the line ends on.
func wholeLines(data []byte, atEOF bool) (int, []byte, error) {
	if i := bytes.IndexByte(data, '\n'); i >= 0 {
		return i + 1, data[:i+1], nil
	}
	if atEOF && len(data) > 0 {
		return len(data), data, nil
	}
	return 0, nil, nil
}
