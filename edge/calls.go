package edge

import (
	"context"
	"errors"
	"io"
	"iter"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// begin finds the machine for a call and counts the call, so that the sandbox
// is not idle meanwhile; the caller calls e.finish. A paused sandbox is resumed
// first. An ended sandbox is Conflict, one whose node lost it Lost.
func (n *Node) begin(ctx context.Context, id dsec.SandboxID) (*entry, driver.Machine, error) {
	e, err := n.get(id)
	if err != nil {
		return nil, nil, err
	}
	for {
		e.mu.Lock()
		if err := e.usable(); err != nil {
			e.mu.Unlock()
			return nil, nil, err
		}
		if e.turn == nil && e.rec.state != dsec.Paused {
			e.use()
			m := e.machine
			e.mu.Unlock()
			return e, m, nil
		}
		if err := n.awake(ctx, e, DetailCall); err != nil { // gives e.mu back
			return nil, nil, err
		}
	}
}

// touch is begin for what a paused sandbox need not be resumed for.
func (n *Node) touch(id dsec.SandboxID) (*entry, driver.Machine, error) {
	e, err := n.get(id)
	if err != nil {
		return nil, nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.usable(); err != nil {
		return nil, nil, err
	}
	e.use()
	return e, e.machine, nil
}

// use counts a call that begins. Requires: e.mu held.
func (e *entry) use() {
	e.calls++
	e.lastUsed = e.clock.nano()
}

// usable says why nothing can be asked of e. Requires: e.mu held.
func (e *entry) usable() error {
	switch {
	case e.rec.state == dsec.LostGone:
		return dsec.Errorf(dsec.Lost, "the sandbox is lost: %s", e.rec.verdict.detail)
	case e.rec.state.Ended():
		return endedError("has ended", e.rec.verdict)
	case e.ending != nil:
		return endedError("is being ended", e.ending.verdict)
	case e.machine == nil:
		return dsec.Errorf(dsec.Conflict, "the sandbox is being created")
	}
	return nil
}

func endedError(what string, v verdict) error {
	if v.detail == "" {
		return dsec.Errorf(dsec.Conflict, "the sandbox %s (%s)", what, v.cause)
	}
	return dsec.Errorf(dsec.Conflict, "the sandbox %s (%s: %s)", what, v.cause, v.detail)
}

// finish ends a call that begin began.
func (e *entry) finish() {
	now := e.clock.nano()
	e.mu.Lock()
	e.calls--
	e.lastUsed = now
	e.mu.Unlock()
}

// explain adds operation and sandbox to what a guest answered. A guest that
// went away in the middle knows less than the table: where the sandbox has
// ended, the error says why.
func (n *Node) explain(e *entry, op string, err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, driver.ErrEnded) && !n.learn(e) {
		err = errClosing // a node that closes lets go of machines that live
	}
	if k := dsec.KindOf(err); k == dsec.Conflict || k == dsec.Unavailable || k == dsec.Internal {
		e.mu.Lock()
		if over := e.usable(); over != nil {
			err = over
		}
		e.mu.Unlock()
	}
	return dsec.WithOp(op, e.id, err)
}

// learnTimeout is how long a machine whose guest has gone may take to be gone.
const learnTimeout = 3 * time.Second

// learn waits until the table knows why the machine of e, whose guest has gone,
// has ended; false where it lives and the node closes.
func (n *Node) learn(e *entry) bool {
	e.mu.Lock()
	over, told := e.awaitEnd(), e.ending != nil && !e.ending.itself
	e.mu.Unlock()
	if over == nil || told {
		return true
	}
	limit := time.NewTimer(learnTimeout)
	defer limit.Stop()
	select {
	case <-over:
	case <-limit.C:
	case <-n.life.Done():
		return false
	}
	return true
}

// call runs f with the machine's guest as one counted call.
func call[T any](ctx context.Context, n *Node, op string, on dsec.Call, f func(driver.Guest) (T, error)) (T, error) {
	e, m, err := n.begin(ctx, on.Sandbox)
	if err != nil {
		var zero T
		return zero, dsec.WithOp(op, on.Sandbox, err)
	}
	defer e.finish()
	v, err := f(m.Guest())
	return v, n.explain(e, op, err)
}

// do is call for what answers with an error alone.
func do(ctx context.Context, n *Node, op string, on dsec.Call, f func(driver.Guest) error) error {
	_, err := call(ctx, n, op, on, func(g driver.Guest) (struct{}, error) { return struct{}{}, f(g) })
	return err
}

// stream runs a sequence of the guest as one call that lasts until its end.
func stream[T any](ctx context.Context, n *Node, op string, on dsec.Call, f func(driver.Guest) iter.Seq2[T, error]) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		e, m, err := n.begin(ctx, on.Sandbox)
		if err != nil {
			var zero T
			yield(zero, dsec.WithOp(op, on.Sandbox, err))
			return
		}
		defer e.finish()
		for v, err := range f(m.Guest()) {
			if !yield(v, n.explain(e, op, err)) {
				return
			}
		}
	}
}

