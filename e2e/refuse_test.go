package e2e_test

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
)

// TestCreateRefused asks for what cannot be: each is refused with its kind, and
// nothing is left of it.
func TestCreateRefused(t *testing.T) {
	n := shared(t)
	list := func() int {
		l, err := n.Sandboxes.List(ctx(t), dsec.Filter{All: true})
		must(t, err)
		return len(l)
	}
	before := list()
	many := make(map[string]string)
	for i := range dsec.MaxLabels + 1 {
		many[strings.Repeat("k", i+1)] = ""
	}
	for _, c := range []struct {
		name   string
		change func(*dsec.Spec)
		kind   dsec.ErrorKind
	}{
		{"no image", func(s *dsec.Spec) { s.Environment.Base = "" }, dsec.Invalid},
		{"unknown image", func(s *dsec.Spec) { s.Environment.Base = "no-such-image" }, dsec.NotFound},
		{"unknown version", func(s *dsec.Spec) { s.Environment.Base = busybox + "@none" }, dsec.NotFound},
		{"unknown workspace", func(s *dsec.Spec) { s.Environment.Workspace = "no-such" }, dsec.NotFound},
		{"unknown toolkit", func(s *dsec.Spec) { s.Environment.Toolkits = []string{"no-such"} }, dsec.NotFound},
		{"bad image name", func(s *dsec.Spec) { s.Environment.Base = "../../etc" }, dsec.Invalid},
		{"long image name", func(s *dsec.Spec) { s.Environment.Base = strings.Repeat("a", 1<<20) }, dsec.Invalid},
		{"many toolkits", func(s *dsec.Spec) { s.Environment.Toolkits = make([]string, dsec.MaxToolkits+1) }, dsec.Invalid},
		{"unknown kind", func(s *dsec.Spec) { s.Kind = "zeppelin" }, dsec.Invalid},
		{"microvm", func(s *dsec.Spec) { s.Kind = dsec.MicroVM }, dsec.Unsupported},
		{"fullvm without a disk", func(s *dsec.Spec) { s.Kind = dsec.FullVM }, dsec.Invalid},
		{"network", func(s *dsec.Spec) { s.Network = "host" }, dsec.Unsupported},
		{"no memory", func(s *dsec.Spec) { s.Resources.Memory = 1 }, dsec.Invalid},
		{"negative memory", func(s *dsec.Spec) { s.Resources.Memory = -1 }, dsec.Invalid},
		{"too much memory", func(s *dsec.Spec) { s.Resources.Memory = math.MaxInt64 }, dsec.Invalid},
		{"not a number", func(s *dsec.Spec) { s.Resources.CPU = math.NaN() }, dsec.Invalid},
		{"infinite", func(s *dsec.Spec) { s.Resources.CPU = math.Inf(1) }, dsec.Invalid},
		{"negative cpu", func(s *dsec.Spec) { s.Resources.CPU = -1 }, dsec.Invalid},
		{"no disk", func(s *dsec.Spec) { s.Resources.Disk = 1 }, dsec.Invalid},
		{"too much disk", func(s *dsec.Spec) { s.Resources.Disk = math.MaxInt64 }, dsec.Invalid},
		{"no pids", func(s *dsec.Spec) { s.Resources.Pids = 1 }, dsec.Invalid},
		{"too many pids", func(s *dsec.Spec) { s.Resources.Pids = math.MaxInt32 }, dsec.Invalid},
		{"short ttl", func(s *dsec.Spec) { s.TTL = 1 }, dsec.Invalid},
		{"negative ttl", func(s *dsec.Spec) { s.TTL = -time.Hour }, dsec.Invalid},
		{"endless ttl", func(s *dsec.Spec) { s.TTL = math.MaxInt64 }, dsec.Invalid},
		{"negative idle", func(s *dsec.Spec) { s.Idle = -1 }, dsec.Invalid},
		{"host name", func(s *dsec.Spec) { s.Hostname = strings.Repeat("h", 64) }, dsec.Invalid},
		{"relative folder", func(s *dsec.Spec) { s.Cwd = "home" }, dsec.Invalid},
		{"variable", func(s *dsec.Spec) { s.Env = map[string]string{"A=B": "c"} }, dsec.Invalid},
		{"large variables", func(s *dsec.Spec) { s.Env = map[string]string{"A": strings.Repeat("x", dsec.MaxEnvBytes)} }, dsec.Invalid},
		{"labels", func(s *dsec.Spec) { s.Labels = many }, dsec.Invalid},
	} {
		t.Run(c.name, func(t *testing.T) {
			spec := plain()
			c.change(&spec)
			sb, err := n.Sandboxes.Create(ctx(t), spec, dsec.CreateOptions{})
			wantKind(t, "create", err, c.kind)
			if err == nil {
				n.stop(t, sb.ID)
			}
		})
	}
	_, err := n.Sandboxes.Create(ctx(t), plain(), dsec.CreateOptions{Key: strings.Repeat("k", dsec.MaxKeyBytes+1)})
	wantKind(t, "long key", err, dsec.Invalid)
	if after := list(); after != before {
		t.Errorf("%d sandboxes became %d", before, after)
	}

	for _, c := range []struct {
		line string
		code int
		text string
	}{
		{"create --image no-such-image", 1, "no-such-image"},
		{"create", 1, "no base image"},
		{"create --image busybox --memory 1", 1, "memory"},
		{"create --image busybox --memory lots", 2, "lots"},
		{"create --image busybox --kind microvm", 1, "microvm"},
		{"create --no-such-flag", 2, "no-such-flag"},
		{"exec", 125, "sandbox"},
		{"exec sbnothing -- true", 125, "sbnothing"},
		{"run --image busybox --pids 1 -- true", 125, "pids"},
		{"image inspect no-such-image", 1, "no-such-image"},
		{"stop sbnothing", 1, "sbnothing"},
	} {
		r := n.run(nil, strings.Fields(c.line)...)
		first, _, _ := strings.Cut(r.err, "\n")
		if r.code != c.code || r.out != "" || !strings.HasPrefix(first, "dsec: ") || !strings.Contains(first, c.text) {
			t.Errorf("dsec %s: status %d, output %q, errors %q; want %d and %q", c.line, r.code, r.out, r.err, c.code, c.text)
		}
	}
}

