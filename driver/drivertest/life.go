package drivertest

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// testLimits goes beyond the limits of memory and of processes.
func testLimits(t *testing.T, e Env) {
	with(t, e, func(t *testing.T, m driver.Machine) {
		limit := e.Config(t).Resources
		if !e.Thrashes {
			over := limit.Memory>>20 + 300
			r := sh(t, m, fmt.Sprintf("dd if=/dev/zero of=/dev/null bs=%dM count=1", over))
			if r.Outcome != dsec.OutOfMemory && !(r.Outcome == dsec.Exited && r.Code != 0) {
				t.Errorf("%d MiB in a sandbox of %d: %+v", over, limit.Memory>>20, r.CommandStatus)
			}
			// The shell's child is the one that is killed here; the guest answers.
			if r := sh(t, m, "tail /dev/zero; echo $?"); string(r.Out) != "137\n" {
				t.Errorf("a memory hog ends with %q", r.Out)
			}
			u, err := m.Usage(ctx(t))
			if err != nil || u.OOMKills == 0 && e.But["limits"] == "" || u.MemoryPeak > limit.Memory && !e.HostFigures || u.CPU == 0 {
				t.Errorf("usage %+v, %v", u, err)
			}
		}
		many := limit.Pids + 144
		r := sh(t, m, fmt.Sprintf("i=0; while [ $i -lt %d ]; do sleep 100 & i=$((i+1)); done; echo made", many))
		if !strings.Contains(strings.ToLower(string(r.Err)), "fork") {
			t.Errorf("%d processes in a sandbox of %d: %q %q", many, limit.Pids, r.Out, r.Err)
		}
	})
}

// testOutOfMemory is about a command that the kernel ends for want of memory:
// its outcome says so, and the agent is not what was ended.
func testOutOfMemory(t *testing.T, e Env) {
	with(t, e, func(t *testing.T, m driver.Machine) {
		for range 2 {
			r, err := m.Guest().Commands().Run(ctx(t), dsec.Call{}, dsec.Command{Argv: []string{"/bin/tail", "/dev/zero"}, Timeout: 2 * time.Minute}, nil)
			if err != nil || r.Outcome != dsec.OutOfMemory {
				t.Fatalf("a memory hog ends with %+v, %v", r.CommandStatus, err)
			}
		}
		if r := sh(t, m, "echo alive"); string(r.Out) != "alive\n" {
			t.Errorf("after it: %+v %q", r.CommandStatus, r.Err)
		}
		if u, err := m.Usage(ctx(t)); err != nil || u.OOMKills < 2 && e.But["out of memory"] == "" {
			t.Errorf("usage %+v, %v", u, err)
		}
	})
}

// testDiskFull fills the writable disk: writing fails as it does on any full
// disk, what is printed is still recorded, and room that is made is usable.
func testDiskFull(t *testing.T, e Env) {
	with(t, e, func(t *testing.T, m driver.Machine) {
		mib := e.Config(t).Resources.Disk >> 20
		// Most of it at once: an emulated machine writes slowly.
		sh(t, m, "fallocate -l $((($(df -Pk / | tail -n 1 | tr -s ' ' | cut -d ' ' -f 2,3 | sed 's/ / - /') - 65536) / 1024 * 1048576)) /fill")
		r := sh(t, m, fmt.Sprintf("dd if=/dev/zero of=/big bs=1M count=%d 2>&1; echo status $?; ls -l /big >/dev/null && echo still here", mib+16))
		if !strings.Contains(string(r.Out), "No space") || strings.Contains(string(r.Out), "status 0") || !strings.Contains(string(r.Out), "still here") {
			t.Fatalf("%d MiB on a disk of %d: %q", mib+16, mib, r.Out)
		}
		if _, err := m.Guest().Files().Write(ctx(t), dsec.Call{}, dsec.FileOp{Path: "/more"}, dsec.WriteOptions{}, strings.NewReader(strings.Repeat("x", 1<<20))); dsec.KindOf(err) != dsec.Exhausted {
			t.Errorf("a write to the full disk: %v", err)
		}
		if r := sh(t, m, "seq 1 20000"); len(r.Out) != 108894 && e.But["disk full"] == "" {
			t.Errorf("%d bytes of output are left, want 108894", len(r.Out))
		}
		if r := sh(t, m, "rm /big /fill && echo x > /more && cat /more"); string(r.Out) != "x\n" {
			t.Errorf("after room was made: %q %q", r.Out, r.Err)
		}
	})
}

