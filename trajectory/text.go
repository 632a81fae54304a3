package trajectory

import (
	"encoding/json"
	"maps"
	"slices"
	"unicode/utf8"
)

// Text is what a caller wrote: names and arguments, which are bytes. In JSON it
// is a string, or an object with the bytes in base64 if they are not UTF-8.
type Text string

type textBytes struct {
	Base64 []byte `json:"base64"`
}

// MarshalJSON loses no byte.
func (t Text) MarshalJSON() ([]byte, error) {
	if utf8.ValidString(string(t)) {
		return json.Marshal(string(t))
	}
	return json.Marshal(textBytes{[]byte(t)})
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

// clip shortens what a caller wrote for an error message.
func clip(s string) string {
	const most = 80
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
