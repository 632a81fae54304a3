// Package rpctest has services in memory, for tests of everything that carries
// the contracts: package rpc, the client and the api.
//
// A Fake behaves: a stopped sandbox is ended, a step is answered from its
// record, an offset is an offset. It runs no programs; the first argument of a
// command names what it plays, see Commands. It is not meant for tests of the
// services themselves.
//
// Read next: fake.go, then rpc/rpc_test.go.
package rpctest

import (
	"bytes"
	"cmp"
	"context"
	"io"
	"iter"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
)

// Fake is a node in memory.
type Fake struct {
	Key   dsec.IDKey
	Place dsec.Place
	Name  string

	// Fail, when set, is asked before every operation ("Sandboxes.Create").
	Fail func(ctx context.Context, op string) error

	mu       sync.Mutex
	cond     *sync.Cond // something changed
	boxes    []*box     // in order of creation
	images   []dsec.Image
	tokens   map[string]dsec.Token
	projects []dsec.Project
	commands int
	calls    map[string]int

	trajectories map[dsec.SandboxID]Trajectory
}

// box is one sandbox of the fake.
type box struct {
	dsec.Sandbox
	cmds  []*cmd
	steps map[dsec.Step]*cmd
	files map[string]*file
}

type file struct {
	dsec.FileInfo
	data []byte
}

type cmd struct {
	dsec.CommandStatus
	log   []dsec.Output // pieces in order
	size  int64
	stdin bytes.Buffer
	fed   int64
	shut  bool
}

// New gives an empty fake node.
func New() *Fake {
	f := &Fake{Place: dsec.Place{Node: 1, Epoch: 1}, Name: "fake", tokens: map[string]dsec.Token{}, calls: map[string]int{}}
	f.cond = sync.NewCond(&f.mu)
	return f
}

// Services gives all services of the fake.
func (f *Fake) Services() dsec.Services {
	return dsec.Services{
		Sandboxes: sandboxes{f}, Commands: commands{f}, Files: files{f}, Ports: ports{f}, Images: images{f},
		Tokens: tokens{f}, Projects: projects{f}, Nodes: nodes{f}, Trajectories: trajectories{f},
	}
}

// Calls gives how often an operation was asked for.
func (f *Fake) Calls(op string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[op]
}

func (f *Fake) enter(ctx context.Context, op string) error {
	f.mu.Lock()
	f.calls[op]++
	fail := f.Fail
	f.mu.Unlock()
	if fail != nil {
		return fail(ctx, op)
	}
	return nil
}

// SetFail sets Fail while calls are under way.
func (f *Fake) SetFail(fail func(ctx context.Context, op string) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.Fail = fail
}

// wait blocks until ready or the end of ctx.
//
// Requires: f.mu held.
func (f *Fake) wait(ctx context.Context, ready func() bool) error {
	stop := context.AfterFunc(ctx, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.cond.Broadcast()
	})
	defer stop()
	for !ready() {
		if err := ctx.Err(); err != nil {
			return err
		}
		f.cond.Wait()
	}
	return nil
}

// Requires: f.mu held.
func (f *Fake) box(id dsec.SandboxID) (*box, error) {
	for _, b := range f.boxes {
		if b.ID == id {
			return b, nil
		}
	}
	return nil, dsec.Errorf(dsec.NotFound, "no sandbox has the id %q", string(id))
}

// Requires: f.mu held.
func (f *Fake) live(id dsec.SandboxID) (*box, error) {
	b, err := f.box(id)
	if err == nil && b.State.Ended() {
		err = dsec.Errorf(dsec.Conflict, "the sandbox has ended")
	}
	return b, err
}

type sandboxes struct{ f *Fake }

