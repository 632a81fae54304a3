package vm_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/vm"
)

// TestVsock goes as far as a host without a vsock device for machines can: over
// its loopback, which a machine of TestMachine has if this one has not.
func TestVsock(t *testing.T) {
	const port = 7099
	dev, err := vm.ListenVsock(port)
	if errors.Is(err, unix.EAFNOSUPPORT) {
		t.Skip("feature vsock: ", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	p := vm.NewPort(dev)
	defer p.Close()
	// Without a loopback of its own a machine sends to whoever runs it, who answers now and then.
	if _, err := os.Stat("/sys/module/vsock_loopback"); err != nil && os.Getenv(insideMachine) == "" {
		t.Log("this host has no vsock loopback; TestMachine has")
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	probe, err := vm.DialVsock(ctx, unix.VMADDR_CID_LOCAL, port)
	if err != nil {
		t.Fatal(err)
	}
	probe.Close()
	go func() {
		for {
			c, err := p.Accept()
			if err != nil {
				return
			}
			go func() {
				var b bytes.Buffer
				b.ReadFrom(c) //nolint:errcheck // the connection's end
			}()
			c.Write(everyByte()) //nolint:errcheck // the host sees it
		}
	}()
	for range 3 {
		raw, err := vm.DialVsock(ctx, unix.VMADDR_CID_LOCAL, port)
		if err != nil {
			t.Fatal(err)
		}
		c, err := vm.Dial(ctx, raw)
		if err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(everyByte()))
		for n := 0; n < len(got); {
			m, err := c.Read(got[n:])
			if err != nil {
				t.Fatal(err)
			}
			n += m
		}
		if !bytes.Equal(got, everyByte()) {
			t.Error("bytes came out of order")
		}
		c.Close()
	}
	if _, err := vm.DialVsock(ctx, unix.VMADDR_CID_LOCAL, port+1); err == nil {
		t.Error("a port that nobody listens on was reached")
	}
}

// insideMachine is set where TestMachine runs this very test.
const insideMachine = "DSEC_TEST_INSIDE"

// testVsock runs TestVsock in the machine, whose kernel has the loopback.
func (v *instance) testVsock(t *testing.T) {
	program := filepath.Join(t.TempDir(), "vm.test")
	build := exec.Command("go", "test", "-c", "-ldflags", "-s -w", "-o", program, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	f, err := os.Open(program)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := v.guest.Files().Write(v.ctx(), dsec.Call{}, dsec.FileOp{Path: "/tmp/vm.test"}, dsec.WriteOptions{Mode: 0o755}, f); err != nil {
		t.Fatal(err)
	}
	r := v.run(insideMachine + "=1 /tmp/vm.test -test.run='^TestVsock$' -test.v; rm /tmp/vm.test")
	if r.Code != 0 || !strings.Contains(string(r.Out), "--- PASS: TestVsock") {
		t.Errorf("status %d\n%s%s", r.Code, r.Out, r.Err)
	}
}
