// Package guest is the agent inside a sandbox. It runs commands and owns their
// pipes and terminals, records what they print, works on files with the rights
// of a user, and joins ports to the host. An Agent satisfies wire.Handler;
// Agent.Serve answers a host over a listener.
//
// It never goes through a shell or a library of the image, and it lives in the
// sandbox's root: paths mean what they mean to the workload. How a process is
// boxed and killed is behind Box; PlainBox is the one without a cgroup. It
// knows nothing of images, tokens or other sandboxes, and keeps nothing on
// disk: what it knows ends with the sandbox.
//
// Of commands:
//   - A command ends when its leader does. What the leader and its children
//     wrote until then is recorded before the end is told, and nothing after.
//   - Children that outlive the leader go on until the sandbox stops. What
//     they still write is read and dropped, so that they neither block nor get
//     SIGPIPE; those of a terminal lose it. A timeout or KILL ends them too,
//     while the leader lives.
//   - A command that ended is remembered until its step is forgotten; of those
//     without a step the newest dsec.CommandsKept.
//   - The arguments and the environment of a CommandStatus are cut to the
//     first 16 KiB each; the command itself got all.
//   - A command never waits for a reader, nor for a disk: when its output
//     cannot be kept any more, Kept says so.
//
// Of steps: only what happened is remembered. A call that failed has changed
// nothing, or nothing that repeating it does not set right, and is carried out
// again. A step is remembered until Forget; whoever calls that answers its
// repetition.
//
// Lock order: Agent.mu, then command.mu, then record.mu. steps.mu and arena.mu
// are leaves. No lock is held while a process starts.
//
// Read next: command.go, record.go for how output is kept, and package wire.
package guest

import (
	"context"
	"errors"
	"iter"
	"net"
	"os"
	"runtime/debug"
	"strconv"
	"sync"
	"time"
	"weak"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/jail"
	"github.com/dsec-go/dsec/wire"
)

// Options say how an Agent works. Only Box is required.
type Options struct {
	Box Box

	// Output is a folder outside the workload's reach; what commands print
	// goes to a file without a name in it. Without it, it is kept in memory.
	// It stays the caller's and must be open as long as the Agent.
	Output *os.File

	// Cells, if set, runs calls each in a room of its own; see cell.go.
	Cells *jail.Box

	// Env, Cwd and User are those of commands that name none.
	Env  []string
	Cwd  string // default /
	User string // default root

	// Passwd and Group are the files in which users are looked up; default
	// /etc/passwd and /etc/group.
	Passwd, Group string
}

// Agent is the guest of one sandbox. It is safe for concurrent use.
type Agent struct {
	opt      Options
	accounts accounts
	arena    arena
	steps    steps
	cells    cells

	mu       sync.Mutex
	commands map[dsec.CommandID]*command
	finished []*command // without a step to keep them, oldest first
	nextID   uint64
	activity dsec.Activity
	news     chan struct{} // closed at the next change of activity
	closed   bool
	still    bool // the clocks of commands stand
	forks    forks
	inlets   map[int]*inlet // by port; nil until the first
	trim     *time.Timer
	young    weak.Pointer[young] // giveBack's
	wg       sync.WaitGroup      // of running commands
}

// A guest is idle for most of its life. So long after its last command it gives
// back memory that a burst of work has left.
const trimAfter = 10 * time.Second

// young is gone once the heap was collected.
type young struct{ _ *young }

// giveBack returns free memory to the host, if the heap was ever collected.
// One that was not holds little; collecting it, or only asking for its
// statistics, would cost 300 KiB of the runtime's own tables.
func (a *Agent) giveBack() {
	a.mu.Lock()
	busy := a.activity.Running > 0
	a.mu.Unlock()
	if !busy && a.young.Value() == nil {
		debug.FreeOSMemory()
		a.young = weak.Make(new(young))
	}
}

var _ wire.Handler = (*Agent)(nil)

// New makes an Agent.
func New(opt Options) *Agent {
	if opt.Cwd == "" {
		opt.Cwd = "/"
	}
	a := &Agent{
		opt:      opt,
		commands: make(map[dsec.CommandID]*command),
		news:     make(chan struct{}),
		young:    weak.Make(new(young)),
	}
	a.accounts.passwd, a.accounts.group = opt.Passwd, opt.Group
	if a.accounts.passwd == "" {
		a.accounts.passwd = "/etc/passwd"
	}
	if a.accounts.group == "" {
		a.accounts.group = "/etc/group"
	}
	a.arena.dir = -1
	if opt.Output != nil {
		a.arena.dir = int(opt.Output.Fd())
	}
	a.steps.init()
	return a
}

