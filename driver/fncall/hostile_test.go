package fncall_test

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
)

// look prints all that a call could find of others: files, processes,
// descriptors, memory that is shared, variables, ports, limits.
const look = `
import os, socket, resource
def walk(d):
    for root, dirs, files in os.walk(d):
        for n in dirs + files:
            p = os.path.join(root, n)
            yield p, os.lstat(p).st_size if not os.path.isdir(p) else 0
for d in ("/tmp", "/work", "/dev", "/var/tmp", "/run", "/root", "/home", "/etc"):
    print(d, sorted(walk(d)))
print("processes", sorted(int(p) for p in os.listdir("/proc") if p.isdigit()))
print("descriptors", sorted(os.listdir("/proc/self/fd")))
print("variables", sorted(os.environ.items()))
for f in ("/proc/sysvipc/shm", "/proc/sysvipc/sem", "/proc/sysvipc/msg", "/proc/net/tcp", "/proc/net/unix", "/proc/self/cgroup", "/proc/keys"):
    try:
        print(f, len(open(f).read().splitlines()), open(f).read() if "cgroup" in f else "")
    except OSError as e:
        print(f, e)
print("mounts", len(open("/proc/self/mountinfo").read().splitlines()))
print("pid", os.getpid(), os.getppid(), os.getpgid(0), os.getsid(0))
print("caps", [l for l in open("/proc/self/status") if l.startswith(("Cap", "NoNewPrivs", "Seccomp:"))])
print("cwd", os.getcwd(), os.umask(0), resource.getrlimit(resource.RLIMIT_NOFILE))
print(sorted(os.listdir("/")))
`

