package e2e_test

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/klauspost/compress/zstd"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver/drivertest"
)

// container is busybox as an OCI image that says how to run things in it.
func container(t *testing.T) v1.Image {
	t.Helper()
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(drivertest.BusyboxTar(t))), nil
	})
	must(t, err)
	img, err := mutate.AppendLayers(empty.Image, layer)
	must(t, err)
	config, err := img.ConfigFile()
	must(t, err)
	config.OS, config.Architecture = "linux", "amd64"
	config.Config = v1.Config{Env: []string{"PATH=/bin", "FROM=image"}, WorkingDir: "/home/alice", User: "alice"}
	img, err = mutate.ConfigFile(img, config)
	must(t, err)
	return img
}

// TestImportFromEverywhere imports busybox from each kind of source by the
// command line and runs it.
func TestImportFromEverywhere(t *testing.T) {
	n := shared(t)
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	write := func(name string, b []byte) string {
		must(t, os.WriteFile(at(name), b, 0o600))
		return at(name)
	}
	img := container(t)
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer server.Close()
	ref := strings.TrimPrefix(server.URL, "http://") + "/team/busybox:1"
	tag, err := name.NewTag(ref, name.Insecure)
	must(t, err)
	must(t, remote.Write(tag, img))
	must(t, tarball.WriteToFile(at("saved.tar"), tag, img))
	_, err = layout.Write(at("layout"), empty.Index)
	must(t, err)
	must(t, layout.Path(at("layout")).AppendImage(img))
	plainTar := drivertest.BusyboxTar(t)
	must(t, os.Mkdir(at("folder"), 0o755))
	untar := exec.Command("tar", "-x", "-C", at("folder"))
	untar.Stdin = bytes.NewReader(plainTar)
	must(t, untar.Run())
	var gz bytes.Buffer
	w := gzip.NewWriter(&gz)
	_, err = w.Write(plainTar)
	must(t, err)
	must(t, w.Close())
	zw, err := zstd.NewWriter(nil)
	must(t, err)
	zst := zw.EncodeAll(plainTar, nil)
	zw.Close()

	digests := map[string]string{}
	for i, c := range []struct {
		source string
		same   string // sources whose layer must be the same
		config bool
	}{
		{"docker://" + ref, "image", true},
		{ref, "image", true},
		{at("saved.tar"), "image", true},
		{at("layout"), "image", true},
		{at("folder"), "folder", false},
		{write("root.tar", plainTar), "image", false},
		{write("root.tar.gz", gz.Bytes()), "image", false},
		{write("root.tar.zst", zst), "image", false},
	} {
		label := fmt.Sprintf("from-%d", i)
		must(t, n.run(nil, "image", "import", c.source, "--name", label).fault())
		got, err := n.Images.Inspect(ctx(t), label)
		must(t, err)
		key := fmt.Sprint(c.same, c.config)
		if digests[key] == "" {
			digests[key] = got.Digest
		}
		if got.Digest != digests[key] {
			t.Errorf("%s is layer %s, others are %s", c.source, got.Digest, digests[key])
		}
		want := "root /\n"
		if c.config {
			want = "alice /home/alice image\n"
		}
		r := n.run(nil, "run", "--image", label, "--", "sh", "-c", "echo $(id -un) $(pwd) $FROM")
		if r.code != 0 || r.out != want {
			t.Errorf("%s says %q, want %q (%v)", c.source, r.out, want, r.fault())
		}
	}

	before, err := n.Images.List(ctx(t), dsec.ImageQuery{})
	must(t, err)
	for _, c := range []struct{ name, source, text string }{
		{"a text", write("text", []byte("this is no archive, however long it may be\n")), ""},
		{"an empty file", write("empty", nil), ""},
		{"half an archive", write("half.tar", plainTar[:len(plainTar)/2]), ""},
		{"half a compressed one", write("half.tar.gz", gz.Bytes()[:gz.Len()/2]), ""},
		{"a missing file", at("missing.tar"), "no such file"},
		{"an unknown image", "docker://" + strings.TrimSuffix(ref, ":1") + ":2", "2"},
		{"no registry", "docker://127.0.0.1:1/x:1", "127.0.0.1:1"},
	} {
		r := n.run(nil, "image", "import", c.source, "--name", "bad")
		if r.code != 1 || !strings.HasPrefix(r.err, "dsec: ") || strings.Contains(r.err, "internal error") || !strings.Contains(r.err, c.text) {
			t.Errorf("%s: status %d, %q", c.name, r.code, r.err)
		}
	}
	if after, err := n.Images.List(ctx(t), dsec.ImageQuery{}); err != nil || len(after.Images) != len(before.Images) {
		t.Errorf("%d images became %d, %v", len(before.Images), len(after.Images), err)
	}
	// A name that is taken by other content is kept.
	r := n.run(nil, "image", "import", at("folder"), "--name", "from-0@"+versionOf(t, n, "from-0"))
	if r.code != 1 || !strings.Contains(r.err, "from-0") {
		t.Errorf("a taken version: %d %q", r.code, r.err)
	}
}

