package client_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc"
)

// odd is a name of all bytes that a name can have, and not UTF-8.
var odd = func() string {
	var b []byte
	for c := 1; c < 256; c++ {
		if c != '/' && c != '=' {
			b = append(b, byte(c))
		}
	}
	return string(b)
}()

func TestSandboxes(t *testing.T) {
	each(t, func(t *testing.T, n node) {
		ctx := t.Context()
		want := dsec.Spec{
			Kind:        dsec.MicroVM,
			Environment: dsec.Environment{Base: "debian@12", Workspace: "repo", Toolkits: []string{"a", "b@2"}},
			Resources:   dsec.Resources{CPU: 1.25, Memory: 5 << 30, Disk: 1 << 33, Pids: 99},
			TTL:         90 * time.Second, Idle: 1500 * time.Millisecond, User: "1000:1000", Cwd: "/" + odd,
			Env: map[string]string{"A": "b", "E": "", "ODD": odd, odd: "x"}, Hostname: "h", Labels: map[string]string{"k": "vä"},
			Job: "job", Project: "p", Network: dsec.NetworkNone,
		}
		key := "key: % ä\n" + odd[:100]
		b, err := n.Sandboxes.Create(ctx, want, dsec.CreateOptions{Key: key})
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(b.Spec, want) {
			t.Errorf("spec\n%#v, want\n%#v", b.Spec, want)
		}
		direct, err := n.Fake.Services().Sandboxes.Get(ctx, b.ID)
		if err != nil || direct.Key != key {
			t.Fatalf("the node has key %q (%v), want %q", direct.Key, err, key)
		}
		direct.Key = b.Key // not UTF-8: replaced in the answer, exact in the request
		if !reflect.DeepEqual(b, direct) {
			t.Errorf("sandbox\n%#v, want\n%#v", b, direct)
		}
		again, err := n.Sandboxes.Create(ctx, want, dsec.CreateOptions{Key: key})
		if err != nil || again.ID != b.ID {
			t.Errorf("create with the same key: %s, %v, want %s", again.ID, err, b.ID)
		}
		other := n.create(t)
		for _, c := range []struct {
			f    dsec.Filter
			want string
		}{
			{dsec.Filter{}, fmt.Sprint(other.Sandbox, b.ID)},
			{dsec.Filter{Limit: 1}, fmt.Sprint(other.Sandbox)},
			{dsec.Filter{After: other.Sandbox}, fmt.Sprint(b.ID)},
			{dsec.Filter{Job: "job"}, fmt.Sprint(b.ID)},
			{dsec.Filter{Labels: map[string]string{"k": "vä"}}, fmt.Sprint(b.ID)},
			{dsec.Filter{State: dsec.Paused}, ""},
		} {
			list, err := n.Sandboxes.List(ctx, c.f)
			var ids []any
			for _, x := range list {
				ids = append(ids, x.ID)
			}
			if got := fmt.Sprint(ids...); err != nil || got != c.want {
				t.Errorf("List(%+v) = %s, %v, want %s", c.f, got, err, c.want)
			}
		}
		if x, err := n.Sandboxes.Extend(ctx, b.ID, time.Hour); err != nil || !x.Expires.After(b.Expires) {
			t.Errorf("Extend: expires %v, %v, want after %v", x.Expires, err, b.Expires)
		}
		if x, err := n.Sandboxes.Pause(ctx, b.ID); err != nil || x.State != dsec.Paused || x.Paused.IsZero() || x.Reclaimed != 1<<33 {
			t.Errorf("Pause: %+v, %v", x, err)
		}
		if x, err := n.Sandboxes.Resume(ctx, b.ID); err != nil || x.State != dsec.Running || !x.Paused.IsZero() || x.Reclaimed != 0 {
			t.Errorf("Resume: %+v, %v", x, err)
		}
		if i, err := n.Sandboxes.Commit(ctx, b.ID, "ws@1"); err != nil || i.Ref() != "ws@1" || i.Role != dsec.Workspace {
			t.Errorf("Commit: %+v, %v", i, err)
		}
		done := make(chan dsec.Sandbox, 1)
		go func() {
			x, err := n.Sandboxes.Wait(ctx, b.ID)
			if err != nil {
				t.Error(err)
			}
			done <- x
		}()
		if x, err := n.Sandboxes.Stop(ctx, b.ID); err != nil || x.State != dsec.Stopped || x.Cause != dsec.CauseUser {
			t.Errorf("Stop: %+v, %v", x, err)
		}
		if x := <-done; x.State != dsec.Stopped || x.Ended.IsZero() {
			t.Errorf("Wait: %+v, want a stopped one", x)
		}
		if x, err := n.Sandboxes.Get(ctx, b.ID); err != nil || x.State != dsec.Stopped {
			t.Errorf("Get: %+v, %v", x, err)
		}
		for _, id := range []dsec.SandboxID{"", "sbunknown", "sb\n", "sbä"} {
			if _, err := n.Sandboxes.Get(ctx, id); err == nil || id != "" && dsec.KindOf(err) != dsec.NotFound {
				t.Errorf("Get(%q): %v", id, err)
			}
		}
	})
}

