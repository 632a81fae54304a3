package jail

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
)

// The test binary plays all three programs: tests are the host side, and run
// again as "dsec-guest hold" and "dsec-guest init" it is the holder and the
// guest. Its guest runs what a message asks for.
func TestMain(m *testing.M) {
	if os.Args[0] == "dsec-guest" {
		var err error
		switch os.Args[1] {
		case "hold":
			err = ServeHold()
		case "init":
			err = Serve(testGuest)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, os.Args[1], err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// testGuest serves messages: "run", uid, argv... with files for output.
func testGuest(sh *Shell) error {
	unix.SetNonblock(3, true)
	listener := os.NewFile(3, "listener")
	box, _, err := sh.Dress(listener, func(*Box, *Outfit) error { return nil })
	if err != nil {
		return err
	}
	s, err := sh.Enter(listener)
	if err != nil {
		return err
	}
	for {
		unix.SetNonblock(3, false)
		fd, _, err := unix.Accept4(3, unix.SOCK_CLOEXEC)
		if err != nil {
			return err
		}
		go func() {
			defer unix.Close(fd)
			m, err := receive(fd)
			if err != nil {
				return
			}
			reply(fd, testRun(box, s, m), nil)
		}()
	}
}

func testRun(box *Box, s *Setup, m *message) string {
	uid, _ := strconv.Atoi(m.fields[1])
	null, _ := os.OpenFile("/dev/null", os.O_RDWR, 0)
	defer null.Close()
	r, err := box.Start(Process{Path: m.fields[3], Argv: m.fields[3:], Env: s.Env, Dir: "/", UID: uint32(uid), GID: uint32(uid),
		Stdin: null, Stdout: m.files[0], Stderr: m.files[0]})
	if err != nil {
		return "error " + err.Error()
	}
	m.close()
	if d, err := time.ParseDuration(m.fields[2]); err == nil {
		time.AfterFunc(d, func() { r.Kill() })
	}
	pid := r.Pid()
	e, err := r.Wait()
	defer r.Release()
	return fmt.Sprintf("pid %d code %d signal %d oom %v err %v", pid, e.Code, e.Signal, r.OOMKilled(), err)
}

type host struct {
	t       *testing.T
	cgroups *Cgroups
	holder  *Holder
	dir     string
}

func newHost(t *testing.T) *host {
	t.Helper()
	h := &host{t: t, dir: t.TempDir()}
	var err error
	if h.cgroups, err = OpenCgroups("dsec-test-" + strconv.Itoa(os.Getpid())); err != nil {
		t.Fatal(err)
	}
	exe, _ := os.Executable()
	h.holder, err = OpenHolder(HolderConfig{Socket: filepath.Join(h.dir, "hold.sock"), Guest: exe, Log: os.Stderr, Join: h.cgroups.JoinGuests})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		pid := h.holder.Pid()
		if err := h.holder.Exit(); err != nil {
			t.Error(err)
		}
		fd, err := unix.PidfdOpen(pid, 0)
		if err == nil {
			unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 10_000)
			unix.Close(fd)
		}
		if err := h.cgroups.Remove(); err != nil {
			t.Error(err)
		}
	})
	return h
}

type testBox struct {
	*host
	socket string
	pidfd  *os.File
	group  *Group
}

const testBase = 0x6fff_0000

// box makes a box whose root is a small Debian-like folder with the host's
// tools bound in by copying busybox-like needs: here, the host's own /usr.
func (h *host) box(r dsec.Resources) *testBox {
	t := h.t
	t.Helper()
	b := &testBox{host: h, socket: filepath.Join(h.dir, "s")}
	l, err := ListenPath(b.socket, unix.SOCK_STREAM)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if b.group, err = h.cgroups.Make("1", testBase); err != nil {
		t.Fatal(err)
	}
	cg, err := b.group.Guest()
	if err != nil {
		t.Fatal(err)
	}
	var pid int
	if pid, b.pidfd, err = h.holder.Spawn(SpawnConfig{Base: testBase, Listener: l, Cgroup: cg, Priority: Urgent}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		unix.PidfdSendSignal(int(b.pidfd.Fd()), unix.SIGKILL, nil, 0)
		unix.Poll([]unix.PollFd{{Fd: int32(b.pidfd.Fd()), Events: unix.POLLIN}}, 10_000)
		b.pidfd.Close()
		if err := b.group.Remove(); err != nil {
			t.Error(err)
		}
	})
	if err := b.group.Limit(r); err != nil {
		t.Fatal(err)
	}
	join, err := b.group.Join()
	if err != nil {
		t.Fatal(err)
	}
	defer join.Close()
	root := h.root()
	defer root.Close()
	out := openTree(t, h.dir)
	defer out.Close()
	_ = pid
	if err := Dress(b.socket, &Outfit{Output: out, Cgroup: join}); err != nil {
		t.Fatal(err)
	}
	if err := Enter(b.socket, &Setup{Root: root, Hostname: "boxed", Hosts: "127.0.0.1 localhost\n",
		Env: []string{"PATH=/usr/bin:/bin"}}); err != nil {
		t.Fatal(err)
	}
	return b
}