// TestLargestLimits asks for the most that a Spec can say. Limits are no
// reservations, so the sandbox runs.
func TestLargestLimits(t *testing.T) {
	n := shared(t)
	spec := plain()
	spec.Resources = dsec.Resources{CPU: dsec.MaxCPU, Memory: dsec.MaxMemory, Disk: dsec.MaxDisk, Pids: dsec.MaxPids}
	spec.TTL, spec.Idle = dsec.MaxTTL, dsec.MaxTTL
	sb := n.create(t, spec)
	if r := n.sh(t, sb.ID, "echo up"); string(r.Out) != "up\n" {
		t.Errorf("output %q, %+v", r.Out, r.CommandStatus)
	}
}

// TestSmallestLimits asks for the least. What does not fit in it fails as a
// command, never as the sandbox.
func TestSmallestLimits(t *testing.T) {
	n := shared(t)
	spec := plain()
	spec.Resources = dsec.Resources{CPU: dsec.MinCPU, Memory: dsec.MinMemory, Disk: dsec.MinDisk, Pids: dsec.MinPids}
	sb := n.create(t, spec)
	r := n.sh(t, sb.ID, "echo up")
	if string(r.Out) != "up\n" && r.Outcome != dsec.OutOfMemory {
		t.Errorf("output %q, %+v", r.Out, r.CommandStatus)
	}
	got, err := n.Sandboxes.Get(ctx(t), sb.ID)
	if err != nil || got.State != dsec.Running {
		t.Errorf("the sandbox is %s (%s %s), %v", got.State, got.Cause, got.Detail, err)
	}
}

