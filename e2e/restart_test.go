package e2e_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/dsec-go/dsec"
)

// counting prints numbers until somebody makes /go, and ends with 7.
const counting = `i=0; until [ -e /go ]; do echo $i; i=$((i+1)); done; echo "last $i"; exit 7`

// checkCount finds out whether every line of counting is there, once, in order.
func checkCount(out []byte) error {
	lines := strings.Split(strings.TrimSuffix(string(out), "\n"), "\n")
	for i, line := range lines[:len(lines)-1] {
		if line != strconv.Itoa(i) {
			return fmt.Errorf("line %d is %q", i, line)
		}
	}
	if want := fmt.Sprintf("last %d", len(lines)-1); lines[len(lines)-1] != want {
		return fmt.Errorf("the last line is %q, want %q", lines[len(lines)-1], want)
	}
	return nil
}

// TestKilledNode kills dsec up, twice, under running commands and whoever reads
// and waits for them. Nothing of the commands is lost, and nobody notices but
// by waiting.
func TestKilledNode(t *testing.T) {
	n := own(t)
	sb := n.create(t, plain())
	keyed, err := n.Sandboxes.Create(ctx(t), plain(), dsec.CreateOptions{Key: "only one"})
	must(t, err)
	st := n.begin(t, sb.ID, dsec.Command{Shell: counting, Output: dsec.MaxOutput})
	quiet := n.begin(t, sb.ID, dsec.Command{Argv: []string{"cat"}, Stdin: dsec.StdinPipe})

	var wg sync.WaitGroup
	began := make(chan struct{}, 2)
	reader, waiter := n.another(t), n.another(t)
	wg.Go(func() { // the SDK reads over both kills
		var out []byte
		var end *dsec.CommandStatus
		for o, err := range reader.Commands.Attach(ctx(t), on(sb.ID), st.ID, 0) {
			if err != nil {
				t.Errorf("attach: %v", err)
				return
			}
			if out == nil {
				began <- struct{}{}
			}
			out = append(out, o.Data...)
			end = o.Status
		}
		if err := checkCount(out); err != nil || end == nil || end.Code != 7 {
			t.Errorf("attached over the kills: %v, %+v", err, end)
		}
	})
	wg.Go(func() {
		end, err := waiter.Commands.Wait(ctx(t), on(sb.ID), st.ID)
		if err != nil || end.Code != 7 {
			t.Errorf("waited over the kills: %+v, %v", end, err)
		}
	})
	cmd, cancel := n.command("exec", "--output", "1G", string(sb.ID), "--", "sh", "-c", counting)
	defer cancel()
	var out buffer
	cmd.Stdout = &out
	wg.Go(func() {
		if r := finish(cmd, nil); r.code != 7 || checkCount([]byte(out.String())) != nil {
			t.Errorf("exec over the kills: status %d, %v, errors %q, %v", r.code, checkCount([]byte(out.String())), r.err, r.cause)
		}
	})
	<-began
	eventually(t, "exec prints", func() bool { return out.String() != "" })
	for range 2 {
		n.kill()
		must(t, n.start())
	}

	if got, err := n.Sandboxes.Get(ctx(t), sb.ID); err != nil || got.State != dsec.Running || !got.Created.Equal(sb.Created) || !got.Expires.Equal(sb.Expires) {
		t.Errorf("after the kills: %+v, %v", got, err)
	}
	if _, err := n.Commands.Write(ctx(t), on(sb.ID), quiet.ID, dsec.StdinWrite{Data: []byte("still here"), Close: true}); err != nil {
		t.Errorf("write: %v", err)
	}
	if a, err := follow(ctx(t), n.Commands, on(sb.ID), quiet.ID); err != nil || string(a.out) != "still here" || a.status.Outcome != dsec.Exited {
		t.Errorf("the quiet command: %q, %+v, %v", a.out, a.status, err)
	}
	if again, err := n.Sandboxes.Create(ctx(t), plain(), dsec.CreateOptions{Key: "only one"}); err != nil || again.ID != keyed.ID {
		t.Errorf("its key gives %s, want %s (%v)", again.ID, keyed.ID, err)
	}
	other := plain()
	other.Hostname = "other"
	_, err = n.Sandboxes.Create(ctx(t), other, dsec.CreateOptions{Key: "only one"})
	wantKind(t, "its key with another spec", err, dsec.Conflict)

	n.sh(t, sb.ID, "touch /go")
	wg.Wait()
	a, err := follow(ctx(t), n.Commands, on(sb.ID), st.ID)
	if err := checkCount(a.out); err != nil {
		t.Error(err)
	}
	if err != nil || a.status.Code != 7 || a.gap != 0 {
		t.Errorf("attached afterwards: %+v, %v", a.status, err)
	}
	if l, err := n.Sandboxes.List(ctx(t), dsec.Filter{}); err != nil || len(l) != 2 {
		t.Errorf("%d sandboxes, %v", len(l), err)
	}
}