// commands, files and ports give a node's guests the contracts' shape.
type (
	commands struct{ n *Node }
	files    struct{ n *Node }
	ports    struct{ n *Node }
)

var (
	_ dsec.Commands = commands{}
	_ dsec.Files    = files{}
	_ dsec.Ports    = ports{}
)

func (c commands) Start(ctx context.Context, on dsec.Call, cmd dsec.Command) (dsec.CommandStatus, error) {
	return call(ctx, c.n, "edge.Start", on, func(g driver.Guest) (dsec.CommandStatus, error) {
		return g.Commands().Start(ctx, on, cmd)
	})
}

func (c commands) Run(ctx context.Context, on dsec.Call, cmd dsec.Command, stdin []byte) (dsec.Result, error) {
	return call(ctx, c.n, "edge.Run", on, func(g driver.Guest) (dsec.Result, error) {
		return g.Commands().Run(ctx, on, cmd, stdin)
	})
}

func (c commands) Attach(ctx context.Context, on dsec.Call, id dsec.CommandID, offset int64) iter.Seq2[dsec.Output, error] {
	return stream(ctx, c.n, "edge.Attach", on, func(g driver.Guest) iter.Seq2[dsec.Output, error] {
		return g.Commands().Attach(ctx, on, id, offset)
	})
}

func (c commands) Read(ctx context.Context, on dsec.Call, id dsec.CommandID, s dsec.Stream, offset int64, max int) ([]byte, error) {
	return call(ctx, c.n, "edge.Read", on, func(g driver.Guest) ([]byte, error) {
		return g.Commands().Read(ctx, on, id, s, offset, max)
	})
}

func (c commands) Write(ctx context.Context, on dsec.Call, id dsec.CommandID, in dsec.StdinWrite) (int64, error) {
	return call(ctx, c.n, "edge.Write", on, func(g driver.Guest) (int64, error) {
		return g.Commands().Write(ctx, on, id, in)
	})
}

func (c commands) Resize(ctx context.Context, on dsec.Call, id dsec.CommandID, size dsec.WinSize) error {
	return do(ctx, c.n, "edge.Resize", on, func(g driver.Guest) error { return g.Commands().Resize(ctx, on, id, size) })
}

func (c commands) Signal(ctx context.Context, on dsec.Call, id dsec.CommandID, sig string) error {
	return do(ctx, c.n, "edge.Signal", on, func(g driver.Guest) error { return g.Commands().Signal(ctx, on, id, sig) })
}

func (c commands) Wait(ctx context.Context, on dsec.Call, id dsec.CommandID) (dsec.CommandStatus, error) {
	return call(ctx, c.n, "edge.WaitCommand", on, func(g driver.Guest) (dsec.CommandStatus, error) {
		return g.Commands().Wait(ctx, on, id)
	})
}

func (c commands) List(ctx context.Context, on dsec.Call) ([]dsec.CommandStatus, error) {
	return call(ctx, c.n, "edge.ListCommands", on, func(g driver.Guest) ([]dsec.CommandStatus, error) {
		return g.Commands().List(ctx, on)
	})
}

func (f files) Stat(ctx context.Context, on dsec.Call, op dsec.FileOp) (dsec.FileInfo, error) {
	return call(ctx, f.n, "edge.Stat", on, func(g driver.Guest) (dsec.FileInfo, error) { return g.Files().Stat(ctx, on, op) })
}

func (f files) List(ctx context.Context, on dsec.Call, op dsec.FileOp, depth int) iter.Seq2[dsec.FileInfo, error] {
	return stream(ctx, f.n, "edge.ListFiles", on, func(g driver.Guest) iter.Seq2[dsec.FileInfo, error] {
		return g.Files().List(ctx, on, op, depth)
	})
}

// Read's call lasts until the reader is closed.
func (f files) Read(ctx context.Context, on dsec.Call, op dsec.FileOp, r dsec.ReadRange) (io.ReadCloser, error) {
	return f.reader(ctx, "edge.ReadFile", on, func(g driver.Guest) (io.ReadCloser, error) { return g.Files().Read(ctx, on, op, r) })
}

func (f files) Write(ctx context.Context, on dsec.Call, op dsec.FileOp, opt dsec.WriteOptions, r io.Reader) (dsec.FileInfo, error) {
	return call(ctx, f.n, "edge.WriteFile", on, func(g driver.Guest) (dsec.FileInfo, error) {
		return g.Files().Write(ctx, on, op, opt, r)
	})
}

