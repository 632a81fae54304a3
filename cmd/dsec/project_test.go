package main

import (
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/dsec-go/dsec"
)

// TestProjectsSeeNothingOfEachOther has two projects on one real node. What is
// the other's does not exist: every answer is NotFound, never Denied.
func TestProjectsSeeNothingOfEachOther(t *testing.T) {
	w := newWorld(t)
	up := w.up()
	w.run("image", "import", w.rootfs(), "--name", "base")
	project := func(name string) dsec.Services {
		w.run("project", "create", name)
		c, err := (&app{Getenv: w.getenv}).readContext()
		if err != nil {
			t.Fatal(err)
		}
		s, err := connect(c.URL, w.run("token", "create", "of-"+name, "--project", name, "--right", "sandboxes", "--right", "images"))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	a, b := project("pa"), project("pb")
	if list := w.run("project", "ls"); !strings.Contains(list, "pa ") || !strings.Contains(list, "default ") {
		t.Errorf("projects: %q", list)
	}

	ctx := t.Context()
	spec := dsec.Spec{Environment: dsec.Environment{Base: "base"}}
	box, err := a.Sandboxes.Create(ctx, spec, dsec.CreateOptions{Key: "k"})
	if err != nil || box.Spec.Project != "pa" {
		t.Fatalf("create: %+v, %v", box.Spec, err)
	}
	theirs, err := b.Sandboxes.Create(ctx, spec, dsec.CreateOptions{Key: "k"})
	if err != nil || theirs.ID == box.ID {
		t.Fatalf("the same key in another project: %s and %s, %v", box.ID, theirs.ID, err)
	}
	on, file := dsec.Call{Sandbox: box.ID}, dsec.FileOp{Path: "/note"}
	if _, err := a.Files.Stat(ctx, on, file); err != nil {
		t.Errorf("its own file: %v", err)
	}
	st, err := a.Commands.Start(ctx, on, dsec.Command{Argv: []string{"/bin/hello", "version"}})
	if err != nil {
		t.Fatal(err)
	}
	img, err := a.Sandboxes.Commit(ctx, box.ID, "private@1")
	if err != nil || img.Project != "pa" {
		t.Fatalf("commit: %+v, %v", img, err)
	}
	using := spec
	using.Environment.Workspace = "private"
	if again, err := a.Sandboxes.Create(ctx, using, dsec.CreateOptions{}); err != nil {
		t.Errorf("its own image: %v", err)
	} else if _, err := a.Sandboxes.Stop(ctx, again.ID); err != nil {
		t.Error(err)
	}

	foreign := map[string]error{}
	_, foreign["get"] = b.Sandboxes.Get(ctx, box.ID)
	_, foreign["extend"] = b.Sandboxes.Extend(ctx, box.ID, dsec.MaxTTL)
	_, foreign["stop"] = b.Sandboxes.Stop(ctx, box.ID)
	_, foreign["pause"] = b.Sandboxes.Pause(ctx, box.ID)
	_, foreign["resume"] = b.Sandboxes.Resume(ctx, box.ID)
	_, foreign["wait"] = b.Sandboxes.Wait(ctx, box.ID)
	_, foreign["commit"] = b.Sandboxes.Commit(ctx, box.ID, "stolen@1")
	_, foreign["list after"] = b.Sandboxes.List(ctx, dsec.Filter{After: box.ID})
	_, foreign["start"] = b.Commands.Start(ctx, on, dsec.Command{Argv: []string{"/bin/hello"}})
	_, foreign["run"] = b.Commands.Run(ctx, on, dsec.Command{Argv: []string{"/bin/hello"}}, nil)
	_, foreign["output"] = b.Commands.Read(ctx, on, st.ID, dsec.Stdout, 0, 10)
	_, foreign["commands"] = b.Commands.List(ctx, on)
	foreign["signal"] = b.Commands.Signal(ctx, on, st.ID, "KILL")
	for _, foreign["attach"] = range b.Commands.Attach(ctx, on, st.ID, 0) {
	}
	_, foreign["stat"] = b.Files.Stat(ctx, on, file)
	_, foreign["read"] = b.Files.Read(ctx, on, file, dsec.ReadRange{})
	_, foreign["write"] = b.Files.Write(ctx, on, file, dsec.WriteOptions{}, strings.NewReader("x"))
	_, foreign["pack"] = b.Files.Pack(ctx, on, dsec.FileOp{Path: "/"})
	foreign["remove file"] = b.Files.Remove(ctx, on, file)
	for _, foreign["files"] = range b.Files.List(ctx, on, dsec.FileOp{Path: "/"}, 1) {
	}
	_, foreign["dial"] = b.Ports.Dial(ctx, on, 80)
	_, foreign["inspect image"] = b.Images.Inspect(ctx, "private")
	_, foreign["inspect version"] = b.Images.Inspect(ctx, "private@1")
	foreign["remove image"] = b.Images.Remove(ctx, "private@1")
	_, foreign["use image"] = b.Sandboxes.Create(ctx, using, dsec.CreateOptions{})
	_, foreign["use image with a key"] = b.Sandboxes.Create(ctx, using, dsec.CreateOptions{Key: "k2"})
	for what, err := range foreign {
		if err == nil || dsec.KindOf(err) != dsec.NotFound {
			t.Errorf("%s of the other project: %v, want NotFound", what, err)
		}
	}
	_, err = b.Images.Inspect(ctx, "private")
	_, none := b.Images.Inspect(ctx, "nowhere")
	if err != nil && none != nil && !sameText(err, none, "private", "nowhere") {
		t.Errorf("an image of another project reads %q, none at all %q", err, none)
	}
	if list, err := b.Sandboxes.List(ctx, dsec.Filter{All: true}); err != nil || len(list) != 1 || list[0].ID != theirs.ID {
		t.Errorf("the other project lists %+v, %v", list, err)
	}
	if page, err := b.Images.List(ctx, dsec.ImageQuery{}); err != nil || len(page.Images) != 1 || page.Images[0].Name != "base" {
		t.Errorf("the other project's images: %+v, %v", page, err)
	}
	if err := b.Images.Remove(ctx, "base"); dsec.KindOf(err) != dsec.Denied {
		t.Errorf("everybody's image is removed by a project: %v, want Denied", err)
	}
	// The other may have the name for itself.
	if i, err := b.Sandboxes.Commit(ctx, theirs.ID, "private@1"); err != nil || i.Project != "pb" {
		t.Errorf("commit under the same name: %+v, %v", i, err)
	}
	for what, f := range map[string]func() error{
		"projects": func() error { _, err := b.Projects.List(ctx); return err },
		"project":  func() error { _, err := b.Projects.Create(ctx, dsec.Project{Name: "pc"}); return err },
		"tokens":   func() error { _, err := b.Tokens.List(ctx); return err },
		"token": func() error {
			_, err := b.Tokens.Issue(ctx, dsec.Token{Name: "x", Project: "pa", Rights: []dsec.Right{dsec.RightSandboxes}})
			return err
		},
		"nodes": func() error { _, err := b.Nodes.Nodes(ctx); return err },
		"create": func() error {
			s := spec
			s.Project = "pa"
			_, err := b.Sandboxes.Create(ctx, s, dsec.CreateOptions{})
			return err
		},
	} {
		if err := f(); err == nil || dsec.KindOf(err) != dsec.Denied {
			t.Errorf("%s by a project's token: %v, want Denied", what, err)
		}
	}

	// A stream that failed after its status was sent is counted as what it was,
	// and names that callers make up are one.
	c, err := (&app{Getenv: w.getenv}).readContext()
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.URL+"/dsec.v1.Commands/MadeUp", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+c.Token)
	req.Header.Set("Content-Type", "application/json")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	metrics := get(t, c.URL+"/metrics")
	for _, want := range []string{
		`dsec_call_seconds_count{code="not_found",procedure="/dsec.v1.Commands/Attach"} 1`,
		`dsec_call_seconds_count{code="unsupported",procedure="unknown"} 1`,
	} {
		if !strings.Contains(metrics, want) {
			t.Errorf("metrics have no %s", want)
		}
	}
	if strings.Contains(metrics, "MadeUp") {
		t.Error("a name that a caller made up is a label")
	}

	// Nothing happened to what is the first one's; the operator sees all.
	if sb, err := a.Sandboxes.Get(ctx, box.ID); err != nil || sb.State != dsec.Running {
		t.Errorf("its own sandbox: %+v, %v", sb, err)
	}
	if list := strings.Fields(w.run("ls", "-q")); !slices.Contains(list, string(box.ID)) || !slices.Contains(list, string(theirs.ID)) {
		t.Errorf("the operator lists %v", list)
	}
	if s := w.start("token", "create", "x", "--project", "nowhere"); <-s.code != 1 || !strings.Contains(s.err.String(), "no project is called") {
		t.Errorf("a token of no project: %s", s.err)
	}
	up.signals <- os.Interrupt
	<-up.code
}