func testForkBomb(t *testing.T, e Env) {
	with(t, e, func(t *testing.T, m driver.Machine) {
		r, err := m.Guest().Commands().Run(ctx(t), dsec.Call{}, dsec.Command{Shell: "f() { f | f & }; f; sleep 100", Timeout: 700 * time.Millisecond}, nil)
		if err != nil || r.Outcome != dsec.TimedOut {
			t.Errorf("outcome %s, error %v", r.Outcome, err)
		}
		if r := sh(t, m, "echo alive"); string(r.Out) != "alive\n" {
			t.Errorf("after a fork bomb: %+v %q", r.CommandStatus, r.Err)
		}
	})
}

// testHostile checks that a root workload cannot reach its guest.
func testHostile(t *testing.T, e Env) {
	with(t, e, func(t *testing.T, m driver.Machine) {
		for _, line := range []string{
			"kill -9 -1",
			"kill -9 1; kill -TERM 1; kill -SEGV 1",
			"for f in /proc/*/fd/*; do echo scribble > $f; done 2>/dev/null; exec 0<&- 1>&- 2>&-",
			"for p in $(seq 1 300); do kill -9 $p; done 2>/dev/null",
			"mount -t tmpfs x /mnt || mount --bind / /mnt || umount -l /proc",
			"echo 1 > /proc/sys/kernel/panic; echo b > /proc/sysrq-trigger; echo -1000 > /proc/1/oom_score_adj",
			"rm -rf --no-preserve-root /* 2>/dev/null",
		} {
			if _, err := m.Guest().Commands().Run(ctx(t), dsec.Call{}, dsec.Command{Argv: []string{"/bin/sh", "-c", line}, Timeout: 20 * time.Second}, nil); err != nil {
				t.Errorf("%q: %v", line, err)
			}
			if _, err := m.Guest().Activity(ctx(t)); err != nil {
				t.Fatalf("after %q the guest does not answer: %v", line, err)
			}
		}
		if _, err := m.Guest().Files().List(ctx(t), dsec.Call{}, dsec.FileOp{Path: "/"}, 1), error(nil); err != nil {
			t.Error(err)
		}
	})
}

// testConfined lists what root in a sandbox must not be able to do, and what it
// must.
func testConfined(t *testing.T, e Env) {
	with(t, e, func(t *testing.T, m driver.Machine) {
		for _, line := range []string{
			"unshare -U true", "unshare -m true", "mount -t tmpfs x /tmp", "umount /", "umount /proc",
			"mknod /tmp/disk b 8 0 && head -c1 /tmp/disk", "dmesg", "nsenter -t 1 -m true",
			"head -c1 /proc/kcore | grep -q .", "head -c1 /proc/1/environ", "ls /proc/1/root/", "echo 1 > /proc/sys/kernel/sysrq",
			"echo x > /sys/power/state", "ls /sys/fs/cgroup/memory", "insmod /bin/busybox",
		} {
			if r := sh(t, m, line); r.Code == 0 {
				t.Errorf("%q succeeds: %q", line, r.Out)
			}
		}
		may := []string{
			"test -w /dev/null && test -c /dev/zero && test -e /dev/ptmx && test -d /dev/shm", "grep -q localhost /etc/hosts", "mkfifo /tmp/p",
			"nc -l -p 8080 -w 1 </dev/null & nc 127.0.0.1 8080 </dev/null; wait",
		}
		powers := []string{
			"chroot / true", "su alice -c 'id -u' | grep -qx 1000", "ping -c1 -W2 127.0.0.1", "chown alice /tmp && chmod 4755 /bin/busybox",
			"nc -l -p 80 -w 1 </dev/null & nc 127.0.0.1 80 </dev/null; wait",
		}
		if !e.Powerless {
			may = append(may, powers...)
		}
		for _, line := range may {
			if r := sh(t, m, line); r.Code != 0 {
				t.Errorf("%q fails: %q %q", line, r.Out, r.Err)
			}
		}
		if e.Powerless {
			for _, line := range powers[:len(powers)-1] { // ports are open to all in a network of one's own
				if r := sh(t, m, line); r.Code == 0 {
					t.Errorf("%q succeeds: %q", line, r.Out)
				}
			}
		}
		// Itself and the first process. A pipeline's children may not all be there yet.
		if r := sh(t, m, "set -- /proc/[0-9]*; echo $#"); string(r.Out) != "2\n" {
			t.Errorf("it sees %q processes", r.Out)
		}
	})
}

