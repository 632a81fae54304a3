package rpc

import (
	"math"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// name splits a name for the wire: a readable text, and the exact bytes where
// the text cannot have them.
func name(s string) (text string, exact []byte) {
	if utf8.ValidString(s) {
		return s, nil
	}
	return strings.ToValidUTF8(s, "\uFFFD"), []byte(s)
}

// unname is the inverse of name. The exact bytes win.
func unname(text string, exact []byte) string {
	if len(exact) > 0 {
		return string(exact)
	}
	return text
}

// names splits a list: all readable, and all exact if one of them has to be.
func names(in []string) (texts []string, exact [][]byte) {
	for _, s := range in {
		if !utf8.ValidString(s) {
			texts = make([]string, len(in))
			exact = make([][]byte, len(in))
			for i, s := range in {
				texts[i], exact[i] = strings.ToValidUTF8(s, "\uFFFD"), []byte(s)
			}
			return texts, exact
		}
	}
	return in, nil
}

func unnames(texts []string, exact [][]byte) []string {
	if len(exact) == 0 {
		return texts
	}
	out := make([]string, len(exact))
	for i, b := range exact {
		out[i] = string(b)
	}
	return out
}

// env splits variables: those of UTF-8, and the others as NAME=value.
func env(in map[string]string) (texts map[string]string, exact [][]byte) {
	odd := 0
	for k, v := range in {
		if !utf8.ValidString(k) || !utf8.ValidString(v) {
			odd++
		}
	}
	if odd == 0 {
		return in, nil
	}
	texts = make(map[string]string, len(in))
	for k, v := range in {
		switch {
		case utf8.ValidString(k) && utf8.ValidString(v):
			texts[k] = v
		case strings.Contains(k, "="):
			// No name at all; split at its "=" it would become another one.
			texts[strings.ToValidUTF8(k, "\uFFFD")] = strings.ToValidUTF8(v, "\uFFFD")
		default:
			exact = append(exact, []byte(k+"="+v))
		}
	}
	return texts, exact
}

// unenv is the inverse of env. An entry without "=" gives a name without a
// value, which is what such an entry means to a process.
func unenv(texts map[string]string, exact [][]byte) map[string]string {
	if len(exact) == 0 {
		return texts
	}
	out := make(map[string]string, len(texts)+len(exact))
	for k, v := range texts {
		out[k] = v
	}
	for _, b := range exact {
		k, v, _ := strings.Cut(string(b), "=")
		out[k] = v
	}
	return out
}

// stamp and unstamp carry times; the zero time is absent.
func stamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

func unstamp(t *timestamppb.Timestamp) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.AsTime()
}

// span and unspan carry durations; zero is absent.
func span(d time.Duration) *durationpb.Duration {
	if d == 0 {
		return nil
	}
	return durationpb.New(d)
}

func unspan(d *durationpb.Duration) time.Duration {
	if d == nil {
		return 0
	}
	return d.AsDuration() // saturates
}

// count gives n for an int32 field. A number that does not fit is invalid
// wherever it is used, and stays so.
func count(n int) int32 {
	return int32(min(max(n, math.MinInt32), math.MaxInt32))
}
