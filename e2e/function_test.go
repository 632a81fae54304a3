package e2e_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/dsec-go/dsec"
)

// TestFunctions calls functions as users do: from the command line, in batches,
// through a restart, and in nobody else's machine.
func TestFunctions(t *testing.T) {
	n := own(t)
	file := func(name, content string) string {
		path := filepath.Join(t.TempDir(), name)
		must(t, os.WriteFile(path, []byte(content), 0o644))
		return path
	}
	fn := func(stdin string, args ...string) result {
		return n.run(strings.NewReader(stdin), append([]string{"fn", "run", "--image", busybox}, args...)...)
	}
	greet := file("greet.sh", "read x; echo hello $x $1 $A; echo err >&2; ls /tmp; touch /tmp/mine; exit $2")
	for range 2 {
		if r := fn("you\n", "-e", "A=b", greet, "a", "3"); r.code != 3 || r.out != "hello you a b\n" || r.err != "err\n" {
			t.Errorf("status %d, prints %q and %q", r.code, r.out, r.err)
		}
	}
	for _, c := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"--time", "0.2s", file("a.sh", "sleep 100")}, 124, "time limit of 200ms"},
		{[]string{"--cpu-time", "0.2s", file("a.sh", "while :; do :; done")}, 124, "CPU time limit of 200ms"},
		{[]string{"--output", "1K", file("a.sh", "yes")}, 137, "1.0 KiB of output"},
		{[]string{file("a.sh", "kill -SEGV $$")}, 139, ""},
		{[]string{file("a.py", "print(1)")}, 125, "no runtime python3"},
		{[]string{file("a.c", "int main(){}")}, 125, "no runtime c"},
		{[]string{file("a.txt", "")}, 125, "--runtime"},
		{[]string{"--memory", "1", greet}, 125, "memory"},
		{[]string{"--file", "../x=" + greet, greet}, 125, "../x"},
	} {
		if r := fn("", c.args...); r.code != c.code || !strings.Contains(r.err, c.says) {
			t.Errorf("fn run %v: status %d, %q; want %d and %q", c.args, r.code, r.err, c.code, c.says)
		}
	}
	var one struct {
		Outcome, Out string
		Memory       int64
		Wall         float64
	}
	must(t, json.Unmarshal([]byte(fn("x\n", "--json", greet, "a", "0").out), &one))
	if one.Outcome != "ok" || one.Out != "hello x a\n" || one.Memory <= 0 || one.Wall <= 0 {
		t.Errorf("as JSON: %+v", one)
	}

	cases := file("cases", `{"stdin":"1\n","args":["a","0"]}`+"\n\n"+`{"stdin":"2\n","args":["b","4"],"env":{"A":"c"}}`+"\n")
	r := n.run(nil, "fn", "batch", "--image", busybox, greet, cases)
	must(t, r.fault())
	lines := strings.Split(strings.TrimSpace(r.out), "\n")
	slices.Sort(lines) // by index
	if len(lines) != 2 || !strings.Contains(lines[0], `"outcome":"ok"`) || !strings.Contains(lines[0], `hello 1 a`) || !strings.Contains(lines[1], `"code":4`) || !strings.Contains(lines[1], "hello 2 b c") {
		t.Errorf("a batch prints %q", r.out)
	}

	if list, err := n.Sandboxes.List(ctx(t), dsec.Filter{All: true}); err != nil || len(list) != 0 {
		t.Errorf("machines of functions are listed: %v %v", list, err)
	}
	// What the warm machines use is kept.
	_, err := n.Images.Collect(ctx(t), dsec.CollectOptions{})
	must(t, err)
	if r := fn("you\n", greet, "a", "0"); r.code != 0 {
		t.Errorf("after a collection: %s", r.err)
	}
	// A killed node leaves its machines; the next one ends them and makes others.
	n.kill()
	must(t, n.start())
	if r := fn("you\n", greet, "a", "0"); r.code != 0 || r.out != "hello you a\n" {
		t.Errorf("after a restart: %d, %q %q", r.code, r.out, r.err)
	}

	box := n.create(t, dsec.Spec{Kind: dsec.FnCall, Environment: plain().Environment})
	n.sh(t, box.ID, "touch /tmp/x")
	if r := n.sh(t, box.ID, "ls /tmp"); string(r.Out) != "" {
		t.Errorf("a command finds %q of the one before", r.Out)
	}
	_, err = n.Sandboxes.Pause(ctx(t), box.ID)
	wantKind(t, "pause", err, dsec.Unsupported)
	_, err = n.Sandboxes.Commit(ctx(t), box.ID, "x@1")
	wantKind(t, "commit", err, dsec.Unsupported)
	n.kill()
	must(t, n.start())
	if r := n.sh(t, box.ID, "echo $((6*7))"); string(r.Out) != "42\n" {
		t.Errorf("after a restart the sandbox prints %q", r.Out)
	}
	n.stop(t, box.ID)
}

// TestFunctionsOfProjects holds a project to its quota, and shows it its own
// images only.
func TestFunctionsOfProjects(t *testing.T) {
	n := own(t)
	n.dsec(t, "project", "create", "small", "--sandboxes", "1", "--memory", "256M")
	token := n.dsec(t, "token", "create", "small", "--project", "small", "--right", "sandboxes")
	script := filepath.Join(t.TempDir(), "a.sh")
	must(t, os.WriteFile(script, []byte("echo hi"), 0o644))
	cmd, cancel := n.command("fn", "run", "--image", busybox, script)
	defer cancel()
	cmd.Env = append(cmd.Env, "DSEC_URL="+n.url, "DSEC_TOKEN="+token)
	if r := finish(cmd, nil); r.code != 125 || !strings.Contains(r.err, "small") || !strings.Contains(r.err, "memory") {
		t.Errorf("a call beyond the project's memory: status %d, %q %q", r.code, r.out, r.err)
	}
}
