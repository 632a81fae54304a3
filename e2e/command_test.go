package e2e_test

import (
	"bytes"
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
)

// TestCommandOutcomes runs each command in the three ways there are, by Run, by
// Start and Attach, and by dsec exec: the same bytes and the same status.
func TestCommandOutcomes(t *testing.T) {
	n := shared(t)
	sb := n.create(t, plain())
	n.sh(t, sb.ID, `printf '#!/no/such\n' > /tmp/lost; chmod 755 /tmp/lost`)
	var args []string // 1.9 MiB of command line
	for range 19 {
		args = append(args, strings.Repeat("y", 100<<10))
	}
	unicode := strings.Repeat("a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", 100_000) // 1, 2, 3 and 4 bytes
	for _, c := range []struct {
		name    string
		argv    []string
		outcome dsec.Outcome
		code    int
		out     string
		err     string
	}{
		{"nothing", []string{"true"}, dsec.Exited, 0, "", ""},
		{"both streams", []string{"sh", "-c", "echo out; echo err >&2; exit 7"}, dsec.Exited, 7, "out\n", "err\n"},
		{"largest status", []string{"sh", "-c", "exit 255"}, dsec.Exited, 255, "", ""},
		{"a status like a timeout's", []string{"sh", "-c", "exit 124"}, dsec.Exited, 124, "", ""},
		{"signal", []string{"sh", "-c", "kill -TERM $$"}, dsec.Signaled, 143, "", ""},
		{"missing", []string{"no-such-program"}, dsec.NotStarted, 127, "", ""},
		{"missing path", []string{"/no/such/program"}, dsec.NotStarted, 127, "", ""},
		{"missing interpreter", []string{"/tmp/lost"}, dsec.NotStarted, 127, "", ""},
		{"not executable", []string{"/etc/passwd"}, dsec.NotStarted, 126, "", ""},
		{"a folder", []string{"/etc"}, dsec.NotStarted, 126, "", ""},
		{"no UTF-8", []string{"printf", `a\0\377\376\r\n\n\n\303`}, dsec.Exited, 0, "a\x00\xff\xfe\r\n\n\n\xc3", ""},
		{"arguments without UTF-8", []string{"echo", "-n", "\xff\xfe\xc3"}, dsec.Exited, 0, "\xff\xfe\xc3", ""},
		{"every byte", []string{"printf", everyByteEscaped()}, dsec.Exited, 0, everyByte(), ""},
		{"a line of 1 MiB", []string{"sh", "-c", `head -c 1048576 /dev/zero | tr '\0' x`}, dsec.Exited, 0, strings.Repeat("x", 1<<20), ""},
		{"characters over the edges of pieces", []string{"sh", "-c", `i=0; while [ $i -lt 1000 ]; do printf '%s' "$0"; i=$((i+1)); done`, unicode[:1000]}, dsec.Exited, 0, unicode, ""},
		{"a long command line", append([]string{"sh", "-c", "echo -n $# ''; echo $* | wc -c"}, args...), dsec.Exited, 0, "18 " + strconv.Itoa(18*(100<<10+1)) + "\n", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			cmd := dsec.Command{Argv: c.argv}
			check := func(way string, outcome dsec.Outcome, code int, out, err string) {
				t.Helper()
				if outcome != c.outcome || code != c.code || out != c.out || err != c.err {
					t.Errorf("%s: %s %d, output of %d %.80q, errors %.80q\nwant %s %d, %d %.80q, %.80q", way,
						outcome, code, len(out), out, err, c.outcome, c.code, len(c.out), c.out, c.err)
				}
			}
			r, err := n.Commands.Run(ctx(t), on(sb.ID), cmd, nil)
			must(t, err)
			check("run", r.Outcome, r.Code, string(r.Out), string(r.Err))
			if (r.Detail != "") != (c.outcome == dsec.NotStarted) {
				t.Errorf("run: detail %q", r.Detail)
			}
			st := n.begin(t, sb.ID, cmd)
			a, err := follow(ctx(t), n.Commands, on(sb.ID), st.ID)
			must(t, err)
			check("attach", a.status.Outcome, a.status.Code, string(a.out), string(a.err))
			x := n.run(nil, append([]string{"exec", string(sb.ID), "--"}, c.argv...)...)
			must(t, x.cause)
			if c.outcome == dsec.NotStarted { // it says why
				if !strings.HasPrefix(x.err, "dsec: ") {
					t.Errorf("exec: errors %q", x.err)
				}
				x.err = ""
			}
			check("exec", c.outcome, x.code, x.out, x.err)
		})
	}
	// What the kernel does not take is an outcome too.
	for name, cmd := range map[string]dsec.Command{
		"an argument of 2 MiB":       {Argv: []string{"true", strings.Repeat("x", 2<<20)}},
		"a shell line of 2 MiB":      {Shell: ": " + strings.Repeat("x", 2<<20)},
		"a command line over 2 MiB ": {Argv: append(append([]string{"true"}, args...), args...)},
	} {
		r, err := n.Commands.Run(ctx(t), on(sb.ID), cmd, nil)
		if err != nil || r.Outcome != dsec.NotStarted || r.Code != 126 || !strings.Contains(r.Detail, "too long") {
			t.Errorf("%s: %s %d %q, %v", name, r.Outcome, r.Code, r.Detail, err)
		}
	}
}

