package fncall_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/driver/container"
	"github.com/dsec-go/dsec/driver/fncall"
	"github.com/dsec-go/dsec/erofs"
	"github.com/dsec-go/dsec/rootfs"
)

// debianBase is the root that "make debian" leaves: with python3 and gcc.
const debianBase = "../../.cache/demo/base.tar"

var (
	guestBinary string
	work        string
)

// TestMain builds the guest, or takes the one that DSEC_TEST_GUEST names: in a
// worker VM there is no compiler.
func TestMain(m *testing.M) {
	if guestBinary = os.Getenv("DSEC_TEST_GUEST"); guestBinary != "" {
		os.Exit(m.Run())
	}
	os.Exit(func() int {
		var err error
		if work, err = os.MkdirTemp("", "fncall"); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(work)
		guestBinary = filepath.Join(work, "dsec-guest")
		build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", guestBinary, "github.com/dsec-go/dsec/cmd/dsec-guest")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		build.Stderr = os.Stderr
		if err := build.Run(); err != nil {
			return 1
		}
		return m.Run()
	}())
}

// debian writes the Debian root as a layer, once for all tests, or takes the one
// that DSEC_TEST_DEBIAN names, two files that end with .meta and .data.
var debian = sync.OnceValues(func() (rootfs.Layer, error) {
	if at := os.Getenv("DSEC_TEST_DEBIAN"); at != "" {
		return rootfs.Layer{Digest: "debian", Meta: at + ".meta", Data: []string{at + ".data"}}, nil
	}
	l, err := layerOf("debian", debianBase)
	if err != nil {
		err = fmt.Errorf("%w: \"make debian\" makes it", err)
	}
	return l, err
})

// layerOf writes the layer of a tar file.
func layerOf(name, file string) (rootfs.Layer, error) {
	l := rootfs.Layer{Digest: name, Meta: filepath.Join(work, name+".meta"), Data: []string{filepath.Join(work, name+".data")}}
	archive, err := os.Open(file)
	if err != nil {
		return l, err
	}
	defer archive.Close()
	data, err := os.Create(l.Data[0])
	if err != nil {
		return l, err
	}
	defer data.Close()
	blob := erofs.NewBlob(data, erofs.BlobOptions{})
	tree, err := erofs.FromTar(context.Background(), archive, blob, erofs.TarOptions{})
	if err != nil {
		return l, err
	}
	if _, _, err := blob.Finish(); err != nil {
		return l, err
	}
	image, err := tree.Encode()
	if err != nil {
		return l, err
	}
	return l, os.WriteFile(l.Meta, image.Meta, 0o600)
}

// rig is a driver and one machine of it.
type rig struct {
	t      testing.TB
	driver *fncall.Driver
	m      driver.Caller
}

var (
	keys   dsec.IDKey
	serial int
)

// newRig starts a machine whose root is Debian's, under the layers more.
func newRig(t testing.TB, more ...*os.File) *rig {
	t.Helper()
	l, err := debian()
	if err != nil {
		t.Fatal(err)
	}
	return rigOn(t, append([]*os.File{mounted(t, l)}, more...)...)
}

// mounted mounts a layer until the test's end.
func mounted(t testing.TB, l rootfs.Layer) *os.File {
	t.Helper()
	m, err := rootfs.MountLayer(l)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

// rigOn starts a machine whose root is some layers.
func rigOn(t testing.TB, layers ...*os.File) *rig {
	t.Helper()
	serial++
	name := "dsec-test-" + strconv.Itoa(os.Getpid()) + "-" + strconv.Itoa(serial)
	inner, err := container.Open(container.Config{Dir: filepath.Join(t.TempDir(), "m"), Guest: guestBinary, Name: name, Pool: -1, Log: os.Stderr})
	if err != nil {
		t.Fatal(err)
	}
	d := fncall.New(inner)
	if _, err := d.Adopt(t.Context()); err != nil {
		t.Fatal(err)
	}
	m, err := d.Start(t.Context(), driver.Config{
		ID: keys.New(dsec.Place{Node: 1, Epoch: 1}), Root: driver.Root{Layers: layers},
		Resources: dsec.Resources{CPU: 2, Memory: 2 << 30, Disk: 1 << 30, Pids: 1024}, Hostname: "fn",
	})
	if err != nil {
		d.Close()
		t.Fatal(err)
	}
	r := &rig{t: t, driver: d, m: m.(driver.Caller)}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if err := m.Stop(ctx); err != nil {
			t.Error(err)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		for _, pattern := range []string{"/sys/fs/cgroup/*/" + name, "/sys/fs/cgroup/" + name} {
			if left, _ := filepath.Glob(pattern); len(left) > 0 {
				t.Errorf("control groups are left: %v", left)
			}
		}
	})
	return r
}

// call runs f with a time to itself.
func (r *rig) call(f dsec.Function) dsec.FunctionResult {
	r.t.Helper()
	res, err := r.try(f)
	if err != nil {
		r.t.Fatalf("call: %v", err)
	}
	return res
}

func (r *rig) try(f dsec.Function) (dsec.FunctionResult, error) {
	ctx, cancel := context.WithTimeout(r.t.Context(), 2*time.Minute) // cold compilers, emulated machines
	defer cancel()
	var b *driver.Build
	if f.Runtime.Compiled() {
		var res dsec.FunctionResult
		var err error
		if b, res, err = r.m.Compile(ctx, f); b == nil {
			return res, err
		}
	}
	return r.m.Call(ctx, f, b)
}

func python(source string, args ...string) dsec.Function {
	return dsec.Function{Runtime: dsec.RuntimePython, Source: []byte(source), Args: args}
}

func shell(source string, args ...string) dsec.Function {
	return dsec.Function{Runtime: dsec.RuntimeShell, Source: []byte(source), Args: args}
}

// want fails unless a call ended so and printed that.
func (r *rig) want(f dsec.Function, outcome dsec.FunctionOutcome, out string) dsec.FunctionResult {
	r.t.Helper()
	res := r.call(f)
	if res.Outcome != outcome || string(res.Out) != out {
		r.t.Errorf("outcome %s %s, code %d %s, prints %q and %q (%s); want %s and %q\n%s", res.Outcome, res.Limit, res.Code, res.Signal,
			res.Out, res.Err, res.Detail, outcome, out, strings.TrimSpace(string(f.Source)))
	}
	return res
}

func pid() string { return strconv.Itoa(os.Getpid()) }

func processOf(t *testing.T, pid string) *os.Process {
	t.Helper()
	n, err := strconv.Atoi(pid)
	if err != nil {
		t.Fatal(err)
	}
	p, err := os.FindProcess(n)
	if err != nil {
		return nil
	}
	return p
}
