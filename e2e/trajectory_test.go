package e2e_test

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dsec-go/dsec"
)

// step names an operation of a test's session.
func step(id dsec.SandboxID, n uint64) dsec.Call {
	return dsec.Call{Sandbox: id, Step: dsec.Step{Session: "t", Number: n}}
}

// session does a dozen operations and more, of all kinds, that have the same
// end each time.
func (n *node) session(t *testing.T, id dsec.SandboxID) {
	t.Helper()
	c, f := ctx(t), n.Files
	run := func(k uint64, line string, code int) {
		t.Helper()
		r, err := n.Commands.Run(c, step(id, k), dsec.Command{Shell: line}, nil)
		if must(t, err); r.Code != code {
			t.Fatalf("%q: status %d, %s%s", line, r.Code, r.Out, r.Err)
		}
	}
	at := func(p string) dsec.FileOp { return dsec.FileOp{Path: p} }
	run(1, "mkdir -p /work/src; echo one > /work/a; echo out; echo err >&2", 0)
	_, err := f.Write(c, step(id, 2), at("/work/b"), dsec.WriteOptions{Mode: 0o600}, strings.NewReader("written\n"))
	must(t, err)
	_, err = f.Write(c, on(id), at("/work/b"), dsec.WriteOptions{Append: true}, strings.NewReader("more\n"))
	must(t, err)
	_, err = f.Write(c, step(id, 3), at("/work/big"), dsec.WriteOptions{}, bytes.NewReader(bytes.Repeat([]byte("0123456789"), 20_000)))
	must(t, err)
	must(t, f.Mkdir(c, step(id, 4), at("/work/dir"), 0o750))
	must(t, f.Symlink(c, step(id, 5), at("/work/link"), "b"))
	must(t, f.Move(c, step(id, 6), at("/work/a"), "/work/dir/a"))
	must(t, f.Chmod(c, step(id, 7), at("/work/dir/a"), 0o604))
	must(t, f.Chown(c, step(id, 8), at("/work/dir/a"), "7:8"))
	must(t, f.Unpack(c, step(id, 9), at("/work/src"), bytes.NewReader(archive(t, "x/y", "packed\n"))))
	wantKind(t, "remove of nothing", f.Remove(c, step(id, 10), at("/work/none")), dsec.NotFound)
	run(11, "cat /work/b /work/dir/a /work/src/x/y; wc -c < /work/big; exit 3", 3)
	r, err := n.Commands.Run(c, step(id, 12), dsec.Command{Argv: []string{"sort"}}, []byte("c\na\nb\n"))
	if must(t, err); string(r.Out) != "a\nb\nc\n" {
		t.Fatalf("sort: %q", r.Out)
	}
	// One in the background, fed and then ended by a signal, with another
	// command between.
	st, err := n.Commands.Start(c, step(id, 13), dsec.Command{
		Shell: `trap "echo bye; exit 9" TERM; while read x; do echo "got $x"; echo "$x" >> /work/lines; done; while :; do :; done`,
		Stdin: dsec.StdinPipe,
	})
	must(t, err)
	_, err = n.Commands.Write(c, on(id), st.ID, dsec.StdinWrite{Data: []byte("first\n")})
	must(t, err)
	eventually(t, "the first line is taken", func() bool {
		r, err := n.Commands.Read(c, on(id), st.ID, dsec.Stdout, 0, 100)
		return err == nil && string(r) == "got first\n"
	})
	run(14, "cat /work/lines", 0)
	_, err = n.Commands.Write(c, on(id), st.ID, dsec.StdinWrite{Offset: 6, Data: []byte("second\n"), Close: true})
	must(t, err)
	eventually(t, "the second line is taken", func() bool {
		r, err := n.Commands.Read(c, on(id), st.ID, dsec.Stdout, 0, 100)
		return err == nil && string(r) == "got first\ngot second\n"
	})
	must(t, n.Commands.Signal(c, on(id), st.ID, "TERM"))
	end, err := n.Commands.Wait(c, on(id), st.ID)
	if must(t, err); end.Code != 9 {
		t.Fatalf("the command in the background: %+v", end)
	}
	must(t, f.Remove(c, step(id, 15), at("/work/dir")))
	r, err = n.Commands.Run(c, step(id, 16), dsec.Command{Shell: "ls -l /work | wc -l; hostname; echo $0", TTY: &dsec.WinSize{Rows: 10, Cols: 40}}, nil)
	if must(t, err); r.Code != 0 {
		t.Fatalf("on a terminal: %+v", r)
	}
}

