package edge_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/driver/synthetic"
	"github.com/dsec-go/dsec/edge"
)

// committer is a Committer that a test scripts.
type committer func(context.Context, edge.CommitSource) (dsec.Image, error)

func (c committer) Commit(ctx context.Context, src edge.CommitSource) (dsec.Image, error) {
	return c(ctx, src)
}

func TestCommit(t *testing.T) {
	r := newRig(t, synthetic.Options{Upper: t.TempDir()})
	var got edge.CommitSource
	var frozen, read bool
	var id dsec.SandboxID
	calls := 0
	r.config = func(c *edge.Config) {
		c.Committer = committer(func(_ context.Context, src edge.CommitSource) (dsec.Image, error) {
			calls++
			got, frozen = src, r.host.Frozen(id)
			src.Read()
			src.Read()
			read = !r.host.Frozen(id) // the layer is still to be written
			return dsec.Image{Digest: "sha256:new", Size: 5, Entries: 2}, nil
		})
	}
	n := r.open()
	defer r.close()
	s := spec()
	s.Environment.Workspace = "task"
	id = r.create(s, "").ID
	ctx := t.Context()
	img, err := n.Commit(ctx, id, "work@2")
	if err != nil {
		t.Fatal(err)
	}
	if img.Ref() != "work@2" || img.Role != dsec.Workspace || img.Digest != "sha256:new" || img.Size != 5 || img.Created.IsZero() || img.Config.Cwd != "/task" {
		t.Errorf("image %+v", img)
	}
	if !frozen || !read || r.host.Frozen(id) {
		t.Errorf("frozen %v while it was read, running %v while the layer was written, frozen %v afterwards", frozen, read, r.host.Frozen(id))
	}
	if !slices.Equal(got.Layers, []string{"sha256:debian", "sha256:task"}) || got.Base == nil || got.Base.Digest != "sha256:task" || got.Dir == "" {
		t.Errorf("committed from %+v", got)
	}
	if known, err := r.names.Resolve(ctx, "", "work@2"); err != nil || known.Digest != "sha256:new" {
		t.Errorf("registered %+v, %v", known, err)
	}
	for name, c := range map[string]struct {
		name string
		kind dsec.ErrorKind
	}{
		"taken":      {"work@2", dsec.Exists},
		"no version": {"work", dsec.Invalid},
		"no name":    {"Wo rk@1", dsec.Invalid},
	} {
		_, err := n.Commit(ctx, id, c.name)
		wantKind(t, name, err, c.kind)
	}
	if calls != 1 {
		t.Errorf("%d layers were written", calls)
	}
	r.host.Fail(synthetic.OpFreeze, 1, errors.New("boom"))
	_, err = n.Commit(ctx, id, "work@3")
	wantKind(t, "freeze fails", err, dsec.Internal)
	if calls != 1 {
		t.Error("a layer was written from what was not frozen")
	}

	// The workspace's name points elsewhere by now: its digest still counts.
	r.names.mu.Lock()
	img = r.names.images["task"]
	img.Digest = "sha256:newer"
	r.names.images["task"] = img
	r.names.mu.Unlock()
	if _, err := n.Commit(ctx, id, "work@4"); err != nil || got.Base.Digest != "sha256:task" {
		t.Errorf("committed on %+v, %v", got.Base, err)
	}
	if _, err := n.Stop(ctx, id); err != nil {
		t.Fatal(err)
	}
	_, err = n.Commit(ctx, id, "work@5")
	wantKind(t, "commit of an ended sandbox", err, dsec.Conflict)
}