func (s sandboxes) Create(ctx context.Context, spec dsec.Spec, opt dsec.CreateOptions) (dsec.Sandbox, error) {
	if err := s.f.enter(ctx, "Sandboxes.Create"); err != nil {
		return dsec.Sandbox{}, err
	}
	if err := spec.Check(); err != nil {
		return dsec.Sandbox{}, dsec.WithOp("fake.Create", "", err)
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	for _, b := range s.f.boxes {
		if opt.Key != "" && b.Key == opt.Key {
			return b.Sandbox, nil
		}
	}
	now := time.Now().UTC()
	spec = spec.WithDefaults()
	b := &box{Sandbox: dsec.Sandbox{
		ID: s.f.Key.New(s.f.Place), Spec: spec, State: dsec.Running, Node: s.f.Name, Created: now, Expires: now.Add(spec.TTL),
		LastUsed: now, Key: opt.Key, Took: 1500 * time.Microsecond, Layers: []string{"sha256:1", "sha256:2"},
		Stages: []dsec.Stage{{Name: "mount", Took: time.Millisecond}}, Usage: dsec.Usage{CPU: time.Second, Memory: 1 << 33, Pids: 2},
	}, steps: map[dsec.Step]*cmd{}, files: map[string]*file{}}
	s.f.boxes = append(s.f.boxes, b)
	return b.Sandbox, nil
}

func (s sandboxes) Get(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	if err := s.f.enter(ctx, "Sandboxes.Get"); err != nil {
		return dsec.Sandbox{}, err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	b, err := s.f.box(id)
	if err != nil {
		return dsec.Sandbox{}, err
	}
	return b.Sandbox, nil
}

func (s sandboxes) List(ctx context.Context, filter dsec.Filter) ([]dsec.Sandbox, error) {
	if err := s.f.enter(ctx, "Sandboxes.List"); err != nil {
		return nil, err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	var out []dsec.Sandbox
	skip := filter.After != ""
	for _, b := range slices.Backward(s.f.boxes) {
		if skip {
			skip = b.ID != filter.After
			continue
		}
		match := filter.All || !b.State.Ended()
		match = match && (filter.Job == "" || b.Spec.Job == filter.Job) && (filter.State == "" || b.State == filter.State)
		for k, v := range filter.Labels {
			match = match && b.Spec.Labels[k] == v
		}
		if match {
			out = append(out, b.Sandbox)
		}
		if filter.Limit > 0 && len(out) == filter.Limit {
			break
		}
	}
	return out, nil
}

func (s sandboxes) Extend(ctx context.Context, id dsec.SandboxID, ttl time.Duration) (dsec.Sandbox, error) {
	if err := s.f.enter(ctx, "Sandboxes.Extend"); err != nil {
		return dsec.Sandbox{}, err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	b, err := s.f.live(id)
	if err != nil {
		return dsec.Sandbox{}, err
	}
	b.Expires = time.Now().UTC().Add(ttl)
	return b.Sandbox, nil
}

func (s sandboxes) Stop(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	if err := s.f.enter(ctx, "Sandboxes.Stop"); err != nil {
		return dsec.Sandbox{}, err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	b, err := s.f.box(id)
	if err != nil {
		return dsec.Sandbox{}, err
	}
	if !b.State.Ended() {
		b.State, b.Cause, b.Ended = dsec.Stopped, dsec.CauseUser, time.Now().UTC()
		s.f.cond.Broadcast()
	}
	return b.Sandbox, nil
}

// The fake's sandboxes wake at no call.
func (s sandboxes) Pause(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	return s.pause(ctx, "Sandboxes.Pause", id, dsec.Paused)
}

func (s sandboxes) Resume(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	return s.pause(ctx, "Sandboxes.Resume", id, dsec.Running)
}

func (s sandboxes) pause(ctx context.Context, op string, id dsec.SandboxID, to dsec.State) (dsec.Sandbox, error) {
	if err := s.f.enter(ctx, op); err != nil {
		return dsec.Sandbox{}, err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	b, err := s.f.live(id)
	if err != nil {
		return dsec.Sandbox{}, err
	}
	switch b.State = to; {
	case to == dsec.Running:
		b.Paused, b.Reclaimed = time.Time{}, 0
	case b.Paused.IsZero():
		b.Paused, b.Reclaimed = time.Now().UTC(), 1<<33
	}
	return b.Sandbox, nil
}

func (s sandboxes) Wait(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	if err := s.f.enter(ctx, "Sandboxes.Wait"); err != nil {
		return dsec.Sandbox{}, err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	b, err := s.f.box(id)
	if err != nil {
		return dsec.Sandbox{}, err
	}
	err = s.f.wait(ctx, func() bool { return b.State.Ended() })
	return b.Sandbox, err
}

func (s sandboxes) Commit(ctx context.Context, id dsec.SandboxID, name string) (dsec.Image, error) {
	if err := s.f.enter(ctx, "Sandboxes.Commit"); err != nil {
		return dsec.Image{}, err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	if _, err := s.f.live(id); err != nil {
		return dsec.Image{}, err
	}
	return s.f.addImage(name, dsec.Workspace, "commit of "+string(id), 1)
}

// Requires: f.mu held.
func (f *Fake) addImage(name string, role dsec.Role, source string, size int64) (dsec.Image, error) {
	if err := dsec.CheckNewImageName(name); err != nil {
		return dsec.Image{}, err
	}
	n, v := dsec.SplitImageName(name)
	i := dsec.Image{Name: n, Version: cmp.Or(v, "abcdef123456"), Role: cmp.Or(role, dsec.Base), Digest: "sha256:3", Size: size,
		Stored: size / 2, Entries: 3, Created: time.Now().UTC(), Source: source,
		Config: dsec.ImageConfig{Env: []string{"PATH=/bin"}, Cwd: "/", User: "root", Shell: []string{"sh"}}}
	for _, x := range f.images {
		if x.Ref() == i.Ref() {
			return dsec.Image{}, dsec.Errorf(dsec.Exists, "image %s exists", i.Ref())
		}
	}
	f.images = append(f.images, i)
	return i, nil
}

type images struct{ f *Fake }

func (s images) Pull(ctx context.Context, ref string, opt dsec.ImportOptions) iter.Seq2[dsec.Progress, error] {
	return func(yield func(dsec.Progress, error) bool) {
		if err := s.f.enter(ctx, "Images.Pull"); err != nil {
			yield(dsec.Progress{}, err)
			return
		}
		for i := range int64(3) {
			if !yield(dsec.Progress{Stage: "fetch", Done: i, Total: 3}, nil) {
				return
			}
		}
		s.f.mu.Lock()
		img, err := s.f.addImage(cmp.Or(opt.Name, ref), opt.Role, ref, 3)
		s.f.mu.Unlock()
		if err != nil {
			yield(dsec.Progress{}, err)
			return
		}
		yield(dsec.Progress{Stage: "store", Done: 3, Total: 3, Image: &img}, nil)
	}
}

func (s images) Upload(ctx context.Context, opt dsec.ImportOptions, r io.Reader) (dsec.Image, error) {
	if err := s.f.enter(ctx, "Images.Upload"); err != nil {
		return dsec.Image{}, err
	}
	n, err := io.Copy(io.Discard, r)
	if err != nil {
		return dsec.Image{}, err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	return s.f.addImage(opt.Name, opt.Role, "upload", n)
}

func (s images) Adopt(ctx context.Context, digest string, opt dsec.ImportOptions) (dsec.Image, error) {
	if err := s.f.enter(ctx, "Images.Adopt"); err != nil {
		return dsec.Image{}, err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	return s.f.addImage(opt.Name, opt.Role, "layer "+digest, 5)
}

// List gives pages that continue after a number.
func (s images) List(ctx context.Context, q dsec.ImageQuery) (dsec.ImagePage, error) {
	if err := s.f.enter(ctx, "Images.List"); err != nil {
		return dsec.ImagePage{}, err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	var page dsec.ImagePage
	from, _ := strconv.Atoi(q.After)
	for n, i := range s.f.images[from:] {
		if q.Limit > 0 && len(page.Images) == q.Limit {
			page.Next = strconv.Itoa(from + n)
			break
		}
		if q.Usage {
			i.Usage = &dsec.ImageUsage{Unique: 3, Cached: 5, Parts: []dsec.ImagePart{{Kind: "data", Digest: "d", Size: 4, Names: 2}}}
		}
		page.Images = append(page.Images, i)
	}
	return page, nil
}

func (s images) Tag(ctx context.Context, name, tag string) (dsec.Image, error) {
	if err := s.f.enter(ctx, "Images.Tag"); err != nil {
		return dsec.Image{}, err
	}
	img, err := s.Inspect(ctx, name)
	img.Tags = []string{tag}
	return img, err
}

// Export gives the names of the environment as text.
func (s images) Export(ctx context.Context, e dsec.Environment) (io.ReadCloser, error) {
	return io.NopCloser(strings.NewReader(strings.Join(e.Parts(), " "))), s.f.enter(ctx, "Images.Export")
}

func (s images) Inspect(ctx context.Context, name string) (dsec.Image, error) {
	if err := s.f.enter(ctx, "Images.Inspect"); err != nil {
		return dsec.Image{}, err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	for _, i := range s.f.images {
		if i.Name == name || i.Ref() == name {
			return i, nil
		}
	}
	return dsec.Image{}, dsec.Errorf(dsec.NotFound, "no image %q", name)
}

func (s images) Remove(ctx context.Context, name string) error {
	if _, err := s.Inspect(ctx, name); err != nil {
		return err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	s.f.images = slices.DeleteFunc(s.f.images, func(i dsec.Image) bool { return i.Name == name || i.Ref() == name })
	return nil
}

func (s images) Collect(ctx context.Context, opt dsec.CollectOptions) (dsec.Collected, error) {
	if !opt.Alone {
		return dsec.Collected{}, dsec.Errorf(dsec.Conflict, "there may be others")
	}
	return dsec.Collected{Blobs: 2, Bytes: 5 << 32}, s.f.enter(ctx, "Images.Collect")
}

type tokens struct{ f *Fake }

func (s tokens) Issue(ctx context.Context, t dsec.Token) (string, error) {
	if err := s.f.enter(ctx, "Tokens.Issue"); err != nil {
		return "", err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	s.f.tokens[t.Name] = t
	return "secret-" + t.Name + strconv.Itoa(len(s.f.tokens)), nil
}

func (s tokens) List(ctx context.Context) ([]dsec.Token, error) {
	if err := s.f.enter(ctx, "Tokens.List"); err != nil {
		return nil, err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	var out []dsec.Token
	for _, k := range slices.Sorted(maps.Keys(s.f.tokens)) {
		out = append(out, s.f.tokens[k])
	}
	return out, nil
}

func (s tokens) Revoke(ctx context.Context, name string) error {
	if err := s.f.enter(ctx, "Tokens.Revoke"); err != nil {
		return err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	if _, ok := s.f.tokens[name]; !ok {
		return dsec.Errorf(dsec.NotFound, "no token %q", name)
	}
	delete(s.f.tokens, name)
	return nil
}

type projects struct{ f *Fake }

func (s projects) Create(ctx context.Context, p dsec.Project) (dsec.Project, error) {
	if err := s.f.enter(ctx, "Projects.Create"); err != nil {
		return dsec.Project{}, err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	if slices.ContainsFunc(s.f.projects, func(o dsec.Project) bool { return o.Name == p.Name }) {
		return dsec.Project{}, dsec.Errorf(dsec.Exists, "project %q exists", string(p.Name))
	}
	p.Created = time.Now().UTC()
	s.f.projects = append(s.f.projects, p)
	return p, nil
}

func (s projects) List(ctx context.Context) ([]dsec.Project, error) {
	if err := s.f.enter(ctx, "Projects.List"); err != nil {
		return nil, err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	return slices.Clone(s.f.projects), nil
}

func (s projects) SetQuota(ctx context.Context, name dsec.ProjectID, q dsec.Quota) error {
	if err := s.f.enter(ctx, "Projects.SetQuota"); err != nil {
		return err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	i := slices.IndexFunc(s.f.projects, func(p dsec.Project) bool { return p.Name == name })
	if i < 0 {
		return dsec.Errorf(dsec.NotFound, "no project %q", string(name))
	}
	s.f.projects[i].Quota = q
	return nil
}

func (s projects) Remove(ctx context.Context, name dsec.ProjectID) error {
	if err := s.f.enter(ctx, "Projects.Remove"); err != nil {
		return err
	}
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	all := len(s.f.projects)
	s.f.projects = slices.DeleteFunc(s.f.projects, func(p dsec.Project) bool { return p.Name == name })
	if len(s.f.projects) == all {
		return dsec.Errorf(dsec.NotFound, "no project %q", string(name))
	}
	return nil
}

type nodes struct{ f *Fake }

func (s nodes) Nodes(ctx context.Context) ([]dsec.Node, error) {
	return []dsec.Node{{
		Name: s.f.Name, Place: s.f.Place, Version: dsec.Version, Kinds: dsec.Kinds, Sandboxes: 1, CPUs: 2, Load: 0.5, Memory: 1 << 35,
		Available: 1 << 34, Disk: 1 << 40, DiskFree: 1 << 39, Pressure: dsec.Pressure{CPU: 1, Memory: 2, IO: 3},
		Features: []dsec.FeatureStatus{{Name: "kvm", Detail: "no device", Cost: "slow"}},
	}}, s.f.enter(ctx, "Nodes.Nodes")
}
