package trajectory

import (
	"bytes"
	"encoding/json"
	"maps"
	"slices"
	"unicode/utf8"
)

// marshal is json.Marshal that leaves <, > and & as they are: records are read
// by people, and hold shell lines.
func marshal(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// Text is what a caller wrote: names and arguments, which are bytes. In JSON it
// is a string, or an object with the bytes in base64 if they are not UTF-8.
type Text string

type textBytes struct {
	Base64 []byte `json:"base64"`
}

// MarshalJSON loses no byte.
func (t Text) MarshalJSON() ([]byte, error) {
	if utf8.ValidString(string(t)) {
		return marshal(string(t))
	}
	return marshal(textBytes{[]byte(t)})
}

// UnmarshalJSON takes both forms.
func (t *Text) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] == '{' {
		var raw textBytes
		err := json.Unmarshal(b, &raw)
		*t = Text(raw.Base64)
		return err
	}
	var s string
	err := json.Unmarshal(b, &s)
	*t = Text(s)
	return err
}

// maxErrorText is the most of an error that is recorded.
const maxErrorText = 1000

// clip shortens what a caller wrote for an error message.
func clip(s string) string { return clipTo(s, 80) }

func clipTo(s string, most int) string {
	if len(s) <= most {
		return s
	}
	n := most
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "…"
}

// sortedKeys gives the names of both maps in order.
func sortedKeys[V any](a, b map[string]V) []string {
	all := slices.AppendSeq(slices.Collect(maps.Keys(a)), maps.Keys(b))
	slices.Sort(all)
	return slices.Compact(all)
}
