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
	program := filepath.Join(t.TempDir(), "rollout-worker")
	build := exec.Command("go", "build", "-ldflags", "-s -w", "-o", program, "../examples/rollout-worker")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build worker: %v\n%s", err, out)
	}
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
