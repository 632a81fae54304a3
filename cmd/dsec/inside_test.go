package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
)

// builtDsec gives the dsec program without a libc, built once.
var builtDsec = sync.OnceValues(func() ([]byte, error) {
	dir, err := os.MkdirTemp("", "dsec-program-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "dsec")
	build := exec.Command("go", "build", "-ldflags", "-s -w", "-o", path, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build dsec: %w\n%s", err, out)
	}
	return os.ReadFile(path)
})

// agentWorld is a node with an image that holds the dsec program and nothing
// else: no libc, no shell.
func agentWorld(t *testing.T) (*world, *session) {
	t.Helper()
	w := newWorld(t)
	up := w.up()
	root := w.rootfs()
	program, err := builtDsec()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "bin", "dsec"), program, 0o755); err != nil {
		t.Fatal(err)
	}
	w.run("image", "import", root, "--name", "tiny@1")
	return w, up
}

// fails runs a command line that must fail and gives its message.
func (w *world) fails(args ...string) string {
	w.t.Helper()
	s := w.start(args...)
	if code := <-s.code; code == 0 {
		w.t.Errorf("dsec %s: succeeded: %s", strings.Join(args, " "), s.out.String())
	}
	return s.err.String()
}

// await polls for a condition that comes true by itself.
func await(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !f(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within 20 s", what)
		}
	}
}

