package e2e_test

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob/blobtest"
	"github.com/dsec-go/dsec/blob/s3/s3test"
	"github.com/dsec-go/dsec/depot"
	"github.com/dsec-go/dsec/driver/drivertest"
)

// bigFiles are what bigTar has under /big, and how large each is.
const (
	bigFiles = 48
	bigSize  = 1 << 20
)

// bigTar is the busybox tree with files of noise, and the sums of those.
func bigTar(t *testing.T) (archive []byte, sums []string) {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for r := tar.NewReader(bytes.NewReader(drivertest.BusyboxTar(t))); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		must(t, err)
		must(t, w.WriteHeader(h))
		_, err = io.Copy(w, r)
		must(t, err)
	}
	noise := rand.NewChaCha8([32]byte{4})
	b := make([]byte, bigSize)
	for i := range bigFiles {
		noise.Read(b)
		must(t, w.WriteHeader(&tar.Header{Name: fmt.Sprintf("big/%02d", i), Mode: 0o644, Size: bigSize}))
		_, err := w.Write(b)
		must(t, err)
		sums = append(sums, fmt.Sprintf("%x", sha256.Sum256(b)))
	}
	must(t, w.Close())
	return out.Bytes(), sums
}

// depot gives the client of a node's dsec data.
func (n *node) depot() *depot.Client {
	return &depot.Client{Dir: filepath.Join(n.data, "cache", "chunks")}
}

func (n *node) depotStats(t *testing.T) depot.Stats {
	t.Helper()
	s, err := n.depot().Stats(ctx(t))
	must(t, err)
	return s
}

// TestLayersComeWhenTheyAreRead imports an image on one node and runs it on another that has
// never seen it: it fetches what is read. Then dsec data is killed again and again while
// sandboxes read, and dsec up too: no read fails or gives other bytes.
func TestLayersComeWhenTheyAreRead(t *testing.T) {
	a, b := unstarted(t), fresh(t)
	s := s3test.Gateway(t, t.TempDir())
	for _, n := range []*node{a, b} {
		n.flags = []string{"--store", s.URL("e2e") + "&timeout=20s"}
		must(t, n.start())
	}
	archive, sums := bigTar(t)
	must(t, a.run(bytes.NewReader(archive), "image", "import", "-", "--name", "big").fault())
	b.take(t, a, "big")

	sb := strings.TrimSpace(b.dsec(t, "create", "--image", "big"))
	if got := b.dsec(t, "exec", sb, "sha256sum", "/big/07"); !strings.HasPrefix(got, sums[7]) {
		t.Errorf("file 7 has %q, want %s", got, sums[7])
	}
	few := b.depotStats(t)
	if few.Fetched == 0 || few.Fetched > int64(len(archive))/4 {
		t.Errorf("%d of %d bytes were fetched for one file", few.Fetched, len(archive))
	}
	// Who waited is told, of the sandbox and of the command.
	use, err := b.Sandboxes.Get(ctx(t), dsec.SandboxID(sb))
	must(t, err)
	if u := use.Usage; u.Fetched < bigSize || u.Fetched > int64(len(archive))/4 || u.Waited <= 0 {
		t.Errorf("the sandbox fetched %d bytes of %d in %v", u.Fetched, len(archive), u.Waited)
	}
	if out := b.dsec(t, "log", sb); !strings.Contains(out, "MiB of the image fetched") {
		t.Errorf("the log does not say that it was fetched:\n%s", out)
	}

	// Two sandboxes read everything while the process that has it is killed.
	other := strings.TrimSpace(b.dsec(t, "create", "--image", "big"))
	done := make(chan string, 2)
	for _, id := range []string{sb, other} {
		go func() {
			r := b.run(nil, "exec", id, "sh", "-c", "cd /big && for i in 1 2; do sha256sum *; done")
			if err := r.fault(); err != nil {
				done <- err.Error()
				return
			}
			done <- r.out
		}()
	}
	kills, outs := 0, []string{}
	for len(outs) < 2 {
		if kills < 5 {
			unix.Kill(b.depotStats(t).Pid, unix.SIGKILL)
			kills++
		}
		select {
		case out := <-done:
			outs = append(outs, out)
		default:
			if kills >= 5 {
				outs = append(outs, <-done)
			}
		}
	}
	for _, out := range outs {
		for i, sum := range sums {
			if strings.Count(out, sum) != 2 {
				t.Errorf("file %d was not read right twice", i)
			}
		}
		if t.Failed() {
			t.Fatalf("output:\n%s", out)
		}
	}

	// The next dsec up has the mount of the last, and with it the pages: what one sandbox
	// has read, another reads without asking.
	pid := b.depotStats(t).Pid
	b.kill()
	must(t, b.start())
	late := strings.TrimSpace(b.dsec(t, "create", "--image", "big"))
	b.dsec(t, "exec", sb, "sha256sum", "/big/12")
	before := b.depotStats(t)
	b.dsec(t, "exec", late, "sha256sum", "/big/12")
	after := b.depotStats(t)
	if before.Pid != pid {
		t.Errorf("dsec data is %d after a restart of dsec up, was %d", before.Pid, pid)
	}
	if n := after.Opened - before.Opened; n > 1 { // the shell of a fresh sandbox is here too
		t.Errorf("a sandbox made after the restart asked %d times for what another has read", n)
	}
	for _, id := range []string{sb, other, late} {
		if got := b.dsec(t, "exec", id, "sha256sum", "/big/11"); !strings.HasPrefix(got, sums[11]) {
			t.Errorf("file 11 has %q, want %s", got, sums[11])
		}
		b.dsec(t, "stop", id)
	}
}

