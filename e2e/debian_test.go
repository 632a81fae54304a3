package e2e_test

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
)

// debianBase is the root that "make debian" leaves.
const debianBase = "../.cache/demo/base.tar"

// TestDebian installs packages from a repository in a layer and uses what sets
// uids and file capabilities, as in Docker.
func TestDebian(t *testing.T) {
	base, err := os.Open(debianBase)
	if err != nil {
		t.Fatalf("%v: \"make debian\" makes it", err)
	}
	defer base.Close()
	n := own(t)
	must(t, n.run(base, "image", "import", "-", "--name", "debian").fault())
	must(t, n.run(nil, "image", "import", repository(t, "hello", "sudo", "iputils-ping", "libcap2-bin"), "--name", "repo", "--as", "toolkit").fault())
	box := n.create(t, dsec.Spec{Environment: dsec.Environment{Base: "debian", Toolkits: []string{"repo"}}})
	defer n.stop(t, box.ID)
	for _, c := range []struct{ line, want string }{
		{"rm -rf /etc/apt/sources.list* && echo 'deb [trusted=yes] file:/opt/repo ./' > /etc/apt/sources.list && apt-get -qq update && echo ok", "ok\n"},
		{"DEBIAN_FRONTEND=noninteractive apt-get -qq install -y hello sudo iputils-ping libcap2-bin >/dev/null && hello", "Hello, world!\n"},
		{"useradd -m bob && echo 'bob ALL=(ALL) NOPASSWD:ALL' >> /etc/sudoers && su bob -c 'id -un; sudo id -un'", "bob\nroot\n"},
		{"getcap /usr/bin/ping; su bob -c 'ping -c1 -W5 127.0.0.1' | grep -o '1 received'", "/usr/bin/ping cap_net_raw=ep\n1 received\n"},
		{"cd /tmp && tar cf e.tar -C / etc && tar xpf e.tar && diff -r --no-dereference /etc etc && stat -c %a /tmp/etc/shadow", "640\n"},
		{"dpkg --verify hello coreutils perl-base libc6 && dpkg --audit && echo sound", "sound\n"},
		{"python3 -c 'import ssl, sqlite3, subprocess; print(subprocess.check_output([\"uname\"]).decode().strip())'", "Linux\n"},
		{"echo 'int main(){return 7;}' > /tmp/a.c && gcc -o /tmp/a /tmp/a.c && /tmp/a; echo $?", "7\n"},
	} {
		r, err := n.Commands.Run(ctx(t), on(box.ID), dsec.Command{Shell: c.line, Timeout: time.Minute}, nil)
		must(t, err)
		if string(r.Out) != c.want {
			t.Errorf("%s\ngives %q, want %q; status %d, errors %q", c.line, r.Out, c.want, r.Code, r.Err)
		}
	}
}

// repository makes a folder whose /opt/repo is an apt repository of packages
// that this machine's own sources serve.
func repository(t *testing.T, packages ...string) string {
	t.Helper()
	root := t.TempDir()
	dir := filepath.Join(root, "opt/repo")
	must(t, os.MkdirAll(dir, 0o755))
	fetch := exec.Command("apt-get", append([]string{"-qq", "-o", "APT::Sandbox::User=root", "download"}, packages...)...)
	fetch.Dir = dir
	if out, err := fetch.CombinedOutput(); err != nil {
		t.Fatalf("apt-get download: %v: %s", err, out)
	}
	debs, err := filepath.Glob(filepath.Join(dir, "*.deb"))
	must(t, err)
	if len(debs) != len(packages) {
		t.Fatalf("fetched %v", debs)
	}
	var index bytes.Buffer
	for _, d := range debs {
		control, err := exec.Command("dpkg-deb", "-f", d).Output()
		must(t, err)
		content, err := os.ReadFile(d)
		must(t, err)
		fmt.Fprintf(&index, "%s\nFilename: ./%s\nSize: %d\nSHA256: %x\n\n", strings.TrimSpace(string(control)), filepath.Base(d), len(content), sha256.Sum256(content))
	}
	must(t, os.WriteFile(filepath.Join(dir, "Packages"), index.Bytes(), 0o644))
	return root
}