// TestCreateChecksUserAndFolder asks for what the image does and does not have,
// on a real root.
func TestCreateChecksUserAndFolder(t *testing.T) {
	w := newWorld(t)
	up := w.up()
	root := w.rootfs()
	for name, text := range map[string]string{"etc/passwd": "root:x:0:0::/:/bin/sh\nagent:x:1000:1000::/bin:/bin/sh\n", "etc/group": "staff:x:50:\n"} {
		if err := os.MkdirAll(filepath.Join(root, "etc"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("bin", filepath.Join(root, "link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(root, "closed"), 0o700); err != nil {
		t.Fatal(err)
	}
	w.run("image", "import", root, "--name", "base")
	for flags, want := range map[string]string{
		"--user agent --cwd /bin":    "",
		"--user 4711:staff":          "",
		"--user agent:4711":          "",
		"--cwd /link":                "",
		"--cwd /bin/":                "",
		"--cwd /closed --user agent": "",
		"--user nobody":              `user "nobody" does not exist`,
		"--user agent:wheel":         `group "wheel" does not exist`,
		"--user agent --cwd /none":   `working directory "/none": no such directory`,
		"--cwd /note":                `working directory "/note" is not a directory`,
		"--cwd /note/below":          `working directory "/note/below" is not a directory`,
	} {
		s := w.start(append([]string{"create", "--image", "base"}, strings.Fields(flags)...)...)
		if code := <-s.code; (code == 0) != (want == "") || !strings.Contains(s.err.String(), want) {
			t.Errorf("create %s: status %d, %q, want %q", flags, code, s.err.String(), want)
		}
	}
	if n := len(strings.Fields(w.run("ls", "--all", "-q"))); n != 6 {
		t.Errorf("%d sandboxes are listed, want the 6 that were made", n)
	}
	w.run("down", "--data", w.data)
	<-up.code
}

// sameText compares two messages that differ in a name and in their request.
func sameText(a, b error, nameA, nameB string) bool {
	cut := func(err error, name string) string {
		text, _, _ := strings.Cut(err.Error(), " (request")
		return strings.ReplaceAll(text, name, "NAME")
	}
	return cut(a, nameA) == cut(b, nameB)
}

// TestProjectSet changes one bound and leaves the others.
func TestProjectSet(t *testing.T) {
	w := newWorld(t)
	w.up()
	w.run("project", "create", "team", "--sandboxes", "5", "--memory", "2G")
	w.run("project", "set", "team", "--sandboxes", "3", "--cpu", "1.5", "--max-ttl", "2h")
	list := w.run("project", "ls")
	for _, part := range []string{"0/3", "0/1.5", "2h0m0s"} {
		if !strings.Contains(list, part) {
			t.Errorf("no %q in %q", part, list)
		}
	}
	w.run("project", "set", "team", "--sandboxes", "none")
	if list := w.run("project", "ls"); strings.Contains(list, "0/3") || !strings.Contains(list, "0/1.5") {
		t.Errorf("after none: %q", list)
	}
	for _, bad := range [][]string{
		{"nobody", "--sandboxes", "3"}, {"team", "--sandboxes", "0"}, {"team", "--sandboxes", "many"},
		{"team", "--memory", "huge"}, {"team", "--max-ttl", "soon"},
	} {
		w.refused(append([]string{"project", "set"}, bad...)...)
	}
	w.run("project", "create", "team/part", "--cpu", "1")
	if text := w.refused("project", "set", "team", "--cpu", "0.5"); !strings.Contains(text, "team/part") {
		t.Errorf("less than a project below it has: %q", text)
	}
}
