package e2e_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver/drivertest"
)

// TestCommitsOnTwoNodes hands a workspace to and fro between two nodes that share a
// store, each time with a commit: a new sandbox on the other has all of it, in one
// layer of a bounded number of blobs.
func TestCommitsOnTwoNodes(t *testing.T) {
	store := "file://" + filepath.Join(t.TempDir(), "store")
	a, b := unstarted(t), fresh(t)
	for _, n := range []*node{a, b} {
		n.flags = []string{"--store", store}
		must(t, n.start())
	}
	a.importBusybox(t)
	b.take(t, a, busybox)
	if out := b.dsec(t, "node", "ls"); !strings.Contains(out, store) {
		t.Errorf("the node's store is not shown:\n%s", out)
	}

	const depth = 20
	for i := range depth {
		n := []*node{a, b}[i%2]
		flags := []string{"create", "--image", busybox}
		if i > 0 {
			flags = append(flags, "--workspace", fmt.Sprintf("work@%d", i-1))
		}
		sb := strings.TrimSpace(n.dsec(t, flags...))
		n.dsec(t, "exec", sb, "sh", "-c", fmt.Sprintf(
			"set -e; mkdir -p /work; dd if=/dev/urandom of=/work/noise bs=64k count=4 2>/dev/null; echo %[1]d > /work/own%[1]d; echo line%[1]d >> /work/all; echo x > /work/gone%[1]d; rm -f /work/gone%[2]d; [ %[1]d = 0 ] || [ -e /work/own%[2]d ]",
			i, i-1))
		must(t, n.run(nil, "commit", sb, fmt.Sprintf("work@%d", i)).fault())
		n.dsec(t, "stop", sb)
		next := []*node{b, a}[i%2]
		next.take(t, n, fmt.Sprintf("work@%d", i))
	}
	data := 0
	img := a.image(t, "work")
	for _, p := range img.Usage.Parts {
		if p.Kind == "data" || p.Kind == "packed" {
			data++
		}
	}
	if data == 0 || data > 33 || img.Role != dsec.Workspace {
		t.Errorf("%d commits made a %s of %d blobs", depth, img.Role, data)
	}
	for _, n := range []*node{a, b} {
		sb := strings.TrimSpace(n.dsec(t, "create", "--image", busybox, "--workspace", "work"))
		out := n.dsec(t, "exec", sb, "sh", "-c", "cd /work; ls own* | wc -l; wc -l < all; tail -n 1 all; ls gone*; ls -l noise | awk '{print $5}'")
		if want := fmt.Sprintf("%d\n%d\nline%d\ngone%d\n262144", depth, depth, depth-1, depth-1); out != want {
			t.Errorf("the last workspace has %q, want %q", out, want)
		}
		n.dsec(t, "stop", sb)
	}
	// What may be another's is not collected, unless somebody says that there is none.
	if r := a.run(nil, "image", "gc"); r.code == 0 || !strings.Contains(r.err, "other clusters") {
		t.Errorf("gc of a shared store: %d, %q", r.code, r.err)
	}
	b.dsec(t, "image", "gc", "--alone")
}

// TestStoreInPlace runs sandboxes from the files of a store where they lie: nothing of their data is
// kept on the node, and a node whose folder is on loan finds them again when it is killed.
func TestStoreInPlace(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	a, b := unstarted(t), fresh(t)
	a.flags = []string{"--store", "file://" + dir}
	b.flags = []string{"--store", "file://" + dir + "?in-place=true"}
	for _, n := range []*node{a, b} {
		must(t, n.start())
	}
	archive, sums := bigTar(t)
	must(t, a.run(bytes.NewReader(archive), "image", "import", "-", "--name", "big").fault())
	b.take(t, a, "big")
	sb := strings.TrimSpace(b.dsec(t, "create", "--image", "big"))
	read := func(when string) {
		t.Helper()
		out := b.dsec(t, "exec", sb, "sh", "-c", "cd /big && sha256sum * | cut -d' ' -f1")
		if got := strings.Fields(out); !slices.Equal(got, sums) {
			t.Errorf("%s: other bytes: %q", when, got)
		}
	}
	read("from the store's files")
	if s := b.depotStats(t); s.Cached != 0 || s.Fetched != 0 {
		t.Errorf("%d bytes were fetched and %d are kept", s.Fetched, s.Cached)
	}
	b.kill()
	must(t, b.start())
	read("after a restart")
	b.dsec(t, "commit", sb, "more@v1")
	again := strings.TrimSpace(b.dsec(t, "create", "--image", "big", "--workspace", "more"))
	b.dsec(t, "exec", again, "sha256sum", "/big/00")
	// What is packed has no such files: it comes through the cache.
	packed := fresh(t)
	packed.flags = []string{"--store", "file://" + dir + "-packed?compress=zstd"}
	must(t, packed.start())
	must(t, packed.run(bytes.NewReader(archive), "image", "import", "-", "--name", "big").fault())
	b.kill()
	b.flags = []string{"--store", "file://" + dir + "-packed?in-place=true"}
	// A node keeps to the store of its layers until it is told that they were moved.
	place := filepath.Join(b.data, "store-place")
	if err := b.start(); err == nil || !strings.Contains(err.Error(), "remove "+place) {
		t.Fatalf("with another store: %v", err)
	}
	// Taking it down asks for no store.
	must(t, b.run(nil, "down", "--data", b.data, "--guest", b.guest).fault())
	must(t, os.Remove(place))
	must(t, b.start())
	b.dsec(t, "image", "import", "layer:"+packed.image(t, "big").Digest, "--name", "other")
	id := strings.TrimSpace(b.dsec(t, "create", "--image", "other"))
	if out := b.dsec(t, "exec", id, "sha256sum", "/big/07"); !strings.HasPrefix(out, sums[7]) {
		t.Errorf("packed data through the cache: %q", out)
	}
}