// TestStoreThatHangs: a read of what is not here fails after its limit, and that alone; what
// is here is read on; a sandbox with a reader that waits is stopped at once; and when the
// store answers again, so do reads. A layer that was used before is created from meanwhile.
func TestStoreThatHangs(t *testing.T) {
	n := unstarted(t)
	s := s3test.Gateway(t, t.TempDir())
	far := blobtest.NewWire(t, s.Addr)
	through := *s
	through.Addr = far.Addr()
	n.flags = []string{"--store", through.URL("e2e") + "&timeout=4s"}
	must(t, n.start())
	archive, sums := bigTar(t)
	must(t, n.run(bytes.NewReader(archive), "image", "import", "-", "--name", "big").fault())
	sb := strings.TrimSpace(n.dsec(t, "create", "--image", "big"))
	victim := strings.TrimSpace(n.dsec(t, "create", "--image", "big"))
	n.dsec(t, "exec", sb, "sha256sum", "/big/02")
	n.dsec(t, "exec", victim, "true")

	far.HoldAfter(0)
	if r := n.run(nil, "exec", sb, "sha256sum", "/big/40"); r.code == 0 || !strings.Contains(r.err, "Input/output error") {
		t.Errorf("a read without a store: %d, %q, %q", r.code, r.out, r.err)
	}
	if got := n.dsec(t, "exec", sb, "sha256sum", "/big/02"); !strings.HasPrefix(got, sums[2]) {
		t.Errorf("what is here has %q", got)
	}
	waiting := make(chan struct{})
	go func() {
		n.run(nil, "exec", victim, "sh", "-c", "sha256sum /big/30; sha256sum /big/31; sha256sum /big/32; sha256sum /big/33")
		close(waiting)
	}()
	opened := n.depotStats(t).Opened
	eventually(t, "a reader that waits", func() bool { return n.depotStats(t).Opened > opened })
	n.dsec(t, "stop", victim)
	<-waiting
	again := strings.TrimSpace(n.dsec(t, "create", "--image", "big"))
	if got := n.metric(t, "dsec_data_failed_total"); got == 0 {
		t.Error("no failed read is counted")
	}

	far.Heal()
	for _, id := range []string{sb, again} {
		eventually(t, "an answer of the store", func() bool {
			r := n.run(nil, "exec", id, "sha256sum", "/big/40")
			return r.code == 0 && strings.HasPrefix(r.out, sums[40])
		})
		n.dsec(t, "stop", id)
	}
}

// TestMachineReadsLazyLayers boots a microVM whose layers are in the store.
func TestMachineReadsLazyLayers(t *testing.T) {
	n := unstarted(t)
	kernels, err := filepath.Abs("../bin/vm")
	must(t, err)
	if _, err := os.Stat(filepath.Join(kernels, "vmlinuz-6.12")); err != nil {
		t.Skip("feature microvm: no guest kernel; make kernel")
	}
	must(t, os.Symlink(kernels, filepath.Join(n.dir, "vm")))
	n.flags = []string{"--store", "file://" + filepath.Join(t.TempDir(), "store") + "?compress=zstd"}
	must(t, n.start())
	archive, sums := bigTar(t)
	must(t, n.run(bytes.NewReader(archive), "image", "import", "-", "--name", "big").fault())
	sb := strings.TrimSpace(n.dsec(t, "create", "--kind", "microvm", "--image", "big", "--memory", "256M", "--cpu", "1"))
	for _, i := range []int{3, 47} {
		if got := n.dsec(t, "exec", sb, "sha256sum", fmt.Sprintf("/big/%02d", i)); !strings.HasPrefix(got, sums[i]) {
			t.Errorf("file %d has %q, want %s", i, got, sums[i])
		}
	}
	n.dsec(t, "stop", sb)
}