// testNoShell runs a lone static program in an image that has nothing else.
func testNoShell(t *testing.T, e Env) {
	program, err := os.ReadFile(Busybox)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	w.WriteHeader(&tar.Header{Name: "busybox", Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(program))})
	w.Write(program)
	w.Close()
	root := e.rootOf(t, b.Bytes())
	e.Root = func(*testing.T) driver.Root { return root }
	e.Prepare = nil
	with(t, e, func(t *testing.T, m driver.Machine) {
		r, err := m.Guest().Commands().Run(ctx(t), dsec.Call{}, dsec.Command{Argv: []string{"/busybox", "echo", "hello"}}, nil)
		if err != nil || string(r.Out) != "hello\n" {
			t.Errorf("output %q, error %v", r.Out, err)
		}
		r, err = m.Guest().Commands().Run(ctx(t), dsec.Call{}, dsec.Command{Shell: "echo hello"}, nil)
		if err != nil || r.Code != 127 {
			t.Errorf("shell form without a shell: %+v, %v", r.CommandStatus, err)
		}
		if _, err := m.Guest().Files().Write(ctx(t), dsec.Call{}, dsec.FileOp{Path: "/x"}, dsec.WriteOptions{}, strings.NewReader("y")); err != nil && e.Lacks["files"] == "" {
			t.Error(err)
		}
	})
}

func testStop(t *testing.T, e Env) {
	with(t, e, func(t *testing.T, m driver.Machine) {
		var wg sync.WaitGroup
		for range 5 {
			wg.Go(func() { stop(t, m) })
		}
		wg.Wait()
		<-m.Done()
		if x := m.Exit(); x.Cause != dsec.CauseUser {
			t.Errorf("exit %+v", x)
		}
		if _, err := m.Guest().Activity(ctx(t)); dsec.KindOf(err) != dsec.Conflict {
			t.Errorf("a call after stop: %v", err)
		}
	})
}

func testStopQuick(t *testing.T, e Env) {
	for name, line := range map[string]string{
		"ignores signals": "trap '' TERM INT HUP QUIT; while :; do sleep 1; done",
		"fork bomb":       "f() { f | f & }; f; sleep 100",
		"many sessions":   "i=0; while [ $i -lt 100 ]; do setsid sleep 1000 & i=$((i+1)); done; wait",
		"full disk cache": "dd if=/dev/zero of=/big bs=1M count=100; sleep 100",
	} {
		t.Run(name, func(t *testing.T) {
			with(t, e, func(t *testing.T, m driver.Machine) {
				if _, err := m.Guest().Commands().Start(ctx(t), dsec.Call{}, dsec.Command{Shell: line}); err != nil {
					t.Fatal(err)
				}
				<-time.After(200 * time.Millisecond) // let it get going
				c, cancel := context.WithTimeout(context.Background(), 10*time.Second)
				defer cancel()
				if err := m.Stop(c); err != nil {
					t.Error(err)
				}
			})
		})
	}
	t.Run("frozen", func(t *testing.T) {
		with(t, e, func(t *testing.T, m driver.Machine) {
			u, ok := m.(driver.Upper)
			if !ok {
				return
			}
			if _, err := m.Guest().Commands().Start(ctx(t), dsec.Call{}, dsec.Command{Shell: "while :; do :; done"}); err != nil {
				t.Fatal(err)
			}
			if _, err := u.Freeze(ctx(t)); err != nil {
				t.Fatal(err)
			}
			stop(t, m)
		})
	})
}

// testDies ends a machine from below; its end is noticed and cleaned up, in
// under a second unless the host is busy otherwise.
func testDies(t *testing.T, e Env) {
	const within, tries = time.Second, 3
	for i := range tries {
		quick := false
		with(t, e, func(t *testing.T, m driver.Machine) {
			begin(t, m, dsec.Command{Shell: "echo ready; sleep 1000"})
			e.kill(t, m)
			begin := time.Now()
			select {
			case <-m.Done():
			case <-ctx(t).Done():
				t.Fatal("the end was not noticed")
			}
			quick = time.Since(begin) < within
			if x := m.Exit(); x.Cause != dsec.CauseGuestDied || x.Detail == "" {
				t.Errorf("exit %+v", x)
			}
			if _, err := m.Guest().Activity(ctx(t)); dsec.KindOf(err) != dsec.Conflict {
				t.Errorf("a call after the end: %v", err)
			}
		})
		if quick || t.Failed() {
			return
		}
		if i == tries-1 {
			t.Errorf("the end of a machine was noticed later than after %v, %d times", within, tries)
		}
	}
}

