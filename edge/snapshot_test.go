package edge_test

import (
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/driver/synthetic"
	"github.com/dsec-go/dsec/edge"
	"github.com/dsec-go/dsec/snapshot"
)

// savedIndex is a snapshot.Index in memory.
type savedIndex struct {
	mu  sync.Mutex
	all []dsec.Snapshot
}

func (x *savedIndex) AddSnapshot(_ context.Context, s dsec.Snapshot) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.all = append(x.all, s)
	return nil
}

func (x *savedIndex) DropSnapshot(_ context.Context, s dsec.Snapshot) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.all = slices.DeleteFunc(x.all, func(o dsec.Snapshot) bool { return o.ID == s.ID })
	return nil
}

func (x *savedIndex) Snapshots(context.Context) ([]dsec.Snapshot, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	return slices.Clone(x.all), nil
}

// withSnapshots gives a rig of machines that can be copied, whose snapshots lie
// in a store.
func withSnapshots(t *testing.T, blobs blob.Store, opt synthetic.Options) *rig {
	t.Helper()
	opt.Copies = true
	r := newRig(t, opt)
	store, err := snapshot.Open(t.Context(), blobs, &savedIndex{}, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	temp := t.TempDir()
	r.config = func(c *edge.Config) { c.Snapshots, c.Temp = store, temp }
	t.Cleanup(func() {
		if left, _ := os.ReadDir(temp); len(left) != 0 {
			t.Errorf("temporary files are left: %v", left)
		}
	})
	return r
}

func (r *rig) write(id dsec.SandboxID, path, text string) {
	r.t.Helper()
	_, err := r.node.Services().Files.Write(r.t.Context(), dsec.Call{Sandbox: id}, dsec.FileOp{Path: path}, dsec.WriteOptions{}, strings.NewReader(text))
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) read(id dsec.SandboxID, path string) string {
	r.t.Helper()
	f, err := r.node.Services().Files.Read(r.t.Context(), dsec.Call{Sandbox: id}, dsec.FileOp{Path: path}, dsec.ReadRange{})
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	b, err := io.ReadAll(f)
	if err != nil {
		r.t.Fatal(err)
	}
	return string(b)
}

func blobCount(t *testing.T, s blob.Store) (n int) {
	t.Helper()
	for _, err := range s.List(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		n++
	}
	return n
}

func TestSnapshot(t *testing.T) {
	blobs := &blob.Memory{}
	r := withSnapshots(t, blobs, synthetic.Options{})
	n := r.open()
	defer r.close()
	ctx := t.Context()
	snaps := n.Services().Snapshots
	s := spec()
	s.Environment.Workspace, s.Env, s.Labels, s.Resources.Memory = "task", map[string]string{"A": "b"}, map[string]string{"l": "1"}, 64<<20
	parent := r.create(s, "")
	r.write(parent.ID, "/kept", "kept")
	snap, err := snaps.Take(ctx, parent.ID, dsec.SnapshotOptions{Key: "k", Sequence: 5})
	if err != nil {
		t.Fatal(err)
	}
	if snap.Sandbox != parent.ID || snap.Sequence != 5 || snap.Key != "k" || snap.Size == 0 || snap.Spec.Kind != dsec.Container ||
		!slices.Equal(snap.Layers, []string{"sha256:debian", "sha256:task"}) {
		t.Errorf("snapshot %+v", snap)
	}
	if again, err := snaps.Take(ctx, parent.ID, dsec.SnapshotOptions{Key: "k"}); err != nil || again.ID != snap.ID {
		t.Errorf("the same key again: %s, %v", again.ID, err)
	}
	r.write(parent.ID, "/kept", "changed since")
	if _, err := n.Stop(ctx, parent.ID); err != nil {
		t.Fatal(err)
	}
	if again, err := snaps.Take(ctx, parent.ID, dsec.SnapshotOptions{Key: "k"}); err != nil || again.ID != snap.ID {
		t.Errorf("the same key after its sandbox: %s, %v", again.ID, err)
	}

	// The names point elsewhere by now; the copy has the layers of the original.
	r.names.mu.Lock()
	for name, img := range r.names.images {
		img.Digest += "-newer"
		r.names.images[name] = img
	}
	r.names.mu.Unlock()
	copied := r.create(dsec.Spec{From: string(snap.ID), Labels: map[string]string{"l": "2"}, TTL: 2 * time.Hour}, "copy")
	if got := r.read(copied.ID, "/kept"); got != "kept" {
		t.Errorf("the copy has %q", got)
	}
	if sp := copied.Spec; sp.Environment.Workspace != "task" || sp.Resources.Memory != 64<<20 || sp.Labels["l"] != "2" || sp.TTL != 2*time.Hour || sp.From != string(snap.ID) ||
		!slices.Equal(copied.Layers, snap.Layers) {
		t.Errorf("the copy is %+v of %v", sp, copied.Layers)
	}
	c, _ := r.host.Config(copied.ID)
	if !slices.Contains(c.Guest.Env, "A=b") || c.Guest.Cwd != "/task" || c.Hostname != string("sb"+copied.ID[12:22]) {
		t.Errorf("its guest has %+v, host name %s", c.Guest, c.Hostname)
	}
	if e := r.created[len(r.created)-1]; e.From != string(snap.ID) {
		t.Errorf("event %+v", e)
	}

	for name, c := range map[string]struct {
		change func(*dsec.Spec)
		kind   dsec.ErrorKind
	}{
		"another kind":        {func(s *dsec.Spec) { s.Kind, s.Environment.Base = dsec.MicroVM, "debian" }, dsec.Invalid},
		"another environment": {func(s *dsec.Spec) { s.Environment.Base = "tools" }, dsec.Invalid},
		"other resources":     {func(s *dsec.Spec) { s.Resources.Memory = 128 << 20 }, dsec.Invalid},
		"variables":           {func(s *dsec.Spec) { s.Env = map[string]string{"A": "b"} }, dsec.Invalid},
		"a user":              {func(s *dsec.Spec) { s.User = "x" }, dsec.Invalid},
		"no such snapshot":    {func(s *dsec.Spec) { s.From = string(dsec.SnapshotIDOf([32]byte{1})) }, dsec.NotFound},
		"a sandbox":           {func(s *dsec.Spec) { s.From = string(parent.ID) }, dsec.NotFound},
	} {
		s := dsec.Spec{From: string(snap.ID)}
		c.change(&s)
		_, err := n.Create(ctx, s, dsec.CreateOptions{})
		wantKind(t, name, err, c.kind)
	}

	// Another project sees none of it.
	foreign := dsec.WithCaller(ctx, dsec.Caller{Project: "other", Token: "t"})
	if list, err := snaps.List(foreign); err != nil || len(list) != 0 {
		t.Errorf("another project lists %v, %v", list, err)
	}
	_, err = snaps.Get(foreign, snap.ID)
	wantKind(t, "get by another project", err, dsec.NotFound)
	wantKind(t, "remove by another project", snaps.Remove(foreign, snap.ID), dsec.NotFound)
	_, err = n.Create(foreign, dsec.Spec{From: string(snap.ID), Project: "other"}, dsec.CreateOptions{})
	wantKind(t, "create by another project", err, dsec.NotFound)

	// What was made from it stays, and is known by its key.
	if err := snaps.Remove(ctx, snap.ID); err != nil {
		t.Fatal(err)
	}
	if k := blobCount(t, blobs); k != 0 {
		t.Errorf("%d blobs are left", k)
	}
	if got := r.read(copied.ID, "/kept"); got != "kept" {
		t.Errorf("after the removal the copy has %q", got)
	}
	if again := r.create(dsec.Spec{From: string(snap.ID), Labels: map[string]string{"l": "2"}, TTL: 2 * time.Hour}, "copy"); again.ID != copied.ID {
		t.Errorf("the key is sandbox %s, want %s", again.ID, copied.ID)
	}
	_, err = n.Create(ctx, dsec.Spec{From: string(snap.ID)}, dsec.CreateOptions{})
	wantKind(t, "create from a removed snapshot", err, dsec.NotFound)
}

// TestSnapshotOfCopy saves a copy after a restart: what its commands have by
// default is in the journal.
func TestSnapshotOfCopy(t *testing.T) {
	r := withSnapshots(t, &blob.Memory{}, synthetic.Options{})
	n := r.open()
	first := r.create(spec(), "")
	snap, err := n.Services().Snapshots.Take(t.Context(), first.ID, dsec.SnapshotOptions{})
	if err != nil {
		t.Fatal(err)
	}
	copied := r.create(dsec.Spec{From: string(snap.ID)}, "")
	r.names.mu.Lock()
	clear(r.names.images) // nothing but the journal knows any more
	r.names.mu.Unlock()
	r.kill()
	n = r.open()
	defer r.close()
	second, err := n.Services().Snapshots.Take(t.Context(), copied.ID, dsec.SnapshotOptions{})
	if err != nil {
		t.Fatal(err)
	}
	third := r.create(dsec.Spec{From: string(second.ID)}, "")
	if c, _ := r.host.Config(third.ID); c.Guest.Cwd != "/debian" || !slices.Contains(c.Guest.Env, "FROM=debian") {
		t.Errorf("the copy of a copy has %+v", c.Guest)
	}
	if got := r.get(copied.ID); got.Spec.From != string(snap.ID) {
		t.Errorf("after the restart it is from %q", got.Spec.From)
	}
}

// TestSnapshotElsewhere makes a sandbox on a node that shares the store and
// nothing else.
func TestSnapshotElsewhere(t *testing.T) {
	blobs := &blob.Memory{}
	r := withSnapshots(t, blobs, synthetic.Options{})
	n := r.open()
	sb := r.create(spec(), "")
	r.write(sb.ID, "/kept", "kept")
	snap, err := n.Services().Snapshots.Take(t.Context(), sb.ID, dsec.SnapshotOptions{})
	if err != nil {
		t.Fatal(err)
	}
	r.close()
	other := withSnapshots(t, blobs, synthetic.Options{})
	other.place.Node = 8
	other.open()
	defer other.close()
	if copied := other.create(dsec.Spec{From: string(snap.ID)}, ""); other.read(copied.ID, "/kept") != "kept" {
		t.Errorf("the copy has %q", other.read(copied.ID, "/kept"))
	}
}

func TestSnapshotFaults(t *testing.T) {
	blobs := &blob.Memory{}
	r := withSnapshots(t, blobs, synthetic.Options{})
	n := r.open()
	defer r.close()
	ctx := t.Context()
	snaps := n.Services().Snapshots
	sb := r.create(spec(), "")
	r.host.Fail(synthetic.OpSnapshot, 1, &dsec.Error{Kind: dsec.Exhausted, Err: errors.New("no space")})
	_, err := snaps.Take(ctx, sb.ID, dsec.SnapshotOptions{})
	wantKind(t, "a full disk", err, dsec.Exhausted)

	// The sandbox ends under it; a second one meanwhile is a conflict.
	begun := make(chan struct{})
	r.host.Intercept(synthetic.OpSnapshot, 1, func(ctx context.Context) error {
		close(begun)
		<-ctx.Done()
		return ctx.Err()
	})
	failed := make(chan error)
	go func() {
		_, err := snaps.Take(context.Background(), sb.ID, dsec.SnapshotOptions{})
		failed <- err
	}()
	<-begun
	_, err = snaps.Take(ctx, sb.ID, dsec.SnapshotOptions{})
	wantKind(t, "a second snapshot meanwhile", err, dsec.Conflict)
	if _, err := n.Stop(ctx, sb.ID); err != nil {
		t.Fatal(err)
	}
	wantKind(t, "a sandbox that ends meanwhile", <-failed, dsec.Conflict)
	if k := blobCount(t, blobs); k != 0 {
		t.Errorf("%d blobs are left", k)
	}

	// A restore that fails leaves nothing.
	sb = r.create(spec(), "")
	snap, err := snaps.Take(ctx, sb.ID, dsec.SnapshotOptions{})
	if err != nil {
		t.Fatal(err)
	}
	r.host.Fail(synthetic.OpStarted, 1, errors.New("boom"))
	_, err = n.Create(ctx, dsec.Spec{From: string(snap.ID)}, dsec.CreateOptions{})
	wantKind(t, "a restore that fails", err, dsec.Internal)
	if _, err := n.Stop(ctx, sb.ID); err != nil {
		t.Fatal(err)
	}
	r.wantNothing()
}

func TestCannot(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	r.config = func(c *edge.Config) { c.Absent = map[dsec.Kind]error{dsec.MicroVM: errors.New("no kernel")} }
	n := r.open()
	defer r.close()
	ctx := t.Context()
	sb := r.create(spec(), "")
	if _, err := n.Pause(ctx, sb.ID); err != nil {
		t.Fatal(err)
	}
	s := n.Services()
	_, err := s.Snapshots.Take(ctx, sb.ID, dsec.SnapshotOptions{})
	wantKind(t, "snapshot", err, dsec.Unsupported)
	_, err = s.Snapshots.Fork(ctx, sb.ID, 1, dsec.ForkOptions{})
	wantKind(t, "fork", err, dsec.Unsupported)
	if !strings.Contains(err.Error(), "container") || !strings.Contains(err.Error(), "forked") {
		t.Errorf("the error names neither kind nor operation: %v", err)
	}
	_, err = s.Screens.Screenshot(ctx, sb.ID)
	wantKind(t, "screenshot", err, dsec.Unsupported)
	wantKind(t, "input", s.Screens.Input(ctx, sb.ID, []dsec.InputEvent{{Key: "a"}}), dsec.Unsupported)
	if r.get(sb.ID).State != dsec.Paused {
		t.Error("what cannot be done has woken it")
	}
	_, err = n.Create(ctx, dsec.Spec{From: string(dsec.SnapshotIDOf([32]byte{1}))}, dsec.CreateOptions{})
	wantKind(t, "create from a snapshot on a node that keeps none", err, dsec.Unsupported)
	vm := spec()
	vm.Kind = dsec.MicroVM
	_, err = n.Create(ctx, vm, dsec.CreateOptions{})
	wantKind(t, "a kind that the node has not", err, dsec.Unsupported)
	if !strings.Contains(err.Error(), "no kernel") {
		t.Errorf("the error does not say why: %v", err)
	}
}

func TestScreen(t *testing.T) {
	r := withSnapshots(t, &blob.Memory{}, synthetic.Options{})
	n := r.open()
	defer r.close()
	sb := r.create(spec(), "")
	s := n.Services().Screens
	if b, err := s.Screenshot(t.Context(), sb.ID); err != nil || string(b) != "screen of "+string(sb.ID) {
		t.Errorf("screenshot %q, %v", b, err)
	}
	if err := s.Input(t.Context(), sb.ID, []dsec.InputEvent{{Key: "ret"}, {Move: &dsec.Point{X: 1}}}); err != nil || r.host.Calls(synthetic.OpInput) != 1 {
		t.Error(err)
	}
	for _, bad := range [][]dsec.InputEvent{nil, {{}}, {{Key: "a", Text: "b"}}, {{Move: &dsec.Point{Y: -1}}}, make([]dsec.InputEvent, dsec.MaxInputEvents+1)} {
		wantKind(t, "input", s.Input(t.Context(), sb.ID, bad), dsec.Invalid)
	}
}

// forks is a rig with a parent that has a file.
func forks(t *testing.T) (*rig, dsec.Sandbox) {
	t.Helper()
	r := withSnapshots(t, &blob.Memory{}, synthetic.Options{})
	r.open()
	s := spec()
	s.Labels, s.Hostname = map[string]string{"l": "1"}, "parent"
	sb := r.create(s, "")
	r.write(sb.ID, "/kept", "kept")
	return r, sb
}

func TestFork(t *testing.T) {
	r, parent := forks(t)
	ctx := t.Context()
	n := r.node
	kids, err := n.Services().Snapshots.Fork(ctx, parent.ID, 3, dsec.ForkOptions{Key: "k", TTL: 2 * time.Hour, Labels: map[string]string{"m": "2"}})
	if err != nil || len(kids) != 3 {
		t.Fatal(kids, err)
	}
	names := map[string]bool{}
	for _, k := range kids {
		c, _ := r.host.Config(k.ID)
		names[c.Hostname] = true
		if k.State != dsec.Running || k.Spec.From != string(parent.ID) || k.Spec.TTL != 2*time.Hour || k.Spec.Labels["l"] != "1" || k.Spec.Labels["m"] != "2" ||
			r.read(k.ID, "/kept") != "kept" || c.Guest.Cwd != "/debian" {
			t.Errorf("child %+v", k)
		}
		r.write(k.ID, "/mine", string(k.ID))
	}
	if len(names) != 3 || names["parent"] {
		t.Errorf("host names %v", names)
	}
	if got := r.read(parent.ID, "/mine"); !strings.Contains(got, "no file") {
		t.Errorf("the parent has a child's file: %q", got)
	}
	again, err := n.Services().Snapshots.Fork(ctx, parent.ID, 3, dsec.ForkOptions{Key: "k"})
	if err != nil || again[2].ID != kids[2].ID {
		t.Errorf("the same key again: %v, %v", again, err)
	}
	_, err = n.Services().Snapshots.Fork(ctx, parent.ID, 2, dsec.ForkOptions{Key: "k"})
	wantKind(t, "the same key for fewer", err, dsec.Conflict)
	for name, c := range map[string]struct {
		n   int
		opt dsec.ForkOptions
	}{
		"none": {0, dsec.ForkOptions{}}, "too many": {dsec.MaxForks + 1, dsec.ForkOptions{}}, "short ttl": {1, dsec.ForkOptions{TTL: 1}},
		"long key": {1, dsec.ForkOptions{Key: strings.Repeat("x", dsec.MaxKeyBytes)}}, "bad label": {1, dsec.ForkOptions{Labels: map[string]string{"": "x"}}},
	} {
		_, err := n.Services().Snapshots.Fork(ctx, parent.ID, c.n, c.opt)
		wantKind(t, name, err, dsec.Invalid)
	}

	// They outlive the edge, and their parent.
	r.kill()
	n = r.open()
	defer r.close()
	if _, err := n.Stop(ctx, parent.ID); err != nil {
		t.Fatal(err)
	}
	if got := r.read(kids[0].ID, "/mine"); got != string(kids[0].ID) {
		t.Errorf("after a restart a child has %q", got)
	}
	more, err := n.Services().Snapshots.Fork(ctx, kids[0].ID, 1, dsec.ForkOptions{})
	if err != nil || r.read(more[0].ID, "/mine") != string(kids[0].ID) {
		t.Errorf("a child of a child: %v, %v", more, err)
	}
}

// TestForkFails breaks forks in several places: none of the children is there,
// and the parent runs on.
func TestForkFails(t *testing.T) {
	r, parent := forks(t)
	defer r.close()
	ctx := t.Context()
	snaps := r.node.Services().Snapshots
	only := func(what string) {
		t.Helper()
		if m := r.host.Machines(); len(m) != 1 || m[0] != parent.ID {
			t.Errorf("%s: machines %v", what, m)
		}
		if all, err := r.node.List(ctx, dsec.Filter{}); err != nil || len(all) != 1 {
			t.Errorf("%s: sandboxes %v, %v", what, all, err)
		}
		if c := r.node.Counts(); c.Alive != 1 || c.Starting != 0 {
			t.Errorf("%s: counts %+v", what, c)
		}
		if k := r.roots.count(); k != 1 {
			t.Errorf("%s: %d environments are held", what, k)
		}
	}
	r.host.Fail(synthetic.OpFork, 1, errors.New("boom"))
	_, err := snaps.Fork(ctx, parent.ID, 3, dsec.ForkOptions{Key: "k"})
	wantKind(t, "fork", err, dsec.Internal)
	only("a driver that fails")
	r.host.Fail(synthetic.OpStarted, 2, errors.New("boom"))
	_, err = snaps.Fork(ctx, parent.ID, 3, dsec.ForkOptions{})
	wantKind(t, "the second child", err, dsec.Internal)
	only("the second child")
	r.roots.mu.Lock()
	r.roots.fail = errors.New("boom")
	r.roots.mu.Unlock()
	_, err = snaps.Fork(ctx, parent.ID, 3, dsec.ForkOptions{})
	wantKind(t, "layers", err, dsec.Internal)
	r.roots.mu.Lock()
	r.roots.fail = nil
	r.roots.mu.Unlock()
	only("layers")
	r.figures.change(func(h *edge.HostSample) { h.Available = 0 })
	eventually(t, "the node looks at the host again", func() bool {
		nodes, err := r.node.Nodes(ctx)
		return err == nil && nodes[0].Available == 0
	})
	_, err = snaps.Fork(ctx, parent.ID, 3, dsec.ForkOptions{})
	wantKind(t, "no memory", err, dsec.Exhausted)
	r.figures.change(func(h *edge.HostSample) { *h = roomy() })
	only("no memory")
	eventually(t, "the node looks at the host again", func() bool {
		nodes, err := r.node.Nodes(ctx)
		return err == nil && nodes[0].Available > 0
	})
	gone, cancel := context.WithCancel(ctx)
	r.host.Intercept(synthetic.OpFork, 1, func(ctx context.Context) error {
		cancel()
		<-ctx.Done()
		return ctx.Err()
	})
	_, err = snaps.Fork(gone, parent.ID, 3, dsec.ForkOptions{})
	wantKind(t, "a caller who goes away", err, dsec.Canceled)
	only("a caller who goes away")
	r.mem.setFail(errors.New("disk"))
	_, err = snaps.Fork(ctx, parent.ID, 3, dsec.ForkOptions{})
	wantKind(t, "a broken journal", err, dsec.Unavailable)
	r.mem.setFail(nil)
	eventually(t, "the journal is healed", func() bool { return !r.node.Counts().Broken })
	eventually(t, "the children have ended", func() bool { return len(r.host.Machines()) == 1 })
	kids, err := snaps.Fork(ctx, parent.ID, 3, dsec.ForkOptions{Key: "k"})
	if err != nil || len(kids) != 3 {
		t.Errorf("after all that: %v, %v", kids, err)
	}
	if got := r.read(parent.ID, "/kept"); got != "kept" {
		t.Errorf("the parent has %q", got)
	}
}

// TestForkQuota counts every child.
func TestForkQuota(t *testing.T) {
	r, parent := forks(t)
	r.close()
	q := &countingQuota{left: 3, held: map[dsec.SandboxID]bool{}}
	old := r.config
	r.config = func(c *edge.Config) { old(c); c.Quota = q }
	n := r.open()
	defer r.close()
	_, err := n.Services().Snapshots.Fork(t.Context(), parent.ID, 4, dsec.ForkOptions{})
	wantKind(t, "four of three", err, dsec.Exhausted)
	if len(q.held) != 1 {
		t.Errorf("%d are counted", len(q.held))
	}
	if _, err := n.Services().Snapshots.Fork(t.Context(), parent.ID, 3, dsec.ForkOptions{}); err != nil || len(q.held) != 4 {
		t.Errorf("%d are counted, %v", len(q.held), err)
	}
}

// countingQuota lets so many in.
type countingQuota struct {
	mu   sync.Mutex
	left int
	held map[dsec.SandboxID]bool
}

func (q *countingQuota) Take(id dsec.SandboxID, _ *dsec.Spec) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.left == 0 {
		return dsec.Errorf(dsec.Exhausted, "quota")
	}
	q.left--
	q.held[id] = true
	return nil
}