func openTree(t *testing.T, dir string) *os.File {
	t.Helper()
	fd, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fd), dir)
}

// root overlays a scratch folder on the host's own root, read-only below.
func (h *host) root() *os.File {
	t := h.t
	up, work := filepath.Join(h.dir, "up"), filepath.Join(h.dir, "work")
	for _, d := range []string{up, work} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
		os.Chown(d, testBase, testBase)
	}
	fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fs)
	for _, o := range [][2]string{{"lowerdir", "/"}, {"upperdir", up}, {"workdir", work}} {
		if err := unix.FsconfigSetString(fs, o[0], o[1]); err != nil {
			t.Fatal(o, err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fd), "root")
}

// run gives the guest's answer and what the command wrote.
func (b *testBox) run(kill string, uid int, argv ...string) (string, string) {
	t := b.t
	t.Helper()
	conn, err := dial(b.socket, unix.SOCK_STREAM)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(conn)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	m := message{fields: append([]string{"run", strconv.Itoa(uid), kill}, argv...), files: []*os.File{w}}
	if err := m.send(conn); err != nil {
		t.Fatal(err)
	}
	w.Close()
	answer, err := receive(conn)
	if err != nil {
		t.Fatal(err)
	}
	r.SetReadDeadline(time.Now().Add(5 * time.Second))
	out, _ := io.ReadAll(r)
	return answer.fields[0], string(out)
}

var roomy = dsec.Resources{CPU: 2, Memory: 256 << 20, Disk: 1 << 30, Pids: 200}

func TestBoxRuns(t *testing.T) {
	b := newHost(t).box(roomy)
	for _, c := range []struct {
		name string
		uid  int
		argv []string
		want string
	}{
		{"pid 1 is the reaper", 0, []string{"/bin/cat", "/proc/1/comm"}, "init\n"},
		{"hostname", 0, []string{"/bin/hostname"}, "boxed\n"},
		{"umask", 0, []string{"/bin/sh", "-c", "umask"}, "0022\n"},
		{"hosts", 0, []string{"/bin/cat", "/etc/hosts"}, "127.0.0.1 localhost\n"},
		{"root inside", 0, []string{"/usr/bin/id", "-u"}, "0\n"},
		{"user", 1000, []string{"/usr/bin/id", "-u"}, "1000\n"},
		{"capabilities", 0, []string{"/bin/grep", "CapBnd", "/proc/self/status"}, "CapBnd:\t00000000a80425fb\n"},
		{"no privileges refused", 0, []string{"/bin/grep", "NoNewPrivs", "/proc/self/status"}, "NoNewPrivs:\t0\n"},
		{"descriptors", 0, []string{"/bin/ls", "/proc/self/fd"}, "0\n1\n2\n3\n"},
		{"no guest", 0, []string{"/bin/sh", "-c", "cat /proc/[0-9]*/comm | grep -c -e dsec -e hold"}, "0\n"},
		{"loopback", 0, []string{"/bin/cat", "/sys/class/net/lo/flags"}, "0x9\n"},
		{"null", 1000, []string{"/bin/sh", "-c", "echo x >/dev/null && head -c3 /dev/zero | od -An -c"}, "  \\0  \\0  \\0\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			answer, out := b.run("", c.uid, c.argv...)
			if out != c.want {
				t.Errorf("%v gives %q, want %q (%s)", c.argv, out, c.want, answer)
			}
		})
	}
}

