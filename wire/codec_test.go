package wire

import (
	"bytes"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
)

func full() dsec.CommandStatus {
	return dsec.CommandStatus{
		ID:   "c1",
		Step: dsec.Step{Session: "s\x00", Number: math.MaxUint64},
		Command: dsec.Command{
			Argv: []string{"a", "", "\xff"}, Shell: "x", Cwd: "/", User: "u:g",
			Env:   map[string]string{"A": "1", "B": ""},
			Stdin: dsec.StdinPipe, TTY: &dsec.WinSize{Rows: 1, Cols: 65535},
			Timeout: time.Hour, Idle: time.Second, Output: 1 << 30,
		},
		Outcome: dsec.TimedOut, Code: 124, Signal: "KILL", Detail: "d", Pid: 1 << 22,
		Started: time.Unix(1, 2).UTC(), Ended: time.Unix(-5, 999_999_999).UTC(),
		Stdout: dsec.StreamStat{Total: math.MaxInt64, Kept: 1}, Stderr: dsec.StreamStat{Total: 2, Kept: 2},
		CPU: time.Minute, MaxRSS: 1 << 40, Replayed: true,
	}
}

func TestCodec(t *testing.T) {
	for _, s := range []dsec.CommandStatus{{}, full()} {
		d := decoder{b: appendStatus(nil, &s)}
		if got := d.status(); !reflect.DeepEqual(got, s) || d.err() != nil || len(d.b) != 0 {
			t.Errorf("status %+v\nbecame %+v", s, got)
		}
	}
	at := int64(-1)
	for _, o := range []dsec.WriteOptions{{}, {Mode: 0o7777, Parents: true, At: &at, Append: true}} {
		d := decoder{b: appendWriteOptions(nil, o)}
		if got := d.writeOptions(); !reflect.DeepEqual(got, o) || d.err() != nil || len(d.b) != 0 {
			t.Errorf("options %+v became %+v", o, got)
		}
	}
	i := dsec.FileInfo{Path: "/\n\xff", Type: dsec.TypeSymlink, Mode: 0o7777, UID: 1<<32 - 1, GID: 2, Size: -1, ModTime: time.Unix(7, 8).UTC(), Target: "t", Nlink: 3}
	d := decoder{b: appendInfo(nil, &i)}
	if got := d.info(); got != i || d.err() != nil {
		t.Errorf("info %+v became %+v", i, got)
	}
	e := dsec.WatchEvent{Op: dsec.OpRename, Path: "a", To: "b"}
	d = decoder{b: appendEvent(nil, e)}
	if got := d.event(); got != e || d.err() != nil {
		t.Errorf("event %+v became %+v", e, got)
	}
	a := dsec.Activity{Running: 3, Last: time.Unix(9, 0).UTC()}
	d = decoder{b: appendActivity(nil, a)}
	if got := d.activity(); got != a || d.err() != nil {
		t.Errorf("activity %+v became %+v", a, got)
	}
	// Every cut of a message is noticed.
	s := full()
	whole := appendStatus(nil, &s)
	for n := range whole {
		d := decoder{b: whole[:n]}
		if d.status(); d.err() == nil {
			t.Fatalf("%d of %d bytes are taken for a status", n, len(whole))
		}
	}
}

func TestVerdict(t *testing.T) {
	for _, k := range dsec.ErrorKinds() {
		_, err := verdict(appendError(nil, dsec.Errorf(k, "text of %v", k)))
		if r, ok := err.(*remoteError); !ok || r.kind != k || r.text != "text of "+k.String() { //nolint:errorlint // never wrapped
			t.Errorf("%v became %v", k, err)
		}
	}
	_, err := verdict(append([]byte{255}, strings.Repeat("x", maxText+1)...))
	if r, ok := err.(*remoteError); !ok || r.kind != dsec.Internal || len(r.text) != maxText { //nolint:errorlint // as above
		t.Errorf("a strange verdict became %v", err)
	}
	if _, err := verdict(nil); dsec.KindOf(err) != dsec.Unavailable {
		t.Errorf("an empty verdict became %v", err)
	}
}

// What is decoded encodes to something that decodes to the same.
func FuzzCodec(f *testing.F) {
	s := full()
	f.Add(appendStatus(nil, &s))
	f.Add(appendInfo(nil, &dsec.FileInfo{Path: "/"}))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		d := decoder{b: b}
		if s := d.status(); !d.bad {
			again := decoder{b: appendStatus(nil, &s)}
			if s2 := again.status(); again.bad || !reflect.DeepEqual(s, s2) {
				t.Fatalf("%+v\n%+v", s, s2)
			}
		}
		d = decoder{b: b}
		if i := d.info(); !d.bad {
			again := decoder{b: appendInfo(nil, &i)}
			if i2 := again.info(); again.bad || i != i2 {
				t.Fatalf("%+v\n%+v", i, i2)
			}
		}
		d = decoder{b: b}
		d.writeOptions()
		d = decoder{b: b}
		d.event()
		d = decoder{b: b}
		d.activity()
		eachItem(b, func(d *decoder) { d.info() }) //nolint:errcheck // must not panic
		var h [headerSize]byte
		copy(h[:], b)
		if h, err := parseHeader(&h); err == nil && !bytes.Equal(h.append(nil), b[:min(len(b), headerSize)]) && len(b) >= headerSize {
			t.Fatalf("header %+v", h)
		}
	})
}
