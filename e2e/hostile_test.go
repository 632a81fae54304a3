package e2e_test

import (
	"bytes"
	"context"
	"os"
	"strings"
	"testing"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver/drivertest"
)

// TestHostileWorkloads runs what workloads do to their computer. While each is
// at it, its own sandbox and a neighbour answer; a stop ends it whatever it is.
func TestHostileWorkloads(t *testing.T) {
	n := shared(t)
	neighbour := n.create(t, plain())
	memory := n.anonymous(t)
	for _, c := range []struct{ name, line string }{
		{"fork bomb", "f() { f | f & }; f; sleep 1000"},
		{"memory hog", "while :; do tail /dev/zero; done"},
		{"all processes, deaf", "trap '' TERM INT HUP QUIT; while :; do setsid sleep 1000 & done"},
		{"every descriptor and every pid", `(for p in /proc/[0-9]*; do for f in $p/fd/*; do echo scribble > $f; done; done) 2>/dev/null
			for p in $(seq 1 400); do [ $p = $$ ] || kill -9 $p; done 2>/dev/null; exec 0<&- 1>&- 2>&-; while :; do kill -9 -1; done`},
		{"no /bin", "rm -rf /bin /etc /usr; while :; do :; done"},
		{"shells overwritten", `cd /bin; cp busybox /keep; for s in sh ash busybox; do rm -f $s; echo junk > $s; chmod 755 $s; done; while :; do :; done`},
		{"its own cage", `(umount -l /proc; mount --bind / /mnt; echo 1 > /proc/sys/kernel/panic; echo b > /proc/sysrq-trigger
			echo -1000 > /proc/self/oom_score_adj; rm -rf --no-preserve-root /dev /sys /proc; hostname hacked) 2>/dev/null; while :; do :; done`},
		{"output without end", "yes & yes >&2"},
		{"files without end", "mkdir /f; cd /f; i=0; while :; do : > $i; i=$((i+1)); done"},
	} {
		t.Run(c.name, func(t *testing.T) {
			sb := n.create(t, plain())
			st := n.begin(t, sb.ID, dsec.Command{Shell: c.line})
			for range 10 {
				if r := n.sh(t, neighbour.ID, "echo alive"); string(r.Out) != "alive\n" {
					t.Fatalf("the neighbour says %q, %+v", r.Out, r.CommandStatus)
				}
				// Its own guest needs neither its memory nor its processes.
				if l, err := n.Commands.List(ctx(t), on(sb.ID)); err != nil || len(l) != 1 {
					t.Fatalf("list: %d, %v", len(l), err)
				}
				if _, err := n.Files.Stat(ctx(t), on(sb.ID), dsec.FileOp{Path: "/tmp"}); err != nil {
					t.Fatalf("stat: %v", err)
				}
			}
			if err := n.Commands.Signal(ctx(t), on(sb.ID), st.ID, "KILL"); err != nil && dsec.KindOf(err) != dsec.Conflict {
				t.Errorf("kill: %v", err)
			}
			if st, err := n.Commands.Wait(ctx(t), on(sb.ID), st.ID); err != nil || st.Outcome == dsec.StillRunning {
				t.Errorf("after the kill: %+v, %v", st, err)
			}
			// After it, the sandbox runs what is brought along.
			program, err := os.ReadFile(drivertest.Busybox)
			must(t, err)
			_, err = n.Files.Write(ctx(t), on(sb.ID), dsec.FileOp{Path: "/again/busybox"}, dsec.WriteOptions{Mode: 0o755, Parents: true}, bytes.NewReader(program))
			must(t, err)
			r, err := n.Commands.Run(ctx(t), on(sb.ID), dsec.Command{Argv: []string{"/again/busybox", "echo", "back"}}, nil)
			if err != nil || string(r.Out) != "back\n" {
				t.Errorf("output %q, %+v, %v", r.Out, r.CommandStatus, err)
			}
			n.begin(t, sb.ID, dsec.Command{Argv: []string{"/again/busybox", "sh", "-c", c.line}})
			got := n.stop(t, sb.ID)
			if got.State != dsec.Stopped || got.Cause != dsec.CauseUser {
				t.Errorf("stopped: %s %s %s", got.State, got.Cause, got.Detail)
			}
		})
	}
	if now := n.anonymous(t); now > memory+64<<20 {
		t.Errorf("the node grew from %d to %d bytes", memory, now)
	}
}

