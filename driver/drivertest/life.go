package drivertest

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

func testLimits(t *testing.T, e Env) {
	with(t, e, func(t *testing.T, m driver.Machine) {
		r := sh(t, m, "dd if=/dev/zero of=/dev/null bs=600M count=1")
		if r.Outcome != dsec.OutOfMemory && !(r.Outcome == dsec.Exited && r.Code != 0) {
			t.Errorf("600 MiB in a sandbox of 256: %+v", r.CommandStatus)
		}
		// The shell's child is the one that is killed here; the guest answers.
		if r := sh(t, m, "tail /dev/zero; echo $?"); string(r.Out) != "137\n" {
			t.Errorf("a memory hog ends with %q", r.Out)
		}
		u, err := m.Usage(ctx(t))
		if err != nil || u.OOMKills == 0 || u.MemoryPeak > 256<<20 || u.CPU == 0 {
			t.Errorf("usage %+v, %v", u, err)
		}
		r = sh(t, m, "i=0; while [ $i -lt 400 ]; do sleep 100 & i=$((i+1)); done; echo made")
		if !strings.Contains(string(r.Err), "can't fork") {
			t.Errorf("400 processes in a sandbox of 256: %q %q", r.Out, r.Err)
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
			"head -c1 /proc/kcore", "head -c1 /proc/1/environ", "ls /proc/1/root/", "echo 1 > /proc/sys/kernel/sysrq",
			"echo x > /sys/power/state", "ls /sys/fs/cgroup/memory", "insmod /bin/busybox",
		} {
			if r := sh(t, m, line); r.Code == 0 {
				t.Errorf("%q succeeds: %q", line, r.Out)
			}
		}
		for _, line := range []string{
			"chroot / true", "su alice -c 'id -u' | grep -qx 1000", "ping -c1 -W2 127.0.0.1", "chown alice /tmp && chmod 4755 /bin/busybox",
			"test -w /dev/null && test -c /dev/zero && test -e /dev/ptmx && test -d /dev/shm", "grep -q localhost /etc/hosts", "mkfifo /tmp/p",
			"nc -l -p 80 -w 1 </dev/null & nc 127.0.0.1 80 </dev/null; wait",
		} {
			if r := sh(t, m, line); r.Code != 0 {
				t.Errorf("%q fails: %q %q", line, r.Out, r.Err)
			}
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
	layer := MountTar(t, b.Bytes())
	e.Root = func(*testing.T) driver.Root { return driver.Root{Layers: []*os.File{layer}} }
	with(t, e, func(t *testing.T, m driver.Machine) {
		r, err := m.Guest().Commands().Run(ctx(t), dsec.Call{}, dsec.Command{Argv: []string{"/busybox", "echo", "hello"}}, nil)
		if err != nil || string(r.Out) != "hello\n" {
			t.Errorf("output %q, error %v", r.Out, err)
		}
		r, err = m.Guest().Commands().Run(ctx(t), dsec.Call{}, dsec.Command{Shell: "echo hello"}, nil)
		if err != nil || r.Code != 127 {
			t.Errorf("shell form without a shell: %+v, %v", r.CommandStatus, err)
		}
		if _, err := m.Guest().Files().Write(ctx(t), dsec.Call{}, dsec.FileOp{Path: "/x"}, dsec.WriteOptions{}, strings.NewReader("y")); err != nil {
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

// testDies ends a machine from below; its end is noticed and cleaned up.
func testDies(t *testing.T, e Env) {
	with(t, e, func(t *testing.T, m driver.Machine) {
		k, ok := m.(interface{ KillGuest() error })
		if !ok {
			return
		}
		if err := k.KillGuest(); err != nil {
			t.Fatal(err)
		}
		select {
		case <-m.Done():
		case <-ctx(t).Done():
			t.Fatal("the end was not noticed")
		}
		if x := m.Exit(); x.Cause != dsec.CauseGuestDied {
			t.Errorf("exit %+v", x)
		}
	})
}

func testFailedStart(t *testing.T, e Env) {
	d := e.Open(t)
	defer d.Close()
	if _, err := d.Adopt(ctx(t)); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*driver.Config){
		"no root":        func(c *driver.Config) { c.Root = driver.Root{} },
		"missing folder": func(c *driver.Config) { c.Root = driver.Root{Dir: "/no/such/folder"} },
		"proc is a file": func(c *driver.Config) {
			var b bytes.Buffer
			w := tar.NewWriter(&b)
			w.WriteHeader(&tar.Header{Name: "proc", Typeflag: tar.TypeReg, Mode: 0o644})
			w.Close()
			c.Root = driver.Root{Layers: []*os.File{MountTar(t, b.Bytes())}}
		},
		"proc is a symlink": func(c *driver.Config) {
			var b bytes.Buffer
			w := tar.NewWriter(&b)
			w.WriteHeader(&tar.Header{Name: "proc", Typeflag: tar.TypeSymlink, Linkname: "/etc"})
			w.Close()
			c.Root = driver.Root{Layers: []*os.File{MountTar(t, b.Bytes())}}
		},
	} {
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
	k, ok := m.(interface{ KillGuest() error })
	if !ok {
		stop(t, m)
		d.Close()
		return
	}
	e.Crash(t, d)
	if err := k.KillGuest(); err != nil {
		t.Fatal(err)
	}
	d = e.Open(t)
	defer d.Close()
	ms, err := d.Adopt(ctx(t))
	if err != nil || len(ms) != 0 {
		t.Errorf("adopted %v (%v), want none", ms, err)
	}
}

func testFreeze(t *testing.T, e Env) {
	with(t, e, func(t *testing.T, m driver.Machine) {
		u, ok := m.(driver.Upper)
		if !ok {
			return
		}
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
	for range 8 {
		wg.Go(func() {
			for range 6 {
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