// TestStoreThatIsAway starts a node whose store does not answer: it serves, and its
// log has no secret.
func TestStoreThatIsAway(t *testing.T) {
	n := unstarted(t)
	const secret = "hunter2hunter2hunter2"
	n.vars = []string{"AWS_ACCESS_KEY_ID=someone", "AWS_SECRET_ACCESS_KEY=" + secret}
	n.flags = []string{"--store", "s3://bucket/p?endpoint=http://127.0.0.1:1&timeout=1s", "--verbose"}
	must(t, n.start())
	if out := n.dsec(t, "image", "ls"); !strings.HasPrefix(out, "IMAGE") {
		t.Errorf("images: %q", out)
	}
	out := n.dsec(t, "node", "ls", "--json")
	if !strings.Contains(out, "s3://bucket/p") {
		t.Errorf("nodes: %s", out)
	}
	doctor := n.run(nil, "doctor", "--store", "s3://bucket/p?endpoint=http://127.0.0.1:1")
	if doctor.code != 0 || !strings.Contains(doctor.out, "store") || !strings.Contains(doctor.out, "no") {
		t.Errorf("doctor: %d, %q, %q", doctor.code, doctor.out, doctor.err)
	}
	for what, text := range map[string]string{"log": n.log.String(), "list of nodes": out, "doctor": doctor.out + doctor.err} {
		if strings.Contains(text, secret) {
			t.Errorf("the %s tells the secret:\n%s", what, text)
		}
	}
}

// TestStoreThatIsNotMounted takes the folder of a store away, as a mount that goes, and leaves an
// empty one: that is no new store. What is asked meanwhile is Unavailable; it all comes back.
func TestStoreThatIsNotMounted(t *testing.T) {
	n := unstarted(t)
	dir := filepath.Join(t.TempDir(), "store")
	n.flags = []string{"--store", "file://" + dir + "?timeout=1s"}
	must(t, n.start())
	n.importBusybox(t)
	aside := func() {
		t.Helper()
		must(t, os.Rename(dir, dir+".aside"))
		must(t, os.Mkdir(dir, 0o755))
	}
	back := func() {
		t.Helper()
		must(t, os.Remove(dir)) // nothing was made in it
		must(t, os.Rename(dir+".aside", dir))
	}
	aside()
	r := n.run(bytes.NewReader(drivertest.BusyboxTar(t)), "image", "import", "-", "--name", "other")
	if r.code == 0 || !strings.Contains(r.err, "mounted") {
		t.Errorf("import: %d %q", r.code, r.err)
	}
	n.kill()
	if err := n.start(); err == nil || !strings.Contains(err.Error(), "mounted") {
		t.Errorf("a node without its store: %v", err)
		n.kill()
	}
	if out := n.dsec(t, "doctor", "--store", "file://"+dir+"/nowhere"); !strings.Contains(out, "no such folder") {
		t.Errorf("doctor says\n%s", out)
	}
	back()
	must(t, n.start())
	n.importBusybox(t)
	id := strings.TrimSpace(n.dsec(t, "create", "--image", busybox))
	n.dsec(t, "exec", id, "true")
}