func everyByte() string {
	b := make([]byte, 256)
	for i := range b {
		b[i] = byte(i)
	}
	return string(b)
}

func everyByteEscaped() string {
	var b strings.Builder
	for i := range 256 {
		fmt.Fprintf(&b, `\%03o`, i)
	}
	return b.String()
}

// TestNobodyReads runs yes without a reader until far more came than is kept.
// Neither the node nor the guest grows, and the beginning can be read meanwhile
// and afterwards.
func TestNobodyReads(t *testing.T) {
	n := shared(t)
	before := n.guests()
	sb := n.create(t, plain())
	n.sh(t, sb.ID, "true")
	memory := func() map[int]int64 {
		m := map[int]int64{0: n.anonymous(t)}
		for _, pid := range n.guests() {
			m[pid] = anonymous(t, pid)
		}
		return m
	}
	st := n.begin(t, sb.ID, dsec.Command{Argv: []string{"yes"}})
	status := func() dsec.CommandStatus {
		l, err := n.Commands.List(ctx(t), on(sb.ID))
		must(t, err)
		return l[len(l)-1]
	}
	eventually(t, "more output than is kept", func() bool { return status().Stdout.Total > dsec.DefaultOutput })
	early := memory()
	eventually(t, "far more output than is kept", func() bool { return status().Stdout.Total > 256<<20 })
	for pid, m := range memory() {
		if was, ok := early[pid]; ok && m > was+32<<20 {
			t.Errorf("process %d grew from %d to %d bytes", pid, was, m)
		}
	}
	for o, err := range n.Commands.Attach(ctx(t), on(sb.ID), st.ID, 0) {
		must(t, err)
		if !bytes.HasPrefix(o.Data, []byte("y\ny\n")) || o.Offset != 0 {
			t.Errorf("it begins with %.10q at %d", o.Data, o.Offset)
		}
		break
	}
	must(t, n.Commands.Signal(ctx(t), on(sb.ID), st.ID, "KILL"))
	end, err := n.Commands.Wait(ctx(t), on(sb.ID), st.ID)
	must(t, err)
	if end.Outcome != dsec.Signaled || end.Code != 137 || end.Stdout.Kept != dsec.DefaultOutput || !end.Stdout.Truncated() {
		t.Errorf("%s %d, %+v", end.Outcome, end.Code, end.Stdout)
	}
	a, err := follow(ctx(t), n.Commands, on(sb.ID), st.ID)
	must(t, err)
	if int64(len(a.out)) != dsec.DefaultOutput+dsec.OutputTail || a.gap != end.Stdout.Total-int64(len(a.out)) {
		t.Errorf("%d bytes are kept, %d are missing of %d", len(a.out), a.gap, end.Stdout.Total)
	}
	n.stop(t, sb.ID)
	eventually(t, "its processes are gone", func() bool { return len(n.guests()) <= len(before)+4 }) // a pool refills
}

