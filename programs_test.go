package dsec_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// packageOf is the Debian package of each program that the code and its tests
// run on the host. A new program has to be named here, which is when somebody
// thinks of who installs it.
var packageOf = map[string]string{
	"/bin/busybox": "busybox-static", "apt-cache": "apt", "apt-get": "apt", "cc": "gcc", "cp": "coreutils", "cmp": "diffutils", "sha256sum": "coreutils", "debugfs": "e2fsprogs", "dpkg-deb": "dpkg", "fsck.erofs": "erofs-utils",
	"kill": "procps", "losetup": "mount", "mcopy": "mtools", "mformat": "mtools", "mke2fs": "e2fsprogs", "mkfs.erofs": "erofs-utils", "mkfs.ext4": "e2fsprogs",
	"mmd": "mtools", "mmdebstrap": "mmdebstrap", "modprobe": "kmod", "mount": "mount", "podman": "podman", "python3": "python3", "qemu-img": "qemu-utils",
	"qemu-system-x86_64": "qemu-system-x86", "runc": "runc", "sleep": "coreutils", "head": "coreutils", "syslinux": "syslinux", "tar": "tar", "true": "coreutils", "xz": "xz-utils", "/bin/sh": "dash", "sh": "dash",
}

// given are packages that every Debian has that can build this: those that it
// calls essential, and apt.
var given = []string{"apt", "coreutils", "dash", "diffutils", "dpkg", "tar"}

// ours are programs that make targets and tests build.
var ours = []string{"go", "dsec", "qemu-system-none", ".ci/sweep", "/proc/self/exe"}

// TestProgramsAreInstalled finds the programs that are run by their names, and
// wants a make target that installs each; for those of tests it is one that
// "make test" needs.
func TestProgramsAreInstalled(t *testing.T) {
	targets := readTargets(t)
	all, forTest := packages(targets, slices.Collect(keys(targets))...), packages(targets, "test")
	consts, calls := map[string]string{}, map[string][]string{} // calls: files of each argument
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata"):
			return fs.SkipDir
		case d.IsDir() || filepath.Ext(path) != ".go":
			return nil
		}
		return findPrograms(path, consts, calls)
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, files := range calls {
		if c, ok := consts[name]; ok {
			name = c
		}
		if program, err := strconv.Unquote(name); err == nil {
			name = program
		} else {
			continue // a variable: what it holds is named elsewhere
		}
		if slices.Contains(ours, name) {
			continue
		}
		p := packageOf[name]
		if p == "" {
			t.Errorf("%s run %q, which packageOf in this test has not", files, name)
			continue
		}
		if slices.Contains(given, p) {
			continue
		}
		for _, f := range files {
			if strings.HasSuffix(f, "_test.go") && !forTest[p] {
				t.Errorf("%s runs %q, and make test does not install %s", f, name, p)
			}
		}
	}
	for program, p := range packageOf { // those of lists of commands among them
		if !all[p] && !slices.Contains(given, p) {
			t.Errorf("no make target installs %s, for %s", p, program)
		}
	}
	if len(calls) < 20 {
		t.Errorf("only %d programs were found", len(calls))
	}
}

func keys[K comparable, V any](m map[K]V) func(func(K) bool) {
	return func(yield func(K) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

// findPrograms adds what a file runs, and string constants, by which others name
// programs.
func findPrograms(path string, consts map[string]string, calls map[string][]string) error {
	f, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
	if err != nil {
		return err
	}
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.GenDecl:
			for _, s := range n.Specs {
				v, ok := s.(*ast.ValueSpec)
				if !ok || n.Tok != token.CONST {
					continue
				}
				for i, x := range v.Values {
					if l, ok := x.(*ast.BasicLit); ok && l.Kind == token.STRING {
						consts[f.Name.Name+"."+v.Names[i].Name] = l.Value
					}
				}
			}
		case *ast.CallExpr:
			at := -1
			switch fun := n.Fun.(type) {
			case *ast.SelectorExpr:
				if x, ok := fun.X.(*ast.Ident); ok && x.Name == "exec" {
					at = map[string]int{"LookPath": 0, "Command": 0, "CommandContext": 1}[fun.Sel.Name]
				}
			case *ast.Ident:
				if fun.Name == "command" { // of the main programs: context, folder, name
					at = 2
				}
			}
			if at >= 0 && at < len(n.Args) {
				switch a := n.Args[at].(type) {
				case *ast.BasicLit:
					calls[a.Value] = append(calls[a.Value], path)
				case *ast.Ident:
					name := f.Name.Name + "." + a.Name
					calls[name] = append(calls[name], path)
				case *ast.SelectorExpr:
					if x, ok := a.X.(*ast.Ident); ok {
						name := x.Name + "." + a.Sel.Name
						calls[name] = append(calls[name], path)
					}
				}
			}
		}
		return true
	})
	return nil
}

// target is a make target: what it needs, and what it installs.
type target struct{ needs, packages []string }

func readTargets(t *testing.T) map[string]*target {
	t.Helper()
	b, err := os.ReadFile("Makefile")
	if err != nil {
		t.Fatal(err)
	}
	head, install := regexp.MustCompile(`^([a-z][a-z-]*):([^=]*)$`), regexp.MustCompile(`^\t\$\(call install,([^)]*)\)`)
	targets := map[string]*target{}
	var at *target
	for line := range strings.Lines(strings.ReplaceAll(string(b), "\\\n", " ")) {
		line = strings.TrimRight(line, "\n")
		if m := head.FindStringSubmatch(line); m != nil {
			at = &target{needs: strings.Fields(m[2])}
			targets[m[1]] = at
		} else if m := install.FindStringSubmatch(line); m != nil && at != nil {
			at.packages = append(at.packages, strings.Fields(m[1])...)
		}
	}
	return targets
}

// packages gives what is installed for some targets.
func packages(targets map[string]*target, names ...string) map[string]bool {
	found := map[string]bool{}
	for _, n := range names {
		t := targets[n]
		if t == nil {
			continue
		}
		for _, p := range t.packages {
			found[p] = true
		}
		for p := range packages(targets, t.needs...) {
			found[p] = true
		}
	}
	return found
}