// TestRootHolds tries the ways out of a root that is not pivoted to.
func TestRootHolds(t *testing.T) {
	b := newHost(t).box(roomy)
	const escape = `
import os, tempfile
d = tempfile.mkdtemp(); fd = os.open("/", os.O_RDONLY); os.chroot(d); os.fchdir(fd)
for i in range(200): os.chdir("..")
os.chroot(".")
print("usr" in os.listdir("/"), "m" in os.listdir("/"))`
	if answer, out := b.run("", 0, "/usr/bin/python3", "-c", escape); out != "True False\n" {
		t.Errorf("after leaving a chroot: %q (%s)", out, answer)
	}
	for _, path := range []string{"/proc/1/root/", "/proc/1/cwd/", "/proc/1/exe", "/proc/1/fd/", "/proc/1/mem", "/proc/1/environ", "/proc/1/map_files"} {
		answer, out := b.run("", 0, "/bin/sh", "-c", "ls -L "+path+" >/dev/null 2>&1 || ! head -c1 "+path+" >/dev/null 2>&1 && echo shut")
		if out != "shut\n" {
			t.Errorf("%s is open: %q (%s)", path, out, answer)
		}
	}
	for _, c := range []string{"umount /", "umount -l /", "mount -t tmpfs x /mnt", "unshare -m true", "nsenter -t 1 -m true"} {
		if answer, _ := b.run("", 0, "/bin/sh", "-c", c); strings.Contains(answer, "code 0") {
			t.Errorf("%s was allowed: %s", c, answer)
		}
	}
}

// TestLandlock does in a user namespace of the workload's own, where it has all
// capabilities and, in this test, no filter, what a domain forbids all the same.
func TestLandlock(t *testing.T) {
	version, err := landlockVersion()
	if err != nil {
		t.Skip("feature landlock:", err)
	}
	b := newHost(t).box(roomy)
	for _, c := range []struct {
		line  string
		fails bool
	}{
		{"unshare -U -r true", false},
		{"unshare -U -r -m --propagation unchanged mount -t tmpfs x /mnt", true},
		{"unshare -U -r -m --propagation unchanged mount --bind /etc /mnt", true},
		{"cd / && mkdir a b && echo x > a/x && ln a/x b/y && mv a b/c && cat b/y b/c/x", false},
		{"sleep 100 & kill -0 $! && kill $!", false},
		{"kill -0 1", version >= landlockScoped},
		{"ls -L /proc/1/root/", true},
	} {
		if answer, out := b.run("", 0, "/bin/sh", "-c", c.line+" 2>&1"); strings.Contains(answer, "code 0") == c.fails {
			t.Errorf("%s: %s %q", c.line, answer, out)
		}
	}
}

func TestKillTakesTheTree(t *testing.T) {
	b := newHost(t).box(roomy)
	answer, out := b.run("300ms", 0, "/bin/sh", "-c", "setsid sleep 1000 & (setsid sleep 1000 &) ; echo up; wait; sleep 1000")
	if !strings.Contains(answer, "signal 9") || out != "up\n" {
		t.Errorf("answer %q, output %q", answer, out)
	}
	if _, out := b.run("", 0, "/bin/sh", "-c", "cat /proc/[0-9]*/comm"); strings.Contains(out, "sleep") {
		t.Errorf("processes are left after kill: %q", out)
	}
}

func TestOOM(t *testing.T) {
	r := roomy
	r.Memory = 32 << 20
	b := newHost(t).box(r)
	answer, out := b.run("", 0, "/bin/dd", "if=/dev/zero", "of=/dev/null", "bs=200M", "count=1")
	if !strings.Contains(answer, "signal 9 oom true") {
		t.Errorf("answer %q, output %q", answer, out)
	}
}

func TestForkBomb(t *testing.T) {
	b := newHost(t).box(roomy)
	answer, _ := b.run("700ms", 0, "/bin/sh", "-c", "f(){ f|f& }; f; sleep 1000")
	if !strings.Contains(answer, "signal 9") {
		t.Errorf("answer %q", answer)
	}
	answer, out := b.run("", 0, "/bin/echo", "alive")
	if out != "alive\n" {
		t.Errorf("after a fork bomb: %q %q", answer, out)
	}
}
