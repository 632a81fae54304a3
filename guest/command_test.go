package guest_test

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/guest"
)

func TestRun(t *testing.T) {
	b := newBox(t)
	os.WriteFile(filepath.Join(b.dir, "plain"), []byte("x"), 0o644)
	os.WriteFile(filepath.Join(b.dir, "noshebang"), []byte("echo hi\n"), 0o755)
	os.WriteFile(filepath.Join(b.dir, "script"), []byte("#!/bin/sh\necho $0 $1\n"), 0o755)
	os.WriteFile(filepath.Join(b.dir, "lost"), []byte("#!/no/such\n"), 0o755)
	for _, c := range []struct {
		name    string
		cmd     dsec.Command
		stdin   string
		outcome dsec.Outcome
		code    int
		out     string
		err     string
	}{
		{"argv", dsec.Command{Argv: []string{"echo", "a  b", ""}}, "", dsec.Exited, 0, "a  b \n", ""},
		{"shell", sh("echo out; echo err >&2; exit 3"), "", dsec.Exited, 3, "out\n", "err\n"},
		{"stdin", dsec.Command{Argv: []string{"cat"}}, "in\x00put", dsec.Exited, 0, "in\x00put", ""},
		{"empty stdin", dsec.Command{Argv: []string{"cat"}, Stdin: dsec.StdinPipe}, "", dsec.Exited, 0, "", ""},
		{"no stdin", sh("readlink /proc/self/fd/0"), "", dsec.Exited, 0, "/dev/null\n", ""},
		{"cwd", dsec.Command{Shell: "pwd", Cwd: "/usr"}, "", dsec.Exited, 0, "/usr\n", ""},
		{"env", dsec.Command{Shell: "echo $A $B", Env: map[string]string{"A": "1", "B": "2"}}, "", dsec.Exited, 0, "1 2\n", ""},
		{"default env", sh("echo $PATH $HOME"), "", dsec.Exited, 0, "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin /root\n", ""},
		{"signal", sh("kill -TERM $$"), "", dsec.Signaled, 143, "", ""},
		{"missing", dsec.Command{Argv: []string{"no-such-program"}}, "", dsec.NotStarted, 127, "", ""},
		{"missing path", dsec.Command{Argv: []string{"/no/such"}}, "", dsec.NotStarted, 127, "", ""},
		{"no interpreter", dsec.Command{Argv: []string{b.dir + "/lost"}}, "", dsec.NotStarted, 127, "", ""},
		{"not executable", dsec.Command{Argv: []string{b.dir + "/plain"}}, "", dsec.NotStarted, 126, "", ""},
		{"folder", dsec.Command{Argv: []string{b.dir}}, "", dsec.NotStarted, 126, "", ""},
		{"no shebang", dsec.Command{Argv: []string{b.dir + "/noshebang"}}, "", dsec.NotStarted, 126, "", ""},
		{"relative", dsec.Command{Argv: []string{"./script", "x"}, Cwd: b.dir}, "", dsec.Exited, 0, b.dir + "/./script x\n", ""},
		{"path of its own", dsec.Command{Argv: []string{"script", "y"}, Env: map[string]string{"PATH": b.dir}}, "", dsec.Exited, 0, b.dir + "/script y\n", ""},
		{"relative path entry", dsec.Command{Argv: []string{"script", "z"}, Cwd: "/", Env: map[string]string{"PATH": strings.TrimPrefix(b.dir, "/")}}, "", dsec.Exited, 0, b.dir + "/script z\n", ""},
		{"too long", dsec.Command{Argv: []string{"true", strings.Repeat("x", 200<<10)}}, "", dsec.NotStarted, 126, "", ""},
		{"bytes", sh(`printf 'a\n\n\r\0b'`), "", dsec.Exited, 0, "a\n\n\r\x00b", ""},
		{"fds", sh("ls /proc/self/fd | wc -l"), "", dsec.Exited, 0, "4\n", ""}, // 0 1 2 and the folder
	} {
		t.Run(c.name, func(t *testing.T) {
			r := b.run(c.cmd, c.stdin)
			if r.Outcome != c.outcome || r.Code != c.code || string(r.Out) != c.out || string(r.Err) != c.err {
				t.Errorf("got %v %d %q %q (%s)\nwant %v %d %q %q", r.Outcome, r.Code, r.Out, r.Err, r.Detail, c.outcome, c.code, c.out, c.err)
			}
			if r.ID == "" || r.Ended.IsZero() || (r.Pid == 0) != (c.outcome == dsec.NotStarted) {
				t.Errorf("status %+v", r.CommandStatus)
			}
			if (r.Detail != "") != (c.outcome == dsec.NotStarted) {
				t.Errorf("detail %q", r.Detail)
			}
		})
	}
}

