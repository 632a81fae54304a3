package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/client"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/driver/synthetic"
	"github.com/dsec-go/dsec/edge"
	"github.com/dsec-go/dsec/journal"
	"github.com/dsec-go/dsec/journal/journaltest"
	"github.com/dsec-go/dsec/trajectory"
)

// recording is a node with recorded services on a synthetic host.
func recording(t *testing.T) dsec.Services {
	t.Helper()
	j, err := journal.Open("journal", journal.Options{FS: journaltest.NewCrashFS()})
	if err != nil {
		t.Fatal(err)
	}
	l, err := trajectory.Open(t.Context(), j, trajectory.Config{Store: new(blob.Memory), Fault: func(err error) { t.Error(err) }})
	if err != nil {
		t.Fatal(err)
	}
	key := dsec.IDKey{9}
	n, err := edge.Open(t.Context(), edge.Config{
		Name: "n1", Keys: &key, Place: dsec.Place{Node: 1, Epoch: 1}, Boot: "b",
		Drivers: []driver.Driver{synthetic.New(synthetic.Options{}).Driver()},
		Journal: &edge.Log{Journal: j}, Names: anyName{}, Roots: noRoots{}, Host: roomyHost{},
		Events: edge.Events{Ended: func(e edge.EndedEvent) { l.Ended(e.ID, e.State, e.Cause, e.Detail) }},
	})
	if err != nil {
		t.Fatal(err)
	}
	rec := trajectory.NewRecorder(l, n.Services(), n)
	if err := rec.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		rec.Close()
		n.Close()
		j.Close()
	})
	s := rec.Services()
	s.Images = oneImage{}
	return s
}

// on runs a command line against the services.
func (s *session) on(t *testing.T, with dsec.Services, status int, args ...string) string {
	t.Helper()
	s.Connect = func(client.Config) (dsec.Services, error) { return with, nil }
	s.out, s.err = newWatched(), newWatched()
	s.Stdout, s.Stderr = s.out, s.err
	if code := <-s.start(args...); code != status {
		t.Fatalf("dsec %v: status %d, want %d: %s%s", args, code, status, s.out, s.err)
	}
	return s.out.String()
}

