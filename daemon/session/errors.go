package session

import (
	"errors"
	"fmt"
)

// Errors of this package. None of them leaves a trace in the ledger.
var (
	// ErrInvalid is in every FieldError: the message was wrong. A retry with the same message is useless.
	ErrInvalid = errors.New("session: invalid")
	// ErrState is returned when the message is right but not now: a second hello, an operation before Attached or after the end.
	ErrState = errors.New("session: not in this state")
	// ErrLimit is returned when a session or the daemon has as much of something as it may. A retry may succeed later.
	ErrLimit = errors.New("session: limit reached")
	// ErrDenied is returned when the credentials are not those that are allowed. A retry is useless.
	ErrDenied = errors.New("session: denied")
	// ErrUnsupported is returned for what this daemon cannot serve. A retry is useless.
	ErrUnsupported = errors.New("session: not supported")
	// ErrNotFound is returned for an unknown session or token.
	ErrNotFound = errors.New("session: not found")
)

// FieldError names the field of a message that is wrong.
type FieldError struct {
	Field  string
	Reason string
	kind   error
}

func (e *FieldError) Error() string { return e.Field + ": " + e.Reason }

func (e *FieldError) Unwrap() error { return e.kind }

func invalid(field, format string, args ...any) error {
	return &FieldError{Field: field, Reason: fmt.Sprintf(format, args...), kind: ErrInvalid}
}

// Invalid is the error of a message whose field is wrong.
func Invalid(field, reason string) error {
	return &FieldError{Field: field, Reason: reason, kind: ErrInvalid}
}

func fieldErr(kind error, field, format string, args ...any) error {
	return &FieldError{Field: field, Reason: fmt.Sprintf(format, args...), kind: kind}
}