func TestCommitFailsAndThaws(t *testing.T) {
	r := newRig(t, synthetic.Options{Upper: t.TempDir()})
	begun := make(chan struct{})
	fail := errors.New("boom")
	r.config = func(c *edge.Config) {
		c.Committer = committer(func(ctx context.Context, src edge.CommitSource) (dsec.Image, error) {
			if fail != nil {
				return dsec.Image{}, fail
			}
			close(begun)
			<-ctx.Done()
			return dsec.Image{}, ctx.Err()
		})
	}
	n := r.open()
	defer r.close()
	sb := r.create(spec(), "")
	_, err := n.Commit(t.Context(), sb.ID, "work@1")
	wantKind(t, "commit", err, dsec.Internal)
	if r.host.Frozen(sb.ID) {
		t.Error("the sandbox stays frozen")
	}
	fail = nil
	failed := make(chan error)
	go func() {
		_, err := n.Commit(context.Background(), sb.ID, "work@1")
		failed <- err
	}()
	<-begun
	_, err = n.Commit(t.Context(), sb.ID, "work@2")
	wantKind(t, "a second commit meanwhile", err, dsec.Conflict)
	if _, err := n.Stop(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	wantKind(t, "commit of a sandbox that is stopped meanwhile", <-failed, dsec.Conflict)
	if _, err := r.names.Resolve(t.Context(), "", "work@1"); dsec.KindOf(err) != dsec.NotFound {
		t.Error("a failed commit left a name")
	}
}

func TestCommitWithoutThePower(t *testing.T) {
	r := newRig(t, synthetic.Options{})
	r.config = func(c *edge.Config) {
		c.Committer = committer(func(context.Context, edge.CommitSource) (dsec.Image, error) { return dsec.Image{}, nil })
	}
	r.open()
	defer r.close()
	_, err := r.node.Commit(t.Context(), r.create(spec(), "").ID, "work@1")
	wantKind(t, "commit", err, dsec.Unsupported)
}

func TestMeasureUpper(t *testing.T) {
	dir := t.TempDir()
	h := synthetic.New(synthetic.Options{Upper: dir})
	m, err := h.Driver().Start(t.Context(), driver.Config{ID: "a"})
	if err != nil {
		t.Fatal(err)
	}
	empty, err := edge.MeasureUpper(t.Context(), m)
	if err != nil {
		t.Fatal(err)
	}
	data := make([]byte, 1<<20)
	data[0], data[1<<19] = 1, 1
	file := filepath.Join(dir, "sub", "file")
	if err := errors.Join(os.Mkdir(filepath.Dir(file), 0o755), os.WriteFile(file, data, 0o644), os.Link(file, filepath.Join(dir, "link"))); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(filepath.Join(dir, "link"), 1<<30); err != nil { // holes cost nothing
		t.Fatal(err)
	}
	full, err := edge.MeasureUpper(t.Context(), m)
	if grown := full - empty; err != nil || grown < 1<<20 || grown > 1<<20+64<<10 {
		t.Errorf("a file of 1 MiB with two names and a hole adds %d bytes, %v", grown, err)
	}
	bare, err := synthetic.New(synthetic.Options{}).Driver().Start(t.Context(), driver.Config{ID: "a"})
	if err != nil {
		t.Fatal(err)
	}
	if n, err := edge.MeasureUpper(t.Context(), bare); n != 0 || err != nil {
		t.Errorf("a machine without a writable layer has %d bytes, %v", n, err)
	}
}

// A workload does not stand still for longer than the limit, however long the
// reading takes.
func TestCommitFreezeIsBounded(t *testing.T) {
	r := newRig(t, synthetic.Options{Upper: t.TempDir()})
	prepared := false
	var id dsec.SandboxID
	r.config = func(c *edge.Config) {
		c.Limits.CommitFreeze = time.Millisecond
		c.Committer = slowReader{committer(func(ctx context.Context, src edge.CommitSource) (dsec.Image, error) {
			<-ctx.Done()
			return dsec.Image{}, ctx.Err()
		}), func() { prepared = !r.host.Frozen(id) }}
	}
	n := r.open()
	defer r.close()
	id = r.create(spec(), "").ID
	_, err := n.Commit(t.Context(), id, "work@1")
	wantKind(t, "slow commit", err, dsec.Timeout)
	if r.host.Frozen(id) || !prepared {
		t.Errorf("frozen afterwards: %v, prepared while it ran: %v", r.host.Frozen(id), prepared)
	}
	if _, err := r.names.Resolve(t.Context(), "", "work@1"); dsec.KindOf(err) != dsec.NotFound {
		t.Errorf("what was not committed has a name: %v", err)
	}
}

type slowReader struct {
	committer
	prepare func()
}

func (s slowReader) Prepare(context.Context, edge.CommitSource) { s.prepare() }