func TestCommands(t *testing.T) {
	each(t, func(t *testing.T, n node) {
		ctx := t.Context()
		on := n.create(t)
		on.Step = dsec.Step{Session: "a:b% ä\u2028\"<", Number: 1 << 63}
		c := dsec.Command{Argv: []string{"echo", "é", odd, ""}, Cwd: "/" + odd, User: "u", Env: map[string]string{"X": odd, "Y": "y"},
			Timeout: time.Minute, Idle: time.Second, Output: 5 << 20, TTY: &dsec.WinSize{Rows: 24, Cols: 65535}}
		r, err := n.Commands.Run(ctx, on, c, nil)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(r.Command, c) {
			t.Errorf("command\n%#v, want\n%#v", r.Command, c)
		}
		if got, want := string(r.Out), strings.Join(c.Argv[1:], " ")+"\n"; got != want || r.Outcome != dsec.Exited || r.Code != 0 {
			t.Errorf("Run: %q, %+v, want %q", got, r, want)
		}
		list, err := n.Fake.Services().Commands.List(ctx, on)
		if err != nil || list[0].Step != on.Step {
			t.Errorf("the node saw step %+v, %v, want %+v", list[0].Step, err, on.Step)
		}
		r2, err := n.Commands.Run(ctx, on, c, nil)
		if err != nil || r2.ID != r.ID || !r2.Replayed {
			t.Errorf("repeated step: %+v, %v, want the record of %s", r2.CommandStatus, err, r.ID)
		}
		_, err = n.Commands.Run(ctx, on, dsec.Command{Shell: "echo other"}, nil)
		if dsec.KindOf(err) != dsec.Diverged {
			t.Errorf("another command of the step: %v, want Diverged", err)
		}

		on.Step = dsec.Step{}
		if r, err := n.Commands.Run(ctx, on, dsec.Command{Argv: []string{"nope"}}, nil); err != nil || r.Outcome != dsec.NotStarted || r.Code != 127 || r.Detail == "" {
			t.Errorf("Run of nothing: %+v, %v", r, err)
		}
		if r, err := n.Commands.Run(ctx, on, dsec.Command{Argv: []string{"cat"}}, []byte(odd)); err != nil || string(r.Out) != odd {
			t.Errorf("Run with stdin: %q, %v", r.Out, err)
		}

		st, err := n.Commands.Start(ctx, on, dsec.Command{Argv: []string{"cat"}, Stdin: dsec.StdinPipe, TTY: &dsec.WinSize{}})
		if err != nil || st.Outcome != dsec.StillRunning {
			t.Fatalf("Start: %+v, %v", st, err)
		}
		if err := n.Commands.Resize(ctx, on, st.ID, dsec.WinSize{Rows: 1, Cols: 2}); err != nil {
			t.Errorf("Resize: %v", err)
		}
		off, err := n.Commands.Write(ctx, on, st.ID, dsec.StdinWrite{Data: []byte("abc")})
		if err != nil || off != 3 {
			t.Errorf("Write: %d, %v", off, err)
		}
		if _, err := n.Commands.Write(ctx, on, st.ID, dsec.StdinWrite{Offset: 4}); dsec.KindOf(err) != dsec.Invalid {
			t.Errorf("Write beyond: %v, want Invalid", err)
		}
		if _, err := n.Commands.Write(ctx, on, st.ID, dsec.StdinWrite{Data: make([]byte, dsec.MaxChunk+1)}); dsec.KindOf(err) != dsec.Invalid {
			t.Errorf("Write of too much: %v, want Invalid", err)
		}
		if off, err := n.Commands.Write(ctx, on, st.ID, dsec.StdinWrite{Offset: 1, Data: []byte("bcd"), Close: true}); err != nil || off != 4 {
			t.Errorf("Write again: %d, %v", off, err)
		}
		if st, err := n.Commands.Wait(ctx, on, st.ID); err != nil || st.Stdout.Total != 4 || st.Command.TTY.Cols != 2 {
			t.Errorf("Wait: %+v, %v", st, err)
		}
		if b, err := n.Commands.Read(ctx, on, st.ID, dsec.Stdout, 1, 2); err != nil || string(b) != "bc" {
			t.Errorf("Read: %q, %v", b, err)
		}
		if _, err := n.Commands.Read(ctx, on, st.ID, 9, 0, 1); dsec.KindOf(err) != dsec.Invalid {
			t.Errorf("Read of stream 9: %v, want Invalid", err)
		}
		hold, err := n.Commands.Start(ctx, on, dsec.Command{Argv: []string{"hold"}})
		if err != nil {
			t.Fatal(err)
		}
		if err := n.Commands.Signal(ctx, on, hold.ID, "KILL"); err != nil {
			t.Errorf("Signal: %v", err)
		}
		if err := n.Commands.Signal(ctx, on, hold.ID, "KILL"); dsec.KindOf(err) != dsec.Conflict {
			t.Errorf("Signal again: %v, want Conflict", err)
		}
		all, err := n.Commands.List(ctx, on)
		if err != nil || len(all) != 5 || all[4].ID != hold.ID || all[4].Signal != "KILL" {
			t.Errorf("List: %+v, %v", all, err)
		}
	})
}