// hostile are calls that try to outlive themselves, reach others or break the
// machine. Each line of want is one of the outcomes that may come of it; what
// matters is what the next call finds.
var hostile = []struct {
	name   string
	f      dsec.Function
	limits dsec.FunctionLimits
	want   string // outcomes, any of them
	out    string // unless empty
}{
	{name: "fork bomb", want: "ok exit timeout memory signal", limits: dsec.FunctionLimits{Wall: 2 * time.Second},
		f: python("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass")},
	{name: "shell fork bomb", want: "ok exit timeout signal output", limits: dsec.FunctionLimits{Wall: 2 * time.Second},
		f: shell("b() { b | b & }; b; sleep 10")},
	{name: "daemon", want: "ok", out: "gone\n", f: python(`
import os, time, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            open("/tmp/still-here", "w").write("x"); time.sleep(0.01)
    os._exit(0)
os.wait()
print("gone")`)},
	{name: "daemon that holds the output", want: "ok", out: "gone\n", f: shell("setsid sh -c 'while :; do sleep 1; done' & echo gone")},
	{name: "kill everything", want: "signal exit ok", f: python(`
import os, signal
for p in list(range(1, 400)) + [-1]:
    for s in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP):
        if p != os.getpid():
            try: os.kill(p, s)
            except OSError: pass`)},
	{name: "signal pid 1 and the parent", want: "ok", out: "0\n", f: python(`
import os, signal
for s in range(1, 65):
    try: os.kill(1, s)
    except OSError: pass
print(os.getppid())`)},
	{name: "ptrace", want: "ok", out: "no\n", f: python(`
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
got = [p for p in range(1, 300) if p != os.getpid() and libc.ptrace(16, p, 0, 0) == 0]
print(got or "no")`)},
	{name: "memory of pid 1", want: "ok", out: "no\n", f: python(`
import os
got = []
for p in (1, os.getppid()):
    for n in ("mem", "environ", "maps", "fd", "root", "cwd", "exe", "ns/mnt"):
        try:
            path = "/proc/%d/%s" % (p, n)
            x = os.listdir(path) if n in ("fd", "root", "cwd") else open(path, "rb").read(1)
            if x: got.append(path)
        except OSError: pass
print(got or "no")`)},
	{name: "back into other namespaces", want: "ok", out: "no\n", f: python(`
import ctypes, os, glob
libc = ctypes.CDLL(None, use_errno=True)
got = []
for path in glob.glob("/proc/*/ns/*"):
    try: fd = os.open(path, os.O_RDONLY)
    except OSError: continue
    if libc.setns(fd, 0) == 0: got.append(path)
for flag in (0x00020000, 0x10000000, 0x20000000, 0x40000000, 0x02000000):
    if libc.unshare(flag) == 0: got.append(hex(flag))
print(got or "no")`)},
	{name: "out of the root", want: "ok", out: "no\n", f: python(`
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
got = []
if libc.umount2(b"/", 2) == 0: got.append("umount /")
if libc.mount(b"none", b"/mnt", b"tmpfs", 0, None) == 0: got.append("mount")
if libc.pivot_root and libc.pivot_root(b"/tmp", b"/tmp") == 0: got.append("pivot")
try: os.chroot("/tmp"); got.append("chroot")
except OSError: pass
for p in ("/dev/.cells", "/../dev/.cells", "/build", "/m", "/bin/dsec-guest"):
    if os.path.exists(p): got.append(p)
try: os.mknod("/tmp/n", 0o60666, os.makedev(254, 0)); open("/tmp/n", "rb").read(1); got.append("device")
except OSError: pass
print(got or "no")`)},
	{name: "write where it must not", want: "ok", out: "no\n", f: python(`
import os
got = []
for p in ("/dev/x", "/sys/x", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger", "/etc/hosts", "/sys/fs/cgroup/x"):
    try: open(p, "w").write("x"); got.append(p)
    except OSError: pass
print(got or "no")`)},
	{name: "shared memory", want: "ok", f: python(`
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
open("/dev/shm/mine", "w").write("x")
libc.shmget.restype = ctypes.c_int
for key in range(1, 20): libc.shmget(key, 4096, 0o1666)
for key in range(1, 20): libc.semget(key, 1, 0o1666)
for key in range(1, 20): libc.msgget(key, 0o1666)
libc.mq_open(b"/queue", 0o102, 0o666, None)
s = socket.socket(socket.AF_UNIX); s.bind("\0mine"); s.listen(1)
t = socket.socket(); t.bind(("127.0.0.1", 4242)); t.listen(1)
print("made", len(open("/proc/sysvipc/shm").readlines()))`), out: "made 20\n"},
	{name: "files everywhere", want: "ok", f: python(`
import os
for d in ("/tmp", "/work", "/etc", "/usr/bin", "/root", "/var/tmp", "/"):
    open(d + "/planted", "w").write("x")
os.remove("/etc/passwd"); os.rename("/bin/sh", "/bin/hs") if not os.path.islink("/bin") else os.remove("/usr/bin/env")
open("/usr/lib/python3/dist-packages/sitecustomize.py", "w").write("import os; os.abort()")
os.chmod("/tmp", 0)`)},
	{name: "fill the disk", want: "ok exit memory", f: python(`
try:
    with open("/tmp/big", "wb") as f:
        while True: f.write(b"x" * (1 << 20))
except OSError as e:
    print(e.errno)`), out: "28\n"},
	{name: "many files", want: "ok exit memory timeout", limits: dsec.FunctionLimits{Wall: 5 * time.Second}, f: python(`
i = 0
try:
    while True:
        open("/tmp/%d" % i, "w").close(); i += 1
except OSError: pass`)},
	{name: "memory hog", want: "memory", f: python("x = []\nwhile True: x.append(bytearray(1 << 20))")},
	{name: "memory hog in a child", want: "exit memory ok", f: python(`
import os
if os.fork() == 0:
    x = []
    while True: x.append(bytearray(1 << 20))
_, s = os.wait(); print(os.WTERMSIG(s)); raise SystemExit(5)`)},
	{name: "a gigabyte of output", want: "output", f: python("import os\nwhile True: os.write(1, b'x' * 65536)")},
	{name: "a gigabyte of errors from a child", want: "output", f: shell("yes >&2 & wait")},
	{name: "input that is not read", want: "ok", out: "fine\n", f: dsec.Function{Runtime: dsec.RuntimePython, Source: []byte("print('fine')"), Stdin: make([]byte, 4<<20)}},
	{name: "zombies", want: "ok", f: python(`
import os
for i in range(40):
    if os.fork() == 0: os._exit(0)`)},
	{name: "closed streams", want: "ok exit", f: python("import os\nos.closerange(0, 100)")},
	{name: "raised signals", want: "signal", f: python("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")},
	{name: "stopped", want: "timeout", limits: dsec.FunctionLimits{Wall: time.Second}, f: python("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)")},
	{name: "busy", want: "timeout", limits: dsec.FunctionLimits{CPU: 300 * time.Millisecond}, f: python("while True: pass")},
	{name: "busy in children", want: "timeout", limits: dsec.FunctionLimits{CPU: 300 * time.Millisecond}, f: shell("for i in 1 2 3; do while :; do :; done & done; wait")},
	{name: "deaf", want: "timeout", limits: dsec.FunctionLimits{Wall: time.Second}, f: python(`
import signal, time
for s in range(1, 65):
    try: signal.signal(s, signal.SIG_IGN)
    except (OSError, ValueError): pass
time.sleep(100)`)},
	{name: "the warm interpreter's own", want: "ok exit", f: python(`
import gc, os, sys, socket
for o in gc.get_objects():
    if isinstance(o, socket.socket):
        try: o.send(b"ok 0\n"); o.shutdown(2)
        except OSError: pass
for fd in range(3, 200):
    try: os.write(fd, b"ok 0\n")
    except OSError: pass
sys.modules["random"].random = None`)},
	{name: "cgroup tricks", want: "ok", out: "no\n", f: python(`
import os, glob
got = []
for path in glob.glob("/sys/fs/cgroup/**", recursive=True):
    try: open(path, "w").write("0"); got.append(path)
    except OSError: pass
print(got or "no")`)},
	{name: "priorities and limits of others", want: "ok", out: "no\n", f: python(`
import os, resource
got = []
for p in (1, os.getppid()):
    try: resource.prlimit(p, resource.RLIMIT_NOFILE, (3, 3)); got.append(p)
    except (OSError, ProcessLookupError, PermissionError): pass
    try: os.setpriority(os.PRIO_PROCESS, p, 19) if p != 0 else None
    except OSError: pass
print(got and got != [0, 1] and [p for p in got if p > 1] or "no")`)},
}

