package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dsec-go/dsec/erofs"
)

// section is a program that is run in the worker VM, and what it must report:
// a pattern that fits nothing would pass.
type section struct {
	name string
	pkg  string // whose tests it is; none when it is a function of the script
	args string
	want []string
}

// behaviours of the driver that are run under emulation, where all would take
// minutes, by kernel.
var behaviours = map[string][]string{
	"6.12": {
		"commands", "files", "ports", "terminal", "timeout_kills_the_tree", "limits", "out_of_memory", "fork_bomb",
		"hostile_workload", "confined", "no_shell", "stop", "ends_by_itself", "failed_start", "start_fails_half-way",
		"adopt", "adopt_after_kill", "freeze", "pause", "pause_and_freeze", "reclaim", "fork",
	},
	"6.1": {
		"commands", "files", "terminal", "timeout_kills_the_tree", "limits", "fork_bomb", "hostile_workload", "confined",
		"stop", "failed_start", "adopt", "freeze", "pause", "reclaim", "fork",
	},
}

// skipped are the tests of function calls that one kernel is enough for.
var skipped = map[string]string{"6.12": "^$", "6.1": "TestHostile|TestDriver"}

// Of function calls: the behaviours, and what hostile calls in Python do.
const (
	cellBehaviours = "commands|terminal|timeout_kills_the_tree|limits|out_of_memory|confined|stop|adopt"
	hostileCalls   = "fork_bomb|daemon|kill_everything|ptrace|memory_of_pid_1|back_into_other_namespaces|out_of_the_root|shared_memory|files_everywhere|memory_hog|memory_hog_in_a_child|the_warm_interpreter's_own|cgroup_tricks|busy_in_children"
)

// sections can be chosen by name in DSEC_TEST_WORKER, for who runs one again and
// again.
var sections = []section{
	{name: "host", want: []string{"Kernel", "LandlockIsOn", "AppArmorIsOn", "Controller/memory", "Address", "Route", "Doctor"}},
	{name: "rootfs", pkg: "rootfs", want: []string{"TestFeaturesAreThere", "TestLayersAreSharedAndCounted", "TestFallbacks"}},
	// It needs Python.
	{name: "jail", pkg: "jail", args: "-test.skip=TestRootHolds", want: []string{"TestBoxRuns", "TestOOM", "TestKillTakesTheTree", "TestForkBomb", "TestLandlock"}},
	{name: "driver", pkg: "driver/container", args: `"-test.run=TestDriver/^($BEHAVIOURS)$|TestReclaimToSwap|TestCrashInAPause"`,
		want: []string{"TestReclaimToSwap", "TestCrashInAPause"}},
	{name: "fncall", pkg: "driver/fncall", args: `"-test.run=TestDriver/^(` + cellBehaviours + `)$|TestCells|TestHostile/^(` + hostileCalls + `)$|TestPreload|TestLimits" "-test.skip=$SKIP"`,
		want: []string{"TestCells/memory", "TestCells/pids", "TestCells/kill_everything", "TestPreload", "TestLimits"}},
	{name: "node", want: []string{"Up", "Create", "Exec", "Memory", "Down", "NothingIsLeft"}},
}

// TestWorker boots worker VMs of an old and a new kernel, with cgroup v2,
// AppArmor and Landlock, and runs in them what tests the container driver on the
// host. A test of the inside is a subtest here.
func TestWorker(t *testing.T) {
	if testing.Short() {
		t.Skip("boots two emulated machines")
	}
	if only := os.Getenv("DSEC_TEST_WORKER"); only != "" {
		sections = slices.DeleteFunc(sections, func(s section) bool { return s.name != "host" && !slices.Contains(strings.Split(only, ","), s.name) })
	}
	dir := t.TempDir()
	build(t, dir)
	versions := []string{"6.1", "6.12"}
	for i, version := range versions {
		t.Run(version, func(t *testing.T) {
			// A machine has its share of the time that is left: on a busy host
			// what is emulated takes its time.
			limit := 10 * time.Minute
			if deadline, ok := t.Deadline(); ok {
				limit = (time.Until(deadline) - 20*time.Second) / time.Duration(len(versions)-i)
			}
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			found := parse(t, runMachine(ctx, t, dir, version))
			for _, s := range sections {
				if s.name == "driver" {
					for _, b := range behaviours[version] {
						s.want = append(s.want, "TestDriver/"+b)
					}
				}
				if s.name == "fncall" && version == "6.12" {
					s.want = append(slices.Clone(s.want), "TestHostile/daemon", "TestHostile/fork_bomb", "TestDriver/commands", "TestDriver/out_of_memory", "TestDriver/adopt")
				}
				t.Run(s.name, func(t *testing.T) { found[s.name].report(t, s.want) })
			}
		})
	}
}

