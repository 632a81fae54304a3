package rpc_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// buf runs buf in the root of the module.
func buf(t *testing.T, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", append([]string{"tool", "-modfile=tools.mod", "buf"}, args...)...)
	cmd.Dir = ".."
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("buf %v: %v\n%s", args, err, out)
	}
}

// needBuf skips where the tools of tools.mod cannot be built, which takes the
// network once.
func needBuf(t *testing.T) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "tool", "-modfile=tools.mod", "buf", "--version")
	cmd.Dir = ".."
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Skipf("feature buf is missing: %v\n%s", err, out)
	}
}

// TestSchema holds the schema to its rules and to those who use it: nothing of
// testdata/baseline.binpb may break. A release writes the baseline anew with
//
//	go tool -modfile=tools.mod buf build --exclude-source-info -o rpc/testdata/baseline.binpb
func TestSchema(t *testing.T) {
	needBuf(t)
	buf(t, "lint")
	buf(t, "format", "--diff", "--exit-code")
	buf(t, "breaking", "--against", "rpc/testdata/baseline.binpb")
}

// TestGenerated checks that the generated code is that of the schema.
func TestGenerated(t *testing.T) {
	needBuf(t)
	fresh := t.TempDir()
	buf(t, "generate", "--output", fresh)
	want := contents(t, filepath.Join(fresh, "rpc", "dsecv1"))
	have := contents(t, "dsecv1")
	if len(want) == 0 {
		t.Fatal("nothing was generated")
	}
	for name := range want {
		if have[name] != want[name] {
			t.Errorf("dsecv1/%s is not what buf generate makes", name)
		}
	}
	for name := range have {
		if _, ok := want[name]; !ok {
			t.Errorf("dsecv1/%s is not generated", name)
		}
	}
}

func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, e := range entries {
		b, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		out[e.Name()] = string(b)
	}
	return out
}