func TestBadCommand(t *testing.T) {
	b := newBox(t)
	for _, c := range []struct {
		cmd  dsec.Command
		text string
	}{
		{dsec.Command{}, "empty"},
		{dsec.Command{Shell: "true", Cwd: "/no/such"}, `"/no/such": no such directory`},
		{dsec.Command{Shell: "true", Cwd: "/etc/passwd"}, `"/etc/passwd" is not a directory`},
		{dsec.Command{Shell: "true", User: "no-such-user"}, `"no-such-user"`},
		{dsec.Command{Shell: "true", User: "root:no-such-group"}, `"no-such-group"`},
	} {
		_, err := b.Commands().Run(b.Context(), nobody, c.cmd, nil)
		wantKind(t, err, dsec.Invalid, c.text)
	}
	_, err := b.Commands().Wait(b.Context(), nobody, "c99")
	wantKind(t, err, dsec.NotFound, "c99")
	if l, err := b.Commands().List(b.Context(), nobody); err != nil || len(l) != 0 {
		t.Fatalf("list %v %v", l, err)
	}
}

func TestUser(t *testing.T) {
	dir := t.TempDir()
	passwd, group := filepath.Join(dir, "passwd"), filepath.Join(dir, "group")
	os.WriteFile(passwd, []byte("root:x:0:0:root:/root:/bin/sh\nann:x:1234:1235::/:/bin/sh\n"), 0o644)
	os.WriteFile(group, []byte("root:x:0:\nann:x:1235:\nextra:x:77:bob,ann\nmore:x:78:ann\n"), 0o644)
	b := newBox(t, func(o *guest.Options) { o.Passwd, o.Group = passwd, group })
	for user, want := range map[string]string{
		"":           "0:0:0 /root",
		"ann":        "1234:1235:1235 77 78 /",
		"1234":       "1234:1235:1235 77 78 /",
		"ann:extra":  "1234:77:77 /",
		"4321":       "4321:0:0 /",
		"4321:9":     "4321:9:9 /",
		"ann:root":   "1234:0:0 /",
		"4294967294": "4294967294:0:0 /",
	} {
		r := b.run(dsec.Command{Shell: `echo $(id -u):$(id -g):$(id -G) $HOME`, User: user}, "")
		if got := strings.TrimSpace(string(r.Out)); got != want {
			t.Errorf("user %q: %q, want %q (%s)", user, got, want, r.Err)
		}
	}
	// A new user is seen at once.
	f, _ := os.OpenFile(passwd, os.O_APPEND|os.O_WRONLY, 0)
	f.WriteString("eve:x:55:55::/tmp:/bin/sh\n")
	f.Close()
	if r := b.run(dsec.Command{Shell: "id -u; echo $HOME", User: "eve"}, ""); string(r.Out) != "55\n/tmp\n" {
		t.Errorf("new user: %q", r.Out)
	}
}