func TestRunLongInput(t *testing.T) {
	n := start(t, "h1")
	on := n.create(t)
	in := bytes.Repeat([]byte("0123456789abcdef"), (rpc.MaxStdin+300000)/16)
	r, err := n.Commands.Run(t.Context(), on, dsec.Command{Argv: []string{"cat"}}, in)
	if err != nil || r.Stdout.Total != int64(len(in)) || !bytes.Equal(r.Out, in[:dsec.MaxRunOutput]) {
		t.Errorf("Run with %d bytes: %d came back, %v", len(in), r.Stdout.Total, err)
	}
}

func TestFiles(t *testing.T) {
	each(t, func(t *testing.T, n node) {
		ctx := t.Context()
		on := n.create(t)
		f := dsec.FileOp{Path: "/d/" + odd, User: "me"}
		big := bytes.Repeat([]byte(odd), 5000)
		i, err := n.Files.Write(ctx, on, f, dsec.WriteOptions{Mode: 0o600, Parents: true}, bytes.NewReader(big))
		if err != nil || i.Path != f.Path || i.Size != int64(len(big)) || i.Mode != 0o600 {
			t.Fatalf("Write: %+v, %v", i, err)
		}
		at := int64(3)
		for _, c := range []struct {
			opt  dsec.WriteOptions
			in   string
			want int64
		}{
			{dsec.WriteOptions{}, "", 0},
			{dsec.WriteOptions{}, "abcdef", 6},
			{dsec.WriteOptions{Append: true}, "ghi", 9},
			{dsec.WriteOptions{At: &at}, "X", 4},
		} {
			if i, err := n.Files.Write(ctx, on, dsec.FileOp{Path: "/d/s"}, c.opt, strings.NewReader(c.in)); err != nil || i.Size != c.want {
				t.Errorf("Write(%+v): %+v, %v, want size %d", c.opt, i, err, c.want)
			}
		}
		if got := read(t, n, on, "/d/s", dsec.ReadRange{}); string(got) != "abcX" {
			t.Errorf("read %q, want abcX", got)
		}
		if got := read(t, n, on, f.Path, dsec.ReadRange{}); !bytes.Equal(got, big) {
			t.Errorf("read %d bytes, want the %d written", len(got), len(big))
		}
		if got := read(t, n, on, f.Path, dsec.ReadRange{Offset: 2, Length: 5}); string(got) != odd[2:7] {
			t.Errorf("read a part: %q, want %q", got, odd[2:7])
		}
		if _, err := n.Files.Read(ctx, on, dsec.FileOp{Path: "/none"}, dsec.ReadRange{}); dsec.KindOf(err) != dsec.NotFound {
			t.Errorf("Read of no file: %v, want NotFound at once", err)
		}
		if err := n.Files.Symlink(ctx, on, dsec.FileOp{Path: "/d/l"}, odd); err != nil {
			t.Error(err)
		}
		if i, err := n.Files.Stat(ctx, on, dsec.FileOp{Path: "/d/l"}); err != nil || i.Target != odd || i.Type != dsec.TypeSymlink || i.ModTime != time.Unix(1700000000, 5).UTC() {
			t.Errorf("Stat: %+v, %v", i, err)
		}
		if err := n.Files.Symlink(ctx, on, dsec.FileOp{Path: "/d/l"}, odd); dsec.KindOf(err) != dsec.Exists {
			t.Errorf("Symlink again: %v, want Exists", err)
		}
		if err := n.Files.Mkdir(ctx, on, dsec.FileOp{Path: "/d/sub"}, 0o700); err != nil {
			t.Error(err)
		}
		if err := n.Files.Chmod(ctx, on, dsec.FileOp{Path: "/d/sub"}, 0o1777); err != nil {
			t.Error(err)
		}
		if err := n.Files.Chown(ctx, on, dsec.FileOp{Path: "/d/sub"}, "5"); err != nil {
			t.Error(err)
		}
		if err := n.Files.Move(ctx, on, dsec.FileOp{Path: "/d/s"}, "/d/"+odd+"2"); err != nil {
			t.Error(err)
		}
		var names []string
		for i, err := range n.Files.List(ctx, on, dsec.FileOp{Path: "/d"}, 1) {
			if err != nil {
				t.Fatal(err)
			}
			names = append(names, i.Path)
			if i.Path == "/d/sub" && (i.UID != 5 || i.Mode != 0o1777) {
				t.Errorf("listed %+v", i)
			}
		}
		if want := []string{"/d/" + odd, "/d/" + odd + "2", "/d/l", "/d/sub"}; !reflect.DeepEqual(names, want) {
			t.Errorf("List: %q, want %q", names, want)
		}
		for range n.Files.List(ctx, on, dsec.FileOp{Path: "/d"}, 1) {
			break // ends the stream
		}
		if err := n.Files.Unpack(ctx, on, dsec.FileOp{Path: "/u"}, bytes.NewReader(big)); err != nil {
			t.Error(err)
		}
		rc, err := n.Files.Pack(ctx, on, dsec.FileOp{Path: "/u"})
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(rc); err != nil || string(got) != "/u/unpacked\n"+string(big) {
			t.Errorf("Pack: %d bytes, %v", len(got), err)
		}
		rc.Close()
		rc, err = n.Files.Read(ctx, on, f, dsec.ReadRange{})
		if err != nil {
			t.Fatal(err)
		}
		rc.Close() // early
		rc.Close()
		if err := n.Files.Remove(ctx, on, f); err != nil {
			t.Error(err)
		}
		if err := n.Files.Remove(ctx, on, f); dsec.KindOf(err) != dsec.NotFound {
			t.Errorf("Remove again: %v, want NotFound", err)
		}
	})
}