// TestKilledWhileCreating kills dsec up in the middle of creates and stops. The
// creates are repeated with their keys: each is one sandbox, and what was half
// made is gone.
func TestKilledWhileCreating(t *testing.T) {
	n := own(t)
	const many = 8
	key := func(i int) dsec.CreateOptions { return dsec.CreateOptions{Key: fmt.Sprint("key ", i)} }
	for round := range 2 {
		var wg sync.WaitGroup
		first := make(chan struct{}, many)
		s := n.another(t)
		for i := range many {
			wg.Go(func() {
				if sb, err := s.Sandboxes.Create(ctx(t), plain(), key(round*many+i)); err == nil {
					first <- struct{}{}
					if i%3 == 0 {
						s.Sandboxes.Stop(ctx(t), sb.ID) //nolint:errcheck // it may be killed under it
					}
				}
			})
		}
		<-first // some are made, some are under way
		n.kill()
		must(t, n.start())
		wg.Wait()
	}
	ids := map[dsec.SandboxID]bool{}
	for i := range 2 * many {
		sb, err := n.Sandboxes.Create(ctx(t), plain(), key(i))
		if err != nil {
			t.Errorf("repeated: %v", err)
		}
		ids[sb.ID] = true
	}
	all, err := n.Sandboxes.List(ctx(t), dsec.Filter{All: true})
	if err != nil || len(ids) != 2*many || len(all) != 2*many {
		t.Errorf("%d creates are %d ids, and %d sandboxes are listed (%v)", 2*many, len(ids), len(all), err)
	}
	for _, sb := range all {
		if sb.State == dsec.Running {
			if r := n.sh(t, sb.ID, "echo up"); string(r.Out) != "up\n" {
				t.Errorf("%s says %q", sb.ID, r.Out)
			}
		}
		n.stop(t, sb.ID)
	}
	// No box is there that nobody knows: what is left is the holder and a pool.
	n.kill()
	must(t, n.start())
	n.dsec(t, "down", "--data", n.data)
	<-n.exited
	if left := n.left(); len(left) > 0 {
		t.Errorf("left behind:\n%s", strings.Join(left, "\n"))
	}
	must(t, n.start())
}

// TestDamagedJournal changes one byte in the middle of a node's journal: it does not start, says
// where and what to do, and is started again with what can be verified. Who lived there is lost.
func TestDamagedJournal(t *testing.T) {
	n := own(t)
	step := func(id dsec.SandboxID) dsec.Call {
		return dsec.Call{Sandbox: id, Step: dsec.Step{Session: "s", Number: 1}}
	}
	run := func(id dsec.SandboxID, word string) dsec.Result {
		r, err := n.Commands.Run(ctx(t), step(id), dsec.Command{Shell: "echo " + word + "; echo x >> /ran"}, nil)
		must(t, err)
		return r
	}
	ended, touched := n.create(t, plain()), n.create(t, plain())
	run(ended.ID, "earlier")
	n.stop(t, ended.ID)
	run(touched.ID, "damaged-here")
	later := n.create(t, plain())
	run(later.ID, "behind")
	if r := n.run(nil, "mend-journal", "--data", n.data); r.code != 1 || !strings.Contains(r.err, "is running") {
		t.Errorf("beside a running node: %d %s", r.code, r.err)
	}
	n.kill()

	segments, err := filepath.Glob(filepath.Join(n.data, "journal", "*.log"))
	must(t, err)
	var path string
	for _, s := range segments {
		b, err := os.ReadFile(s)
		must(t, err)
		if at := bytes.Index(b, []byte("damaged-here")); at >= 0 {
			path, b[at] = s, b[at]^1
			must(t, os.WriteFile(s, b, 0o600))
		}
	}
	err = n.start()
	if err == nil || !strings.Contains(err.Error(), path+" at offset ") || !strings.Contains(err.Error(), "dsec mend-journal") {
		t.Fatalf("a damaged journal: %v", err)
	}
	if out := n.dsec(t, "mend-journal", "--data", n.data); !strings.Contains(out, path+".damaged") {
		t.Errorf("mend says\n%s", out)
	}
	if out := n.dsec(t, "mend-journal", "--data", n.data); !strings.Contains(out, "whole") {
		t.Errorf("mend says of a whole journal\n%s", out)
	}
	must(t, n.start())

	sb, err := n.Sandboxes.Get(ctx(t), ended.ID)
	if err != nil || sb.Cause != dsec.CauseUser {
		t.Errorf("who had ended: %s %s, %v", sb.State, sb.Cause, err)
	}
	eventually(t, "who lived there is lost", func() bool {
		sb, err = n.Sandboxes.Get(ctx(t), touched.ID)
		return err == nil && sb.State == dsec.LostGone
	})
	if sb.Cause != dsec.CauseNodeLost || !strings.Contains(sb.Detail, "damaged") {
		t.Errorf("who lived there: %s, %q", sb.Cause, sb.Detail)
	}
	_, err = n.Commands.Run(ctx(t), step(touched.ID), dsec.Command{Shell: "echo damaged-here; echo x >> /ran"}, nil)
	wantKind(t, "a step of who is lost", err, dsec.Lost)
	// Who came later has lost nothing: its step is answered, not run again.
	if r := run(later.ID, "behind"); string(r.Out) != "behind\n" || !r.Replayed {
		t.Errorf("a step of who came later: %q, replayed %v", r.Out, r.Replayed)
	}
	if r := n.sh(t, later.ID, "wc -l < /ran"); strings.TrimSpace(string(r.Out)) != "1" {
		t.Errorf("it ran %s times", r.Out)
	}
	for _, id := range []dsec.SandboxID{ended.ID, touched.ID, later.ID} {
		if r := n.run(nil, "log", "--verify", string(id)); r.code != 0 {
			t.Errorf("log of %s: %d %s", id, r.code, r.err)
		}
	}
	if out := n.dsec(t, "log", string(touched.ID)); !strings.Contains(out, "damaged") {
		t.Errorf("the log of who is lost does not say so:\n%s", out)
	}
	// The next restart has nothing to mend and ends nobody.
	n.kill()
	must(t, n.start())
	if sb, err := n.Sandboxes.Get(ctx(t), later.ID); err != nil || sb.State != dsec.Running {
		t.Errorf("after one more restart: %s, %v", sb.State, err)
	}
}

