package edge

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/snapshot"
)

// snapshots is a node's dsec.Snapshots.
type snapshots struct{ n *Node }

var _ dsec.Snapshots = snapshots{}

// StageSnapshot is the stage of a creation in which the files of its snapshot
// are fetched.
const StageSnapshot = "snapshot"

// flight is a keyed call under way, shared by all that ask for it.
type flight struct {
	done chan struct{} // closed once the rest is set
	v    any
	err  error
}

// once runs f, or waits for the call of the same operation and key that runs it.
// What has a key belongs to nobody: a caller who goes away leaves it to the
// others, who may be the same one, asking again.
func once[T any](ctx context.Context, n *Node, op string, k keyID, f func(context.Context) (T, error)) (T, error) {
	if k.key == "" {
		return f(ctx)
	}
	var zero T
	name := op + " " + string(k.project) + " " + k.key
	n.mu.Lock()
	fl := n.flights[name]
	if fl == nil {
		if n.closed {
			n.mu.Unlock()
			return zero, errClosing
		}
		fl = &flight{done: make(chan struct{})}
		n.flights[name] = fl
		n.work.Go(func() {
			v, err := f(dsec.Carry(n.life, ctx))
			n.mu.Lock()
			delete(n.flights, name)
			n.mu.Unlock()
			fl.v, fl.err = v, err
			close(fl.done)
		})
	}
	n.mu.Unlock()
	select {
	case <-fl.done:
	case <-ctx.Done():
		return zero, context.Cause(ctx)
	}
	if fl.err != nil {
		return zero, fl.err
	}
	return fl.v.(T), nil //nolint:forcetypeassert // the name holds the operation
}