func TestStdinStream(t *testing.T) {
	b := newBox(t)
	st := b.start(dsec.Command{Argv: []string{"cat"}, Stdin: dsec.StdinPipe})
	if n := b.write(st.ID, 0, "hello ", false); n != 6 {
		t.Fatalf("offset %d", n)
	}
	if n := b.write(st.ID, 0, "hello ", false); n != 6 { // a repetition
		t.Fatalf("offset %d", n)
	}
	if n := b.write(st.ID, 3, "lo world", false); n != 11 { // overlapping
		t.Fatalf("offset %d", n)
	}
	_, err := b.Commands().Write(b.Context(), nobody, st.ID, dsec.StdinWrite{Offset: 20, Data: []byte("x")})
	wantKind(t, err, dsec.Invalid, "20")
	b.write(st.ID, 11, "", true)
	b.write(st.ID, 11, "", true) // a repetition
	_, err = b.Commands().Write(b.Context(), nobody, st.ID, dsec.StdinWrite{Offset: 11, Data: []byte("x")})
	wantKind(t, err, dsec.Conflict)
	if a := b.attach(st.ID, 0); a.out != "hello world" || a.status.Outcome != dsec.Exited {
		t.Fatalf("%+v", a)
	}

	// More than a pipe holds, through Run, and back.
	for _, n := range []int{64<<10 + 1, 3 << 20} {
		in := bytes.Repeat([]byte("0123456789abcdef"), n/16+1)[:n]
		r := b.run(dsec.Command{Argv: []string{"cat"}}, string(in))
		if !bytes.Equal(r.Out, in) {
			t.Fatalf("%d bytes came back as %d", n, len(r.Out))
		}
	}

	// Commands that do not read, and end.
	if r := b.run(dsec.Command{Argv: []string{"true"}}, strings.Repeat("x", 1<<20)); r.Code != 0 {
		t.Fatalf("%+v", r)
	}
	st = b.start(dsec.Command{Argv: []string{"sleep", "600"}, Stdin: dsec.StdinPipe})
	done := make(chan error, 1)
	go func() {
		off := int64(0)
		for {
			n, err := b.Commands().Write(b.Context(), nobody, st.ID, dsec.StdinWrite{Offset: off, Data: bytes.Repeat([]byte("y"), 100<<10)})
			if err != nil {
				done <- err
				return
			}
			off = n
		}
	}()
	eventually(t, "a full pipe", func() bool {
		ctx, cancel := context.WithTimeout(b.Context(), 50*time.Millisecond)
		defer cancel()
		_, err := b.Commands().Write(ctx, nobody, st.ID, dsec.StdinWrite{Offset: 0, Data: bytes.Repeat([]byte("y"), 100<<10)})
		return dsec.KindOf(err) == dsec.Timeout
	})
	if err := b.Commands().Signal(b.Context(), nobody, st.ID, "KILL"); err != nil {
		t.Fatal(err)
	}
	wantKind(t, <-done, dsec.Conflict)
}

func TestOrder(t *testing.T) {
	b := newBox(t)
	st := b.start(sh("for i in 1 2 3; do echo o$i; sleep 0.02; echo e$i >&2; sleep 0.02; done"))
	a := b.attach(st.ID, 0)
	if a.out != "o1\no2\no3\n" || a.err != "e1\ne2\ne3\n" || a.order != "oeoeoe" {
		t.Fatalf("%+v", a)
	}
	if again := b.attach(st.ID, 4); again.out != "2\no3\n"[1:] && again.out != "o2\no3\n" {
		t.Fatalf("from 4: %+v", again)
	}
	if end := b.attach(st.ID, a.next); end.out != "" || end.status.Code != 0 {
		t.Fatalf("from the end: %+v", end)
	}
}

func TestTimeout(t *testing.T) {
	b := newBox(t)
	mark := "31415.926"
	r := b.run(dsec.Command{Shell: "echo begun; setsid sleep " + mark + " & (sleep " + mark + " &) ; sleep " + mark, Timeout: 300 * time.Millisecond}, "")
	if r.Outcome != dsec.TimedOut || r.Code != 124 || string(r.Out) != "begun\n" {
		t.Fatalf("%+v", r)
	}
	eventually(t, "the tree is gone", func() bool { return !alive(mark) })
	r = b.run(dsec.Command{Shell: "for i in 1 2 3 4 5; do sleep 0.3; echo a; done; echo b; exec sleep " + mark, Idle: time.Second}, "")
	if r.Outcome != dsec.Inactive || r.Code != 124 || string(r.Out) != "a\na\na\na\na\nb\n" {
		t.Fatalf("%+v", r)
	}
	if alive(mark) {
		t.Fatal("the silent one runs on")
	}
}

func TestSignal(t *testing.T) {
	b := newBox(t)
	st := b.start(sh("trap 'echo got; exit 7' USR1; echo ready; while :; do sleep 0.01; done"))
	for o := range b.Commands().Attach(b.Context(), nobody, st.ID, 0) {
		if string(o.Data) == "ready\n" {
			break
		}
	}
	for _, bad := range []string{"", "NOPE", "0", "65", "-1"} {
		wantKind(t, b.Commands().Signal(b.Context(), nobody, st.ID, bad), dsec.Invalid)
	}
	if err := b.Commands().Signal(b.Context(), nobody, st.ID, "usr1"); err != nil {
		t.Fatal(err)
	}
	if a := b.attach(st.ID, 0); a.out != "ready\ngot\n" || a.status.Code != 7 {
		t.Fatalf("%+v", a)
	}
	wantKind(t, b.Commands().Signal(b.Context(), nobody, st.ID, "TERM"), dsec.Conflict)

	mark := "27182.818"
	st = b.start(sh("setsid sleep " + mark + " & echo x; sleep " + mark))
	for range b.Commands().Attach(b.Context(), nobody, st.ID, 0) {
		break
	}
	eventually(t, "the child runs", func() bool { return alive(mark) })
	if err := b.Commands().Signal(b.Context(), nobody, st.ID, "9"); err != nil {
		t.Fatal(err)
	}
	if st := b.wait(st.ID); st.Outcome != dsec.Signaled || st.Code != 137 || st.Signal != "KILL" {
		t.Fatalf("%+v", st)
	}
	eventually(t, "the tree is gone", func() bool { return !alive(mark) })
}

