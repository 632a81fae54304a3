package main

import (
	"strings"
	"testing"

	"github.com/dsec-go/dsec"
)

// TestCases reads the lines of a batch: what is wrong is said with its line, in
// words of the lines.
func TestCases(t *testing.T) {
	cases, err := readCases(strings.NewReader("{\"stdin\": \"1\"}\n\n  {\"args\": [\"-v\"], \"time\": 1.5}"))
	if err != nil || len(cases) != 2 || string(cases[0].Stdin) != "1" || cases[1].Limits.Wall.Seconds() != 1.5 {
		t.Errorf("%+v, %v", cases, err)
	}
	for text, want := range map[string]string{
		"{}\n[1]":               "line 2 of the cases: a case is an object, and this is of type array",
		`{"stdin": 5}`:          `"stdin" cannot be of type number`,
		`{"input": "1 2"}`:      `unknown field "input"`,
		"{\"stdin\": \"1\",\n}": "line 1 of the cases: the object has no end: a case is one line",
		"hello":                 "line 1",
	} {
		if _, err := readCases(strings.NewReader(text)); dsec.KindOf(err) != dsec.Invalid || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}