// build makes the programs of the image and those that are run in it.
func build(t *testing.T, dir string) {
	t.Helper()
	goTool := func(args ...string) {
		t.Helper()
		c := exec.Command("go", args...)
		c.Dir, c.Env = "..", append(os.Environ(), "CGO_ENABLED=0")
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	for _, p := range []string{"./cmd/dsec", "./cmd/dsec-guest", "./worker", "./vmimage"} {
		goTool("build", "-ldflags=-s -w", "-o", dir+"/", p)
	}
	script, err := os.ReadFile("testdata/run.sh")
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range sections[1:] {
		what := s.name
		if s.pkg != "" {
			what = "/test/" + s.name + " -test.v=test2json " + s.args // each verdict as it is known
			goTool("test", "-c", "-ldflags=-s -w", "-o", filepath.Join(dir, s.name+".test"), "./"+s.pkg)
		}
		script = fmt.Appendf(script, "section %s %s\n", s.name, what)
	}
	if err := os.WriteFile(filepath.Join(dir, "run.sh"), script, 0o755); err != nil {
		t.Fatal(err)
	}
	layer(t, filepath.Join(dir, "data"))
}

// layer makes the folder that the machine finds on its disk: Debian as a layer,
// with Python, which an emulated machine would take too long to import.
func layer(t *testing.T, dir string) {
	t.Helper()
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	archive, err := os.Open("../.cache/demo/base.tar")
	if err != nil {
		t.Fatalf("%v: make debian makes it", err)
	}
	defer archive.Close()
	data, err := os.Create(filepath.Join(dir, "debian.data"))
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	blob := erofs.NewBlob(data, erofs.BlobOptions{})
	tree, err := erofs.FromTar(t.Context(), archive, blob, erofs.TarOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := blob.Finish(); err != nil {
		t.Fatal(err)
	}
	image, err := tree.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "debian.meta"), image.Meta, 0o644); err != nil {
		t.Fatal(err)
	}
}

