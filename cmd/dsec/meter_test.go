package main

import (
	"bytes"
	"io"
	"strings"
	"testing"
	"time"
)

func TestMeterLine(t *testing.T) {
	for _, c := range []struct {
		label       string
		done, total int64
		took        time.Duration
		want        string
	}{
		{"upload", 0, 0, 0, "upload  0 B"},
		{"upload", 3 << 20, 0, 3 * time.Second, "upload  3.0 MiB  1.0 MiB/s"},
		{"upload", 1 << 20, 4 << 20, 500 * time.Millisecond, "upload  [######..................]  25%  1.0 MiB of 4.0 MiB"},
		{"fetch x", 10 << 20, 100 << 20, 2 * time.Second, "fetch x  [##......................]  10%  10.0 MiB of 100.0 MiB  5.0 MiB/s  18s left"},
		{"upload", 4 << 20, 4 << 20, 4 * time.Second, "upload  [########################] 100%  4.0 MiB of 4.0 MiB  1.0 MiB/s"},
		{"upload", 5 << 20, 4 << 20, 0, "upload  5.0 MiB"}, // the file grew
	} {
		if got := meterLine(c.label, c.done, c.total, c.took); got != c.want {
			t.Errorf("%d of %d: %q, want %q", c.done, c.total, got, c.want)
		}
	}
}

// What is read shows on a terminal, its end too, and nowhere else.
func TestMeterOfReader(t *testing.T) {
	var b bytes.Buffer
	m := &meter{&progress{w: &b}, "upload", 8, time.Now()}
	if _, err := io.Copy(io.Discard, &countingReader{r: strings.NewReader("12345678"), m: m, then: "the server stores it"}); err != nil {
		t.Fatal(err)
	}
	m.clear()
	if got := b.String(); !strings.Contains(got, "100%  8 B of 8 B") || !strings.Contains(got, "upload  8 B, the server stores it") || !strings.HasSuffix(got, "\r\x1b[K") {
		t.Errorf("on a terminal: %q", got)
	}
	quiet := (&app{Stderr: &b}).meter("upload", 8)
	b.Reset()
	quiet.report("", 4, 0)
	quiet.clear()
	if b.Len() > 0 {
		t.Errorf("in a pipe: %q", b.String())
	}
}