func archive(t *testing.T, name, content string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	must(t, w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(content))}))
	_, err := w.Write([]byte(content))
	must(t, err)
	must(t, w.Close())
	return b.Bytes()
}

// replayReport is what dsec replay --json prints.
type replayReport struct {
	Sandbox     string
	Commit      uint64
	Operations  int
	Alike       int
	Differences []struct {
		Record               uint64
		Step, Operation      string
		Field, Recorded, Now string
		Diff                 string
	}
	NotCompared []struct {
		Record         uint64
		Operation, Why string
	}
	Files    *struct{ Changed, Alike int }
	FilesWhy string
}

func (n *node) replay(t *testing.T, status int, args ...string) replayReport {
	t.Helper()
	r := n.run(nil, append([]string{"replay", "--json"}, args...)...)
	if r.code != status || r.cause != nil {
		t.Fatalf("dsec replay %v: status %d, want %d; %s%s, %v", args, r.code, status, r.out, r.err, r.cause)
	}
	var rep replayReport
	if err := json.Unmarshal([]byte(r.out), &rep); err != nil {
		t.Fatalf("dsec replay %v: %v in %s", args, err, r.out)
	}
	return rep
}

// TestReplayAlike replays a session while its sandbox lives and after its end:
// all is as it was, and nothing of the replay is left.
func TestReplayAlike(t *testing.T) {
	n := shared(t)
	sb := n.create(t, plain())
	n.session(t, sb.ID)
	alive := func() int {
		l, err := n.Sandboxes.List(ctx(t), dsec.Filter{})
		must(t, err)
		return len(l)
	}
	before := alive()
	rep := n.replay(t, 0, string(sb.ID))
	if rep.Operations < 20 || rep.Alike != rep.Operations || len(rep.Differences) > 0 {
		t.Errorf("%+v", rep)
	}
	if rep.Files == nil || rep.Files.Changed < 6 || rep.Files.Alike != rep.Files.Changed {
		t.Errorf("files: %+v", rep.Files)
	}
	if got := alive(); got != before {
		t.Errorf("%d sandboxes after the replay, %d before", got, before)
	}
	n.stop(t, sb.ID)
	if again := n.replay(t, 0, string(sb.ID)); again.Alike != rep.Operations || again.Files != nil {
		t.Errorf("of the ended sandbox: %+v", again)
	}
	r := n.run(nil, "replay", string(sb.ID))
	if want := fmt.Sprintf("%d of %d operations alike\nfiles not compared: the recorded sandbox has ended\n", rep.Operations, rep.Operations); r.code != 0 || r.out != want {
		t.Errorf("status %d, %q, want %q", r.code, r.out, want)
	}
}

// TestReplayNamesTheDifference has one command whose output is chance, and one
// that writes a file which nothing prints.
func TestReplayNamesTheDifference(t *testing.T) {
	n := shared(t)
	sb := n.create(t, plain())
	n.sh(t, sb.ID, "echo same")
	_, err := n.Commands.Run(ctx(t), step(sb.ID, 7), dsec.Command{Shell: "echo before; cat /proc/sys/kernel/random/uuid; echo behind"}, nil)
	must(t, err)
	n.sh(t, sb.ID, "cat /proc/sys/kernel/random/uuid > /root/chance; echo ${DSEC_SEED}${PYTHONHASHSEED}${SOURCE_DATE_EPOCH}")
	rep := n.replay(t, 1, string(sb.ID))
	if rep.Operations != 3 || rep.Alike != 2 || len(rep.Differences) != 2 {
		t.Fatalf("%+v", rep)
	}
	d := rep.Differences[0]
	if d.Record != 4 || d.Step != "t:7" || d.Field != "stdout" || d.Recorded == d.Now || !strings.HasPrefix(d.Diff, " before\n-") || !strings.HasSuffix(d.Diff, "\n behind\n") {
		t.Errorf("first difference: %+v", d)
	}
	if d := rep.Differences[1]; d.Record != 0 || d.Operation != "file /root/chance" || d.Field != "content" {
		t.Errorf("second difference: %+v", d)
	}
	r := n.run(nil, "replay", string(sb.ID))
	for _, want := range []string{"first difference: #4 (step t:7) $ echo before; cat", "stdout: recorded sha256:", "\n    -", "2 of 3 operations alike\n"} {
		if r.code != 1 || !strings.Contains(r.out, want) {
			t.Errorf("status %d, %q, want %q", r.code, r.out, want)
		}
	}
	rep = n.replay(t, 1, string(sb.ID), "--clock", "2020-01-01T00:00:00Z", "--seed", "5")
	if len(rep.Differences) != 3 || !strings.Contains(rep.Differences[1].Diff, "+551577836800") {
		t.Errorf("with another clock and seed: %+v", rep.Differences)
	}
	// What has no end is told, and that the files still change.
	_, err = n.Commands.Start(ctx(t), step(sb.ID, 8), dsec.Command{Argv: []string{"sleep", "1000"}})
	must(t, err)
	rep = n.replay(t, 1, string(sb.ID))
	if rep.Operations != 3 || len(rep.NotCompared) != 1 || rep.NotCompared[0].Why != "it never ended" || !strings.Contains(rep.NotCompared[0].Operation, "sleep 1000") || rep.FilesWhy != "commands still run, which may change them" {
		t.Errorf("with a command that never ended: %+v", rep)
	}
	r = n.run(nil, "replay", string(sb.ID))
	for _, want := range []string{"not compared: #", "sleep 1000: it never ended\n", "files not compared: commands still run"} {
		if !strings.Contains(r.out, want) {
			t.Errorf("%q, want %q", r.out, want)
		}
	}
	n.stop(t, sb.ID)
	rep = n.replay(t, 1, string(sb.ID))
	if len(rep.NotCompared) != 1 || rep.NotCompared[0].Why != "the end of the sandbox broke it off" || rep.FilesWhy != "the recorded sandbox has ended" {
		t.Errorf("once it was broken off: %+v", rep)
	}
	if r := n.run(nil, "replay", "sbnone"); r.code != 125 {
		t.Errorf("of nothing: status %d, %s", r.code, r.err)
	}
}