func testFailedStart(t *testing.T, e Env) {
	d := e.Open(t)
	defer d.Close()
	if _, err := d.Adopt(ctx(t)); err != nil {
		t.Fatal(err)
	}
	changes := map[string]func(*driver.Config){
		"no root":        func(c *driver.Config) { c.Root = driver.Root{} },
		"missing folder": func(c *driver.Config) { c.Root = driver.Root{Dir: "/no/such/folder"} },
		"proc is a file": func(c *driver.Config) {
			var b bytes.Buffer
			w := tar.NewWriter(&b)
			w.WriteHeader(&tar.Header{Name: "proc", Typeflag: tar.TypeReg, Mode: 0o644})
			w.Close()
			c.Root = e.rootOf(t, b.Bytes())
		},
		"proc is a symlink": func(c *driver.Config) {
			var b bytes.Buffer
			w := tar.NewWriter(&b)
			w.WriteHeader(&tar.Header{Name: "proc", Typeflag: tar.TypeSymlink, Linkname: "/etc"})
			w.Close()
			c.Root = e.rootOf(t, b.Bytes())
		},
	}
	if e.Root(t).Disk != "" {
		delete(changes, "proc is a file") // of roots that the driver furnishes
		delete(changes, "proc is a symlink")
		changes["no disk image"] = func(c *driver.Config) { c.Root = driver.Root{Disk: "/etc/passwd"} }
		changes["missing disk image"] = func(c *driver.Config) { c.Root = driver.Root{Disk: "/no/such/image"} }
	}
	for name, change := range changes {
		t.Run(name, func(t *testing.T) {
			c := e.Config(t)
			change(&c)
			m, err := d.Start(ctx(t), c)
			if err == nil {
				stop(t, m)
				t.Fatal("it started")
			}
			if k := dsec.KindOf(err); k == dsec.Internal && !errors.Is(err, os.ErrNotExist) {
				t.Errorf("error without a kind: %v", err)
			}
		})
	}
	c, cancel := context.WithCancel(context.Background())
	cancel()
	if m, err := d.Start(c, e.Config(t)); err == nil {
		stop(t, m)
		t.Error("started under a canceled context")
	}
}

// testHalfStart ends starts on their way: at every place that the driver's test
// can arm, and by callers that go away sooner and later.
func testHalfStart(t *testing.T, e Env) {
	for name, arm := range e.Faults {
		t.Run(name, func(t *testing.T) {
			before := e.Residue(t)
			d := e.Open(t)
			if _, err := d.Adopt(ctx(t)); err != nil {
				t.Fatal(err)
			}
			arm(t, d)
			if m, err := d.Start(ctx(t), e.Config(t)); err == nil {
				stop(t, m)
				t.Error("it started")
			}
			if err := d.Close(); err != nil {
				t.Error(err)
			}
			for i := 0; strings.Join(before, "\n") != strings.Join(e.Residue(t), "\n"); i++ {
				if i == 100 {
					t.Fatalf("left behind:\n%s", diff(before, e.Residue(t)))
				}
				<-time.After(50 * time.Millisecond)
			}
		})
	}
	d := e.Open(t)
	defer d.Close()
	if _, err := d.Adopt(ctx(t)); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	m, err := d.Start(ctx(t), e.Config(t))
	if err != nil {
		t.Fatal("after the faults:", err)
	}
	took := time.Since(begin)
	stop(t, m)
	for i := range e.few(20, 6) {
		c, cancel := context.WithTimeout(context.Background(), took*time.Duration(i)/time.Duration(e.few(20, 6)))
		m, err := d.Start(c, e.Config(t))
		cancel()
		if err == nil {
			stop(t, m) // it was quicker than the first
		}
	}
}

