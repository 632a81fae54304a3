package dsec_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"go/format"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
)

const module = "github.com/dsec-go/dsec"

// floors is the house: what a package may import is below it. A package that
// is not here has no place yet, and the test says so.
var floors = map[string]int{
	"": 1, // the words

	"blob": 2, "blob/s3": 2, "blob/store": 2, "erofs": 2, "jail": 2, "network": 2, "wire": 2, "guest": 2, "journal": 2, "sched": 2, "swap": 2, "vm": 2, "vm/initramfs": 2, "qemu": 2, "fuse": 2, "hold": 2,
	"rpc": 2, "rpc/dsecv1": 2, "client": 2, "jail/profile": 2,

	"image": 3, "cluster": 3, "driver": 3, "snapshot": 3,

	"rootfs": 4, "trajectory": 4, "lazy": 4,

	"driver/container": 5, "driver/microvm": 5, "driver/fullvm": 5, "driver/fncall": 5, "driver/synthetic": 5, "depot": 5,

	"edge": 6, "api": 6, "watch": 6, "job": 6,

	"web": 7, "compat/e2b": 7, "compat/docker": 7,

	"cmd/dsec": 8, "cmd/dsec-guest": 8, "demo": 8, "bench": 8, "vmimage": 8, "worker": 8, "examples/rollout-worker": 8, "examples/agent-loop": 8,
}

// neighbours are the imports between packages of one floor that are meant.
var neighbours = map[string][]string{
	"blob/s3":      {"blob"},
	"blob/store":   {"blob", "blob/s3"},
	"cmd/dsec":     {"bench", "demo"},
	"client":       {"rpc", "rpc/dsecv1"},
	"guest":        {"wire", "jail"},
	"rpc":          {"rpc/dsecv1"},
	"jail/profile": {"jail"},
	"vm":           {"wire"},
	"vm/initramfs": {"vm"},
	"qemu":         {"jail"},
	"hold":         {"jail"},
}

// testOnly are packages that tests alone may import.
var testOnly = map[string]bool{
	"blob/blobtest": true, "blob/s3/s3test": true, "journal/journaltest": true, "rpc/rpctest": true, "driver/drivertest": true, "testcluster": true, "e2e": true,
	"sdk": true, "examples": true, // hold no Go but tests
}

// pkg is what the go command says of a package.
type pkg struct {
	ImportPath string
	Doc        string
	Name       string
	Imports    []string
}

// name is the path within the module.
func (p pkg) name() string {
	return strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, module), "/")
}

func goList(t *testing.T, args ...string) []pkg {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list", "-json=ImportPath,Doc,Name,Imports"}, args...)...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list %v: %v\n%s", args, err, stderr.Bytes())
	}
	var list []pkg
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return list
		} else if err != nil {
			t.Fatal(err)
		}
		list = append(list, p)
	}
}

func TestImportsGoDown(t *testing.T) {
	for _, p := range goList(t, "./...") {
		name := p.name()
		if testOnly[name] {
			continue
		}
		floor, ok := floors[name]
		if !ok {
			t.Errorf("package %s has no floor in this test", p.ImportPath)
			continue
		}
		for _, imp := range p.Imports {
			if imp != module && !strings.HasPrefix(imp, module+"/") {
				continue
			}
			to := pkg{ImportPath: imp}.name()
			switch {
			case testOnly[to]:
				t.Errorf("%s imports %s, which is for tests", p.ImportPath, imp)
			case floors[to] > floor:
				t.Errorf("%s on floor %d imports %s above it", p.ImportPath, floor, imp)
			case floors[to] == floor && !slices.Contains(neighbours[name], to):
				t.Errorf("%s imports %s beside it", p.ImportPath, imp)
			}
		}
	}
}

func TestEveryPackageHasADoc(t *testing.T) {
	for _, p := range goList(t, "./...") {
		if strings.TrimSpace(p.Doc) == "" && p.name() != "rpc/dsecv1" { // generated, nothing else
			t.Errorf("package %s has no package comment", p.ImportPath)
		}
	}
}

// TestLightPackagesStayLight keeps what runs inside sandboxes and what users
// link free of what only a node needs.
func TestLightPackagesStayLight(t *testing.T) {
	light := map[string][]string{
		".":                {"net/http", "google.golang.org", "net"},
		"./cmd/dsec-guest": {"net/http", "google.golang.org/protobuf", "connectrpc.com"},
		"./guest":          {"net/http", "google.golang.org/protobuf", "connectrpc.com"},
		"./client": {
			"go.etcd.io", "github.com/vishvananda/netlink", "google.golang.org/grpc", "github.com/minio",
			module + "/driver", module + "/edge", module + "/rootfs", module + "/jail",
		},
	}
	for dir, banned := range light {
		if files, err := filepath.Glob(filepath.Join(dir, "*.go")); err != nil || len(files) == 0 {
			continue
		}
		for _, p := range goList(t, "-deps", dir) {
			for _, b := range banned {
				if p.ImportPath == b || strings.HasPrefix(p.ImportPath, b+"/") {
					t.Errorf("%s links %s", dir, p.ImportPath)
				}
			}
		}
	}
}

// TestArchitectureNamesWhatExists checks the links of the page that new people
// read first: a name in a link to a Go file is declared there.
func TestArchitectureNamesWhatExists(t *testing.T) {
	page, err := os.ReadFile("docs/ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	links := regexp.MustCompile("\\[`([^`]+)`\\]\\(([^)]+)\\)").FindAllSubmatch(page, -1)
	if len(links) < 50 {
		t.Errorf("only %d links were found", len(links))
	}
	for _, l := range links {
		name, target := string(l[1]), filepath.Join("docs", string(l[2]))
		text, err := os.ReadFile(target)
		switch {
		case errors.Is(err, syscall.EISDIR):
		case err != nil:
			t.Errorf("%s: %v", name, err)
		case filepath.Ext(target) == ".go" && filepath.Ext(name) == "":
			declared := regexp.MustCompile(`(?m)^(func (\([^)]*\) )?|type |\t)` + regexp.QuoteMeta(name) + `\b`)
			if !declared.Match(text) {
				t.Errorf("%s declares no %s", target, name)
			}
		}
	}
}

func TestFormat(t *testing.T) {
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata"):
			return fs.SkipDir
		case d.IsDir() || filepath.Ext(path) != ".go":
			return nil
		}
		src, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		want, err := format.Source(src)
		if err != nil {
			return err
		}
		if !bytes.Equal(src, want) {
			t.Errorf("%s is not formatted: run gofmt -w on it", path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestLint(t *testing.T) {
	if testing.Short() {
		t.Skip("vet and staticcheck take a minute the first time")
	}
	for _, args := range [][]string{
		{"vet", "./..."},
		{"tool", "-modfile=tools.mod", "staticcheck", "./..."},
	} {
		if out, err := exec.Command("go", args...).CombinedOutput(); err != nil {
			t.Errorf("go %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
}
