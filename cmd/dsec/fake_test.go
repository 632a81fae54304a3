package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"net"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing/iotest"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/client"
)

// fake is a server whose sandboxes are memory and whose programs are the few
// that fakeCommand knows.
type fake struct {
	mu        sync.Mutex
	key       dsec.IDKey
	sandboxes map[dsec.SandboxID]*fakeSandbox
	order     []dsec.SandboxID
	images    map[string]dsec.Image
	tokens    []dsec.Token
	projects  []dsec.Project
	unreach   bool // every call is Unavailable
	breaks    int  // Attach streams that break after their first event
	registry  []string
}

type fakeSandbox struct {
	dsec.Sandbox
	files    map[string]string
	commands []*fakeCommand
	ended    chan struct{}
}

type fakeCommand struct {
	dsec.CommandStatus
	mu      sync.Mutex
	out     []dsec.Output
	changed chan struct{}
	stdin   *io.PipeWriter
	signal  chan string
}

func newFake() *fake {
	return &fake{sandboxes: map[dsec.SandboxID]*fakeSandbox{}, images: map[string]dsec.Image{
		"debian": {Name: "debian", Version: "12", Role: dsec.Base, Size: 3 << 20, Stored: 2 << 20, Entries: 7, Source: "tar"},
	}}
}

// connect is an app's Connect.
func (f *fake) connect(to client.Config) (dsec.Services, error) {
	if f.unreach {
		return dsec.Services{}, dsec.Errorf(dsec.Unavailable, "dial %s: connection refused", to.URL)
	}
	if to.Token == "wrong" {
		return dsec.Services{}, dsec.Errorf(dsec.Unauthenticated, "the token is not known")
	}
	return dsec.Services{
		Sandboxes: fakeSandboxes{f}, Commands: fakeCommands{f}, Files: fakeFiles{f}, Ports: fakePorts{f},
		Images: fakeImages{f}, Tokens: fakeTokens{f}, Projects: fakeProjects{f}, Nodes: fakeNodes{f},
	}, nil
}

func (f *fake) get(id dsec.SandboxID) (*fakeSandbox, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	sb := f.sandboxes[id]
	if sb == nil {
		return nil, &dsec.Error{Op: "edge.Get", Kind: dsec.NotFound, Err: errors.New("no such sandbox"), Request: "r1"}
	}
	return sb, nil
}

type fakeSandboxes struct{ *fake }

