package main

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// idDigits is how much of an id a table shows; every command takes such a prefix.
const idDigits = 12

func shortID(b []byte) string {
	s := hex.EncodeToString(b)
	if len(s) > idDigits {
		s = s[:idDigits]
	}
	return dash(s)
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// size writes bytes as people read them: at most four digits, in powers of 1024.
func size(n uint64) string {
	if n < 1024 {
		return strconv.FormatUint(n, 10) + " B"
	}
	v, unit := float64(n), ""
	for _, unit = range []string{"KiB", "MiB", "GiB", "TiB", "PiB"} {
		v /= 1024
		if v < 1023.95 {
			break
		}
	}
	return strings.TrimSuffix(strconv.FormatFloat(v, 'f', 1, 64), ".0") + " " + unit
}

// count groups digits by three.
func count(n uint64) string {
	s := strconv.FormatUint(n, 10)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

func percent(part, whole uint64) string {
	if whole == 0 {
		return "-"
	}
	return strconv.FormatFloat(100*float64(part)/float64(whole), 'f', 1, 64) + " %"
}

// span writes a duration with its two largest units.
func span(d time.Duration) string {
	d = max(d, 0)
	switch {
	case d < time.Second:
		return fmt.Sprintf("%dms", d.Milliseconds())
	case d < time.Minute:
		return strings.TrimSuffix(strconv.FormatFloat(d.Seconds(), 'f', 1, 64), ".0") + "s"
	case d < time.Hour:
		return fmt.Sprintf("%dm%ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 24*time.Hour:
		return fmt.Sprintf("%dh%dm", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%dd%dh", int(d.Hours())/24, int(d.Hours())%24)
}

func millis(ms int64) string { return span(time.Duration(ms) * time.Millisecond) }

// ago is the time since a moment in the daemon's clock, which is this machine's.
func (a *app) ago(unixMs int64) string {
	if unixMs == 0 {
		return "-"
	}
	return span(a.now().Sub(time.UnixMilli(unixMs)))
}

func clock(unixMs int64) string {
	return time.UnixMilli(unixMs).UTC().Format("2006-01-02 15:04:05 UTC")
}

// table prints rows in columns, the first one being the head.
func table(w io.Writer, rows [][]string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		for i, cell := range row {
			row[i] = dash(cell)
		}
		if _, err := fmt.Fprintln(t, strings.Join(row, "\t")); err != nil {
			return err
		}
	}
	return t.Flush()
}

// show prints an answer as asked for: as JSON, or with the command's own table.
func (a *app) show(m proto.Message, asTable func(w io.Writer) error) error {
	if a.output == "table" {
		return asTable(a.out)
	}
	return writeJSON(a.out, document(m.ProtoReflect()))
}

// document is a message for JSON: field names as in the .proto, every field there, ids in hex, enums in lower case without their prefix.
func document(m protoreflect.Message) map[string]any {
	out := map[string]any{}
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		v := m.Get(f)
		switch {
		case f.IsList():
			list := make([]any, v.List().Len())
			for k := range list {
				list[k] = value(f, v.List().Get(k))
			}
			out[string(f.Name())] = list
		case f.Message() != nil && !m.Has(f):
			out[string(f.Name())] = nil
		default:
			out[string(f.Name())] = value(f, v)
		}
	}
	return out
}

func value(f protoreflect.FieldDescriptor, v protoreflect.Value) any {
	switch f.Kind() {
	case protoreflect.MessageKind:
		return document(v.Message())
	case protoreflect.BytesKind:
		return hex.EncodeToString(v.Bytes())
	case protoreflect.EnumKind:
		if d := f.Enum().Values().ByNumber(v.Enum()); d != nil {
			return enumWord(string(f.Enum().Name()), string(d.Name()))
		}
		return int32(v.Enum())
	}
	return v.Interface()
}

// enumWord is HEALTH_OK of Health as "ok".
func enumWord(enum, name string) string {
	var prefix strings.Builder
	for i, r := range enum {
		if i > 0 && r >= 'A' && r <= 'Z' {
			prefix.WriteByte('_')
		}
		prefix.WriteRune(r)
	}
	return strings.ToLower(strings.TrimPrefix(name, strings.ToUpper(prefix.String())+"_"))
}

func writeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(jsonWriter{w})
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}