func versionOf(t *testing.T, n *node, name string) string {
	t.Helper()
	img, err := n.Images.Inspect(ctx(t), name)
	must(t, err)
	return img.Version
}

// TestCommittedDeletions deletes files in the second of two commits: in a folder of the workspace's
// own nothing of them is listed, and what was the base's is gone.
func TestCommittedDeletions(t *testing.T) {
	n := shared(t)
	box := func(flags ...string) string {
		return strings.TrimSpace(n.dsec(t, append([]string{"create", "--image", busybox}, flags...)...))
	}
	first := box()
	n.dsec(t, "exec", first, "sh", "-c", "mkdir -p /proj/deep /proj/old; echo a > /proj/a; echo b > /proj/b; echo c > /proj/deep/c; echo x > /etc/own")
	n.dsec(t, "commit", first, "ghosts@1")
	second := box("--workspace", "ghosts")
	n.dsec(t, "exec", second, "sh", "-c", "rm /proj/a /proj/deep/c /etc/own /bin/yes; rmdir /proj/old")
	n.dsec(t, "commit", second, "ghosts@2")
	third := box("--workspace", "ghosts@2")
	const look = "find /proj /etc/own /bin/yes 2>&1 | sort"
	want := n.dsec(t, "exec", second, "sh", "-c", look)
	if got := n.dsec(t, "exec", third, "sh", "-c", look); got != want || !strings.Contains(got, "/proj/b") || strings.Contains(got, "/proj/a") {
		t.Errorf("the commit has\n%s\nand the sandbox has\n%s", got, want)
	}
	for _, id := range []string{first, second, third} {
		n.dsec(t, "stop", id)
	}
}

// TestCommittedWorkspace keeps what a sandbox changed and starts from it.
func TestCommittedWorkspace(t *testing.T) {
	n := shared(t)
	first := n.create(t, plain())
	n.sh(t, first.ID, `mkdir -p /work/deep && echo one > /work/deep/file && ln /work/deep/file /work/hard && ln -s deep /work/link
		echo changed > /etc/group; rm /bin/vi; rm -r /var; mkdir /var; echo x > /home/alice/mine; chown alice /home/alice/mine; chmod 4755 /work/deep/file`)
	running := n.begin(t, first.ID, dsec.Command{Shell: "while :; do echo x >> /work/log; done"})
	n.dsec(t, "commit", string(first.ID), "kept@1")
	if l, err := n.Commands.List(ctx(t), on(first.ID)); err != nil || l[len(l)-1].Outcome != dsec.StillRunning {
		t.Errorf("after a commit: %+v, %v", l, err)
	}
	must(t, n.Commands.Signal(ctx(t), on(first.ID), running.ID, "KILL"))
	spec := plain()
	spec.Environment.Workspace = "kept@1"
	check := func(spec dsec.Spec, more string) dsec.Sandbox {
		t.Helper()
		sb := n.create(t, spec)
		r := n.sh(t, sb.ID, `cat /work/link/file /etc/group; stat -c '%h %a' /work/hard; stat -c %U /home/alice/mine; ls /var; ls /bin/vi; echo /work/more*`)
		if want := "one\nchanged\n2 4755\nalice\n" + more; string(r.Out) != want || !strings.Contains(string(r.Err), "/bin/vi") {
			t.Errorf("it has %q (%q), want %q", r.Out, r.Err, want)
		}
		return sb
	}
	second := check(spec, "/work/more*\n")
	n.sh(t, second.ID, "echo more > /work/more")
	n.dsec(t, "commit", string(second.ID), "kept@2")
	spec.Environment.Workspace = "kept" // the newest
	third := check(spec, "/work/more\n")
	r := n.run(nil, "commit", string(third.ID), "kept@2")
	if r.code != 1 || !strings.Contains(r.err, "kept@2") {
		t.Errorf("a taken version: %d %q", r.code, r.err)
	}
	// A name can go while it is in use.
	n.dsec(t, "image", "rm", "kept@2")
	_, err := n.Images.Collect(ctx(t), dsec.CollectOptions{})
	must(t, err)
	if r := n.sh(t, third.ID, "cat /work/more"); string(r.Out) != "more\n" {
		t.Errorf("after a collection it reads %q %q", r.Out, r.Err)
	}
}