func (q *countingQuota) Keep(id dsec.SandboxID, _ *dsec.Spec) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.held[id] = true
}

func (q *countingQuota) Give(id dsec.SandboxID, _ *dsec.Spec) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.left++
	delete(q.held, id)
}

func (q *countingQuota) Extend(*dsec.Spec) error { return nil }

// TestDiskRole lets disk images go with their kind alone.
func TestDiskRole(t *testing.T) {
	for kind, want := range map[dsec.Kind]dsec.ErrorKind{dsec.Container: dsec.Invalid, dsec.FullVM: dsec.Unsupported} {
		r := newRig(t, synthetic.Options{Kind: kind})
		r.image("vm", dsec.Disk)
		n := r.open()
		s := dsec.Spec{Kind: kind, Environment: dsec.Environment{Base: "vm"}}
		if kind == dsec.FullVM {
			r.create(s, "") // the synthetic driver takes mounts
			s.Environment.Base = "debian"
			_, err := n.Create(t.Context(), s, dsec.CreateOptions{})
			wantKind(t, "a full machine of layers", err, dsec.Invalid)
			s.Environment = dsec.Environment{Base: "vm", Workspace: "task"}
			_, err = n.Create(t.Context(), s, dsec.CreateOptions{})
			wantKind(t, "a disk image with a workspace", err, dsec.Invalid)
		} else {
			_, err := n.Create(t.Context(), s, dsec.CreateOptions{})
			wantKind(t, "a disk image as a container", err, want)
		}
		r.close()
	}
}