// TestSandboxDrivesSandboxes is an agent in an image without a libc: it makes
// sandboxes with the dsec program over its loopback, over a restart of the node,
// and they end with it.
func TestSandboxDrivesSandboxes(t *testing.T) {
	w, up := agentWorld(t)
	if msg := w.fails("create", "--image", "tiny", "--api-sandboxes", "3"); !strings.Contains(msg, "--api") {
		t.Error(msg)
	}
	agent := w.run("create", "--image", "tiny", "--api", "--api-sandboxes", "3", "--memory", "512M")
	in := func(args ...string) []string { return append([]string{"exec", agent, "--", "dsec"}, args...) }
	child := w.run(in("create", "--image", "tiny", "--label", "of=agent", "--memory", "64M")...)
	if got := w.run(in("exec", child, "--", "hello", "version")...); !strings.HasPrefix(got, "dsec-guest ") {
		t.Errorf("exec from inside gave %q", got)
	}
	if got := w.run(in("ls", "-q")...); got != child {
		t.Errorf("ls from inside gave %q, want %s alone", got, child)
	}
	if got := w.run("ls", "-q"); !strings.Contains(got, child) || !strings.Contains(got, agent) {
		t.Errorf("the operator lists %q", got)
	}
	sb, err := w.services().Sandboxes.Get(t.Context(), dsec.SandboxID(child))
	if want := dsec.SandboxProject("default", dsec.SandboxID(agent)); err != nil || sb.Spec.Project != want {
		t.Errorf("the child is of project %q, want %q: %v", sb.Spec.Project, want, err)
	}
	w.run(in("cp", "/note", child+":/copied")...)
	if got := w.run("cp", child+":/copied", "-"); got != "from the image" {
		t.Errorf("what the agent copied is %q", got)
	}

	// The quota is exact, and given back at the end of a sandbox.
	second := w.run(in("create", "--image", "tiny")...)
	w.run(in("create", "--image", "tiny")...)
	if msg := w.fails(in("create", "--image", "tiny")...); !strings.Contains(msg, "3 of the 3 sandboxes") {
		t.Errorf("a create beyond the quota: %s", msg)
	}
	w.run(in("stop", second)...)
	w.run(in("create", "--image", "tiny")...)

	// A new process of the node finds listener, token and counts again.
	up.signals <- os.Interrupt
	<-up.code
	up = w.up()
	if got := w.run(in("exec", child, "--", "hello", "version")...); !strings.HasPrefix(got, "dsec-guest ") {
		t.Errorf("after a restart exec from inside gave %q", got)
	}
	if msg := w.fails(in("create", "--image", "tiny")...); !strings.Contains(msg, "3 of the 3 sandboxes") {
		t.Errorf("a create beyond the quota after a restart: %s", msg)
	}

	// Its end is theirs.
	w.run("stop", agent)
	await(t, "the end of what the agent made", func() bool { return w.run("ls", "-q") == "" })
	if sb, err := w.services().Sandboxes.Get(t.Context(), dsec.SandboxID(child)); err != nil || sb.State != dsec.Stopped || sb.Cause != dsec.CauseOwner {
		t.Errorf("the child ended as %s, %s: %v", sb.State, sb.Cause, err)
	}
	if got := w.run("project", "ls", "--json"); !strings.Contains(got, `"sandboxes": 0`) {
		t.Errorf("after all has ended: %s", got)
	}
	w.run("down", "--data", w.data)
	<-up.code
	if left := w.left(); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// TestSandboxCannotReachFurther lets an agent attack what is not its own.
func TestSandboxCannotReachFurther(t *testing.T) {
	w, up := agentWorld(t)
	create := append([]string{"create", "--image", "tiny", "--memory", "512M"}, "--api")
	agent, other := w.run(create...), w.run(create...)
	delegate := w.run(append(create, "--api-rights", "sandboxes", "--api-rights", "delegate", "--api-sandboxes", "4")...)
	victim := w.run("exec", other, "--", "dsec", "create", "--image", "tiny")
	in := func(id string, args ...string) []string { return append([]string{"exec", id, "--", "dsec"}, args...) }

	// Of others nothing exists: not its own sandbox, not its neighbour, not what that made.
	for _, id := range []string{agent, other, victim} {
		for _, args := range [][]string{
			{"inspect", id}, {"stop", id}, {"exec", id, "--", "hello", "version"}, {"cp", id + ":/note", "-"}, {"ports", id, "7070"},
			{"pause", id}, {"wait", id}, {"commit", id, "stolen@1"},
		} {
			if args[0] == "ports" || args[0] == "wait" {
				continue // they do not end by themselves where they are let in
			}
			msg := w.fails(in(agent, args...)...)
			if !strings.Contains(msg, "no sandbox has the id") && !(args[0] == "commit" && strings.Contains(msg, "has not the right")) {
				t.Errorf("%v: %s", args, msg)
			}
		}
	}
	for _, test := range []struct {
		from string
		args []string
		want string
	}{
		{agent, []string{"create", "--image", "tiny", "--project", "default"}, "the token is of project"},
		{agent, []string{"create", "--image", "tiny", "--project", "default/@" + other}, "the token is of project"},
		{agent, []string{"create", "--image", "tiny", "--api"}, "has not the right delegate"},
		{agent, []string{"token", "create", "x"}, "has not the right"},
		{agent, []string{"project", "create", "default/x"}, "has not the right"},
		{agent, []string{"project", "ls"}, "has not the right"},
		{agent, []string{"node", "ls"}, "has not the right"},
		{agent, []string{"image", "rm", "tiny@1"}, "has not the right"},
		{delegate, []string{"token", "create", "x", "--project", "default"}, "makes no tokens and projects"},
		{delegate, []string{"token", "ls"}, "makes no tokens and projects"},
		{delegate, []string{"project", "create", "default/@" + delegate + "/x"}, "makes no tokens and projects"},
		{delegate, []string{"create", "--image", "tiny", "--api", "--api-rights", "images"}, "has not the right"},
		{delegate, []string{"create", "--image", "tiny", "--api", "--api-rights", "admin"}, "not one of"},
	} {
		if msg := w.fails(in(test.from, test.args...)...); !strings.Contains(msg, test.want) {
			t.Errorf("%v: %s, want %q", test.args, msg, test.want)
		}
	}

	// No other token counts inside, no token from inside outside.
	c, err := (&app{Getenv: w.getenv}).readContext()
	if err != nil {
		t.Fatal(err)
	}
	for _, secret := range []string{c.Token, "dsec_nonsense", tokenOf(t, w, other)} {
		if msg := w.fails("exec", "-e", "DSEC_TOKEN="+secret, agent, "--", "dsec", "ls"); !strings.Contains(msg, "only the sandbox's own token counts") {
			t.Errorf("a token that is not the sandbox's own: %s", msg)
		}
	}
	stolen, err := connect(c.URL, tokenOf(t, w, agent))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stolen.Sandboxes.List(t.Context(), dsec.Filter{}); dsec.KindOf(err) != dsec.Unauthenticated {
		t.Errorf("a sandbox's token outside: %v", err)
	}
	if body := w.run(in(agent, "ls")...); strings.Contains(body, "dsec_call") {
		t.Error(body)
	}

	// An agent of an agent counts for both.
	nested := w.run(in(delegate, "create", "--image", "tiny", "--api", "--api-sandboxes", "100", "--memory", "256M")...)
	inNested := func(args ...string) []string {
		return append([]string{"exec", delegate, "--", "dsec", "exec", nested, "--", "dsec"}, args...)
	}
	for range 3 {
		w.run(inNested("create", "--image", "tiny", "--memory", "64M")...)
	}
	if msg := w.fails(inNested("create", "--image", "tiny")...); !strings.Contains(msg, "4 of the 4 sandboxes") {
		t.Errorf("a grandchild beyond its grandparent's quota: %s", msg)
	}
	if got := strings.Fields(w.run(in(delegate, "ls", "-q")...)); len(got) != 4 {
		t.Errorf("the agent sees %v, want its child and three grandchildren", got)
	}
	w.run("stop", delegate)
	want := []string{agent, other, victim}
	slices.Sort(want)
	await(t, "the end of all that the agent made", func() bool {
		got := strings.Fields(w.run("ls", "-q"))
		slices.Sort(got)
		return slices.Equal(got, want)
	})
	up.signals <- os.Interrupt
	<-up.code
}

// tokenOf reads a sandbox's token as what runs in it can.
func tokenOf(t *testing.T, w *world, id string) string {
	t.Helper()
	s, on := w.services(), dsec.Call{Sandbox: dsec.SandboxID(id)}
	st, err := s.Commands.Start(t.Context(), on, dsec.Command{Argv: []string{"dsec", "image", "import", "-", "--name", "x"}, Stdin: dsec.StdinPipe})
	if err != nil {
		t.Fatal(err)
	}
	var token string
	await(t, "the environment of a command", func() bool {
		r, err := s.Files.Read(t.Context(), on, dsec.FileOp{Path: fmt.Sprintf("/proc/%d/environ", st.Pid)}, dsec.ReadRange{})
		if err != nil {
			return false
		}
		defer r.Close()
		b, _ := io.ReadAll(r)
		for kv := range strings.SplitSeq(string(b), "\x00") {
			if v, ok := strings.CutPrefix(kv, "DSEC_TOKEN="); ok {
				token = v
			}
		}
		return token != ""
	})
	if err := s.Commands.Signal(t.Context(), on, st.ID, "KILL"); err != nil {
		t.Error(err)
	}
	return token
}

// TestTokenLendsNoMoreThanItHas has a tenant's own token make projects and
// tokens.
func TestTokenLendsNoMoreThanItHas(t *testing.T) {
	w, up := agentWorld(t)
	ctx := context.Background()
	w.run("project", "create", "acme", "--sandboxes", "2")
	w.run("project", "create", "rival")
	c, _ := (&app{Getenv: w.getenv}).readContext()
	soon := time.Now().Add(time.Hour).UTC().Truncate(time.Second)
	open := func(secret string) dsec.Services {
		s, err := connect(c.URL, secret)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	secret, err := w.services().Tokens.Issue(ctx, dsec.Token{
		Name: "acme", Project: "acme", Rights: []dsec.Right{dsec.RightSandboxes, dsec.RightDelegate}, Expires: soon,
	})
	if err != nil {
		t.Fatal(err)
	}
	boss := open(secret)
	if _, err := boss.Projects.Create(ctx, dsec.Project{Name: "acme/team", Quota: dsec.Quota{Sandboxes: 1}}); err != nil {
		t.Fatal(err)
	}
	for _, p := range []dsec.Project{
		{Name: "acme/big", Quota: dsec.Quota{Sandboxes: 3}}, {Name: "rival/x"}, {Name: "new"}, {Name: "acme"}, {Name: "acme/@x"}, {Name: "acmes/x"},
	} {
		if _, err := boss.Projects.Create(ctx, p); err == nil {
			t.Errorf("made project %+v", p)
		}
	}
	for _, tok := range []dsec.Token{
		{Name: "a", Project: "rival", Rights: []dsec.Right{dsec.RightSandboxes}},
		{Name: "b", Project: "acme", Rights: []dsec.Right{dsec.RightSandboxes}}, // beside itself: would outlive its revocation
		{Name: "c", Project: "acme/team", Rights: []dsec.Right{dsec.RightAdmin}},
		{Name: "d", Project: "acme/team", Rights: []dsec.Right{dsec.RightImages}},
		{Name: "e", Project: "acme/team", Rights: []dsec.Right{dsec.RightSandboxes}, Expires: soon.Add(time.Second)},
	} {
		if _, err := boss.Tokens.Issue(ctx, tok); dsec.KindOf(err) != dsec.Denied {
			t.Errorf("token %s: %v, want Denied", tok.Name, err)
		}
	}
	secret, err = boss.Tokens.Issue(ctx, dsec.Token{Name: "t", Project: "acme/team", Rights: []dsec.Right{dsec.RightSandboxes}})
	if err != nil {
		t.Fatal(err)
	}
	list, err := boss.Tokens.List(ctx)
	if err != nil || len(list) != 1 || list[0].Name != "acme/team/t" || !list[0].Expires.Equal(soon) {
		t.Errorf("tokens of the tenant: %+v, %v", list, err)
	}
	for _, name := range []string{"operator", "acme"} {
		if err := boss.Tokens.Revoke(ctx, name); dsec.KindOf(err) != dsec.NotFound {
			t.Errorf("revoke %s: %v, want NotFound", name, err)
		}
	}
	projects, err := boss.Projects.List(ctx)
	if err != nil || len(projects) != 2 || projects[0].Name != "acme" || projects[1].Name != "acme/team" {
		t.Errorf("projects of the tenant: %+v, %v", projects, err)
	}

	// The team sees less than its tenant, and counts for it.
	team, spec := open(secret), dsec.Spec{Environment: dsec.Environment{Base: "tiny"}}
	one, err := team.Sandboxes.Create(ctx, spec, dsec.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := team.Sandboxes.Create(ctx, spec, dsec.CreateOptions{}); dsec.KindOf(err) != dsec.Exhausted || !strings.Contains(err.Error(), "acme/team") {
		t.Errorf("a second one of the team: %v", err)
	}
	if _, err := boss.Sandboxes.Get(ctx, one.ID); err != nil {
		t.Errorf("the tenant looks at its team's: %v", err)
	}
	theirs, err := boss.Sandboxes.Create(ctx, spec, dsec.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := team.Sandboxes.Stop(ctx, theirs.ID); dsec.KindOf(err) != dsec.NotFound {
		t.Errorf("the team stops what is its tenant's: %v", err)
	}
	if _, err := boss.Sandboxes.Create(ctx, spec, dsec.CreateOptions{}); dsec.KindOf(err) != dsec.Exhausted || !strings.Contains(err.Error(), "project acme has 2 of the 2") {
		t.Errorf("a third one: %v", err)
	}
	if err := boss.Projects.Remove(ctx, "acme/team"); dsec.KindOf(err) != dsec.Conflict {
		t.Errorf("remove a project with a sandbox: %v", err)
	}
	if _, err := boss.Sandboxes.Stop(ctx, one.ID); err != nil {
		t.Fatal(err)
	}
	if err := boss.Projects.Remove(ctx, "acme/team"); err != nil {
		t.Error(err)
	}
	if _, err := team.Sandboxes.List(ctx, dsec.Filter{}); dsec.KindOf(err) != dsec.Unauthenticated {
		t.Errorf("a token of a removed project: %v", err)
	}
	up.signals <- os.Interrupt
	<-up.code
}