// TestTwoClients has two clients share a command: both feed it, both read it,
// and a third that comes and goes harms neither.
func TestTwoClients(t *testing.T) {
	n := shared(t)
	sb := n.create(t, plain())
	clients := []dsec.Services{n.another(t), n.another(t)}
	call := dsec.Call{Sandbox: sb.ID, Step: dsec.Step{Session: "both", Number: 1}}
	cmd := dsec.Command{Argv: []string{"cat"}, Stdin: dsec.StdinPipe}
	var ids [2]dsec.CommandID
	var wg sync.WaitGroup
	for i, s := range clients {
		wg.Go(func() {
			st, err := s.Commands.Start(ctx(t), call, cmd)
			if err != nil {
				t.Error(err)
			}
			ids[i] = st.ID
		})
	}
	wg.Wait()
	if ids[0] != ids[1] || ids[0] == "" {
		t.Fatalf("one step is two commands: %v", ids)
	}
	id := ids[0]
	var want strings.Builder
	got := make(chan string, 2)
	for _, s := range clients {
		wg.Go(func() {
			a, err := follow(ctx(t), s.Commands, on(sb.ID), id)
			if err != nil || a.status.Code != 0 {
				t.Errorf("attach: %+v, %v", a.status, err)
			}
			got <- string(a.out)
		})
	}
	for i := range 200 {
		piece := fmt.Sprintf("piece %d of %d\n", i, i%2)
		off := int64(want.Len())
		for _, s := range clients { // the second repeats what the first did
			next, err := s.Commands.Write(ctx(t), on(sb.ID), id, dsec.StdinWrite{Offset: off, Data: []byte(piece)})
			if err != nil || next != off+int64(len(piece)) {
				t.Fatalf("write at %d gives %d, %v", off, next, err)
			}
		}
		want.WriteString(piece)
		if i%20 == 0 {
			c, cancel := context.WithCancel(ctx(t))
			for range n.Commands.Attach(c, on(sb.ID), id, 0) {
				break
			}
			cancel()
		}
	}
	_, err := n.Commands.Write(ctx(t), on(sb.ID), id, dsec.StdinWrite{Offset: int64(want.Len()), Close: true})
	must(t, err)
	wg.Wait()
	for range clients {
		if s := <-got; s != want.String() {
			t.Errorf("a client got %d bytes of %d", len(s), want.Len())
		}
	}
}

// TestOrphans starts many times the children that a sandbox may have at once,
// none of which is waited for: none stays a zombie and takes a place.
func TestOrphans(t *testing.T) {
	n := shared(t)
	sb := n.create(t, plain())
	r := n.sh(t, sb.ID, `i=0; while [ $i -lt 1000 ]; do (: &); i=$((i+1)); done; echo made`)
	if string(r.Out) != "made\n" || len(r.Err) > 0 {
		t.Errorf("%q %.200q, %+v", r.Out, r.Err, r.CommandStatus)
	}
	eventually(t, "no zombies", func() bool {
		return string(n.sh(t, sb.ID, "cat /proc/[0-9]*/stat 2>/dev/null | grep -c ' Z '").Out) == "0\n"
	})
}

// TestSandboxHasNoMainProcess lets commands come and go: the sandbox stays, and
// what one left in the background outlives it, the call and its connection.
func TestSandboxHasNoMainProcess(t *testing.T) {
	n := shared(t)
	sb := n.create(t, plain())
	r := n.sh(t, sb.ID, "sleep 1000 & echo $!")
	if r.Outcome != dsec.Exited || r.Ended.Sub(r.Started) > 10*time.Second {
		t.Errorf("a background child holds its command: %+v", r.CommandStatus)
	}
	n.transport.CloseIdleConnections()
	if r := n.sh(t, sb.ID, "kill -0 "+string(r.Out)); r.Code != 0 {
		t.Errorf("the child is gone: %q", r.Err)
	}
	if got, err := n.Sandboxes.Get(ctx(t), sb.ID); err != nil || got.State != dsec.Running {
		t.Errorf("%s, %v", got.State, err)
	}
}