// A background child that holds the pipes does not hold the command, and is
// not harmed by its end.
func TestBackground(t *testing.T) {
	b := newBox(t)
	f := filepath.Join(b.dir, "proof")
	fifo := filepath.Join(b.dir, "go")
	r := b.run(sh("mkfifo "+fifo+"; (read x < "+fifo+"; echo late; echo late >&2; echo alive > "+f+") & echo early"), "")
	if string(r.Out) != "early\n" || r.Outcome != dsec.Exited {
		t.Fatalf("%+v", r)
	}
	if err := os.WriteFile(fifo, []byte("x\n"), 0); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the child goes on", func() bool { p, _ := os.ReadFile(f); return string(p) == "alive\n" })
	if a := b.attach(r.ID, 0); a.out != "early\n" || a.status.Stdout.Total != 6 {
		t.Fatalf("%+v", a)
	}
}

// Output of a process that exits at once is never lost, and neither are
// children.
func TestQuickExits(t *testing.T) {
	b := newBox(t)
	for i := range 300 {
		if r := b.run(sh("echo out; echo err >&2"), ""); string(r.Out) != "out\n" || string(r.Err) != "err\n" {
			t.Fatalf("run %d: %q %q", i, r.Out, r.Err)
		}
	}
	if c := leftovers().children; c != 0 {
		t.Fatalf("%d children left", c)
	}
}

func TestSteps(t *testing.T) {
	b := newBox(t)
	f := filepath.Join(b.dir, "count")
	c := sh("echo x >> " + f + "; cat")
	r1, err := b.Commands().Run(b.Context(), step(1), c, []byte("in"))
	if err != nil || r1.Replayed {
		t.Fatalf("%+v %v", r1, err)
	}
	r2, err := b.Commands().Run(b.Context(), step(1), c, []byte("in"))
	if err != nil || !r2.Replayed || r2.ID != r1.ID || string(r2.Out) != "in" {
		t.Fatalf("%+v %v", r2, err)
	}
	if p, _ := os.ReadFile(f); string(p) != "x\n" {
		t.Fatalf("it ran %q", p)
	}
	for what, try := range map[string]func() error{
		"standard input": func() error { _, err := b.Commands().Run(b.Context(), step(1), c, []byte("other")); return err },
		"shell line":     func() error { _, err := b.Commands().Run(b.Context(), step(1), sh("true"), []byte("in")); return err },
		"timeout": func() error {
			d := c
			d.Timeout = time.Second
			_, err := b.Commands().Run(b.Context(), step(1), d, []byte("in"))
			return err
		},
		"operation": func() error { return b.Files().Mkdir(b.Context(), step(1), dsec.FileOp{Path: "/tmp"}, 0) },
	} {
		wantKind(t, try(), dsec.Diverged, what)
	}
	// A running command is joined.
	c = dsec.Command{Argv: []string{"cat"}, Stdin: dsec.StdinPipe}
	s1, err := b.Commands().Start(b.Context(), step(2), c)
	if err != nil {
		t.Fatal(err)
	}
	s2, err := b.Commands().Start(b.Context(), step(2), c)
	if err != nil || !s2.Replayed || s2.ID != s1.ID || s2.Outcome != dsec.StillRunning {
		t.Fatalf("%+v %v", s2, err)
	}
	b.write(s1.ID, 0, "", true)
	b.wait(s1.ID)
	// What never started is no answer.
	bad := dsec.Command{Shell: "true", Cwd: b.dir + "/sub"}
	_, err = b.Commands().Run(b.Context(), step(3), bad, nil)
	wantKind(t, err, dsec.Invalid)
	os.Mkdir(b.dir+"/sub", 0o755)
	if _, err = b.Commands().Run(b.Context(), step(3), bad, nil); err != nil {
		t.Fatal(err)
	}
	// A step whose answer is safe elsewhere is forgotten, and only that one;
	// its command is still known by its id.
	if err := b.Forget(b.Context(), []dsec.Step{step(2).Step, step(99).Step}); err != nil {
		t.Fatal(err)
	}
	if st, err := b.Commands().Wait(b.Context(), nobody, s1.ID); err != nil || st.Outcome != dsec.Exited {
		t.Fatalf("%+v %v", st, err)
	}
	if r, err := b.Commands().Run(b.Context(), step(3), bad, nil); err != nil || !r.Replayed {
		t.Fatalf("%+v %v", r, err)
	}
	if r, err := b.Commands().Run(b.Context(), step(2), dsec.Command{Shell: "true"}, nil); err != nil || r.Replayed {
		t.Fatalf("%+v %v", r, err)
	}
	if l, err := b.Commands().List(b.Context(), nobody); err != nil || len(l) != 4 {
		t.Fatalf("%d commands, %v", len(l), err)
	}
}