// made gives a sandbox in which something was done.
func made(t *testing.T, s dsec.Services) dsec.SandboxID {
	t.Helper()
	sb, err := s.Sandboxes.Create(t.Context(), dsec.Spec{Environment: dsec.Environment{Base: "debian"}}, dsec.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	call := dsec.Call{Sandbox: sb.ID}
	run := func(argv ...string) {
		t.Helper()
		if _, err := s.Commands.Run(t.Context(), call, dsec.Command{Argv: argv}, nil); err != nil {
			t.Fatal(err)
		}
	}
	call.Step = dsec.Step{Session: "s", Number: 1}
	run("echo", "hello", "\x1b[31mit's\x1b[m")
	call.Step = dsec.Step{}
	run("warn", "careful")
	run("exit", "3")
	if _, err := s.Commands.Run(t.Context(), call, dsec.Command{Argv: []string{"cat"}}, []byte("fed\xff\n")); err != nil {
		t.Fatal(err)
	}
	run("yes", "40000")
	if _, err := s.Files.Write(t.Context(), call, dsec.FileOp{Path: "/f"}, dsec.WriteOptions{}, strings.NewReader("content\n")); err != nil {
		t.Fatal(err)
	}
	if err := s.Files.Remove(t.Context(), call, dsec.FileOp{Path: "/none"}); err == nil {
		t.Fatal("what is not there was removed")
	}
	// One in the background, and what is done to it.
	st, err := s.Commands.Start(t.Context(), call, dsec.Command{Argv: []string{"hang"}})
	if err != nil {
		t.Fatal(err)
	}
	run("true")
	if err := s.Commands.Signal(t.Context(), call, st.ID, "KILL"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Commands.Wait(t.Context(), call, st.ID); err != nil {
		t.Fatal(err)
	}
	return sb.ID
}

var (
	clocks = regexp.MustCompile(`\d\d:\d\d:\d\d\.\d\d\d|\d{4}-\d\d-\d\d \(\w+\), UTC`)
	spans  = regexp.MustCompile(`(after |, |\()\d[0-9.]*m?s`)
)

func TestLogReadsAsASession(t *testing.T) {
	s := recording(t)
	id := made(t, s)
	got := newSession(nil).on(t, s, 0, "log", string(id))
	got = spans.ReplaceAllString(clocks.ReplaceAllString(got, "T"), "${1}D")
	want := `T
T #1 created: container of debian, 1 CPU, 1.0 GiB, on node n1
T #2 s:1 run
  $ echo hello '?[31mit'\''s?[m'
    hello it's
  exit 0 after D, 19 B
T #4 run
  $ warn careful
  ! careful
  exit 0 after D, 8 B
T #6 run
  $ exit 3
  exit 3 after D
T #8 run
  $ cat
  < fed` + "\uFFFD" + `
    fed` + "\uFFFD" + `
  exit 0 after D, 5 B
T #10 run
  $ yes 40000
`
	if !strings.HasPrefix(got, want) {
		t.Errorf("the session is\n%s\nwant\n%s", got, want)
	}
	for _, want := range []string{
		"T #12 write /f (8 B, D)\n  < content\n",
		"T #14 remove /none\n  fails after D: not_found: ",
		"T #16 run\n  $ hang\nT #17 run\n  $ true\n  exit 0 after D\nT #19 send KILL to c6 (D)\n",
		"end of #16, hang\n  killed by KILL after D\n",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("the session has no %q:\n%s", want, got)
		}
	}
}

func TestLogLines(t *testing.T) {
	s := recording(t)
	id := made(t, s)
	type line struct {
		Seq, Of       uint64
		Op            string
		Content       string
		ContentBase64 []byte
		Output        []struct {
			Stream, Text string
			Base64       []byte
		}
		Size int
		Cut  bool
		Hash string
	}
	read := func(args ...string) (all []line) {
		t.Helper()
		for l := range strings.Lines(newSession(nil).on(t, s, 0, append([]string{"log", "--json", string(id)}, args...)...)) {
			var x line
			if err := json.Unmarshal([]byte(l), &x); err != nil {
				t.Fatalf("%v in %s", err, l)
			}
			all = append(all, x)
		}
		return all
	}
	all := read()
	if len(all) != 21 || all[20].Seq != 21 {
		t.Fatalf("%d records", len(all))
	}
	if o := all[2].Output; len(o) != 1 || o[0].Stream != "stdout" || o[0].Text != "hello \x1b[31mit's\x1b[m\n" {
		t.Errorf("output %+v", o)
	}
	if o := all[4].Output; len(o) != 1 || o[0].Stream != "stderr" || o[0].Text != "careful\n" {
		t.Errorf("errors %+v", o)
	}
	if c := all[7]; string(c.ContentBase64) != "fed\xff\n" || c.Content != "" || c.Size != 5 {
		t.Errorf("input %+v", c)
	}
	if c := all[12]; c.Content != "content\n" {
		t.Errorf("file %+v", c)
	}
	sizes := func(l line) (n int) {
		for _, o := range l.Output {
			n += len(o.Text)
		}
		return n
	}
	if l := all[10]; sizes(l) != bodyCut || !l.Cut {
		t.Errorf("%d bytes of a long output, cut %v", sizes(l), l.Cut)
	}
	if l := read("--full")[10]; sizes(l) != 40000 || l.Cut {
		t.Errorf("%d bytes of all of a long output, cut %v", sizes(l), l.Cut)
	}
}

func TestLogVerifiesWhatItExported(t *testing.T) {
	s := recording(t)
	id := made(t, s)
	if _, err := s.Sandboxes.Stop(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	x, dir := newSession(nil), filepath.Join(t.TempDir(), "records")
	head, err := s.Trajectories.Head(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	whole := "23 records, chain whole, head " + head.Hash + "\n"
	for _, args := range [][]string{
		{"log", "--verify", string(id)}, {"log", "--raw", dir, string(id)}, {"log", "--verify", "--full", "--from", dir}, {"log", "--verify", "--head", head.Hash, string(id)},
	} {
		if got := x.on(t, s, 0, args...); got != whole && got != strings.Replace(whole, ", chain whole", "", 1) {
			t.Errorf("%v: %q, want %q", args, got, whole)
		}
	}
	x.on(t, s, 1, "log", "--raw", dir, string(id)) // not over what is there
	x.on(t, s, 1, "log", "--verify", "--from", dir, "sbother")
	x.on(t, s, 1, "log", "--verify")
	path := filepath.Join(dir, "00000005.record")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, bytes.Replace(b, []byte("careful"), []byte("carefu1"), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	changed := "record 6 does not follow from record 5: one of them was changed"
	x.on(t, s, 1, "log", "--verify", "--from", dir)
	if got := x.err.String(); !strings.Contains(got, changed) {
		t.Errorf("%q", got)
	}
	// Whoever only reads learns it too, and reads all there is.
	for _, args := range [][]string{{"log", "--from", dir}, {"log", "--json", "--from", dir}} {
		got := x.on(t, s, 1, args...)
		if !strings.Contains(got, "carefu1") || !strings.Contains(got, "content") {
			t.Errorf("%v: %s", args, got)
		}
		if got := x.err.String(); got != "dsec: the record does not verify: "+changed+"\n" {
			t.Errorf("%v: %q", args, got)
		}
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	x.on(t, s, 0, "log", "--from", dir)
	if got := x.err.String(); got != "" {
		t.Errorf("of a whole record it is said: %q", got)
	}
	if err := os.Remove(filepath.Join(dir, "00000023.record")); err != nil {
		t.Fatal(err)
	}
	x.on(t, s, 1, "log", "--from", dir)
	if got, want := x.err.String(), "dsec: the record does not verify: records 23 to 23 are missing at the end\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestCastToStandardOutput(t *testing.T) {
	s := recording(t)
	id := made(t, s)
	x, file := newSession(nil), filepath.Join(t.TempDir(), "f.cast")
	x.on(t, s, 0, "log", "--cast", file, string(id))
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got := x.on(t, s, 0, "log", "--cast", "-", string(id)); got != string(want) || !strings.HasPrefix(got, `{"version":2`) {
		t.Errorf("%.100q, want %.100q", got, want)
	}
}

func TestReplayOfAFakeNode(t *testing.T) {
	s := recording(t)
	id := made(t, s)
	x := newSession(nil)
	if got := x.on(t, s, 0, "replay", string(id)); !strings.HasPrefix(got, "10 of 10 operations alike\n") {
		t.Errorf("%q", got)
	}
	branch := strings.TrimSpace(x.on(t, s, 0, "replay", string(id), "--to", "16", "--keep"))
	list, err := s.Commands.List(t.Context(), dsec.Call{Sandbox: dsec.SandboxID(branch)})
	if err != nil || len(list) != 6 || list[5].Outcome != dsec.StillRunning {
		t.Errorf("commands of the branch: %+v, %v", list, err)
	}
	for _, to := range []string{"0", "99", "s:2", "soon"} {
		x.on(t, s, 125, "replay", string(id), "--to", to)
	}
	x.on(t, s, 125, "replay", string(id), "--clock", "late")
	x.on(t, s, 125, "replay", string(id), "--seed", "-1")
}

func TestCastKeepsCharactersWhole(t *testing.T) {
	text := strings.Repeat("aé€😀", 20)
	begin := time.Unix(1700000000, 0)
	for n := 1; n < 9; n++ {
		var pieces [][]byte
		for b := []byte(text); len(b) > 0; {
			k := min(n, len(b))
			pieces, b = append(pieces, b[:k]), b[k:]
		}
		c := cast{begin: begin}
		c.spread(pieces, begin, begin.Add(time.Second), []castInput{{begin.Add(time.Millisecond), []byte("€😀\n")}}, true)
		got, last := "", begin
		for _, e := range c.events {
			if !utf8.ValidString(e.data) || e.at.Before(last) || e.at.After(begin.Add(time.Second)) {
				t.Errorf("pieces of %d: event %+v", n, e)
			}
			got, last = got+e.data, e.at
		}
		if got != text {
			t.Errorf("pieces of %d: %q", n, got)
		}
	}
}

func TestLineDiff(t *testing.T) {
	for _, c := range []struct{ was, now, want string }{
		{"a\nb\nc\n", "a\nB\nc\n", " a\n-b\n+B\n c\n"},
		{"", "x\n", "+x\n"},
		{"x\n", "", "-x\n"},
		{"same\n", "same\n", ""},
		{"\xff\n", "x\n", ""},
		{strings.Repeat("l\n", diffLines+1), "x\n", ""},
	} {
		if got := lineDiff([]byte(c.was), []byte(c.now)); got != c.want {
			t.Errorf("%.20q and %.20q: %q, want %q", c.was, c.now, got, c.want)
		}
	}
}

// FuzzReadable holds what is printed of any output to what a terminal shows
// without moving its cursor.
func FuzzReadable(f *testing.F) {
	for _, s := range []string{"", "a\rb", "\x1b[31mred\x1b[m", "\x1b]0;title\x07x", "\x1b", "\xff\x9b1m", "tab\there"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got := readable(s)
		if !utf8.ValidString(got) {
			t.Errorf("%q is no UTF-8", got)
		}
		for _, r := range got {
			if r < ' ' || r >= 0x7f && r < 0xa0 {
				t.Errorf("%q of %q has %q", got, s, r)
			}
		}
	})
}
