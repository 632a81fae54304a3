//go:build runtimes

package fncall_test

import (
	"errors"
	"strconv"
	"strings"
	"testing"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// runtimesBase is the root that "make test-runtimes" makes: Debian with every
// runtime that a call can name, of its own packages.
const runtimesBase = "../../.cache/runtimes.tar"

// adders read two numbers and print the sum and the first argument.
var adders = map[dsec.Runtime]string{
	dsec.RuntimePython: "import sys\na, b = map(int, input().split())\nprint(a + b, sys.argv[1])",
	dsec.RuntimeBash:   "read a b; echo $((a + b)) $1",
	dsec.RuntimeShell:  "read a b; echo $((a + b)) $1",
	dsec.RuntimeC:      "#include <stdio.h>\nint main(int c, char **v) { long a, b; scanf(\"%ld %ld\", &a, &b); printf(\"%ld %s\\n\", a + b, v[1]); }",
	dsec.RuntimeCpp:    "#include <iostream>\n#include <vector>\n#include <numeric>\nint main(int c, char **v) { std::vector<long> x(2); std::cin >> x[0] >> x[1]; std::cout << std::accumulate(x.begin(), x.end(), 0L) << ' ' << v[1] << std::endl; }",
	dsec.RuntimeGo:     "package main\n\nimport (\n\t\"fmt\"\n\t\"os\"\n)\n\nfunc main() {\n\tvar a, b int\n\tfmt.Scan(&a, &b)\n\tfmt.Println(a+b, os.Args[1])\n}\n",
	dsec.RuntimeNode:   "const [a, b] = require('fs').readFileSync(0, 'utf8').trim().split(' ').map(Number); console.log(a + b, process.argv[2]);",
}

// wrong are programs that do not come to a run, and what is said of them.
var wrong = map[dsec.Runtime]struct{ source, says string }{
	dsec.RuntimeCpp: {"int main() { return nothing; }", "main.cpp:1"},
	dsec.RuntimeGo:  {"package main\n\nfunc main() { nothing() }\n", "main.go:3"},
}

// TestRealRuntimes builds once and runs often, with the compilers and
// interpreters of Debian, in all runtimes.
func TestRealRuntimes(t *testing.T) {
	l, err := layerOf("runtimes", runtimesBase)
	if err != nil {
		t.Fatalf("%v: \"make test-runtimes\" makes it", err)
	}
	r := rigOn(t, mounted(t, l))
	for runtime, source := range adders {
		t.Run(string(runtime), func(t *testing.T) {
			f := dsec.Function{Runtime: runtime, Source: []byte(source), Args: []string{"x"}}
			f.Limits.Memory = 512 << 20 // of node's address space much is touched
			for _, user := range []string{"", "nobody"} {
				f.User = user
				build, res, err := compiled(t, r, f)
				if err != nil {
					t.Fatalf("compile as %q: %v %s\n%s", user, err, res.Outcome, res.Err)
				}
				for i := range 5 {
					f.Stdin = []byte(strconv.Itoa(i) + " 1000000")
					res, err := r.m.Call(t.Context(), f, build)
					if want := strconv.Itoa(1000000+i) + " x\n"; err != nil || res.Outcome != dsec.FunctionOK || string(res.Out) != want {
						t.Errorf("call %d as %q: %v, %s %s, %q %q; want %q", i, user, err, res.Outcome, res.Limit, res.Out, res.Err, want)
					}
				}
			}
			if w, ok := wrong[runtime]; ok {
				f.Source = []byte(w.source)
				if b, res, err := r.m.Compile(t.Context(), f); err != nil || b != nil || res.Outcome != dsec.FunctionCompile || !strings.Contains(string(res.Err)+string(res.Out), w.says) {
					t.Errorf("a wrong program: %v, %s, %q %q", err, res.Outcome, res.Out, res.Err)
				}
			}
		})
	}
}

func compiled(t *testing.T, r *rig, f dsec.Function) (*driver.Build, dsec.FunctionResult, error) {
	t.Helper()
	if !f.Runtime.Compiled() {
		return nil, dsec.FunctionResult{}, nil
	}
	b, res, err := r.m.Compile(t.Context(), f)
	if err == nil && b == nil {
		err = errors.New(res.Detail)
	}
	return b, res, err
}
