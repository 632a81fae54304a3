package rpc

import (
	"math/rand/v2"
	"strconv"
	"strings"

	"github.com/dsec-go/dsec"
)

// The headers of DSec. Those of a request route it and make it repeatable, so
// that a front door relays bodies without decoding them.
const (
	HeaderSandbox = "Dsec-Sandbox"   // the sandbox that the call is for
	HeaderStep    = "Dsec-Step"      // "SESSION:NUMBER", see StepText
	HeaderKey     = "Dsec-Key"       // the key of a create, see KeyText
	HeaderEpoch   = "Dsec-Job-Epoch" // of the owner of the sandbox's job, a number
	HeaderRequest = "Dsec-Request"   // id of the request, in both directions
	HeaderAuth    = "Authorization"
)

// StepText gives a step as a header: the session, escaped as KeyText does, a
// colon and the number. The zero step is "".
func StepText(s dsec.Step) string {
	if s.IsZero() {
		return ""
	}
	return KeyText(s.Session) + ":" + strconv.FormatUint(s.Number, 10)
}

// ParseStep is the inverse of StepText. A malformed step is Invalid.
func ParseStep(text string) (dsec.Step, error) {
	if text == "" {
		return dsec.Step{}, nil
	}
	i := strings.LastIndexByte(text, ':')
	if i <= 0 {
		return dsec.Step{}, dsec.Errorf(dsec.Invalid, "step %q is not SESSION:NUMBER", clip(text))
	}
	n, err := strconv.ParseUint(text[i+1:], 10, 64)
	if err != nil {
		return dsec.Step{}, dsec.Errorf(dsec.Invalid, "step %q is not SESSION:NUMBER", clip(text))
	}
	session, err := ParseKey(text[:i])
	if err != nil {
		return dsec.Step{}, err
	}
	step := dsec.Step{Session: session, Number: n}
	return step, step.Check()
}

// ParseEpoch gives the epoch of a header, 0 for none. A malformed one is Invalid.
func ParseEpoch(text string) (uint64, error) {
	if text == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil || n == 0 {
		return 0, dsec.Errorf(dsec.Invalid, "epoch %q is not a number from 1 on", clip(text))
	}
	return n, nil
}

const hexDigits = "0123456789ABCDEF"

// KeyText gives any bytes as a header value: letters, digits and punctuation
// stand for themselves, all else and % as %XX.
func KeyText(s string) string {
	n := 0
	for i := 0; i < len(s); i++ {
		if !plain(s[i]) {
			n++
		}
	}
	if n == 0 {
		return s
	}
	out := make([]byte, 0, len(s)+2*n)
	for i := 0; i < len(s); i++ {
		if c := s[i]; plain(c) {
			out = append(out, c)
		} else {
			out = append(out, '%', hexDigits[c>>4], hexDigits[c&15])
		}
	}
	return string(out)
}

func plain(c byte) bool { return c > ' ' && c < 0x7f && c != '%' }

// ParseKey is the inverse of KeyText. It accepts spaces and bytes above ASCII
// as they are; a malformed escape is Invalid.
func ParseKey(s string) (string, error) {
	if len(s) > 3*dsec.MaxKeyBytes {
		return "", dsec.Errorf(dsec.Invalid, "header value of %d bytes is longer than %d", len(s), dsec.MaxKeyBytes)
	}
	if strings.IndexByte(s, '%') < 0 {
		return s, nil
	}
	out := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		if s[i] != '%' {
			out = append(out, s[i])
			continue
		}
		if i+2 >= len(s) {
			return "", dsec.Errorf(dsec.Invalid, "header value %q has a %% that is not followed by two hex digits", clip(s))
		}
		v, err := strconv.ParseUint(s[i+1:i+3], 16, 8)
		if err != nil {
			return "", dsec.Errorf(dsec.Invalid, "header value %q has a %% that is not followed by two hex digits", clip(s))
		}
		out = append(out, byte(v))
		i += 2
	}
	return string(out), nil
}

// NewRequestID gives a fresh request id. It is a name, not a secret.
func NewRequestID() string { return strconv.FormatUint(rand.Uint64(), 36) }

// RequestIDOr gives the request id that a caller sent if it is one to be
// trusted in a log line, else a fresh one.
func RequestIDOr(sent string) string {
	if sent == "" || len(sent) > 64 {
		return NewRequestID()
	}
	for i := 0; i < len(sent); i++ {
		c := sent[i]
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_' || c == '.') {
			return NewRequestID()
		}
	}
	return sent
}

// clip shortens a caller's text for a message.
func clip(s string) string {
	if len(s) > 64 {
		return s[:64] + "..."
	}
	return s
}