func (f files) Mkdir(ctx context.Context, on dsec.Call, op dsec.FileOp, mode uint32) error {
	return do(ctx, f.n, "edge.Mkdir", on, func(g driver.Guest) error { return g.Files().Mkdir(ctx, on, op, mode) })
}

func (f files) Move(ctx context.Context, on dsec.Call, op dsec.FileOp, to string) error {
	return do(ctx, f.n, "edge.Move", on, func(g driver.Guest) error { return g.Files().Move(ctx, on, op, to) })
}

func (f files) Remove(ctx context.Context, on dsec.Call, op dsec.FileOp) error {
	return do(ctx, f.n, "edge.Remove", on, func(g driver.Guest) error { return g.Files().Remove(ctx, on, op) })
}

func (f files) Chmod(ctx context.Context, on dsec.Call, op dsec.FileOp, mode uint32) error {
	return do(ctx, f.n, "edge.Chmod", on, func(g driver.Guest) error { return g.Files().Chmod(ctx, on, op, mode) })
}

func (f files) Chown(ctx context.Context, on dsec.Call, op dsec.FileOp, owner string) error {
	return do(ctx, f.n, "edge.Chown", on, func(g driver.Guest) error { return g.Files().Chown(ctx, on, op, owner) })
}

func (f files) Symlink(ctx context.Context, on dsec.Call, op dsec.FileOp, target string) error {
	return do(ctx, f.n, "edge.Symlink", on, func(g driver.Guest) error { return g.Files().Symlink(ctx, on, op, target) })
}

func (f files) Watch(ctx context.Context, on dsec.Call, op dsec.FileOp, opt dsec.WatchOptions) iter.Seq2[dsec.WatchEvent, error] {
	return stream(ctx, f.n, "edge.Watch", on, func(g driver.Guest) iter.Seq2[dsec.WatchEvent, error] {
		return g.Files().Watch(ctx, on, op, opt)
	})
}

// Pack's call lasts until the reader is closed.
func (f files) Pack(ctx context.Context, on dsec.Call, op dsec.FileOp) (io.ReadCloser, error) {
	return f.reader(ctx, "edge.Pack", on, func(g driver.Guest) (io.ReadCloser, error) { return g.Files().Pack(ctx, on, op) })
}

func (f files) Unpack(ctx context.Context, on dsec.Call, op dsec.FileOp, r io.Reader) error {
	return do(ctx, f.n, "edge.Unpack", on, func(g driver.Guest) error { return g.Files().Unpack(ctx, on, op, r) })
}

// reader is call for what goes on after it has answered.
func (f files) reader(ctx context.Context, op string, on dsec.Call, open func(driver.Guest) (io.ReadCloser, error)) (io.ReadCloser, error) {
	e, m, err := f.n.begin(ctx, on.Sandbox)
	if err != nil {
		return nil, dsec.WithOp(op, on.Sandbox, err)
	}
	r, err := open(m.Guest())
	if err != nil {
		e.finish()
		return nil, f.n.explain(e, op, err)
	}
	return &countedReader{r, f.n, e, op, sync.OnceFunc(e.finish)}, nil
}

// countedReader keeps a call counted until it is closed.
type countedReader struct {
	io.ReadCloser
	n    *Node
	e    *entry
	op   string
	done func()
}

// Read names operation and sandbox in its errors, io.EOF excepted.
func (r *countedReader) Read(b []byte) (int, error) {
	n, err := r.ReadCloser.Read(b)
	if err != nil && err != io.EOF {
		err = r.n.explain(r.e, r.op, err)
	}
	return n, err
}

// Close ends the call.
func (r *countedReader) Close() error {
	defer r.done()
	return r.ReadCloser.Close()
}

// Dial's call lasts until the connection is closed: a sandbox that serves
// somebody is not idle.
func (p ports) Dial(ctx context.Context, on dsec.Call, port int) (dsec.PortConn, error) {
	const op = "edge.Dial"
	e, m, err := p.n.begin(ctx, on.Sandbox)
	if err != nil {
		return nil, dsec.WithOp(op, on.Sandbox, err)
	}
	c, err := m.Guest().Ports().Dial(ctx, on, port)
	if err != nil {
		e.finish()
		return nil, p.n.explain(e, op, err)
	}
	return &countedConn{c, sync.OnceFunc(e.finish)}, nil
}

// countedConn keeps a call counted until it is closed.
type countedConn struct {
	dsec.PortConn
	done func()
}

// Close ends the call.
func (c *countedConn) Close() error {
	defer c.done()
	return c.PortConn.Close()
}