func TestHostile(t *testing.T) {
	r := newRig(t)
	before := r.call(python(look))
	if before.Outcome != dsec.FunctionOK {
		t.Fatalf("look: %s, %s", before.Outcome, before.Err)
	}
	first := string(before.Out)
	for _, want := range []string{"processes [1, 2]\n", "descriptors ['0', '1', '2', '3']\n", "pid 2 0 2 2\n", "CapEff:\\t0000000000000000", "CapBnd", "NoNewPrivs:\\t1", "/tmp []\n"} {
		if !strings.Contains(first, want) {
			t.Errorf("a fresh call sees no %q:\n%s", want, first)
		}
	}
	for _, h := range hostile {
		t.Run(h.name, func(t *testing.T) {
			r := &rig{t: t, driver: r.driver, m: r.m}
			f := h.f
			f.Limits = h.limits
			res := r.call(f)
			if !strings.Contains(" "+h.want+" ", " "+string(res.Outcome)+" ") || h.out != "" && string(res.Out) != h.out {
				t.Errorf("outcome %s %s, code %d, prints %.200q and %.500q; want %s and %q", res.Outcome, res.Limit, res.Code, res.Out, res.Err, h.want, h.out)
			}
			after := r.call(python(look))
			if got := string(after.Out); got != first {
				t.Errorf("the next call sees something else: %s %s\n%s", after.Outcome, after.Err, difference(first, got))
			}
		})
	}
}

// difference gives the lines that two texts do not have in common.
func difference(a, b string) string {
	la, lb := strings.Split(a, "\n"), strings.Split(b, "\n")
	var out strings.Builder
	for i := range max(len(la), len(lb)) {
		x, y := "", ""
		if i < len(la) {
			x = la[i]
		}
		if i < len(lb) {
			y = lb[i]
		}
		if x != y {
			out.WriteString("- " + x + "\n+ " + y + "\n")
		}
	}
	return out.String()
}

// TestTogether calls at once on one machine, which edges do not do: calls see
// nothing of each other even then.
func TestTogether(t *testing.T) {
	r := newRig(t)
	first := string(r.call(python(look)).Out)
	var calls sync.WaitGroup
	for range 4 {
		calls.Go(func() {
			for range 3 {
				if res, err := r.try(python("import time; open('/tmp/mine','w').write('x'); open('/dev/shm/mine','w'); time.sleep(0.05)")); err != nil || res.Outcome != dsec.FunctionOK {
					t.Errorf("call: %v %v %s", err, res.Outcome, res.Err)
				}
				if res, err := r.try(python(look)); err != nil || string(res.Out) != first && !sameButGroup(first, string(res.Out)) {
					t.Errorf("call: %v\n%s", err, difference(first, string(res.Out)))
				}
			}
		})
	}
	calls.Wait()
}

// sameButGroup ignores the number of the cell, by which calls at the same time
// differ.
func sameButGroup(a, b string) bool {
	for i := range 10 {
		b = strings.ReplaceAll(b, "cell"+string(rune('0'+i)), "cell0")
	}
	return a == b
}