// TestWithoutPrograms takes away what commands are made of: each failure is the
// command's own outcome.
func TestWithoutPrograms(t *testing.T) {
	n := shared(t)
	sb := n.create(t, plain())
	for _, c := range []struct {
		name, line string
		cmd        dsec.Command
		code       int
	}{
		{"junk for a shell", "rm /bin/sh; echo junk > /bin/sh; chmod 755 /bin/sh", dsec.Command{Shell: "echo x"}, 126},
		{"other programs do not mind", "", dsec.Command{Argv: []string{"true"}}, 0},
		{"a shell without its interpreter", "", dsec.Command{Argv: []string{"ash", "-c", "rm /bin/sh; echo '#!/bin/gone' > /bin/sh; chmod 755 /bin/sh"}}, 0},
		{"it cannot start", "", dsec.Command{Shell: "echo x"}, 127},
		{"everything is removed", "", dsec.Command{Argv: []string{"rm", "-rf", "/bin"}}, 0},
		{"nothing is found", "", dsec.Command{Argv: []string{"true"}}, 127},
		{"no shell is found", "", dsec.Command{Shell: "true"}, 127},
	} {
		if c.line != "" {
			n.sh(t, sb.ID, c.line)
		}
		r, err := n.Commands.Run(ctx(t), on(sb.ID), c.cmd, nil)
		if err != nil || r.Code != c.code {
			t.Errorf("%s: %d %s, %v; want %d", c.name, r.Code, r.Detail, err, c.code)
		}
	}
}

// TestOutOfMemory is told as such, in the command and in the sandbox's figures.
func TestOutOfMemory(t *testing.T) {
	n := shared(t)
	spec := plain()
	spec.Resources.Memory = 32 << 20
	sb := n.create(t, spec)
	r := n.sh(t, sb.ID, "exec tail /dev/zero")
	if r.Outcome != dsec.OutOfMemory || r.Code != 137 {
		t.Errorf("%s %d", r.Outcome, r.Code)
	}
	got, err := n.Sandboxes.Get(ctx(t), sb.ID)
	must(t, err)
	if got.State != dsec.Running || got.Usage.OOMKills == 0 || got.Usage.MemoryPeak > sb.Spec.Resources.Memory {
		t.Errorf("%s, %+v", got.State, got.Usage)
	}
}

// TestDiskLimit lets a workload write more than it may: the sandbox ends, and
// everybody is told why.
func TestDiskLimit(t *testing.T) {
	n := shared(t)
	spec := plain()
	spec.Resources.Disk = 8 << 20
	sb := n.create(t, spec)
	st := n.begin(t, sb.ID, dsec.Command{Shell: "dd if=/dev/zero of=/big bs=1M count=64; sleep 1000"})
	ended, err := n.Sandboxes.Wait(ctx(t), sb.ID)
	must(t, err)
	if ended.Cause != dsec.CauseDisk || ended.State == dsec.Running || !strings.Contains(ended.Detail, "8 MiB") {
		t.Errorf("%s %s %q", ended.State, ended.Cause, ended.Detail)
	}
	end, err := n.Commands.Wait(ctx(t), on(sb.ID), st.ID)
	must(t, err)
	if end.Outcome != dsec.Interrupted || !strings.Contains(end.Detail, "disk") {
		t.Errorf("its command: %s, %q", end.Outcome, end.Detail)
	}
	if r := n.run(nil, "wait", string(sb.ID)); !strings.Contains(r.out+r.err, "disk") {
		t.Errorf("dsec wait says %q %q (%d)", r.out, r.err, r.code)
	}
}

// TestEndsReachWhoWaits stops a sandbox under an Attach, a Wait, a Watch and a
// Run: each ends at once, with its kind.
func TestEndsReachWhoWaits(t *testing.T) {
	n := shared(t)
	sb := n.create(t, plain())
	st := n.begin(t, sb.ID, dsec.Command{Shell: "echo up; sleep 1000"})
	ready, ends := make(chan struct{}, 4), make(chan error, 4)
	go func() {
		var last error
		for _, err := range n.Commands.Attach(ctx(t), on(sb.ID), st.ID, 0) {
			if last = err; err == nil {
				ready <- struct{}{}
			}
		}
		ends <- last
	}()
	go func() {
		var last error
		for _, err := range n.Files.Watch(ctx(t), on(sb.ID), dsec.FileOp{Path: "/tmp"}, dsec.WatchOptions{}) {
			if last = err; err == nil {
				ready <- struct{}{}
			}
		}
		ends <- last
	}()
	<-ready
	<-ready
	go func() { _, err := n.Commands.Wait(ctx(t), on(sb.ID), st.ID); ends <- err }()
	go func() {
		_, err := n.Commands.Run(ctx(t), on(sb.ID), dsec.Command{Shell: "touch /ran; sleep 1000"}, nil)
		ends <- err
	}()
	eventually(t, "the second command runs", func() bool {
		_, err := n.Files.Stat(ctx(t), on(sb.ID), dsec.FileOp{Path: "/ran"})
		return err == nil
	})
	n.stop(t, sb.ID)
	c, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for range 4 {
		select {
		case err := <-ends:
			wantKind(t, "a call that waited", err, dsec.Conflict)
		case <-c.Done():
			t.Fatal("a call waits on")
		}
	}
}
