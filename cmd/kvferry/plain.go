package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Strings in a daemon's answer come from engines, peers and requests: none of them may move the cursor of who reads them, or look like a line of ours.

// linedFields are those whose lines mean something.
var linedFields = []protoreflect.Name{"yaml", "preimage"}

// unprintable is what acts on a terminal instead of being shown: control characters, and those that turn the direction of text or begin a line.
func unprintable(r rune) bool {
	return unicode.IsControl(r) || unicode.In(r, unicode.Bidi_Control, unicode.Zl, unicode.Zp)
}

// plain shows what is unprintable in s, or no UTF-8, as an escape sequence of Go.
func plain(s string) string { return escape(s, "") }

func escape(s, keep string) string {
	var b strings.Builder
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case unprintable(r) && !strings.ContainsRune(keep, r):
			b.WriteString(strings.Trim(fmt.Sprintf("%+q", r), "'"))
		default:
			b.WriteString(s[i : i+n])
		}
		i += n
	}
	return b.String()
}

// scrub makes every string of an answer plain.
func scrub(m protoreflect.Message) {
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		keep := ""
		if slices.Contains(linedFields, f.Name()) {
			keep = "\n"
		}
		switch {
		case f.IsMap(): // Admin has none
			m.Clear(f)
		case f.IsList():
			for i := range v.List().Len() {
				switch f.Kind() {
				case protoreflect.MessageKind:
					scrub(v.List().Get(i).Message())
				case protoreflect.StringKind:
					v.List().Set(i, protoreflect.ValueOfString(escape(v.List().Get(i).String(), keep)))
				}
			}
		case f.Kind() == protoreflect.MessageKind:
			scrub(v.Message())
		case f.Kind() == protoreflect.StringKind:
			m.Set(f, protoreflect.ValueOfString(escape(v.String(), keep)))
		}
		return true
	})
}

// scrubbed is an answer as it may be shown. JSON stays as it is: its writer escapes.
func (a *app) scrubbed(answer any) {
	if m, ok := answer.(proto.Message); ok && a.output == "table" {
		scrub(m.ProtoReflect())
	}
}

// jsonWriter escapes what encoding/json leaves: DEL, the C1 controls and the marks of direction. They stand within strings only.
type jsonWriter struct{ io.Writer }

func (w jsonWriter) Write(p []byte) (int, error) {
	var b strings.Builder
	for _, r := range string(p) {
		if r != '\n' && unprintable(r) {
			fmt.Fprintf(&b, `\u%04x`, r)
		} else {
			b.WriteRune(r)
		}
	}
	if _, err := io.WriteString(w.Writer, b.String()); err != nil {
		return 0, err
	}
	return len(p), nil
}