// TestBranch takes a sandbox as it was behind a step, from its beginning and
// from a commit.
func TestBranch(t *testing.T) {
	n := shared(t)
	sb := n.create(t, plain())
	write := func(k uint64) {
		t.Helper()
		_, err := n.Commands.Run(ctx(t), step(sb.ID, k), dsec.Command{Shell: fmt.Sprintf("echo %d >> /root/steps", k)}, nil)
		must(t, err)
	}
	branch := func(to string) (dsec.SandboxID, string) {
		t.Helper()
		r := n.run(nil, "replay", string(sb.ID), "--to", to, "--keep")
		must(t, r.fault())
		id := dsec.SandboxID(strings.TrimSpace(r.out))
		t.Cleanup(func() { n.stop(t, id) })
		return id, r.err
	}
	write(1)
	write(2)
	name := "branch-" + string(sb.ID[len(sb.ID)-8:]) + "@v1"
	_, err := n.Sandboxes.Commit(ctx(t), sb.ID, name)
	must(t, err)
	write(3)
	write(4)
	for _, c := range []struct {
		to, steps, workspace, report string
	}{
		{"t:1", "1\n", "", "1 of 1 operations alike\n"},
		{"t:2", "1\n2\n", "", "2 of 2 operations alike\n"},
		{"t:3", "1\n2\n3\n", name, "1 of 1 operations alike\n"},
		{"8", "1\n2\n3\n", name, "1 of 1 operations alike\n"}, // the record of its request
	} {
		id, report := branch(c.to)
		if got := n.sh(t, id, "cat /root/steps"); string(got.Out) != c.steps {
			t.Errorf("to %s: steps %q, want %q", c.to, got.Out, c.steps)
		}
		b, err := n.Sandboxes.Get(ctx(t), id)
		if err != nil || b.Spec.Environment.Workspace != c.workspace || b.Spec.Labels["dsec.replay-of"] != string(sb.ID) || b.State != dsec.Running {
			t.Errorf("to %s: %+v, %v", c.to, b.Spec, err)
		}
		if !strings.HasSuffix(report, c.report) {
			t.Errorf("to %s: %q, want %q", c.to, report, c.report)
		}
	}
	// What the first line does later is nothing to the branch, nor the other way.
	write(5)
	if got := n.sh(t, sb.ID, "cat /root/steps"); string(got.Out) != "1\n2\n3\n4\n5\n" {
		t.Errorf("the first line: %q", got.Out)
	}
	// A commit that is gone is no way; then all is done again.
	must(t, n.Images.Remove(ctx(t), name))
	if id, _ := branch("t:3"); string(n.sh(t, id, "cat /root/steps").Out) != "1\n2\n3\n" {
		t.Error("without the commit the branch is another")
	}
	if r := n.run(nil, "replay", string(sb.ID), "--to", "t:99"); r.code != 125 || !strings.Contains(r.err, "has no step t:99") {
		t.Errorf("to no step: status %d, %s", r.code, r.err)
	}
}