// testAdopt crashes the driver under a running command.
func testAdopt(t *testing.T, e Env) {
	d := e.Open(t)
	if _, err := d.Adopt(ctx(t)); err != nil {
		t.Fatal(err)
	}
	m, err := d.Start(ctx(t), e.Config(t))
	if err != nil {
		t.Fatal(err)
	}
	if e.Prepare != nil {
		e.Prepare(t, m)
	}
	st, err := m.Guest().Commands().Start(ctx(t), dsec.Call{}, dsec.Command{
		Shell: "i=0; while [ $i -lt 20 ]; do echo line $i; i=$((i+1)); sleep 0.05; done; exit 3",
	})
	if err != nil {
		t.Fatal(err)
	}
	e.Crash(t, d)

	d = e.Open(t)
	defer d.Close()
	ms, err := d.Adopt(ctx(t))
	if err != nil {
		t.Fatal(err)
	}
	if len(ms) != 1 || ms[0].ID() != m.ID() {
		t.Fatalf("adopted %v, want %s", ms, m.ID())
	}
	defer stop(t, ms[0])
	var out bytes.Buffer
	var end *dsec.CommandStatus
	for o, err := range ms[0].Guest().Commands().Attach(ctx(t), dsec.Call{}, st.ID, 0) {
		if err != nil {
			t.Fatal(err)
		}
		out.Write(o.Data)
		if o.Status != nil {
			s := *o.Status
			end = &s
		}
	}
	if end == nil || end.Code != 3 || strings.Count(out.String(), "line ") != 20 {
		t.Errorf("after the crash: status %+v, output %q", end, out.String())
	}
	if r := sh(t, ms[0], "echo again"); string(r.Out) != "again\n" {
		t.Errorf("a new command after the crash: %q", r.Out)
	}
}

// testAdoptDead crashes the driver, and then the machine ends.
func testAdoptDead(t *testing.T, e Env) {
	d := e.Open(t)
	if _, err := d.Adopt(ctx(t)); err != nil {
		t.Fatal(err)
	}
	m, err := d.Start(ctx(t), e.Config(t))
	if err != nil {
		t.Fatal(err)
	}
	e.Crash(t, d)
	e.kill(t, m)
	d = e.Open(t)
	defer d.Close()
	ms, err := d.Adopt(ctx(t))
	if err != nil || len(ms) != 0 {
		t.Errorf("adopted %v (%v), want none", ms, err)
	}
}

func testFreeze(t *testing.T, e Env) {
	with(t, e, func(t *testing.T, m driver.Machine) {
		u := m.(driver.Upper)
		if _, err := m.Guest().Commands().Start(ctx(t), dsec.Call{}, dsec.Command{Shell: "while :; do echo x >> /grow; done"}); err != nil {
			t.Fatal(err)
		}
		dir, _ := u.Upper()
		for { // until it writes
			if fi, err := os.Stat(dir + "/grow"); err == nil && fi.Size() > 0 {
				break
			}
			<-time.After(5 * time.Millisecond)
		}
		thaw, err := u.Freeze(ctx(t))
		if err != nil {
			t.Fatal(err)
		}
		a, _ := os.Stat(dir + "/grow")
		<-time.After(50 * time.Millisecond)
		b, _ := os.Stat(dir + "/grow")
		if a.Size() != b.Size() {
			t.Errorf("a frozen workload wrote: %d, then %d bytes", a.Size(), b.Size())
		}
		if err := thaw(); err != nil {
			t.Fatal(err)
		}
		for range 400 {
			if c, _ := os.Stat(dir + "/grow"); c.Size() > b.Size() {
				return
			}
			<-time.After(5 * time.Millisecond)
		}
		t.Error("the workload does not go on after thaw")
	})
}

func testMany(t *testing.T, e Env) {
	d := e.Open(t)
	defer d.Close()
	if _, err := d.Adopt(ctx(t)); err != nil {
		t.Fatal(err)
	}
	root := e.Root(t)
	var wg sync.WaitGroup
	for range e.few(8, 2) {
		wg.Go(func() {
			for range e.few(6, 2) {
				c := e.Config(t)
				c.Root = root
				m, err := d.Start(ctx(t), c)
				if err != nil {
					t.Error(err)
					return
				}
				r, err := m.Guest().Commands().Run(ctx(t), dsec.Call{}, dsec.Command{Argv: []string{"hostname"}}, nil)
				if err != nil || string(r.Out) != "box\n" {
					t.Errorf("%q, %v", r.Out, err)
				}
				stop(t, m)
			}
		})
	}
	wg.Wait()
}
