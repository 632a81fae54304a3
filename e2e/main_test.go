package e2e_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/dsec-go/dsec/driver/drivertest"
)

// programs is the folder with the built dsec and dsec-guest.
var programs string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "dsec-e2e-")
	if err != nil {
		panic(err)
	}
	programs = dir
	code := 1
	if err := build(); err != nil {
		fmt.Fprintln(os.Stderr, err)
	} else {
		code = m.Run()
		if err := common.end(); err != nil {
			fmt.Fprintln(os.Stderr, "the shared node:", err)
			code = 1
		}
		if code != 0 && common.node != nil {
			fmt.Fprintf(os.Stderr, "log of the shared node:\n%s", common.node.log.tail())
		}
	}
	os.RemoveAll(dir)
	os.Exit(code)
}

func build() error {
	cmd := exec.Command("go", "build", "-o", programs+"/", "../cmd/dsec", "../cmd/dsec-guest")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build: %w\n%s", err, out)
	}
	return nil
}

// common is the node that most tests share. It starts with the first of them.
var common sharedNode

type sharedNode struct {
	once sync.Once
	node *node
	disk *disk
	dir  string
	err  error
}

// busybox is the name of the image that every node here has.
const busybox = "busybox"

// shared gives the shared node.
func shared(t *testing.T) *node {
	t.Helper()
	common.once.Do(func() {
		common.err = common.start(drivertest.BusyboxTar(t))
	})
	if common.err != nil {
		t.Fatal("the shared node:", common.err)
	}
	return common.node
}

func (s *sharedNode) start(image []byte) error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("feature root: a node makes namespaces and mounts")
	}
	var err error
	if s.dir, err = os.MkdirTemp("", "dsec-e2e-"); err != nil {
		return err
	}
	// A file system of its own tells at its end whether anything still holds it.
	if s.disk, err = makeDisk(filepath.Join(s.dir, "disk"), 16<<30); err != nil {
		return err
	}
	if s.node, err = newNode(filepath.Join(s.dir, "node"), filepath.Join(s.disk.dir, "data")); err != nil {
		return err
	}
	if err := s.node.start(); err != nil {
		return err
	}
	r := s.node.run(bytes.NewReader(image), "image", "import", "-", "--name", busybox)
	return r.fault()
}

// end takes the node down and looks for what is left of it.
func (s *sharedNode) end() error {
	if s.dir == "" {
		return nil
	}
	defer os.RemoveAll(s.dir)
	var err error
	if s.node != nil {
		err = s.node.end()
	}
	if s.disk != nil {
		if e := s.disk.end(); err == nil {
			err = e
		}
	}
	return err
}