// TestVerifyFindsWhatWasAltered exports a trajectory and alters each file.
func TestVerifyFindsWhatWasAltered(t *testing.T) {
	n := shared(t)
	sb := n.create(t, plain())
	n.session(t, sb.ID)
	n.stop(t, sb.ID)
	head, err := n.Trajectories.Head(ctx(t), sb.ID)
	must(t, err)
	if !head.Over {
		t.Fatalf("the sandbox has ended, its trajectory has not: %+v", head)
	}
	want := fmt.Sprintf("%d records, chain whole, head %s", head.Seq, head.Hash)
	if got := n.dsec(t, "log", "--verify", "--full", string(sb.ID)); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	dir := filepath.Join(t.TempDir(), "records")
	n.dsec(t, "log", string(sb.ID), "--raw", dir)
	verify := func(args ...string) result {
		return n.run(nil, append([]string{"log", "--verify", "--full", "--from", dir}, args...)...)
	}
	if r := verify(); r.code != 0 || strings.TrimSpace(r.out) != want {
		t.Fatalf("status %d, %q, %s", r.code, r.out, r.err)
	}
	if r := verify("--head", "00"); r.code != 1 || !strings.Contains(r.err, "the head is "+head.Hash) {
		t.Errorf("another head: status %d, %s", r.code, r.err)
	}
	broken := func(what, name string, is ...string) {
		t.Helper()
		r := verify()
		if r.code != 1 || r.out != "" {
			t.Errorf("%s of %s: status %d, %s", what, name, r.code, r.out)
		}
		for _, text := range is {
			if strings.Contains(r.err, text) {
				return
			}
		}
		t.Errorf("%s of %s: %q, want one of %q", what, name, r.err, is)
	}
	files, err := os.ReadDir(dir)
	must(t, err)
	bodies := 0
	for _, f := range files {
		path := filepath.Join(dir, f.Name())
		b, err := os.ReadFile(path)
		must(t, err)
		var seq uint64
		if k, _ := fmt.Sscanf(f.Name(), "%d.", &seq); k != 1 {
			continue // the head
		}
		record := fmt.Sprintf("record %d", seq)
		next := fmt.Sprintf("record %d does not follow from record %d", seq+1, seq)
		how := seq % 4 // each file one, as each takes a process
		switch {
		case filepath.Ext(path) == ".body":
			bodies++
			record, next, how = "body of "+record, "body of "+record, 0
		case seq > 20 && seq < head.Seq-3:
			continue
		}
		switch how {
		case 0:
			flipped := bytes.Clone(b)
			flipped[len(flipped)-1] ^= 1
			must(t, os.WriteFile(path, flipped, 0o600))
			broken("a flipped bit", f.Name(), next, record+", the last, was changed", record+": ")
		case 1:
			must(t, os.WriteFile(path, b[:len(b)/2], 0o600))
			broken("the half", f.Name(), next, record+": ")
		case 2:
			must(t, os.Remove(path))
			broken("the absence", f.Name(), fmt.Sprintf("record %d is followed by", seq-1), "missing at the end", record+": ")
		case 3:
			other := bytes.Replace(b, []byte("default"), []byte("dafault"), 1) // whose it is
			must(t, os.WriteFile(path, other, 0o600))
			broken("another project", f.Name(), next, record+", the last, was changed", record+": ")
		}
		must(t, os.WriteFile(path, b, 0o600))
	}
	if bodies == 0 {
		t.Error("the session has no body beside its records")
	}
	second, third := filepath.Join(dir, "00000002.record"), filepath.Join(dir, "00000003.record")
	must(t, os.Rename(second, second+"x"))
	must(t, os.Rename(third, second))
	must(t, os.Rename(second+"x", third))
	broken("an exchange", "records 2 and 3", "record 1 is followed by record 3")
	must(t, os.Rename(second, second+"x"))
	must(t, os.Rename(third, second))
	must(t, os.Rename(second+"x", third))
	must(t, verify().fault())
	// What is whole can be read without the server.
	from := n.dsec(t, "log", "--from", dir, "--full")
	if at := n.dsec(t, "log", string(sb.ID), "--full"); from != at {
		t.Errorf("the exported session reads otherwise:\n%s\n\n%s", from, at)
	}
}

