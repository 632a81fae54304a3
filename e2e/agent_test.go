package e2e_test

import (
	"archive/tar"
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver/drivertest"
)

// TestRolloutsOutliveTheirTrainer runs examples/rollout-worker in a sandbox. Its
// trainer goes and comes back, again and again, the worker and the node are
// killed once each, and every step of every rollout has run exactly once.
func TestRolloutsOutliveTheirTrainer(t *testing.T) {
	n := own(t)
	program := example(t, "rollout-worker")
	must(t, n.run(bytes.NewReader(withProgram(t, program)), "image", "import", "-", "--name", "worker").fault())
	spec := plain()
	spec.Environment.Base = "worker"
	spec.API = &dsec.Delegation{Quota: dsec.Quota{Sandboxes: 3}}
	worker := n.create(t, spec)
	run := func() dsec.CommandID {
		st, err := n.Commands.Start(ctx(t), dsec.Call{Sandbox: worker.ID}, dsec.Command{
			Argv: []string{"/bin/rollout-worker", "-state", "/state", "-parallel", "3"},
		})
		must(t, err)
		return st.ID
	}
	command := run()

	const tasks, steps = 6, 4
	a := struct {
		Submit []map[string]any `json:"submit"`
		After  uint64           `json:"after"`
	}{}
	for i := range tasks {
		var lines []string
		for s := range steps {
			// A step that ran twice, or not at all, shows in what the last one prints.
			lines = append(lines, fmt.Sprintf("echo %d >> /ran; sleep 0.1; cat /ran | tr '\\n' ' '", s+1))
		}
		a.Submit = append(a.Submit, map[string]any{"id": fmt.Sprint("t", i), "image": busybox, "steps": lines})
	}
	got := map[string]int{}
	for visit := 0; a.After < tasks*steps; visit++ {
		if visit > 50 {
			t.Fatalf("after %d visits there are %d results", visit, a.After)
		}
		switch visit {
		case 2: // the worker dies; its log is in its sandbox
			must(t, n.Commands.Signal(ctx(t), dsec.Call{Sandbox: worker.ID}, command, "KILL"))
			_, err := n.Commands.Wait(ctx(t), dsec.Call{Sandbox: worker.ID}, command)
			must(t, err)
			command = run()
		case 4: // the node dies; everything in sandboxes goes on
			n.kill()
			must(t, n.start())
		}
		var conn dsec.PortConn
		eventually(t, "a connection to the worker", func() (ok bool) {
			var err error
			conn, err = n.Ports.Dial(ctx(t), dsec.Call{Sandbox: worker.ID}, 9000)
			return err == nil
		})
		must(t, json.NewEncoder(conn).Encode(a))
		r := bufio.NewScanner(conn)
		for range 3 { // the trainer takes a few results, then it is gone
			if a.After == tasks*steps || !r.Scan() {
				break
			}
			var res struct {
				Seq              uint64
				Task, Out, Error string
				Step             int
			}
			must(t, json.Unmarshal(r.Bytes(), &res))
			want := strings.Join(strings.Fields("1 2 3 4")[:res.Step], " ")
			if res.Seq != a.After+1 || res.Error != "" || res.Step != got[res.Task]+1 || strings.TrimSpace(res.Out) != want {
				t.Fatalf("after %d came %s", a.After, r.Bytes())
			}
			a.After, got[res.Task] = res.Seq, res.Step
		}
		conn.Close()
	}
	for i := range tasks {
		if got[fmt.Sprint("t", i)] != steps {
			t.Errorf("task %d had %d steps, want %d", i, got[fmt.Sprint("t", i)], steps)
		}
	}
	all, err := n.Sandboxes.List(ctx(t), dsec.Filter{All: true})
	must(t, err)
	if len(all) != 1+tasks {
		t.Errorf("there were %d sandboxes, want the worker's and %d", len(all), tasks)
	}
}

// example builds one of the examples.
func example(t *testing.T, name string) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), name)
	build := exec.Command("go", "build", "-ldflags", "-s -w", "-o", program, "../examples/"+name)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", name, err, out)
	}
	return program
}

