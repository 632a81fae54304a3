package main

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/alecthomas/kong"

	"github.com/dsec-go/dsec"
)

func TestSizesAndAges(t *testing.T) {
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1288490189: "1.2 GiB", 1<<20 - 1: "1.0 MiB", 5 << 60: "5.0 EiB"} {
		if got := size(n); got != want {
			t.Errorf("size(%d) = %q, want %q", n, got, want)
		}
	}
	for d, want := range map[time.Duration]string{
		-time.Hour: "0s", 59 * time.Second: "59s", 200 * time.Second: "3m", 47 * time.Hour: "47h", 49 * time.Hour: "2d",
	} {
		if got := age(d); got != want {
			t.Errorf("age(%v) = %q, want %q", d, got, want)
		}
	}
	if got := printable("a\x1b[2Jb\nc\u009bd"); got != "a?[2Jb?c?d" {
		t.Errorf("printable gave %q", got)
	}
}

func TestFlagValues(t *testing.T) {
	for s, want := range map[string]int64{"0": 0, "1024": 1024, "512M": 512 << 20, "2g": 2 << 30, "1.5K": 1536, "3GiB": 3 << 30, "7MB": 7 << 20} {
		if got, err := parseBytes(s); err != nil || got != want {
			t.Errorf("parseBytes(%q) = %d, %v; want %d", s, got, err, want)
		}
	}
	for _, s := range []string{"", "M", "-1", "1X", "1e30", "nan", "99999P", "1MM"} {
		if got, err := parseBytes(s); err == nil {
			t.Errorf("parseBytes(%q) = %d", s, got)
		}
	}
	for s, want := range map[string]time.Duration{"90s": 90 * time.Second, "1h30m": 90 * time.Minute, "2d": 48 * time.Hour, "1.5": 1500 * time.Millisecond} {
		var d span
		if err := d.UnmarshalText([]byte(s)); err != nil || time.Duration(d) != want {
			t.Errorf("span %q = %v, %v; want %v", s, time.Duration(d), err, want)
		}
	}
	for _, s := range []string{"", "-1s", "x", "1y", "nand"} {
		var d span
		if err := d.UnmarshalText([]byte(s)); err == nil {
			t.Errorf("span %q = %v", s, time.Duration(d))
		}
	}
}

func TestJSONForm(t *testing.T) {
	var b bytes.Buffer
	a := app{Stdout: &b}
	err := a.json(dsec.Result{
		CommandStatus: dsec.CommandStatus{ID: "c1", Outcome: dsec.Exited, CPU: 1500 * time.Millisecond, MaxRSS: 7, Started: time.Unix(0, 0)},
		Out:           []byte("text"), Err: []byte{0xff},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"id": "c1"`, `"cpu": 1.5`, `"maxRss": 7`, `"started": "1970-01-01T00:00:00Z"`, `"out": "text"`, `"err": "/w=="`, `"argv": []`, `"tty": null`} {
		if !bytes.Contains(b.Bytes(), []byte(want)) {
			t.Errorf("no %s in %s", want, b.Bytes())
		}
	}
	if bytes.Contains(b.Bytes(), []byte("ended")) {
		t.Errorf("a zero time is shown: %s", b.Bytes())
	}
	for name, want := range map[string]string{"OOMKills": "oomKills", "ID": "id", "CPUs": "cpus", "OK": "ok", "TTL": "ttl", "MemoryPeak": "memoryPeak"} {
		if got := fieldName(name); got != want {
			t.Errorf("fieldName(%q) = %q, want %q", name, got, want)
		}
	}
}

func TestReferences(t *testing.T) {
	for s, want := range map[string]string{
		"registry.example/team/app:1.2": "registry.example/team/app@1.2",
		"localhost:5000/app":            "localhost-5000/app",
		"app:3":                         "app@3",
		"r.example/App@sha256:00ff":     "r.example/app@sha256-00ff",
		"r.example/a__b":                "r.example/a-b",
	} {
		if !isReference(s) {
			t.Errorf("%q is no reference", s)
		}
		got := localName(s)
		if got != want {
			t.Errorf("localName(%q) = %q, want %q", s, got, want)
		}
		if err := dsec.CheckImageName(got); err != nil {
			t.Error(err)
		}
	}
	for _, s := range []string{"", "debian", "debian@12", "team/app", "./x", "/x", "../x:1"} {
		if isReference(s) {
			t.Errorf("%q is a reference", s)
		}
	}
}

func TestForwards(t *testing.T) {
	for s, want := range map[string]forward{
		"80": {"127.0.0.1:80", 80}, "8080:80": {"127.0.0.1:8080", 80}, "0:80": {"127.0.0.1:0", 80},
		"0.0.0.0:1:2": {"0.0.0.0:1", 2}, "[::1]:1:2": {"[::1]:1", 2},
	} {
		if got, err := parseForward(s); err != nil || got != want {
			t.Errorf("parseForward(%q) = %v, %v; want %v", s, got, err, want)
		}
	}
	for _, s := range []string{"", "x", "1:", ":1", "1:0", "70000", "1:2:3:x"} {
		if got, err := parseForward(s); err == nil {
			t.Errorf("parseForward(%q) = %v", s, got)
		}
	}
}

func TestUntil(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	for d, want := range map[time.Duration]string{
		-time.Second: "expired", 0: "expired", time.Millisecond: "1s", 1600 * time.Millisecond: "2s",
		119 * time.Second: "119s", 2*time.Minute - time.Millisecond: "2m", time.Hour - time.Second: "60m",
		89*time.Minute + 31*time.Second: "90m", 2*time.Hour - time.Second: "2h", 2*time.Hour + 29*time.Minute: "2h",
		24*time.Hour - time.Second: "24h", 48*time.Hour - time.Second: "2d", 30*24*time.Hour - time.Second: "30d",
	} {
		if got := until(now.Add(d), now); got != want {
			t.Errorf("%v is left: %q, want %q", d, got, want)
		}
	}
}

// Every flag that takes a value says what holds without it.
func TestHelpNamesDefaults(t *testing.T) {
	parser, err := kong.New(&cli{})
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for _, leaf := range parser.Model.Leaves(false) {
		for _, group := range leaf.AllFlags(true) {
			for _, f := range group {
				seen++
				if !f.IsBool() && !strings.Contains(helpText(f.Value), "default") {
					t.Errorf("dsec %s: --%s names no default: %s", leaf.Path(), f.Name, f.Help)
				}
			}
		}
	}
	if seen < 50 {
		t.Errorf("%d flags were seen", seen)
	}
}