// able is Unsupported at once, with kind and operation, unless the machine of a
// sandbox has a power. Nothing is done to the sandbox; a paused one stays so.
func able[P any](n *Node, id dsec.SandboxID, what string) (P, error) {
	var zero P
	e, err := n.get(id)
	if err != nil {
		return zero, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.usable(); err != nil {
		return zero, err
	}
	p, ok := e.machine.(P)
	if !ok {
		return zero, unable(e.rec.spec.spec.Kind, what)
	}
	return p, nil
}

func unable(kind dsec.Kind, what string) error {
	return dsec.Errorf(dsec.Unsupported, "sandboxes of kind %s cannot %s", kind, what)
}

// visible reports whether the caller may know of what is a project's.
func visible(ctx context.Context, p dsec.ProjectID) bool {
	c, ok := dsec.CallerFrom(ctx)
	return !ok || c.Admin || c.Sees(p)
}

func checkKey(key string) error {
	if len(key) > dsec.MaxKeyBytes {
		return dsec.Errorf(dsec.Invalid, "key of %d bytes is longer than %d", len(key), dsec.MaxKeyBytes)
	}
	return nil
}

// Take saves a sandbox. It goes on if the caller of one with a key goes away.
func (s snapshots) Take(ctx context.Context, id dsec.SandboxID, opt dsec.SnapshotOptions) (dsec.Snapshot, error) {
	const op = "edge.Take"
	n := s.n
	begin := time.Now()
	out, err := func() (dsec.Snapshot, error) {
		if err := checkKey(opt.Key); err != nil {
			return dsec.Snapshot{}, err
		}
		if _, err := able[driver.Snapshotter](n, id, "be saved"); err != nil {
			return n.takenBefore(ctx, id, opt.Key, err)
		}
		if n.cfg.Snapshots == nil {
			return dsec.Snapshot{}, dsec.Errorf(dsec.Unsupported, "this node keeps no snapshots")
		}
		e, err := n.get(id)
		if err != nil {
			return dsec.Snapshot{}, err
		}
		return once(ctx, n, "take", keyID{e.record().spec.spec.Project, opt.Key}, func(ctx context.Context) (dsec.Snapshot, error) {
			return n.takeSnapshot(ctx, id, opt)
		})
	}()
	if err == nil {
		n.events.Saved(SavedEvent{ID: id, Snapshot: out.ID, Project: out.Project, Bytes: out.Size, Took: time.Since(begin)})
	}
	return out, dsec.WithOp(op, id, err)
}

// takenBefore gives what a key stands for, when the sandbox cannot be asked any
// more; otherwise why it cannot.
func (n *Node) takenBefore(ctx context.Context, id dsec.SandboxID, key string, err error) (dsec.Snapshot, error) {
	if key != "" && n.cfg.Snapshots != nil && dsec.KindOf(err) == dsec.Conflict {
		if all, lerr := n.cfg.Snapshots.List(ctx); lerr == nil {
			for _, s := range all {
				if s.Sandbox == id && s.Key == key {
					return s, nil
				}
			}
		}
	}
	return dsec.Snapshot{}, err
}

func (n *Node) takeSnapshot(ctx context.Context, id dsec.SandboxID, opt dsec.SnapshotOptions) (dsec.Snapshot, error) {
	e, m, err := n.touch(id)
	if err != nil {
		return dsec.Snapshot{}, err
	}
	defer e.finish()
	rec := e.record()
	all, err := n.cfg.Snapshots.List(ctx)
	if err != nil {
		return dsec.Snapshot{}, err
	}
	count := 0
	for _, s := range all {
		if s.Project != rec.spec.spec.Project {
			continue
		}
		if opt.Key != "" && s.Key == opt.Key {
			if s.Sandbox != id {
				return dsec.Snapshot{}, dsec.Errorf(dsec.Conflict, "key %q made a snapshot of another sandbox", opt.Key)
			}
			return s, nil
		}
		count++
	}
	if count >= dsec.MaxSnapshots {
		return dsec.Snapshot{}, dsec.Errorf(dsec.Exhausted, "project %q has %d snapshots", rec.spec.spec.Project, count)
	}
	if err := n.room(); err != nil {
		return dsec.Snapshot{}, err
	}
	guest, err := n.guestOf(ctx, rec)
	if err != nil {
		return dsec.Snapshot{}, err
	}
	if err := e.beginCommit(); err != nil {
		return dsec.Snapshot{}, err
	}
	defer e.endCommit()
	ctx, stop, err := n.whileAlive(ctx, m, "it was being saved")
	if err != nil {
		return dsec.Snapshot{}, err
	}
	defer stop()
	dir, err := os.MkdirTemp(n.cfg.Temp, "save-")
	if err != nil {
		return dsec.Snapshot{}, hostFault(err)
	}
	defer os.RemoveAll(dir)
	info, err := m.(driver.Snapshotter).Snapshot(ctx, dir) //nolint:forcetypeassert // Take has looked
	if err != nil {
		return dsec.Snapshot{}, causeOf(ctx, fmt.Errorf("save: %w", err))
	}
	// From here on it may end: what was saved stays what it was.
	stop()
	st, err := n.cfg.Snapshots.Put(context.WithoutCancel(ctx), snapshot.State{
		Snapshot: dsec.Snapshot{
			Project: rec.spec.spec.Project, Sandbox: id, Spec: n.specOf(rec), Layers: *rec.layers, Created: n.clock.now().UTC(),
			Memory: info.Memory, Sequence: opt.Sequence, Key: opt.Key,
		},
		Guest: snapshot.Guest{Env: guest.Env, Cwd: guest.Cwd, User: guest.User},
	}, dir)
	return st.Snapshot, err
}

// specOf gives the Spec of a sandbox as it is now, without an API: what may be
// done through that is the sandbox's own.
func (n *Node) specOf(r *record) dsec.Spec {
	s := cloneSpec(r.spec.spec)
	s.Labels, s.API = r.effectiveLabels(nil), nil
	return s
}

// whileAlive gives a context that ends with the machine or the node.
func (n *Node) whileAlive(ctx context.Context, m driver.Machine, while string) (context.Context, context.CancelFunc, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	if !n.spawn(func() {
		select {
		case <-m.Done():
			cancel(dsec.Errorf(dsec.Conflict, "the sandbox ended while %s", while))
		case <-n.life.Done():
			cancel(errClosing)
		case <-ctx.Done():
		}
	}) {
		cancel(nil)
		return ctx, nil, errClosing
	}
	return ctx, func() { cancel(nil) }, nil
}

// guestOf composes anew what the commands of a sandbox have by default: its
// images by digest, since names may point elsewhere by now.
func (n *Node) guestOf(ctx context.Context, r *record) (driver.GuestConfig, error) {
	spec := r.spec.spec
	if r.from != nil {
		return *r.from, nil
	}
	var images []dsec.Image
	for i, name := range spec.Environment.Parts() {
		digest := (*r.layers)[i]
		if by, ok := n.cfg.Names.(ByDigest); ok {
			img, err := by.ByDigest(ctx, digest)
			if err != nil {
				return driver.GuestConfig{}, err
			}
			images = append(images, img)
			continue
		}
		img, err := n.cfg.Names.Resolve(ctx, spec.Project, name)
		if err == nil && img.Digest != digest {
			err = dsec.Errorf(dsec.NotFound, "image %s is another by now", name)
		}
		if err != nil {
			return driver.GuestConfig{}, err
		}
		images = append(images, img)
	}
	return guestConfig(images, spec), nil
}

// fromSnapshot fills a Spec with what its snapshot says. A keyed create that was
// done is known by its key, also when the snapshot is gone.
func (n *Node) fromSnapshot(ctx context.Context, spec dsec.Spec) (dsec.Spec, *snapshot.State, error) {
	if n.cfg.Snapshots == nil {
		return spec, nil, dsec.Errorf(dsec.Unsupported, "this node keeps no snapshots")
	}
	id := dsec.SnapshotID(spec.From)
	st, err := n.cfg.Snapshots.Get(ctx, id)
	if err == nil && !visible(ctx, st.Project) {
		err = dsec.Errorf(dsec.NotFound, "no snapshot has the id %s", id)
	}
	if err != nil {
		return spec, nil, err
	}
	if spec.Project == "" {
		spec.Project = st.Project
	}
	old := st.Spec
	switch {
	case spec.Kind != "" && spec.Kind != old.Kind:
		return spec, nil, dsec.Errorf(dsec.Invalid, "snapshot %s is of kind %s, not %s", id, old.Kind, spec.Kind)
	case spec.Environment.Base != "" && !sameParts(spec.Environment, old.Environment):
		return spec, nil, dsec.Errorf(dsec.Invalid, "snapshot %s is of another environment", id)
	case differ(spec.Resources.CPU, old.Resources.CPU), differ(spec.Resources.Memory, old.Resources.Memory),
		differ(spec.Resources.Disk, old.Resources.Disk), differ(spec.Resources.Pids, old.Resources.Pids):
		return spec, nil, dsec.Errorf(dsec.Invalid, "snapshot %s is of a sandbox with other resources", id)
	}
	spec.Kind, spec.Environment, spec.Resources = old.Kind, old.Environment, old.Resources
	return spec.WithDefaults(), &st, nil
}

// differ reports whether a value was given that is not the snapshot's.
func differ[T comparable](given, saved T) bool {
	var none T
	return given != none && given != saved
}

func sameParts(a, b dsec.Environment) bool {
	return strings.Join(a.Parts(), " ") == strings.Join(b.Parts(), " ") && a.Workspace == b.Workspace
}

// restore starts the machine of a request from the files of its snapshot.
func (n *Node) restore(ctx context.Context, req *request, c driver.Config) (driver.Machine, error) {
	r, ok := n.drivers[req.spec.spec.Kind].(driver.Restorer)
	if !ok {
		return nil, unable(req.spec.spec.Kind, "begin with a snapshot")
	}
	dir, err := os.MkdirTemp(n.cfg.Temp, "restore-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	if err := n.cfg.Snapshots.Fetch(ctx, req.from.ID, dir); err != nil {
		return nil, err
	}
	req.stage(StageSnapshot)
	return r.Restore(ctx, c, dir)
}

// List gives what the caller may see.
func (s snapshots) List(ctx context.Context) ([]dsec.Snapshot, error) {
	const op = "edge.ListSnapshots"
	if s.n.cfg.Snapshots == nil {
		return nil, nil
	}
	all, err := s.n.cfg.Snapshots.List(ctx)
	if err != nil {
		return nil, dsec.WithOp(op, "", err)
	}
	own := all[:0]
	for _, x := range all {
		if visible(ctx, x.Project) {
			own = append(own, x)
		}
	}
	return own, nil
}

// Get finds one, also of another cluster with the same store.
func (s snapshots) Get(ctx context.Context, id dsec.SnapshotID) (dsec.Snapshot, error) {
	st, err := s.get(ctx, id)
	return st.Snapshot, dsec.WithOp("edge.GetSnapshot", "", err)
}

func (s snapshots) get(ctx context.Context, id dsec.SnapshotID) (snapshot.State, error) {
	none := dsec.Errorf(dsec.NotFound, "no snapshot has the id %.60q", string(id))
	if s.n.cfg.Snapshots == nil {
		return snapshot.State{}, none
	}
	st, err := s.n.cfg.Snapshots.Get(ctx, id)
	if err == nil && !visible(ctx, st.Project) {
		err = none
	}
	return st, err
}

// Remove deletes one.
func (s snapshots) Remove(ctx context.Context, id dsec.SnapshotID) error {
	const op = "edge.RemoveSnapshot"
	if _, err := s.get(ctx, id); err != nil && !s.lists(ctx, id) {
		return dsec.WithOp(op, "", err)
	}
	return dsec.WithOp(op, "", s.n.cfg.Snapshots.Remove(ctx, id))
}

// lists reports whether the caller is shown a snapshot, which may be damaged.
func (s snapshots) lists(ctx context.Context, id dsec.SnapshotID) bool {
	all, err := s.List(ctx)
	return err == nil && slices.ContainsFunc(all, func(x dsec.Snapshot) bool { return x.ID == id })
}

// screens is a node's dsec.Screens.
type screens struct{ n *Node }

var _ dsec.Screens = screens{}

// screen finds the screen of a sandbox, which is woken for it.
func (s screens) screen(ctx context.Context, id dsec.SandboxID) (*entry, driver.Screen, error) {
	if _, err := able[driver.Screen](s.n, id, "show a screen: they have none"); err != nil {
		return nil, nil, err
	}
	e, m, err := s.n.begin(ctx, id)
	if err != nil {
		return nil, nil, err
	}
	return e, m.(driver.Screen), nil //nolint:forcetypeassert // able has looked
}

// Screenshot gives what the display shows.
func (s screens) Screenshot(ctx context.Context, id dsec.SandboxID) ([]byte, error) {
	const op = "edge.Screenshot"
	e, m, err := s.screen(ctx, id)
	if err != nil {
		return nil, dsec.WithOp(op, id, err)
	}
	defer e.finish()
	b, err := m.Screenshot(ctx)
	return b, s.n.explain(e, op, err)
}

// Input plays events.
func (s screens) Input(ctx context.Context, id dsec.SandboxID, events []dsec.InputEvent) error {
	const op = "edge.Input"
	if err := dsec.CheckInput(events); err != nil {
		return dsec.WithOp(op, id, err)
	}
	e, m, err := s.screen(ctx, id)
	if err != nil {
		return dsec.WithOp(op, id, err)
	}
	defer e.finish()
	return s.n.explain(e, op, m.Input(ctx, events))
}
