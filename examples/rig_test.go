package examples_test

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

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/client"
	"github.com/dsec-go/dsec/driver/drivertest"
)

// patience is how long anything here may take.
const patience = 2 * time.Minute

// node is a "dsec up" on folders of its own, with the busybox image.
type node struct {
	dir, python, url, token string
	log                     bytes.Buffer // complete once the process has ended
	dsec.Services
}

// start builds the programs and starts a node, which goes down with the test.
func start(t *testing.T) *node {
	t.Helper()
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("feature python3: it is not installed")
	}
	if os.Geteuid() != 0 {
		t.Skip("feature root: a node makes namespaces and mounts")
	}
	n := &node{dir: t.TempDir(), python: python}
	build := exec.Command("go", "build", "-o", n.dir+"/", "../cmd/dsec", "../cmd/dsec-guest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	must(t, run(build))
	up := n.dsec("up", "--listen", "127.0.0.1:0")
	up.Stderr = &n.log
	up.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a Ctrl-C is for the test
	out, err := up.StdoutPipe()
	must(t, err)
	must(t, up.Start())
	t.Cleanup(func() {
		if err := errors.Join(run(n.dsec("down")), up.Wait()); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("log of the node:\n%s", n.log.Bytes())
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
	must(t, err)
	n.token = strings.TrimSpace(string(token))
	transport := client.NewTransport()
	t.Cleanup(transport.CloseIdleConnections)
	n.Services, err = client.Open(client.Config{URL: n.url, Token: n.token, Transport: transport})
	must(t, err)
	load := n.dsec("image", "import", "-", "--name", "busybox")
	load.Stdin = bytes.NewReader(drivertest.BusyboxTar(t))
	must(t, run(load))
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

// script prepares a Python program that finds libdsec and the node.
func (n *node) script(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, n.python, args...)
	cmd.Env = append(n.env(), "PYTHONPATH=../sdk/python", "PYTHONDONTWRITEBYTECODE=1", "DSEC_URL="+n.url, "DSEC_TOKEN="+n.token)
	return cmd
}

// env is what the programs of the node's user see.
func (n *node) env() []string {
	return append(os.Environ(), "HOME="+n.dir, "XDG_CONFIG_HOME=", "DSEC_URL=", "DSEC_TOKEN=")
}

func run(cmd *exec.Cmd) error {
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, out)
	}
	return nil
}

func limited(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