// TestInterruptedNode ends dsec up by Ctrl-C with a command under way, which
// exec survives.
func TestInterruptedNode(t *testing.T) {
	n := own(t)
	sb := n.create(t, plain())
	cmd, cancel := n.command("exec", string(sb.ID), "--", "sh", "-c", "echo up; until [ -e /go ]; do sleep 0.05; done; echo down; exit 9")
	defer cancel()
	var out buffer
	cmd.Stdout = &out
	done := make(chan result, 1)
	go func() { done <- finish(cmd, nil) }()
	eventually(t, "it runs", func() bool { return out.String() == "up\n" })
	must(t, exec.Command("kill", "-INT", fmt.Sprint(n.proc.Process.Pid)).Run())
	select {
	case <-n.exited:
	case <-ctx(t).Done():
		t.Fatal("dsec up goes on")
	}
	if code := n.proc.ProcessState.ExitCode(); code != 0 {
		t.Errorf("dsec up ended with %d", code)
	}
	must(t, n.start())
	n.sh(t, sb.ID, "touch /go")
	if r := <-done; r.code != 9 || out.String() != "up\ndown\n" {
		t.Errorf("exec ended with %d, output %q, errors %q", r.code, out.String(), r.err)
	}
}

// TestDownUnderLoad takes a node down with everything at work. The program ends
// and nothing is left, which is looked for when the test ends.
func TestDownUnderLoad(t *testing.T) {
	n := own(t)
	for _, line := range []string{"f() { f | f & }; f; sleep 1000", "yes", "trap '' TERM; while :; do :; done", "tail /dev/zero", "dd if=/dev/zero of=/big bs=1M count=100; sleep 1000"} {
		sb, err := n.Sandboxes.Create(ctx(t), plain(), dsec.CreateOptions{})
		must(t, err)
		st := n.begin(t, sb.ID, dsec.Command{Shell: line})
		go n.Commands.Wait(ctx(t), on(sb.ID), st.ID) //nolint:errcheck // it is cut off
	}
	n.dsec(t, "down", "--data", n.data)
	<-n.exited
	if code := n.proc.ProcessState.ExitCode(); code != 0 {
		t.Errorf("dsec up ended with %d", code)
	}
	files := func() (out []string) {
		for _, s := range n.left() {
			if !bytes.HasPrefix([]byte(s), []byte("guest")) {
				out = append(out, s)
			}
		}
		return out
	}
	if left := files(); len(left) > 0 {
		slices.Sort(left)
		t.Errorf("left behind:\n%s", strings.Join(left, "\n"))
	}
}

// TestCorruptJournal starts a node whose journal cannot be read: it refuses, and
// touches nothing. dsec down ends the sandboxes all the same.
func TestCorruptJournal(t *testing.T) {
	n := own(t)
	sb, err := n.Sandboxes.Create(ctx(t), plain(), dsec.CreateOptions{})
	must(t, err)
	for range 3 {
		n.sh(t, sb.ID, "true")
	}
	n.kill()
	logs, err := filepath.Glob(filepath.Join(n.data, "journal", "*.log"))
	if err != nil || len(logs) == 0 {
		t.Fatalf("%q %v", logs, err)
	}
	b, err := os.ReadFile(logs[0])
	must(t, err)
	b[100] ^= 1
	must(t, os.WriteFile(logs[0], b, 0o600))
	before := len(n.members())
	if err := n.start(); err == nil || !strings.Contains(err.Error(), "corrupt") {
		t.Errorf("up said %v", err)
	}
	// Spare shells are the old process's to lose, the sandbox and its holder not.
	if now := len(n.members()); now == 0 || before == 0 {
		t.Errorf("%d processes became %d", before, now)
	}
	r := n.run(nil, "down", "--data", n.data, "--guest", n.guest)
	must(t, r.fault())
	if !strings.Contains(r.err, "journal") {
		t.Errorf("down said %q", r.err)
	}
	if left := n.boxes(); len(left) != 0 {
		t.Errorf("left behind:\n%s", strings.Join(left, "\n"))
	}
	n.proc = nil // there is no node to take down
}