// Commands gives the agent's commands.
func (a *Agent) Commands() dsec.Commands { return commands{a} }

// Files gives the agent's files.
func (a *Agent) Files() dsec.Files { return files{a} }

// Ports gives the agent's ports.
func (a *Agent) Ports() dsec.Ports { return ports{} }

// Activity reports what runs.
func (a *Agent) Activity(context.Context) (dsec.Activity, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.activity, nil
}

// Activities yields what runs now and after each change, until ctx ends.
func (a *Agent) Activities(ctx context.Context) iter.Seq[dsec.Activity] {
	return func(yield func(dsec.Activity) bool) {
		for {
			a.mu.Lock()
			now, news := a.activity, a.news
			a.mu.Unlock()
			if !yield(now) {
				return
			}
			select {
			case <-news:
			case <-ctx.Done():
				return
			}
		}
	}
}

// changeActivity counts commands. Requires: a.mu held.
func (a *Agent) changeActivity(n int) {
	a.activity.Running += n
	if n < 0 {
		a.activity.Last = time.Now().UTC()
	}
	switch {
	case a.activity.Running > 0:
		if a.trim != nil {
			a.trim.Stop()
		}
	case a.trim == nil:
		a.trim = time.AfterFunc(trimAfter, a.giveBack)
	default:
		a.trim.Reset(trimAfter)
	}
	close(a.news)
	a.news = make(chan struct{})
}

// Forget drops the answers of steps that the host has safe.
func (a *Agent) Forget(_ context.Context, steps []dsec.Step) error {
	for _, c := range a.steps.forget(steps) {
		a.mu.Lock()
		c.forgotten = true
		if c.isDone() {
			a.keep(c)
		}
		a.mu.Unlock()
	}
	return nil
}

// keep puts a command among those that are remembered for no step's sake, and
// forgets the oldest. Requires: a.mu held.
func (a *Agent) keep(c *command) {
	a.finished = append(a.finished, c)
	for len(a.finished) > dsec.CommandsKept {
		old := a.finished[0]
		a.finished[0] = nil
		a.finished = a.finished[1:]
		delete(a.commands, old.id)
		old.out.free()
	}
}

// Serve answers every connection of l until l is closed, each on goroutines of
// its own. It returns when the last connection has ended.
func (a *Agent) Serve(l net.Listener) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		conn, err := l.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return nil
			}
			var ne net.Error
			if errors.As(err, &ne) && ne.Timeout() || isShort(err) {
				time.Sleep(10 * time.Millisecond) // out of descriptors or memory for now
				continue
			}
			return err
		}
		wg.Go(func() {
			wire.Serve(conn, a) //nolint:errcheck // the host sees the same end
		})
	}
}

// Close kills every command and waits for their ends. The Agent starts nothing
// afterwards.
func (a *Agent) Close() error {
	a.mu.Lock()
	a.closed = true
	var live []*command
	for _, c := range a.commands {
		if !c.isDone() {
			live = append(live, c)
		}
	}
	inlets := a.inlets
	a.mu.Unlock()
	for _, in := range inlets {
		in.close()
	}
	for _, c := range live {
		c.kill(dsec.Signaled) //nolint:errcheck // it has ended then
	}
	a.wg.Wait()
	a.mu.Lock()
	if a.trim != nil {
		a.trim.Stop()
	}
	a.mu.Unlock()
	a.arena.close()
	return nil
}

// find gives a command by its ID.
func (a *Agent) find(id dsec.CommandID) (*command, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c, ok := a.commands[id]
	if !ok {
		return nil, dsec.Errorf(dsec.NotFound, "no command has the id %q", clip(string(id)))
	}
	return c, nil
}

// register gives a command its ID and makes it known. Requires: a.mu held.
func (a *Agent) register(c *command) {
	a.nextID++
	c.seq = a.nextID
	c.id = dsec.CommandID("c" + strconv.FormatUint(c.seq, 10))
	c.status.ID = c.id
	a.commands[c.id] = c
}

// identity resolves the user of a command or a file call.
func (a *Agent) identity(user string) (identity, error) {
	if user == "" {
		user = a.opt.User
	}
	return a.accounts.lookup(user)
}