// runMachine makes the image and a disk and gives what the machine printed.
func runMachine(ctx context.Context, t *testing.T, dir, version string) []byte {
	t.Helper()
	image, disk, console := filepath.Join(dir, version+".cpio"), filepath.Join(dir, version+".disk"), filepath.Join(dir, version+".log")
	args := []string{"-cache", "../.cache/vm", "-out", "../bin/vm", "worker", "-kernel", version, "-bin", dir, "-o", image, "-add", "test/run=" + dir + "/run.sh"}
	for _, s := range sections {
		if s.pkg != "" {
			args = append(args, "-add", "test/"+s.name+"="+filepath.Join(dir, s.name+".test"))
		}
	}
	if out, err := exec.Command(filepath.Join(dir, "vmimage"), args...).CombinedOutput(); err != nil {
		t.Fatalf("make image: %v\n%s", err, out)
	}
	if err := os.WriteFile(disk, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mke2fs", "-q", "-F", "-t", "ext4", "-E", "lazy_itable_init=1", "-d", filepath.Join(dir, "data"), disk, "4G").CombinedOutput(); err != nil {
		t.Fatalf("make disk: %v\n%s", err, out)
	}
	defer os.Remove(disk)
	defer os.Remove(image)
	// QEMU ends with the thread that started it, should this process be killed.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	c := exec.CommandContext(ctx, "qemu-system-x86_64", "-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", "2048",
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-monitor", "none",
		"-kernel", "../bin/vm/vmlinuz-"+version, "-initrd", image,
		"-append", "console=ttyS0 panic=-1 quiet cgroup_no_v1=all lsm=landlock,lockdown,yama,apparmor,bpf WORKER_KERNEL="+version+" BEHAVIOURS="+strings.Join(behaviours[version], "|")+" SKIP="+skipped[version]+" worker.data=/dev/vda"+
			" worker.address=10.0.2.15/24 worker.gateway=10.0.2.2 -- /test/run",
		"-drive", "if=none,id=data,format=raw,cache=unsafe,file="+disk, "-device", "virtio-blk-pci,drive=data",
		"-netdev", "user,id=net,restrict=on", "-device", "virtio-net-pci,netdev=net,romfile=",
		"-serial", "file:"+console, "-serial", "stdio")
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	begin := time.Now()
	err := c.Run()
	t.Logf("the machine ran for %v", time.Since(begin).Round(time.Second))
	whole := bytes.Count(out.Bytes(), []byte("@@@ end ")) == len(sections) // a panic ends QEMU in good order
	if words, e := os.ReadFile(console); err != nil || e != nil || ctx.Err() != nil || !whole {
		t.Errorf("the machine: %v, %v; its console:\n%s", err, context.Cause(ctx), tail(words))
	}
	return out.Bytes()
}

func tail(b []byte) []byte { return b[max(0, len(b)-4000):] }

// results are what a section printed.
type results struct {
	text   bytes.Buffer
	ended  string // the exit status
	names  []string
	states map[string]string // PASS, FAIL or SKIP
	said   map[string]string // what a test printed
}

var (
	verdict = regexp.MustCompile(`^\x16?\s*--- (PASS|FAIL|SKIP): (\S+) \(`)
	turn    = regexp.MustCompile(`^\x16?=== (?:RUN|NAME|CONT|PAUSE) +(\S*)`)
)

func parse(t *testing.T, out []byte) map[string]*results {
	t.Helper()
	found := map[string]*results{}
	var at *results
	var test string // whose lines these are
	for r := bufio.NewReader(bytes.NewReader(out)); ; {
		line, err := r.ReadString('\n')
		if err == io.EOF {
			return found
		}
		line = strings.TrimRight(line, "\r\n")
		if name, ok := strings.CutPrefix(line, "@@@ begin "); ok {
			at, test = &results{states: map[string]string{}, said: map[string]string{}}, ""
			found[name] = at
			continue
		}
		if at == nil {
			continue
		}
		if status, ok := strings.CutPrefix(line, "@@@ end "); ok {
			at.ended, at = status, nil
			continue
		}
		fmt.Fprintln(&at.text, line)
		if m := verdict.FindStringSubmatch(line); m != nil {
			at.names = append(at.names, m[2])
			at.states[m[2]] = m[1]
		} else if m := turn.FindStringSubmatch(line); m != nil {
			test = m[1]
		} else {
			at.said[test] += line + "\n"
		}
	}
}

// report makes a subtest of every test of the inside.
func (r *results) report(t *testing.T, want []string) {
	if r == nil {
		t.Fatal("it did not begin")
	}
	slices.Sort(r.names)
	for _, n := range r.names {
		t.Run(n, func(t *testing.T) {
			switch r.states[n] {
			case "FAIL":
				t.Errorf("it fails in the machine:\n%s", r.said[n])
			case "SKIP":
				t.Skipf("it is skipped in the machine:\n%s", r.said[n])
			}
		})
	}
	for _, n := range want {
		if r.states[n] == "" {
			t.Errorf("%s did not report", n)
		}
	}
	if r.ended != "0" {
		t.Errorf("it ended with status %q", r.ended)
	}
	if t.Failed() {
		t.Logf("it printed, of no test:\n%s\nand in all:\n%s", r.said[""], r.text.String())
	}
}