// TestCommandRefused asks a sandbox for what cannot be run.
func TestCommandRefused(t *testing.T) {
	n := shared(t)
	sb := n.create(t, plain())
	run := []string{"true"}
	for _, c := range []struct {
		name string
		c    dsec.Command
	}{
		{"nothing", dsec.Command{}},
		{"empty list", dsec.Command{Argv: []string{}}},
		{"no program", dsec.Command{Argv: []string{""}}},
		{"both forms", dsec.Command{Argv: run, Shell: "true"}},
		{"NUL in an argument", dsec.Command{Argv: []string{"echo", "a\x00b"}}},
		{"NUL in a line", dsec.Command{Shell: "echo \x00"}},
		{"missing folder", dsec.Command{Argv: run, Cwd: "/no/such"}},
		{"folder is a file", dsec.Command{Argv: run, Cwd: "/etc/passwd"}},
		{"relative folder", dsec.Command{Argv: run, Cwd: "home"}},
		{"missing user", dsec.Command{Argv: run, User: "no-such-user"}},
		{"missing group", dsec.Command{Argv: run, User: "alice:no-such-group"}},
		{"user out of range", dsec.Command{Argv: run, User: "99999999999"}},
		{"negative timeout", dsec.Command{Argv: run, Timeout: -1}},
		{"endless timeout", dsec.Command{Argv: run, Timeout: dsec.MaxTimeout + 1}},
		{"negative idle", dsec.Command{Argv: run, Idle: -1}},
		{"negative output", dsec.Command{Argv: run, Output: -1}},
		{"endless output", dsec.Command{Argv: run, Output: dsec.MaxOutput + 1}},
		{"stdin mode", dsec.Command{Argv: run, Stdin: "socket"}},
		{"variable", dsec.Command{Argv: run, Env: map[string]string{"": "x"}}},
		{"large arguments", dsec.Command{Shell: strings.Repeat("x", dsec.MaxArgBytes+1)}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := n.Commands.Run(ctx(t), on(sb.ID), c.c, nil)
			// What is too large for a message never gets as far as a check.
			if c.name == "large arguments" {
				wantKind(t, "run", err, dsec.Invalid, dsec.Exhausted)
				return
			}
			wantKind(t, "run", err, dsec.Invalid)
			_, err = n.Commands.Start(ctx(t), on(sb.ID), c.c)
			wantKind(t, "start", err, dsec.Invalid)
		})
	}
	if l, err := n.Commands.List(ctx(t), on(sb.ID)); err != nil || len(l) != 0 {
		t.Errorf("%d commands, %v", len(l), err)
	}
	// 0 is "none" for both times, and the largest are allowed.
	for _, c := range []dsec.Command{{Argv: run}, {Argv: run, Timeout: dsec.MaxTimeout, Idle: dsec.MaxTimeout, Output: dsec.MaxOutput}} {
		if r, err := n.Commands.Run(ctx(t), on(sb.ID), c, nil); err != nil || r.Outcome != dsec.Exited {
			t.Errorf("%+v: %+v, %v", c, r.CommandStatus, err)
		}
	}

	_, err := n.Commands.Wait(ctx(t), on(sb.ID), "c999")
	wantKind(t, "unknown command", err, dsec.NotFound)
	_, err = n.Commands.Start(ctx(t), on("sbnothing"), dsec.Command{Argv: run})
	wantKind(t, "no ID", err, dsec.NotFound)
	altered := sb.ID[:len(sb.ID)-1] + "a"
	if altered == sb.ID {
		altered = sb.ID[:len(sb.ID)-1] + "b"
	}
	_, err = n.Commands.Start(ctx(t), on(altered), dsec.Command{Argv: run})
	wantKind(t, "altered ID", err, dsec.NotFound)
	n.stop(t, sb.ID)
	_, err = n.Commands.Start(ctx(t), on(sb.ID), dsec.Command{Argv: run})
	wantKind(t, "ended sandbox", err, dsec.Conflict)
}