func TestTerminal(t *testing.T) {
	b := newBox(t)
	st := b.start(dsec.Command{Shell: "stty size; tty; echo $TERM; read x; stty size; echo done $x", TTY: &dsec.WinSize{Rows: 33, Cols: 77}})
	got := ""
	for o, err := range b.Commands().Attach(b.Context(), nobody, st.ID, 0) {
		if err != nil {
			t.Fatal(err)
		}
		if got += string(o.Data); strings.Contains(got, "xterm\r\n") {
			break
		}
	}
	if !strings.HasPrefix(got, "33 77\r\n/dev/pts/") {
		t.Fatalf("begins %q", got)
	}
	if err := b.Commands().Resize(b.Context(), nobody, st.ID, dsec.WinSize{Rows: 5, Cols: 6}); err != nil {
		t.Fatal(err)
	}
	b.write(st.ID, 0, "word\n", false)
	a := b.attach(st.ID, 0)
	if !strings.HasSuffix(a.out, "5 6\r\ndone word\r\n") || a.err != "" {
		t.Fatalf("ends %q", a.out)
	}
	wantKind(t, b.Commands().Resize(b.Context(), nobody, st.ID, dsec.WinSize{}), dsec.Conflict)
	// The end of the input is a character.
	st = b.start(dsec.Command{Argv: []string{"cat"}, TTY: &dsec.WinSize{Rows: 1, Cols: 80}})
	b.write(st.ID, 0, "a\n", true)
	if st := b.wait(st.ID); st.Code != 0 || st.Outcome != dsec.Exited {
		t.Fatalf("%+v", st)
	}
	// Nothing is lost at a quick end.
	for range 50 {
		if r := b.run(dsec.Command{Shell: "echo hello", TTY: &dsec.WinSize{Rows: 1, Cols: 80}}, ""); string(r.Out) != "hello\r\n" {
			t.Fatalf("%q", r.Out)
		}
	}
	// ^C reaches the foreground.
	st = b.start(dsec.Command{Shell: "trap 'echo int; exit 9' INT; echo up; while :; do sleep 0.01; done", TTY: &dsec.WinSize{Rows: 1, Cols: 80}})
	for range b.Commands().Attach(b.Context(), nobody, st.ID, 0) {
		break
	}
	b.write(st.ID, 0, "\x03", false)
	if st := b.wait(st.ID); st.Code != 9 {
		t.Fatalf("%+v", st)
	}
	st = b.start(sh("sleep 0.2"))
	wantKind(t, b.Commands().Resize(b.Context(), nobody, st.ID, dsec.WinSize{}), dsec.Invalid)
	b.wait(st.ID)
}

func TestActivity(t *testing.T) {
	b := newBox(t)
	seen := make(chan dsec.Activity, 100)
	b.Subscribe(func(a dsec.Activity) { seen <- a })
	if a := <-seen; a.Running != 0 || !a.Last.IsZero() {
		t.Fatalf("%+v", a)
	}
	st := b.start(dsec.Command{Argv: []string{"cat"}, Stdin: dsec.StdinPipe})
	if a := <-seen; a.Running != 1 {
		t.Fatalf("%+v", a)
	}
	b.write(st.ID, 0, "", true)
	if a := <-seen; a.Running != 0 || a.Last.IsZero() {
		t.Fatalf("%+v", a)
	}
	if a, err := b.Activity(b.Context()); err != nil || a.Running != 0 || a.Last.IsZero() {
		t.Fatalf("%+v %v", a, err)
	}
}
