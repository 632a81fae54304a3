package sdk_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dsec-go/dsec/driver/drivertest"
)

// limit is how long the tests of one language may take.
const limit = 4 * time.Minute

// TestPython runs the tests of libdsec: those that need no node, and the others
// against one that is started here.
func TestPython(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("feature python3: it is not installed")
	}
	n := start(t)
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, python, "-W", "error::ResourceWarning", "-m", "unittest", "discover", "-v", "-t", ".", "-s", "tests")
	cmd.Dir = "python"
	cmd.Env = append(n.env(), "DSEC_TEST_URL="+n.url, "DSEC_TEST_TOKEN="+n.token, "PYTHONDONTWRITEBYTECODE=1", "PYTHONFAULTHANDLER=1")
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGABRT) } // it says where it hangs
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s\nlog of the node:\n%s", err, out, n.log.Bytes())
	}
	if bytes.Contains(out, []byte("skipped=")) {
		t.Errorf("tests were skipped:\n%s", out)
	}

	// What people copy works, unchanged, with every kind; its settings are found
	// where dsec up left them.
	for kind, image := range map[string]string{"container": "busybox", "microvm": "busybox", "fncall": "busybox", "fullvm": "debian-vm"} {
		t.Run("examples with "+kind, func(t *testing.T) {
			if image == "debian-vm" {
				load := n.dsec("image", "import", machines(t, "debian.img"), "--name", image, "--as", "disk")
				if err := run(load); err != nil {
					t.Fatal(err)
				}
			}
			for example, want := range map[string]string{"grade": "3 of 3 right", "agent": "3 passed"} {
				if example == "agent" && kind == "fncall" {
					continue // nothing stays from one call to the next
				}
				ctx, cancel := context.WithTimeout(context.Background(), limit)
				defer cancel()
				cmd := exec.CommandContext(ctx, python, "examples/"+example+".py", "--image", image, "--kind", kind)
				cmd.Dir = "python"
				cmd.Env = append(n.env(), "PYTHONPATH=.", "PYTHONDONTWRITEBYTECODE=1")
				if out, err := cmd.CombinedOutput(); err != nil || !bytes.Contains(out, []byte(want)) {
					t.Errorf("%s: %v\n%s\nlog of the node:\n%s", example, err, out, n.log.Bytes())
				}
			}
		})
	}
}

// machines gives the path of what make puts into bin/vm: guest kernels and a
// disk image.
func machines(t *testing.T, name string) string {
	t.Helper()
	path, err := filepath.Abs(filepath.Join("..", "bin", "vm", name))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Skipf("feature %s: it is not made; make kernel vm", name)
	}
	return path
}

// node is a "dsec up" on folders of its own.
type node struct {
	dir, url, token string
	log             bytes.Buffer // complete once the process has ended
}

// start builds the programs and starts a node that has the busybox image. It
// goes down with the test.
func start(t *testing.T) *node {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("feature root: a node makes namespaces and mounts")
	}
	n := &node{dir: t.TempDir()}
	build := exec.Command("go", "build", "-o", n.dir+"/", "../cmd/dsec", "../cmd/dsec-guest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	if err := os.Symlink(machines(t, ""), filepath.Join(n.dir, "vm")); err != nil { // where dsec looks for them
		t.Fatal(err)
	}
	up := n.dsec("up", "--listen", "127.0.0.1:0")
	up.Stderr = &n.log
	up.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a Ctrl-C is for the test
	out, err := up.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := up.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(run(n.dsec("down")), up.Wait()); err != nil {
			t.Error(err)
		}
	})
	lines := bufio.NewReader(out)
	line, err := lines.ReadString('\n')
	go io.Copy(io.Discard, lines) //nolint:errcheck // ends with the process
	_, rest, found := strings.Cut(line, "serves at ")
	if err != nil || !found {
		t.Fatalf("dsec up said %q, %v", line, err)
	}
	n.url, _, _ = strings.Cut(rest, ",")
	token, err := os.ReadFile(filepath.Join(n.dir, "data", "token"))
	if err != nil {
		t.Fatal(err)
	}
	n.token = strings.TrimSpace(string(token))
	load := n.dsec("image", "import", "-", "--name", "busybox")
	load.Stdin = bytes.NewReader(drivertest.BusyboxTar(t))
	if err := run(load); err != nil {
		t.Fatal(err)
	}
	return n
}

// dsec prepares a command line of the node's own dsec.
func (n *node) dsec(args ...string) *exec.Cmd {
	if args[0] == "up" || args[0] == "down" {
		args = append(args, "--data", filepath.Join(n.dir, "data"))
	}
	cmd := exec.Command(filepath.Join(n.dir, "dsec"), args...)
	cmd.Env = n.env()
	return cmd
}

// env is what the programs of the node's user see.
func (n *node) env() []string {
	return append(os.Environ(), "HOME="+n.dir, "XDG_CONFIG_HOME=", "DSEC_URL=", "DSEC_TOKEN=")
}

func run(cmd *exec.Cmd) error {
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("dsec %s: %w\n%s", strings.Join(cmd.Args[1:], " "), err, out)
	}
	return nil
}
