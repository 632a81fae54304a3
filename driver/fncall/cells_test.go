package fncall_test

import (
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver/drivertest"
)

// glance prints what a call could find of others, with no more than a shell and
// busybox: what can be tested on a host that has neither Python nor Debian.
const glance = `
for d in /tmp /work /dev/shm /dev/mqueue /dev/pts /root /home /etc /bin; do echo $d $(ls -A $d 2>&1 | md5sum | cut -c1-8) $(ls -A $d | wc -l); done
echo processes /proc/[0-9]*
echo descriptors $(ls /proc/self/fd)
env | sort
cat /proc/sysvipc/shm /proc/sysvipc/sem /proc/sysvipc/msg | wc -l
wc -l < /proc/net/tcp; wc -l < /proc/net/unix; wc -l < /proc/self/mountinfo
grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status
cat /proc/self/cgroup | grep -v '^$' | wc -l
hostname; umask; pwd; ls -A /
`

// TestCells runs calls on busybox: limits and figures of control groups of
// either kind, and that no call finds anything of an earlier one.
func TestCells(t *testing.T) {
	r := rigOn(t, drivertest.Root(t))
	before := r.call(shell(glance))
	first := string(before.Out)
	if before.Outcome != dsec.FunctionOK {
		t.Fatalf("glance: %s %s", before.Outcome, before.Err)
	}
	for _, want := range []string{"processes /proc/1 /proc/2", "CapEff:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2", "/work"} {
		if !strings.Contains(first, want) {
			t.Errorf("a fresh call sees no %q:\n%s", want, first)
		}
	}
	for _, c := range []struct {
		name, source string
		limits       dsec.FunctionLimits
		outcomes     string
		limit        string
	}{
		{name: "ok", source: "echo fine", outcomes: "ok"},
		{name: "exit", source: "exit 3", outcomes: "exit"},
		{name: "wall", source: "sleep 100", limits: dsec.FunctionLimits{Wall: time.Second}, outcomes: "timeout", limit: dsec.LimitWall},
		{name: "cpu", source: "while :; do :; done", limits: dsec.FunctionLimits{CPU: 300 * time.Millisecond}, outcomes: "timeout", limit: dsec.LimitCPU},
		{name: "cpu of children", source: "while :; do :; done & while :; do :; done & wait", limits: dsec.FunctionLimits{CPU: 300 * time.Millisecond}, outcomes: "timeout", limit: dsec.LimitCPU},
		{name: "memory", source: "exec tail /dev/zero", limits: dsec.FunctionLimits{Memory: 32 << 20}, outcomes: "memory"},
		{name: "files are memory", source: "dd if=/dev/zero of=/tmp/x bs=1M count=100", limits: dsec.FunctionLimits{Memory: 64 << 20}, outcomes: "exit memory"},
		{name: "output", source: "yes", outcomes: "output"},
		{name: "pids", source: "i=0; while [ $i -lt 40 ]; do sleep 50 & i=$((i+1)); done", limits: dsec.FunctionLimits{Pids: 16}, outcomes: "exit"},
		{name: "fork bomb", source: "f() { f | f & }; f; sleep 50", limits: dsec.FunctionLimits{Wall: 3 * time.Second}, outcomes: "timeout ok exit signal output"},
		{name: "daemon", source: "setsid sh -c 'while :; do echo x > /tmp/mine; done' & echo gone", outcomes: "ok"},
		{name: "kill everything", source: "kill -9 1; kill -STOP 1; kill -9 -1", outcomes: "ok exit signal"},
		{name: "files everywhere", source: "for d in /tmp /work /etc /root /home /bin /dev/shm; do echo x > $d/planted; done; rm -rf /etc/passwd /home/alice; chmod 0 /tmp", outcomes: "ok exit"},
		{name: "out of the root", source: "umount / || umount -l /proc || mount -t tmpfs x /mnt || chroot /tmp || mknod /tmp/n b 8 0 || nsenter -t 1 -m true || unshare -U true", outcomes: "exit"},
		{name: "host's names", source: "hostname other; echo 1 > /proc/sys/kernel/sysrq; echo x > /proc/sys/kernel/hostname", outcomes: "exit"},
		{name: "control groups", source: "for f in $(find /sys/fs/cgroup -name '*.procs' -o -name tasks -o -name '*.max' 2>/dev/null); do echo 0 > $f && exit 0; done 2>/dev/null; exit 1", outcomes: "exit"},
		{name: "stopped", source: "kill -STOP $$", limits: dsec.FunctionLimits{Wall: time.Second}, outcomes: "timeout", limit: dsec.LimitWall},
		{name: "a crash", source: "kill -SEGV $$", outcomes: "signal"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := &rig{t: t, driver: r.driver, m: r.m}
			f := shell(c.source)
			f.Limits = c.limits
			res := r.call(f)
			if !strings.Contains(" "+c.outcomes+" ", " "+string(res.Outcome)+" ") || c.limit != "" && res.Limit != c.limit {
				t.Errorf("outcome %s %s, code %d, prints %.200q and %.500q; want %s %s", res.Outcome, res.Limit, res.Code, res.Out, res.Err, c.outcomes, c.limit)
			}
			if after := r.call(shell(glance)); string(after.Out) != first {
				t.Errorf("the next call sees something else: %s %s\n%s", after.Outcome, after.Err, difference(first, string(after.Out)))
			}
		})
	}
	// Figures are those of one call.
	big := r.call(shell("dd if=/dev/zero of=/dev/null bs=60M count=1 2>/dev/null"))
	small := r.call(shell(":"))
	if big.Memory < 60<<20 || small.Memory > 20<<20 || small.Memory <= 0 || big.CPU <= 0 || big.Wall <= 0 {
		t.Errorf("peaks are %d and %d KiB, time %v of %v", big.Memory>>10, small.Memory>>10, big.CPU, big.Wall)
	}
}