// TestLogOfASession reads one in all forms, while it goes on.
func TestLogOfASession(t *testing.T) {
	n := shared(t)
	sb := n.create(t, plain())
	follow, cancel := n.command("log", string(sb.ID), "--follow", "--json")
	defer cancel()
	var lines buffer
	follow.Stdout = &lines
	ended := make(chan result)
	go func() { ended <- finish(follow, nil) }()
	n.session(t, sb.ID)
	eventually(t, "the log follows", func() bool { return strings.Contains(lines.String(), `"op":"symlink"`) })
	text := n.dsec(t, "log", string(sb.ID))
	for _, want := range []string{
		"created: container of busybox, 2 CPU, 256.0 MiB",
		"t:1 run\n  $ mkdir -p /work/src; echo one > /work/a; echo out; echo err >&2\n",
		"\n    out\n", "\n  ! err\n", "\n  exit 0 after ",
		"t:2 write /work/b (8 B, ",
		"\n  < written\n",
		"t:6 move /work/a to /work/dir/a (",
		"t:10 remove /work/none\n  fails after ",
		"  exit 3 after ",
		"feed c", "send TERM to c", "\n    bye\n  exit 9 after ",
		"run on a terminal of 40 by 10",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the log has no %q:\n%s", want, text)
		}
	}
	if strings.ContainsAny(text, "\x1b\r") {
		t.Error("the log has escapes in a pipe")
	}
	film := filepath.Join(t.TempDir(), "film.cast")
	n.dsec(t, "log", string(sb.ID), "--cast", film)
	checkCast(t, film)
	n.stop(t, sb.ID)
	r := <-ended
	must(t, r.fault())
	var seq uint64
	for l := range strings.Lines(lines.String()) {
		var rec struct {
			Seq uint64
			Op  string
		}
		if err := json.Unmarshal([]byte(l), &rec); err != nil || rec.Seq != seq+1 {
			t.Fatalf("line %q after record %d: %v", l, seq, err)
		}
		seq = rec.Seq
	}
	if head, err := n.Trajectories.Head(ctx(t), sb.ID); err != nil || head.Seq != seq {
		t.Errorf("%d records were followed, the head is %+v, %v", seq, head, err)
	}
}

// checkCast holds a file against what players expect of asciicast v2.
func checkCast(t *testing.T, path string) {
	t.Helper()
	b, err := os.ReadFile(path)
	must(t, err)
	lines := strings.Split(strings.TrimSuffix(string(b), "\n"), "\n")
	var head struct {
		Version, Width, Height int
		Timestamp              int64
		Idle                   float64 `json:"idle_time_limit"`
	}
	must(t, json.Unmarshal([]byte(lines[0]), &head))
	if head.Version != 2 || head.Width < 80 || head.Height < 24 || head.Timestamp == 0 || head.Idle != 2 {
		t.Errorf("header %s", lines[0])
	}
	last, shown := 0.0, ""
	for _, l := range lines[1:] {
		var e []any
		if err := json.Unmarshal([]byte(l), &e); err != nil || len(e) != 3 {
			t.Fatalf("event %s: %v", l, err)
		}
		at, _ := e[0].(float64)
		kind, _ := e[1].(string)
		data, ok := e[2].(string)
		if at < last || kind != "o" && kind != "r" || !ok {
			t.Errorf("event %s behind %v", l, last)
		}
		last = at
		if kind == "o" {
			shown += data
		}
	}
	for _, want := range []string{"$ mkdir -p /work/src", "out\r\n", "[exit 3]", "got first\r\n", "bye\r\n", "[exit 9]"} {
		if !strings.Contains(shown, want) {
			t.Errorf("the cast has no %q", want)
		}
	}
}

// TestReplayedShows repeats a step by the command line.
func TestReplayedShows(t *testing.T) {
	n := shared(t)
	sb := n.create(t, plain())
	var first string
	for i, want := range []bool{false, true} {
		r := n.run(nil, "exec", "--json", "--step", "s:1", string(sb.ID), "--", "sh", "-c", "cat /proc/sys/kernel/random/uuid; echo err >&2; exit 4")
		var res struct {
			Code     int
			Replayed bool
			Step     struct{ Session string }
			Out, Err string
		}
		if err := json.Unmarshal([]byte(r.out), &res); err != nil || r.code != 4 {
			t.Fatalf("status %d, %v: %s%s", r.code, err, r.out, r.err)
		}
		if res.Replayed != want || res.Code != 4 || res.Step.Session != "s" || res.Err != "err\n" || i > 0 && res.Out != first {
			t.Errorf("run %d: %+v", i, res)
		}
		first = res.Out
	}
}