func read(t *testing.T, n node, on dsec.Call, path string, r dsec.ReadRange) []byte {
	t.Helper()
	rc, err := n.Files.Read(t.Context(), on, dsec.FileOp{Path: path}, r)
	if err != nil {
		t.Fatal(err)
	}
	defer rc.Close()
	b, err := io.ReadAll(rc)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestListMany(t *testing.T) {
	n := start(t, "h1")
	on := n.create(t)
	for i := range 1000 {
		if err := n.Fake.Services().Files.Mkdir(t.Context(), on, dsec.FileOp{Path: fmt.Sprintf("/m/%04d", i)}, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	count := 0
	for i, err := range n.Files.List(t.Context(), on, dsec.FileOp{Path: "/m"}, 1) {
		if want := fmt.Sprintf("/m/%04d", count); err != nil || i.Path != want {
			t.Fatalf("entry %q, %v, want %q", i.Path, err, want)
		}
		count++
	}
	if count != 1000 {
		t.Errorf("%d entries, want 1000", count)
	}
}

func TestWatch(t *testing.T) {
	each(t, func(t *testing.T, n node) {
		on := n.create(t)
		for e, err := range n.Files.Watch(t.Context(), on, dsec.FileOp{Path: "/w"}, dsec.WatchOptions{Recursive: true}) {
			if err != nil {
				t.Fatal(err)
			}
			if e.Op == dsec.OpReady {
				if err := n.Files.Mkdir(t.Context(), on, dsec.FileOp{Path: "/w/" + odd}, 0); err != nil {
					t.Fatal(err)
				}
				continue
			}
			if e.Op != dsec.OpCreate || e.Path != "/w/"+odd {
				t.Errorf("event %+v", e)
			}
			break
		}
	})
}

func TestPorts(t *testing.T) {
	each(t, func(t *testing.T, n node) {
		on := n.create(t)
		if _, err := n.Ports.Dial(t.Context(), on, 8); dsec.KindOf(err) != dsec.Unavailable {
			t.Errorf("Dial of nothing: %v, want Unavailable", err)
		}
		if got := n.Calls("Ports.Dial"); got != 1 {
			t.Errorf("dialled %d times, want once", got)
		}
		c, err := n.Ports.Dial(t.Context(), on, 7)
		if err != nil {
			t.Fatal(err)
		}
		big := bytes.Repeat([]byte(odd), 4000)
		go func() {
			if k, err := c.Write(big); err != nil || k != len(big) {
				t.Errorf("Write: %d, %v", k, err)
			}
			if err := c.CloseWrite(); err != nil {
				t.Errorf("CloseWrite: %v", err)
			}
		}()
		got, err := io.ReadAll(c)
		if err != nil || !bytes.Equal(got, append(big, "bye"...)) {
			t.Errorf("read %d bytes, %v, want %d and bye", len(got), err, len(big))
		}
		if _, err := c.Write([]byte("x")); !errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("Write after CloseWrite: %v", err)
		}
		if err := errors.Join(c.Close(), c.Close()); err != nil {
			t.Errorf("Close: %v", err)
		}
		// A close while a read waits ends the read.
		c, err = n.Ports.Dial(t.Context(), on, 7)
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan error)
		go func() {
			_, err := c.Read(make([]byte, 1))
			done <- err
		}()
		c.Close()
		if err := <-done; err == nil {
			t.Error("Read after Close gave no error")
		}
		if _, err := c.Write([]byte("x")); err == nil {
			t.Error("Write after Close gave no error")
		}
	})
}

func TestImagesTokensProjectsNodes(t *testing.T) {
	each(t, func(t *testing.T, n node) {
		ctx := t.Context()
		var reports []dsec.Progress
		for p, err := range n.Images.Pull(ctx, "debian", dsec.ImportOptions{Name: "d@1", Role: dsec.Toolkit}) {
			if err != nil {
				t.Fatal(err)
			}
			reports = append(reports, p)
		}
		if len(reports) != 4 || reports[1].Done != 1 || reports[3].Image == nil || reports[3].Image.Role != dsec.Toolkit {
			t.Errorf("Pull: %+v", reports)
		}
		i, err := n.Images.Upload(ctx, dsec.ImportOptions{Name: "u@1"}, io.LimitReader(zeros{}, 3<<20+1))
		if err != nil || i.Size != 3<<20+1 {
			t.Errorf("Upload: %+v, %v", i, err)
		}
		if _, err := n.Images.Upload(ctx, dsec.ImportOptions{Name: "u@1"}, strings.NewReader("")); dsec.KindOf(err) != dsec.Exists {
			t.Errorf("Upload again: %v, want Exists", err)
		}
		for _, q := range []dsec.ImageQuery{{}, {Limit: 1, Usage: true}, {After: "1"}} {
			direct, _ := n.Fake.Services().Images.List(ctx, q)
			if page, err := n.Images.List(ctx, q); err != nil || !reflect.DeepEqual(page, direct) {
				t.Errorf("List %+v: %+v, %v, want %+v", q, page, err, direct)
			}
		}
		var refs []string
		for i, err := range dsec.AllImages(ctx, n.Images, dsec.ImageQuery{Limit: 1}) {
			if err != nil {
				t.Fatal(err)
			}
			refs = append(refs, i.Ref())
		}
		if !slices.Equal(refs, []string{"d@1", "u@1"}) {
			t.Errorf("AllImages: %v", refs)
		}
		if x, err := n.Images.Tag(ctx, "u", "stable"); err != nil || !slices.Equal(x.Tags, []string{"stable"}) || x.Ref() != "u@1" {
			t.Errorf("Tag: %+v, %v", x, err)
		}
		if x, err := n.Images.Adopt(ctx, "sha256:1", dsec.ImportOptions{Name: "a@1", Role: dsec.Toolkit}); err != nil || x.Role != dsec.Toolkit || x.Source != "layer sha256:1" {
			t.Errorf("Adopt: %+v, %v", x, err)
		}
		r, err := n.Images.Export(ctx, dsec.Environment{Base: "d", Workspace: "w", Toolkits: []string{"t"}})
		if err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(r); err != nil || string(b) != "d w t" {
			t.Errorf("Export: %q, %v", b, err)
		}
		r.Close()
		if x, err := n.Images.Inspect(ctx, "u"); err != nil || !reflect.DeepEqual(x, i) {
			t.Errorf("Inspect: %+v, %v", x, err)
		}
		if err := n.Images.Remove(ctx, "u"); err != nil {
			t.Error(err)
		}
		if c, err := n.Images.Collect(ctx, dsec.CollectOptions{Alone: true}); err != nil || c != (dsec.Collected{Blobs: 2, Bytes: 5 << 32}) {
			t.Errorf("Collect: %+v, %v", c, err)
		}
		tok := dsec.Token{Name: "t", Project: "p", Rights: []dsec.Right{dsec.RightImages, dsec.RightAdmin}, Expires: time.Unix(2e9, 0).UTC()}
		if s, err := n.Tokens.Issue(ctx, tok); err != nil || s != "secret-t1" {
			t.Errorf("Issue: %q, %v", s, err)
		}
		if l, err := n.Tokens.List(ctx); err != nil || !reflect.DeepEqual(l, []dsec.Token{tok}) {
			t.Errorf("List: %+v, %v", l, err)
		}
		if err := n.Tokens.Revoke(ctx, "t"); err != nil {
			t.Error(err)
		}
		p, err := n.Projects.Create(ctx, dsec.Project{Name: "p1"})
		if err != nil || p.Name != "p1" || p.Created.IsZero() {
			t.Errorf("Create: %+v, %v", p, err)
		}
		if _, err := n.Projects.Create(ctx, dsec.Project{Name: "p1"}); dsec.KindOf(err) != dsec.Exists {
			t.Errorf("Create again: %v, want Exists", err)
		}
		if l, err := n.Projects.List(ctx); err != nil || !reflect.DeepEqual(l, []dsec.Project{p}) {
			t.Errorf("List: %+v, %v", l, err)
		}
		q := dsec.Quota{Sandboxes: 3, CPU: 0.5, Memory: 1 << 30, TTL: time.Hour}
		if err := n.Projects.SetQuota(ctx, "p1", q); err != nil {
			t.Error(err)
		}
		if err := n.Projects.SetQuota(ctx, "p2", q); dsec.KindOf(err) != dsec.NotFound {
			t.Errorf("SetQuota of nothing: %v, want NotFound", err)
		}
		if l, err := n.Projects.List(ctx); err != nil || len(l) != 1 || l[0].Quota != q {
			t.Errorf("List: %+v, %v, want %+v", l, err, q)
		}
		want, _ := n.Fake.Services().Nodes.Nodes(ctx)
		if got, err := n.Nodes.Nodes(ctx); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("Nodes: %+v, %v, want %+v", got, err, want)
		}
	})
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }
