package fncall_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/driver/drivertest"
)

const (
	cHello = "#include <stdio.h>\nint main(int c, char **v) { int a, b; if (scanf(\"%d %d\", &a, &b) == 2) printf(\"%d %s\\n\", a + b, c > 1 ? v[1] : \"\"); return 3; }"
	cBad   = "int main( {"
)

func TestRuntimes(t *testing.T) {
	r := newRig(t)
	r.want(shell("echo hello $1; pwd; echo $0", "you"), dsec.FunctionOK, "hello you\n/work\nmain.sh\n")
	r.want(dsec.Function{Runtime: dsec.RuntimeBash, Source: []byte("a=(1 2 3); echo ${a[1]} ${BASH_VERSION:+bash}")}, dsec.FunctionOK, "2 bash\n")
	f := python("import sys; print(input()[::-1], sys.argv, __name__, __file__)", "a", "b c")
	f.Stdin = []byte("olleh\n")
	if res := r.want(f, dsec.FunctionOK, "hello ['/work/main.py', 'a', 'b c'] __main__ /work/main.py\n"); !res.Warm {
		t.Error("Python is not warm")
	}
	c := dsec.Function{Runtime: dsec.RuntimeC, Source: []byte(cHello), Stdin: []byte("20 22"), Args: []string{"x"}}
	if res := r.want(c, dsec.FunctionExit, "42 x\n"); res.Code != 3 || res.Warm {
		t.Errorf("code %d, warm %v", res.Code, res.Warm)
	}
	c.Source = []byte(cBad)
	if res := r.want(c, dsec.FunctionCompile, ""); !strings.Contains(string(res.Err), "main.c:1") || res.Detail == "" || res.Code == 0 {
		t.Errorf("the compiler's errors are %q, %q, %d", res.Err, res.Detail, res.Code)
	}
	for _, runtime := range []dsec.Runtime{dsec.RuntimeGo, dsec.RuntimeNode} {
		if _, err := r.try(dsec.Function{Runtime: runtime}); dsec.KindOf(err) != dsec.Unsupported || !strings.Contains(err.Error(), string(runtime)) {
			t.Errorf("runtime %s that is not there: %v", runtime, err)
		}
	}
}

// TestStandIns checks how compilers and interpreters are called that the test
// image does not have: scripts in their place show it.
func TestStandIns(t *testing.T) {
	script := func(name string, lines ...string) []byte {
		return []byte("#!/bin/sh\n" + strings.Join(lines, "\n") + "\n")
	}
	build := []string{
		`out=; while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; last=$1; shift; done`,
		`printf '#!/bin/sh\necho built from %s by %s: "$@"; cat\n' "$last" "$(basename $0)" > $out; chmod 755 $out`,
	}
	layer := drivertest.MountTar(t, toolchain(t, map[string][]byte{
		"g++": script("g++", build...), "go": script("go", append([]string{`[ "$1" = build ] || exit 9; [ "$GOPROXY" = off ] || exit 8`}, build...)...),
		"node": script("node", `echo node "$@"; cat "$1"`),
	}))
	r := newRig(t, layer)
	for _, c := range []struct {
		runtime dsec.Runtime
		want    string
	}{
		{dsec.RuntimeCpp, "built from main.cpp by g++: a\nin"},
		{dsec.RuntimeGo, "built from main.go by go: a\nin"},
		{dsec.RuntimeNode, "node main.js a\nsource"},
	} {
		r.want(dsec.Function{Runtime: c.runtime, Source: []byte("source"), Args: []string{"a"}, Stdin: []byte("in")}, dsec.FunctionOK, c.want)
	}
}

// toolchain is a layer with programs in /usr/local/bin.
func toolchain(t *testing.T, programs map[string][]byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, d := range []string{"usr", "usr/local", "usr/local/bin"} {
		if err := w.WriteHeader(&tar.Header{Name: d, Typeflag: tar.TypeDir, Mode: 0o755}); err != nil {
			t.Fatal(err)
		}
	}
	for name, content := range programs {
		if err := w.WriteHeader(&tar.Header{Name: "usr/local/bin/" + name, Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(content))}); err != nil {
			t.Fatal(err)
		}
		w.Write(content) //nolint:errcheck // to memory
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestInputs(t *testing.T) {
	r := newRig(t)
	f := shell(`cat a/b/c; ls -ld a/b/run | cut -c1-10; ./a/b/run; echo "$V"; id -u; touch own && ls -l own | cut -d' ' -f3; echo $HOME`)
	f.Files = []dsec.FunctionFile{{Path: "a/b/c", Data: []byte("content\n")}, {Path: "a/b/run", Mode: 0o755, Data: []byte("#!/bin/sh\necho ran\n")}}
	f.Env = map[string]string{"V": "a\nb"}
	f.User = "1234"
	r.want(f, dsec.FunctionOK, "content\n-rwxr-xr-x\nran\na\nb\n1234\n1234\n/\n")
	f = python("import os, sys; print(os.getuid(), os.environ.get('V'), open('a').read(), len(sys.stdin.buffer.read()), sorted(os.listdir('.')))")
	f.User, f.Env, f.Files, f.Stdin = "nobody", map[string]string{"V": "é"}, []dsec.FunctionFile{{Path: "a", Data: []byte("A")}}, make([]byte, 3<<20)
	r.want(f, dsec.FunctionOK, "65534 é A 3145728 ['a', 'main.py']\n")
	f = shell("true")
	f.User = "stranger"
	if _, err := r.try(f); dsec.KindOf(err) != dsec.Invalid || !strings.Contains(err.Error(), "stranger") {
		t.Errorf("a user that is not there: %v", err)
	}
	f = shell("true")
	f.Files, f.Limits.Memory = []dsec.FunctionFile{{Path: "big", Data: make([]byte, 8<<20)}}, 8<<20
	if _, err := r.try(f); dsec.KindOf(err) != dsec.Invalid || !strings.Contains(err.Error(), "big") {
		t.Errorf("a file that does not fit: %v", err)
	}
}

// TestPythonEnds checks that a fork of the warm interpreter ends as one that was
// started for the program.
func TestPythonEnds(t *testing.T) {
	r := newRig(t)
	for _, c := range []struct {
		source, out, err string
		code             int
	}{
		{"import sys; sys.exit(7)", "", "", 7},
		{"raise SystemExit", "", "", 0},
		{"raise SystemExit('why')", "", "why\n", 1},
		{"import atexit\natexit.register(print, 'last')\nprint('first')", "first\nlast\n", "", 0},
		{"import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\nprint('main')", "main\nthread\n", "", 0},
		{"out = open(1, 'w', closefd=False)\nout.write('unflushed')", "unflushed", "", 0},
		{"import sys\nsys.stdout.write('no newline')", "no newline", "", 0},
		{"def f():\n  return 1/0\nf()", "", "Traceback (most recent call last):\n  File \"/work/main.py\", line 3, in <module>\n    f()\n  File \"/work/main.py\", line 2, in f\n    return 1/0\n           ~^~\nZeroDivisionError: division by zero\n", 1},
		{"x = (", "", "  File \"/work/main.py\", line 1\n    x = (\n        ^\nSyntaxError: '(' was never closed\n", 1},
		{"import os; os._exit(9)", "", "", 9},
		{"import os, sys\nif os.fork() == 0:\n  print('child'); sys.exit(0)\nos.wait(); print('parent')", "child\nparent\n", "", 0},
		{"import multiprocessing as m\ndef f(x): return x * x\nif __name__ == '__main__':\n  with m.Pool(2) as p: print(p.map(f, [1, 2, 3]))", "[1, 4, 9]\n", "", 0},
		{"import subprocess, sys\nprint(subprocess.check_output([sys.executable, '-c', 'print(5)']).decode().strip())", "5\n", "", 0},
	} {
		res := r.call(python(c.source))
		if string(res.Out) != c.out || string(res.Err) != c.err || res.Code != c.code {
			t.Errorf("%s\nprints %q and %q, code %d; want %q, %q, %d", c.source, res.Out, res.Err, res.Code, c.out, c.err, c.code)
		}
	}
	random := python("import os, random, uuid; print(random.random(), os.urandom(4).hex(), uuid.uuid4())")
	if a, b := string(r.call(random).Out), string(r.call(random).Out); a == b {
		t.Errorf("two calls have the same random numbers: %s", a)
	}
}

func TestPreload(t *testing.T) {
	r := newRig(t)
	f := python("import sys; print('decimal' in sys.modules, 'json.tool' in sys.modules)")
	r.want(f, dsec.FunctionOK, "False False\n")
	f.Preload = []string{"decimal", "json.tool"}
	r.want(f, dsec.FunctionOK, "True True\n")
	f.Preload = []string{"nothing_like_it"}
	if _, err := r.try(f); dsec.KindOf(err) != dsec.Invalid || !strings.Contains(err.Error(), "No module named 'nothing_like_it'") {
		t.Errorf("a module that is not there: %v", err)
	}
	r.want(python("print(1)"), dsec.FunctionOK, "1\n")
}

func TestLimits(t *testing.T) {
	r := newRig(t)
	for _, c := range []struct {
		name    string
		f       dsec.Function
		limits  dsec.FunctionLimits
		outcome dsec.FunctionOutcome
		limit   string
	}{
		{"wall", shell("sleep 100"), dsec.FunctionLimits{Wall: 200 * time.Millisecond}, dsec.FunctionTimeout, dsec.LimitWall},
		{"cpu", shell("while :; do :; done"), dsec.FunctionLimits{CPU: 200 * time.Millisecond}, dsec.FunctionTimeout, dsec.LimitCPU},
		{"memory", python("x = bytearray(100 << 20)"), dsec.FunctionLimits{Memory: 64 << 20}, dsec.FunctionMemory, ""},
		{"enough memory", python("x = bytearray(100 << 20)"), dsec.FunctionLimits{Memory: 256 << 20}, dsec.FunctionOK, ""},
		{"output", shell("head -c 2000 /dev/zero"), dsec.FunctionLimits{Output: 1000}, dsec.FunctionOutput, ""},
		{"exact output", shell("head -c 1000 /dev/zero"), dsec.FunctionLimits{Output: 1000}, dsec.FunctionOK, ""},
		{"errors", shell("head -c 2000 /dev/zero >&2"), dsec.FunctionLimits{Output: 1000}, dsec.FunctionOutput, ""},
		{"pids", python("import os\nfor i in range(20):\n  if os.fork() == 0: os.pause() if hasattr(os, 'pause') else __import__('time').sleep(9)"), dsec.FunctionLimits{Pids: 8}, dsec.FunctionExit, ""},
		{"one process", shell("exec true"), dsec.FunctionLimits{Pids: 1}, dsec.FunctionOK, ""},
	} {
		c.f.Limits = c.limits
		res := r.call(c.f)
		if res.Outcome != c.outcome || res.Limit != c.limit {
			t.Errorf("%s: %s %s, code %d %s, %q; want %s %s", c.name, res.Outcome, res.Limit, res.Code, res.Signal, res.Err, c.outcome, c.limit)
		}
		if res.Outcome == dsec.FunctionOutput && (len(res.Out)+len(res.Err) != 1000 || !res.Stdout.Truncated() && !res.Stderr.Truncated()) {
			t.Errorf("%s: %d and %d bytes are kept, totals %v %v", c.name, len(res.Out), len(res.Err), res.Stdout, res.Stderr)
		}
	}
	// Figures are those of the call, not of the machine's life.
	big := r.call(python("x = bytearray(100 << 20)"))
	small := r.call(python("pass"))
	if big.Memory < 100<<20 || small.Memory > 40<<20 || small.Memory <= 0 {
		t.Errorf("peaks are %d and %d MiB", big.Memory>>20, small.Memory>>20)
	}
	busy := r.call(python("import os\nif os.fork() == 0:\n  for i in range(3000000): pass\n  os._exit(0)\nos.wait()"))
	if busy.CPU <= small.CPU || busy.CPU <= 0 || busy.Wall <= 0 {
		t.Errorf("CPU times are %v and %v", busy.CPU, small.CPU)
	}
}

// TestBuildIsShared runs a build in a machine that did not make it, and finds
// that no call can change it for others.
func TestBuildIsShared(t *testing.T) {
	a, b := newRig(t), newRig(t)
	f := dsec.Function{Runtime: dsec.RuntimeC, Source: []byte("#include <stdlib.h>\nint main() { return system(\"rm -rf /build/main; echo x > /build/main; ls -l /build | wc -l\"); }")}
	ctx := t.Context()
	build, res, err := a.m.Compile(ctx, f)
	if err != nil || build == nil {
		t.Fatalf("compile: %v, %s %s", err, res.Outcome, res.Err)
	}
	for _, r := range []*rig{b, a, b, a} {
		res, err := r.m.Call(ctx, f, build)
		if err != nil || string(res.Out) != "2\n" || !strings.Contains(string(res.Err), "Read-only file system") {
			t.Errorf("call: %v, prints %q and %q", err, res.Out, res.Err)
		}
	}
	if _, err := a.m.Call(ctx, f, nil); dsec.KindOf(err) != dsec.Invalid {
		t.Errorf("a call without its build: %v", err)
	}
}

// TestCallerGoesAway ends the call of whoever does, and the machine serves on.
func TestCallerGoesAway(t *testing.T) {
	r := newRig(t)
	ctx, cancel := context.WithCancel(t.Context())
	gone := errors.New("gone")
	time.AfterFunc(200*time.Millisecond, cancel)
	_, err := r.m.Call(ctx, python("import time; open('/tmp/x', 'w'); time.sleep(100)"), nil)
	if dsec.KindOf(err) != dsec.Canceled {
		t.Errorf("a call whose caller went away: %v %v", err, gone)
	}
	r.want(python("import os; print(os.listdir('/tmp'))"), dsec.FunctionOK, "[]\n")
}

// TestWarmProgramDies ends the warm interpreter as a fault would: the call says
// that its machine is of no use.
func TestWarmProgramDies(t *testing.T) {
	r := newRig(t)
	r.want(python("print(1)"), dsec.FunctionOK, "1\n")
	killWarm(t)
	_, err := r.try(python("print(1)"))
	if !errors.Is(err, driver.ErrBroken) || dsec.KindOf(err) != dsec.Unavailable {
		t.Errorf("a call without its interpreter: %v", err)
	}
}

// killWarm ends the warm interpreters of this test's machines.
func killWarm(t *testing.T) {
	t.Helper()
	list, err := filepath.Glob("/proc/[0-9]*/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	killed := 0
	for _, p := range list {
		group, _ := os.ReadFile(p)
		line, _ := os.ReadFile(filepath.Dir(p) + "/cmdline")
		if !strings.Contains(string(group), "dsec-test-"+pid()+"-") || !strings.HasPrefix(string(line), "python3\x00-X\x00utf8\x00-c") {
			continue
		}
		if process := processOf(t, filepath.Base(filepath.Dir(p))); process != nil {
			process.Kill() //nolint:errcheck // gone is as good
			killed++
		}
	}
	if killed == 0 {
		t.Fatal("there is no warm interpreter")
	}
}