func (f fakeSandboxes) Create(_ context.Context, spec dsec.Spec, opt dsec.CreateOptions) (dsec.Sandbox, error) {
	spec = spec.WithDefaults()
	if err := spec.Check(); err != nil {
		return dsec.Sandbox{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	base, _ := dsec.SplitImageName(spec.Environment.Base)
	if _, ok := f.images[base]; !ok {
		return dsec.Sandbox{}, dsec.Errorf(dsec.NotFound, "no image is named %s", spec.Environment.Base)
	}
	for _, sb := range f.sandboxes {
		if opt.Key != "" && sb.Key == opt.Key {
			return sb.Sandbox, nil
		}
	}
	now := time.Now()
	sb := &fakeSandbox{files: map[string]string{}, ended: make(chan struct{}), Sandbox: dsec.Sandbox{
		ID: f.key.New(dsec.Place{Node: 1, Epoch: 1}), Spec: spec, State: dsec.Running, Node: "n1", Key: opt.Key,
		Created: now, Expires: now.Add(spec.TTL), Stages: []dsec.Stage{{Name: "root", Took: 3 * time.Millisecond}},
	}}
	f.sandboxes[sb.ID] = sb
	f.order = append(f.order, sb.ID)
	return sb.Sandbox, nil
}

func (f fakeSandboxes) Get(_ context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	sb, err := f.get(id)
	if err != nil {
		return dsec.Sandbox{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return sb.Sandbox, nil
}

func (f fakeSandboxes) List(_ context.Context, flt dsec.Filter) ([]dsec.Sandbox, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var list []dsec.Sandbox
	for _, id := range slices.Backward(f.order) {
		sb := f.sandboxes[id]
		if sb.State.Ended() && !flt.All || flt.Job != "" && flt.Job != sb.Spec.Job {
			continue
		}
		match := true
		for k, v := range flt.Labels {
			match = match && sb.Spec.Labels[k] == v
		}
		if match {
			list = append(list, sb.Sandbox)
		}
	}
	return list, nil
}

func (f fakeSandboxes) Extend(context.Context, dsec.SandboxID, time.Duration) (dsec.Sandbox, error) {
	return dsec.Sandbox{}, dsec.Errorf(dsec.Unsupported, "fake")
}

func (f fakeSandboxes) Stop(_ context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	sb, err := f.get(id)
	if err != nil {
		return dsec.Sandbox{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !sb.State.Ended() {
		sb.State, sb.Cause, sb.Ended = dsec.Stopped, dsec.CauseUser, time.Now()
		close(sb.ended)
	}
	return sb.Sandbox, nil
}

func (f fakeSandboxes) Pause(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	return f.turn(ctx, id, dsec.Running, dsec.Paused)
}

func (f fakeSandboxes) Resume(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	return f.turn(ctx, id, dsec.Paused, dsec.Running)
}

// turn changes the state of a sandbox that has the first one.
func (f fakeSandboxes) turn(ctx context.Context, id dsec.SandboxID, from, to dsec.State) (dsec.Sandbox, error) {
	sb, err := f.get(id)
	if err != nil {
		return dsec.Sandbox{}, err
	}
	f.mu.Lock()
	if sb.State == from {
		sb.State, sb.Paused, sb.Reclaimed = to, time.Time{}, 0
		if to == dsec.Paused {
			sb.Paused, sb.Reclaimed = time.Now(), 20<<20
		}
	}
	f.mu.Unlock()
	return f.Get(ctx, id)
}

func (f fakeSandboxes) Wait(ctx context.Context, id dsec.SandboxID) (dsec.Sandbox, error) {
	sb, err := f.get(id)
	if err != nil {
		return dsec.Sandbox{}, err
	}
	select {
	case <-sb.ended:
		return f.Get(ctx, id)
	case <-ctx.Done():
		return dsec.Sandbox{}, ctx.Err()
	}
}

func (f fakeSandboxes) Commit(_ context.Context, id dsec.SandboxID, name string) (dsec.Image, error) {
	if _, err := f.get(id); err != nil {
		return dsec.Image{}, err
	}
	return f.keep(dsec.ImportOptions{Name: name, Role: dsec.Workspace}, "commit")
}

func (f *fake) keep(opt dsec.ImportOptions, source string) (dsec.Image, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	img := dsec.Image{Role: opt.Role, Source: source}
	img.Name, img.Version = dsec.SplitImageName(opt.Name)
	if img.Version == "" {
		img.Version = "0123456789ab"
	}
	if old, ok := f.images[img.Name]; ok && old.Version == img.Version {
		return dsec.Image{}, dsec.Errorf(dsec.Exists, "image %s exists", img.Ref())
	}
	f.images[img.Name] = img
	return img, nil
}

type fakeCommands struct{ *fake }

func (f fakeCommands) Start(_ context.Context, on dsec.Call, c dsec.Command) (dsec.CommandStatus, error) {
	sb, err := f.get(on.Sandbox)
	if err != nil {
		return dsec.CommandStatus{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, old := range sb.commands {
		if !on.Step.IsZero() && old.Step == on.Step {
			return old.status(), nil
		}
	}
	cmd := &fakeCommand{changed: make(chan struct{}), signal: make(chan string, 8), CommandStatus: dsec.CommandStatus{
		ID: dsec.CommandID("c" + strconv.Itoa(len(sb.commands)+1)), Step: on.Step, Command: c, Outcome: dsec.StillRunning, Pid: 7,
		Started: time.Now(),
	}}
	var in io.Reader = strings.NewReader("")
	if c.Stdin == dsec.StdinPipe {
		r, w := io.Pipe()
		in, cmd.stdin = r, w
	}
	sb.commands = append(sb.commands, cmd)
	go cmd.run(in)
	return cmd.status(), nil
}

func (c *fakeCommand) status() dsec.CommandStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.CommandStatus
}

func (c *fakeCommand) emit(o dsec.Output) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n := len(c.out); n > 0 {
		o.Offset = c.out[n-1].Offset + int64(len(c.out[n-1].Data))
	}
	o.Offset += o.Gap
	c.out = append(c.out, o)
	close(c.changed)
	c.changed = make(chan struct{})
}

// run is the programs of the fake.
func (c *fakeCommand) run(in io.Reader) {
	args := c.Command.Argv[1:]
	print := func(s dsec.Stream, text string) { c.emit(dsec.Output{Stream: s, Data: []byte(text)}) }
	outcome, code, signal, detail := dsec.Exited, 0, "", ""
	switch c.Command.Argv[0] {
	case "echo":
		print(dsec.Stdout, strings.Join(args, " ")+"\n")
	case "both":
		print(dsec.Stdout, "out\n")
		print(dsec.Stderr, "err\n")
		print(dsec.Stdout, "\x00\r\n")
	case "binary":
		for i := range 1024 {
			print(dsec.Stdout, string([]byte{byte(i), byte(i >> 8)}))
		}
	case "gap":
		c.emit(dsec.Output{Stream: dsec.Stdout, Data: []byte("tail\n"), Gap: 1000})
	case "cat":
		buf := make([]byte, 4096)
		for n, err := 0, error(nil); err == nil; {
			n, err = in.Read(buf)
			print(dsec.Stdout, string(buf[:n]))
		}
	case "env":
		for _, k := range slices.Sorted(maps.Keys(c.Command.Env)) {
			print(dsec.Stdout, k+"="+c.Command.Env[k]+"\n")
		}
		print(dsec.Stdout, fmt.Sprintf("cwd=%s user=%s\n", c.Command.Cwd, c.Command.User))
	case "tty":
		print(dsec.Stdout, fmt.Sprint(c.Command.TTY != nil, "\r\n"))
	case "exit":
		code, _ = strconv.Atoi(args[0])
	case "hang":
		print(dsec.Stdout, "ready\n")
		outcome, signal = dsec.Signaled, <-c.signal
		code = map[string]int{"INT": 130, "KILL": 137, "PIPE": 141, "TERM": 143}[signal]
	case "stubborn":
		print(dsec.Stdout, "ready\n")
		for signal = ""; signal != "KILL"; signal = <-c.signal {
			print(dsec.Stdout, signal+"\n")
		}
		outcome, code = dsec.Signaled, 137
	case "deaf":
		print(dsec.Stdout, "ready\n")
		select {} // ends with the test
	case "rawcat":
		print(dsec.Stdout, fmt.Sprint(*c.Command.TTY))
		for b, end := make([]byte, 1), false; !end; end = b[0] == 4 {
			_, _ = io.ReadFull(in, b)
			print(dsec.Stdout, string(b))
		}
	case "slow":
		outcome, code = dsec.TimedOut, 124
	case "oom":
		outcome, code = dsec.OutOfMemory, 137
	case "gone":
		outcome, code = dsec.Interrupted, 0
	default:
		outcome, code, detail = dsec.NotStarted, 127, c.Command.Argv[0]+": not found"
	}
	c.mu.Lock()
	c.Outcome, c.Code, c.Signal, c.Detail, c.Ended = outcome, code, signal, detail, time.Now()
	st := c.CommandStatus
	c.mu.Unlock()
	c.emit(dsec.Output{Status: &st})
}

func (f fakeCommands) command(on dsec.Call, id dsec.CommandID) (*fakeCommand, error) {
	sb, err := f.get(on.Sandbox)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range sb.commands {
		if c.ID == id {
			return c, nil
		}
	}
	return nil, dsec.Errorf(dsec.NotFound, "no command %s", id)
}

func (f fakeCommands) Attach(ctx context.Context, on dsec.Call, id dsec.CommandID, offset int64) iter.Seq2[dsec.Output, error] {
	return func(yield func(dsec.Output, error) bool) {
		c, err := f.command(on, id)
		if err != nil {
			yield(dsec.Output{}, err)
			return
		}
		for i := 0; ; i++ {
			c.mu.Lock()
			for i == len(c.out) {
				changed := c.changed
				c.mu.Unlock()
				select {
				case <-changed:
				case <-ctx.Done():
					yield(dsec.Output{}, ctx.Err())
					return
				}
				c.mu.Lock()
			}
			o := c.out[i]
			c.mu.Unlock()
			if o.Status == nil && o.Offset+int64(len(o.Data)) <= offset {
				continue
			}
			if !yield(o, nil) || o.Status != nil {
				return
			}
			f.mu.Lock()
			broken := f.breaks > 0
			f.breaks = max(0, f.breaks-1)
			f.mu.Unlock()
			if broken {
				yield(dsec.Output{}, dsec.Errorf(dsec.Unavailable, "connection reset"))
				return
			}
		}
	}
}

func (f fakeCommands) Write(_ context.Context, on dsec.Call, id dsec.CommandID, in dsec.StdinWrite) (int64, error) {
	c, err := f.command(on, id)
	if err != nil {
		return 0, err
	}
	if c.stdin == nil {
		return 0, dsec.Errorf(dsec.Conflict, "input is closed")
	}
	if _, err := c.stdin.Write(in.Data); err != nil {
		return 0, dsec.Errorf(dsec.Conflict, "input is closed")
	}
	if in.Close {
		c.stdin.Close()
	}
	return in.Offset + int64(len(in.Data)), nil
}

func (f fakeCommands) Signal(_ context.Context, on dsec.Call, id dsec.CommandID, sig string) error {
	c, err := f.command(on, id)
	if err != nil {
		return err
	}
	c.signal <- sig
	return nil
}

func (f fakeCommands) Wait(ctx context.Context, on dsec.Call, id dsec.CommandID) (dsec.CommandStatus, error) {
	for o, err := range f.Attach(ctx, on, id, 1<<60) {
		if err != nil {
			return dsec.CommandStatus{}, err
		}
		if o.Status != nil {
			return *o.Status, nil
		}
	}
	return dsec.CommandStatus{}, dsec.Errorf(dsec.Internal, "no status")
}

func (f fakeCommands) List(_ context.Context, on dsec.Call) ([]dsec.CommandStatus, error) {
	sb, err := f.get(on.Sandbox)
	if err != nil {
		return nil, err
	}
	var list []dsec.CommandStatus
	for _, c := range sb.commands {
		list = append(list, c.status())
	}
	return list, nil
}

func (f fakeCommands) Run(context.Context, dsec.Call, dsec.Command, []byte) (dsec.Result, error) {
	return dsec.Result{}, dsec.Errorf(dsec.Unsupported, "fake")
}

func (f fakeCommands) Read(context.Context, dsec.Call, dsec.CommandID, dsec.Stream, int64, int) ([]byte, error) {
	return nil, dsec.Errorf(dsec.Unsupported, "fake")
}

func (f fakeCommands) Resize(context.Context, dsec.Call, dsec.CommandID, dsec.WinSize) error {
	return nil
}

// fakeFiles keeps files by absolute path; a folder is a path with a slash.
type fakeFiles struct{ *fake }

func (f fakeFiles) Stat(_ context.Context, on dsec.Call, o dsec.FileOp) (dsec.FileInfo, error) {
	sb, err := f.get(on.Sandbox)
	if err != nil {
		return dsec.FileInfo{}, err
	}
	p := path.Clean(o.Path)
	if _, ok := sb.files[p+"/"]; ok || p == "/" {
		return dsec.FileInfo{Path: p, Type: dsec.TypeDir, Mode: 0o755}, nil
	}
	if data, ok := sb.files[p]; ok && !strings.HasSuffix(o.Path, "/.") {
		return dsec.FileInfo{Path: p, Type: dsec.TypeFile, Mode: 0o640, Size: int64(len(data))}, nil
	} else if ok {
		return dsec.FileInfo{}, dsec.Errorf(dsec.Invalid, "%s is no folder", p)
	}
	return dsec.FileInfo{}, dsec.Errorf(dsec.NotFound, "%s does not exist", p)
}

func (f fakeFiles) Read(ctx context.Context, on dsec.Call, o dsec.FileOp, _ dsec.ReadRange) (io.ReadCloser, error) {
	if _, err := f.Stat(ctx, on, o); err != nil {
		return nil, err
	}
	sb, _ := f.get(on.Sandbox)
	return io.NopCloser(strings.NewReader(sb.files[path.Clean(o.Path)])), nil
}

func (f fakeFiles) Write(ctx context.Context, on dsec.Call, o dsec.FileOp, opt dsec.WriteOptions, r io.Reader) (dsec.FileInfo, error) {
	sb, err := f.get(on.Sandbox)
	if err != nil {
		return dsec.FileInfo{}, err
	}
	if dir := path.Dir(path.Clean(o.Path)); !opt.Parents {
		if _, err := f.Stat(ctx, on, dsec.FileOp{Path: dir}); err != nil {
			return dsec.FileInfo{}, err
		}
	}
	b, err := io.ReadAll(r)
	sb.files[path.Clean(o.Path)] = string(b)
	return dsec.FileInfo{}, err
}

func (f fakeFiles) Pack(_ context.Context, on dsec.Call, o dsec.FileOp) (io.ReadCloser, error) {
	sb, err := f.get(on.Sandbox)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	prefix := strings.TrimSuffix(path.Clean(o.Path), "/") + "/"
	for _, p := range slices.Sorted(maps.Keys(sb.files)) {
		rel, ok := strings.CutPrefix(p, prefix)
		if !ok || rel == "" {
			continue
		}
		h := &tar.Header{Name: rel, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(sb.files[p]))}
		if strings.HasSuffix(p, "/") {
			h.Typeflag, h.Mode = tar.TypeDir, 0o755
		}
		if err := w.WriteHeader(h); err != nil {
			return nil, err
		}
		io.WriteString(w, sb.files[p])
	}
	w.Close()
	return io.NopCloser(&b), nil
}

func (f fakeFiles) Unpack(_ context.Context, on dsec.Call, o dsec.FileOp, r io.Reader) error {
	sb, err := f.get(on.Sandbox)
	if err != nil {
		return err
	}
	sb.files[path.Clean(o.Path)+"/"] = ""
	for t := tar.NewReader(r); ; {
		h, err := t.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return dsec.Errorf(dsec.Invalid, "%v", err)
		}
		b, _ := io.ReadAll(t)
		p := path.Join(o.Path, h.Name)
		if h.Typeflag == tar.TypeDir {
			p += "/"
		}
		sb.files[p] = string(b)
	}
}

func (fakeFiles) List(context.Context, dsec.Call, dsec.FileOp, int) iter.Seq2[dsec.FileInfo, error] {
	return nil
}
func (fakeFiles) Mkdir(context.Context, dsec.Call, dsec.FileOp, uint32) error { return nil }
func (fakeFiles) Move(context.Context, dsec.Call, dsec.FileOp, string) error  { return nil }
func (fakeFiles) Remove(context.Context, dsec.Call, dsec.FileOp) error        { return nil }
func (fakeFiles) Chmod(context.Context, dsec.Call, dsec.FileOp, uint32) error { return nil }
func (fakeFiles) Chown(context.Context, dsec.Call, dsec.FileOp, string) error { return nil }
func (fakeFiles) Symlink(context.Context, dsec.Call, dsec.FileOp, string) error {
	return nil
}
func (fakeFiles) Watch(context.Context, dsec.Call, dsec.FileOp, dsec.WatchOptions) iter.Seq2[dsec.WatchEvent, error] {
	return nil
}

// fakePorts has one server in every sandbox: port 7 sends back what it got
// once its client has no more.
type fakePorts struct{ *fake }

func (f fakePorts) Dial(_ context.Context, on dsec.Call, port int) (dsec.PortConn, error) {
	if port != 7 {
		return nil, dsec.Errorf(dsec.Unavailable, "nothing listens on port %d", port)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer l.Close()
	go func(l net.Listener) {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		b, _ := io.ReadAll(c)
		c.Write(append([]byte("back: "), b...))
	}(l)
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

type fakeImages struct{ *fake }

func (f fakeImages) Pull(_ context.Context, ref string, opt dsec.ImportOptions) iter.Seq2[dsec.Progress, error] {
	return func(yield func(dsec.Progress, error) bool) {
		if strings.Contains(ref, "unknown") {
			yield(dsec.Progress{}, dsec.Errorf(dsec.NotFound, "the registry has no %s", ref))
			return
		}
		f.registry = append(f.registry, ref)
		if !yield(dsec.Progress{Stage: "fetch", Done: 1, Total: 2}, nil) {
			return
		}
		img, err := f.keep(opt, ref)
		yield(dsec.Progress{Stage: "store", Image: &img}, err)
	}
}

func (f fakeImages) Upload(_ context.Context, opt dsec.ImportOptions, r io.Reader) (dsec.Image, error) {
	var names []string
	for t := tar.NewReader(r); ; {
		h, err := t.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return dsec.Image{}, dsec.Errorf(dsec.Invalid, "read archive: %v", err)
		}
		names = append(names, h.Name)
	}
	return f.keep(opt, "tar of "+strings.Join(names, " "))
}

func (f fakeImages) Adopt(_ context.Context, digest string, opt dsec.ImportOptions) (dsec.Image, error) {
	return f.keep(opt, "layer "+digest)
}

// List has two images on a page.
func (f fakeImages) List(_ context.Context, q dsec.ImageQuery) (page dsec.ImagePage, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, n := range slices.Sorted(maps.Keys(f.images)) {
		switch {
		case n <= q.After || !strings.HasPrefix(n, q.Prefix):
		case len(page.Images) == 2:
			page.Next = page.Images[1].Name
			return page, nil
		default:
			img := f.images[n]
			if q.Usage {
				img.Usage = &dsec.ImageUsage{Unique: 3 << 20, Cached: 5 << 10}
			}
			page.Images = append(page.Images, img)
		}
	}
	return page, nil
}

func (f fakeImages) Tag(ctx context.Context, name, tag string) (dsec.Image, error) {
	i, err := f.Inspect(ctx, name)
	if err != nil {
		return i, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	i.Tags = append(i.Tags, tag)
	f.images[i.Name] = i
	return i, nil
}

// Export gives the environment as text, and breaks off for an image named broken.
func (f fakeImages) Export(_ context.Context, e dsec.Environment) (io.ReadCloser, error) {
	var r io.Reader = strings.NewReader(strings.Join(e.Parts(), " ") + "\n")
	if e.Base == "broken" {
		r = io.MultiReader(r, iotest.ErrReader(dsec.Errorf(dsec.Unavailable, "the store is gone")))
	}
	return io.NopCloser(r), nil
}

func (f fakeImages) Inspect(_ context.Context, name string) (dsec.Image, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n, v := dsec.SplitImageName(name)
	if i, ok := f.images[n]; ok && (v == "" || v == i.Version) {
		return i, nil
	}
	return dsec.Image{}, dsec.Errorf(dsec.NotFound, "no image is named %s", name)
}

func (f fakeImages) Remove(ctx context.Context, name string) error {
	i, err := f.Inspect(ctx, name)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.images, i.Name)
	return nil
}

func (f fakeImages) Collect(_ context.Context, opt dsec.CollectOptions) (dsec.Collected, error) {
	if opt.Alone {
		return dsec.Collected{}, dsec.Errorf(dsec.Conflict, "not alone")
	}
	return dsec.Collected{Blobs: 2, Bytes: 5 << 20}, nil
}

type fakeTokens struct{ *fake }

func (f fakeTokens) Issue(_ context.Context, t dsec.Token) (string, error) {
	f.tokens = append(f.tokens, t)
	return "secret-of-" + t.Name, nil
}
func (f fakeTokens) List(context.Context) ([]dsec.Token, error) { return f.tokens, nil }
func (f fakeTokens) Revoke(_ context.Context, name string) error {
	n := len(f.tokens)
	f.tokens = slices.DeleteFunc(f.tokens, func(t dsec.Token) bool { return t.Name == name })
	if len(f.tokens) == n {
		return dsec.Errorf(dsec.NotFound, "no token is named %s", name)
	}
	return nil
}

type fakeProjects struct{ *fake }

func (f fakeProjects) Create(_ context.Context, p dsec.Project) (dsec.Project, error) {
	if slices.ContainsFunc(f.projects, func(o dsec.Project) bool { return o.Name == p.Name }) {
		return dsec.Project{}, dsec.Errorf(dsec.Exists, "a project is called %s already", p.Name)
	}
	p.Created = time.Now()
	f.projects = append(f.projects, p)
	return p, nil
}
func (f fakeProjects) SetQuota(_ context.Context, name dsec.ProjectID, q dsec.Quota) error {
	i := slices.IndexFunc(f.projects, func(p dsec.Project) bool { return p.Name == name })
	if i < 0 {
		return dsec.Errorf(dsec.NotFound, "no project is called %s", name)
	}
	f.projects[i].Quota = q
	return nil
}

func (f fakeProjects) Remove(_ context.Context, name dsec.ProjectID) error {
	all := len(f.projects)
	f.projects = slices.DeleteFunc(f.projects, func(p dsec.Project) bool { return p.Name == name })
	if len(f.projects) == all {
		return dsec.Errorf(dsec.NotFound, "no project is called %s", name)
	}
	return nil
}

func (f fakeProjects) List(context.Context) ([]dsec.Project, error) { return f.projects, nil }

type fakeNodes struct{ *fake }

func (f fakeNodes) Nodes(context.Context) ([]dsec.Node, error) {
	return []dsec.Node{{Name: "n1", Version: dsec.Version, Kinds: []dsec.Kind{dsec.Container}, CPUs: 2, Memory: 24 << 30}}, nil
}