// TestAgentLoopIsDurable kills examples/agent-loop after each of its events. Each
// run goes on where the last one was, every action has run once, and a fork has
// the same beginning in a sandbox of its own.
func TestAgentLoopIsDurable(t *testing.T) {
	n := own(t)
	program, dir := example(t, "agent-loop"), t.TempDir()
	log, forked := filepath.Join(dir, "a.jsonl"), filepath.Join(dir, "b.jsonl")
	loop := func(args ...string) *exec.Cmd {
		cmd := exec.CommandContext(ctx(t), program, args...)
		cmd.Env = append(os.Environ(), "DSEC_URL="+n.url, "DSEC_TOKEN="+n.token)
		return cmd
	}
	lines := func(path string) (out []string) {
		b, _ := os.ReadFile(path)
		for line := range strings.Lines(string(b)) {
			out = append(out, line)
		}
		return out
	}
	for events := 1; events < 8; events++ {
		cmd := loop("run", "-log", log, "-image", busybox, "look", "around")
		must(t, cmd.Start())
		eventually(t, fmt.Sprint(events, " events"), func() bool { return len(lines(log)) >= events })
		cmd.Process.Kill()
		cmd.Wait()
	}
	finish := func(path string) []string {
		t.Helper()
		for range 2 { // what has finished stays as it is
			if out, err := loop("run", "-log", path, "-image", busybox).CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
		}
		return lines(path)
	}
	whole := finish(log)
	if len(whole) != 8 || !strings.Contains(whole[7], `"finish"`) {
		t.Fatalf("the log is\n%s", strings.Join(whole, ""))
	}
	if out, err := loop("fork", "-log", log, "-at", "5", "-to", forked).CombinedOutput(); err != nil {
		t.Fatalf("fork: %v\n%s", err, out)
	}
	if other := finish(forked); len(other) != 8 || !strings.Contains(other[4], `"of"`) || strings.Contains(other[5], `"of"`) {
		t.Errorf("the log of the fork is\n%s", strings.Join(other, ""))
	}
	if out, err := loop("trace", "-log", log, "-after", "6").Output(); err != nil || string(out) != whole[6]+whole[7] {
		t.Errorf("trace gave %s, %v", out, err)
	}
	all, err := n.Sandboxes.List(ctx(t), dsec.Filter{All: true})
	must(t, err)
	if len(all) != 2 {
		t.Errorf("there were %d sandboxes, want one for each log", len(all))
	}
	for _, sb := range all {
		ran := 0
		for r, err := range n.Trajectories.Records(ctx(t), sb.ID, 0) {
			must(t, err)
			if r.Op == dsec.RecordCommand && r.Of == 0 {
				ran++
			}
		}
		if ran != 3 {
			t.Errorf("in %s %d commands ran, want 3", sb.ID, ran)
		}
	}
}

// TestFloodOfTheLoopback has a workload that opens connections to its API and
// says nothing. It is in its own way alone.
func TestFloodOfTheLoopback(t *testing.T) {
	n := own(t)
	spec := plain()
	spec.API = &dsec.Delegation{Port: 8080}
	bad, good := n.create(t, spec), n.create(t, spec)
	// The program of the image that fetches URLs is not in every build of it.
	ask := func(token, path string) string {
		return `{ printf 'POST ` + path + ` HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\n` +
			`Content-Length: 2\r\nConnection: close\r\n\r\n{}' "` + token + `"; sleep 2; } | nc 127.0.0.1 8080 >/answer; cat /answer`
	}
	list := ask("$DSEC_TOKEN", "/dsec.v1.Sandboxes/List")
	sh := func(sb dsec.Sandbox, line string) dsec.Result {
		t.Helper()
		r, err := n.Commands.Run(ctx(t), dsec.Call{Sandbox: sb.ID}, dsec.Command{Shell: line}, nil)
		must(t, err)
		return r
	}
	for _, sb := range []dsec.Sandbox{bad, good} {
		if r := sh(sb, "env | grep DSEC_URL; "+list); !strings.Contains(string(r.Out), "DSEC_URL=http://127.0.0.1:8080") || !strings.Contains(string(r.Out), "200 OK") {
			t.Fatalf("a plain program inside: %d %q %q", r.Code, r.Out, r.Err)
		}
	}
	// Nothing but the API is behind the port, and it asks everybody.
	for _, path := range []string{"/metrics", "/dsec.v1.Nodes/List"} {
		if r := sh(good, ask("", path)); !strings.Contains(string(r.Out), "401 Unauthorized") {
			t.Errorf("%s: %q", path, r.Out)
		}
	}
	before := len(fds(t, n.proc.Process.Pid))
	st, err := n.Commands.Start(ctx(t), dsec.Call{Sandbox: bad.ID}, dsec.Command{
		Shell: "for i in $(seq 180); do sleep 1000 | nc 127.0.0.1 8080 >/dev/null & done 2>/dev/null; wait",
	})
	must(t, err)
	eventually(t, "the flood", func() bool { return len(fds(t, n.proc.Process.Pid)) > before+40 })
	for range 3 {
		if r := sh(good, list); !strings.Contains(string(r.Out), "200 OK") {
			t.Errorf("beside a flood: %q %q", r.Out, r.Err)
		}
		if r := sh(bad, "echo alive"); string(r.Out) != "alive\n" {
			t.Errorf("within a flood: %q", r.Out)
		}
	}
	if more := len(fds(t, n.proc.Process.Pid)) - before; more > 2*64+40 {
		t.Errorf("a flood of one sandbox holds %d descriptors of the node", more)
	}
	// The node may have been faster: who says nothing is sent away.
	if err := n.Commands.Signal(ctx(t), dsec.Call{Sandbox: bad.ID}, st.ID, "KILL"); err != nil && dsec.KindOf(err) != dsec.Conflict {
		t.Error(err)
	}
	eventually(t, "the end of the flood", func() bool { return strings.Contains(string(sh(bad, list).Out), "200 OK") })
}

func fds(t *testing.T, pid int) []os.DirEntry {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	must(t, err)
	return entries
}

// withProgram is busybox with one program more.
func withProgram(t *testing.T, path string) []byte {
	t.Helper()
	program, err := os.ReadFile(path)
	must(t, err)
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	r := tar.NewReader(bytes.NewReader(drivertest.BusyboxTar(t)))
	for {
		h, err := r.Next()
		if err != nil {
			break
		}
		must(t, w.WriteHeader(h))
		if _, err := bufio.NewReader(r).WriteTo(w); err != nil {
			t.Fatal(err)
		}
	}
	must(t, w.WriteHeader(&tar.Header{Name: "bin/" + filepath.Base(path), Mode: 0o755, Size: int64(len(program)), Typeflag: tar.TypeReg}))
	_, err = w.Write(program)
	must(t, err)
	must(t, w.Close())
	return out.Bytes()
}
