package guest

import (
	"context"
	"errors"
	"os"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
	"golang.org/x/sys/unix"
)

// command is one command, running or finished.
type command struct {
	a    *Agent
	id   dsec.CommandID
	seq  uint64
	step dsec.Step
	spec dsec.Command // cut to a bearable size
	out  *record
	in   *input // nil without an input
	tty  *os.File

	alive sync.RWMutex // held while run is used by others than wait
	run   Running      // nil once released, and if it was not started

	forgotten bool          // guarded by Agent.mu: no step keeps it
	done      chan struct{} // closed when status is final

	mu      sync.Mutex
	status  dsec.CommandStatus // without the counts of the streams
	cause   dsec.Outcome       // why we killed it
	timeout *time.Timer
	idle    *time.Timer
	due     time.Time // when timeout fires
	spoke   time.Time // last output, kept only with an idle time
	still   time.Time // since when the clocks stand; zero while they go
}

func (c *command) isDone() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

// snapshot gives the status as of now.
func (c *command) snapshot() dsec.CommandStatus {
	c.mu.Lock()
	s := c.status
	c.mu.Unlock()
	s.Stdout, s.Stderr = c.out.stats()
	return s
}

// start makes a command of a valid request. An error means that nothing runs;
// a program that cannot be executed is a command that has ended.
func (a *Agent) start(step dsec.Step, spec dsec.Command, stdin []byte) (*command, error) {
	id, err := a.identity(spec.User)
	if err != nil {
		return nil, err
	}
	dir := spec.Cwd
	if dir == "" {
		dir = a.opt.Cwd
	}
	if err := checkDir(dir); err != nil {
		return nil, err
	}
	p := Process{
		Argv:   spec.Argv,
		Env:    environ(a.opt.Env, spec.Env, id.home, spec.TTY != nil),
		Dir:    dir,
		UID:    id.uid,
		GID:    id.gid,
		Groups: id.groups,
		TTY:    spec.TTY != nil,
	}
	if spec.Shell != "" {
		p.Argv = []string{shell, "-c", spec.Shell}
	}
	limit := spec.Output
	if limit == 0 {
		limit = dsec.DefaultOutput
	}
	c := &command{a: a, step: step, spec: cut(spec), out: newRecord(&a.arena, limit), done: make(chan struct{})}
	c.status = dsec.CommandStatus{Step: step, Command: c.spec, Outcome: dsec.StillRunning, Started: time.Now().UTC()}

	if p.Path, err = findProgram(p.Argv[0], getenv(p.Env, "PATH"), dir, id); err != nil {
		return a.refuse(c, p.Argv[0], err)
	}
	io, err := openStdio(spec, len(stdin) > 0, id)
	if err != nil {
		return nil, short(err)
	}
	p.Stdin, p.Stdout, p.Stderr = io.child[0], io.child[1], io.child[2]
	a.forks.enter()
	for try := time.Duration(1); ; try++ {
		c.run, err = a.opt.Box.Start(p)
		// A program that was just written may still be open for writing in a
		// child that is about to execute something else.
		if !errors.Is(err, unix.ETXTBSY) || try > 20 {
			break
		}
		time.Sleep(try * time.Millisecond)
	}
	a.forks.leave()
	io.closeChild()
	if err != nil {
		io.closeOurs()
		return a.refuse(c, p.Argv[0], err)
	}
	if err := a.adopt(c, io, stdin); err != nil {
		return nil, err
	}
	return c, nil
}

// adopt makes a started command known and sets its goroutines going.
func (a *Agent) adopt(c *command, io *stdio, stdin []byte) error {
	c.status.Pid = c.run.Pid()
	c.tty = io.tty
	if io.in != nil {
		c.in = &input{f: io.in, tty: io.tty != nil, sem: make(chan struct{}, 1)}
	}
	a.mu.Lock()
	closed := a.closed
	if !closed {
		a.register(c)
		a.wg.Add(1)
		a.changeActivity(1)
		c.arm(a.still)
	}
	a.mu.Unlock()
	if closed {
		c.run.Kill() //nolint:errcheck // it has ended then
		c.run.Wait() //nolint:errcheck // as above
		c.run.Release()
		io.closeOurs()
		return dsec.Errorf(dsec.Conflict, "the sandbox is ending")
	}
	var pumps [2]*pump
	for i, f := range io.out {
		if f != nil {
			pumps[i] = newPump(c, i, f)
			go pumps[i].run() // ends with the last holder of the other end, or the command's end
		}
	}
	if c.in != nil && io.feed {
		// Ends with the command at the latest, which closes the input.
		go c.in.write(context.Background(), dsec.StdinWrite{Data: stdin, Close: true}) //nolint:errcheck // it need not read it
	}
	go c.wait(pumps)
	return nil
}

// refuse ends a command that could not be executed.
func (a *Agent) refuse(c *command, program string, err error) (*command, error) {
	code, detail, ok := notStarted(err)
	if !ok {
		return nil, short(err)
	}
	c.status.Outcome, c.status.Code, c.status.Detail = dsec.NotStarted, code, clip(program)+": "+detail
	c.status.Ended = c.status.Started
	a.mu.Lock()
	defer a.mu.Unlock()
	a.register(c)
	c.out.end()
	close(c.done)
	if c.step.IsZero() {
		a.keep(c)
	}
	return c, nil
}

// short makes Exhausted of errors that say that the system is out of something.
func short(err error) error {
	if isShort(err) {
		return dsec.Errorf(dsec.Exhausted, "start the command: %w", err)
	}
	return dsec.Errorf(dsec.Internal, "start the command: %w", err)
}

func isShort(err error) bool {
	for _, e := range []unix.Errno{unix.EAGAIN, unix.ENOMEM, unix.EMFILE, unix.ENFILE, unix.ENOSPC, unix.EDQUOT} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// wait sees a command through to its end.
func (c *command) wait(pumps [2]*pump) {
	defer c.a.wg.Done()
	x, err := c.run.Wait()
	c.mu.Lock()
	c.disarm()
	cause := c.cause
	c.mu.Unlock()
	oom := c.run.OOMKilled()
	for _, p := range pumps {
		if p != nil {
			p.drain(c.tty != nil)
		}
	}
	if c.in != nil {
		c.in.end()
	}
	if c.tty != nil {
		c.tty.Close() // children that stayed lose their terminal
	}
	c.alive.Lock()
	run := c.run
	c.run = nil
	c.alive.Unlock()
	defer run.Release() // once the end is told, which need not wait for it
	c.out.end()

	c.a.mu.Lock()
	defer c.a.mu.Unlock()
	c.mu.Lock()
	s := &c.status
	s.Ended = time.Now().UTC()
	s.CPU, s.MaxRSS = x.CPU, x.MaxRSS
	s.Outcome, s.Code = dsec.Exited, x.Code
	switch {
	case err != nil: // nobody else reaps, so this cannot happen
		s.Outcome, s.Detail = dsec.Interrupted, err.Error()
	case x.Signal == unix.SIGKILL && (cause == dsec.TimedOut || cause == dsec.Inactive):
		s.Outcome, s.Code = cause, 124
	case oom && (x.Signal == unix.SIGKILL || x.Code == 128+int(unix.SIGKILL)):
		s.Outcome, s.Code, s.Detail = dsec.OutOfMemory, 128+int(unix.SIGKILL), "killed at the memory limit"
	case x.Signal != 0:
		s.Outcome, s.Code, s.Signal = dsec.Signaled, 128+int(x.Signal), signalName(x.Signal)
	}
	c.mu.Unlock()
	close(c.done)
	c.a.changeActivity(-1)
	if c.step.IsZero() || c.forgotten {
		c.a.keep(c)
	}
}

// kill ends the whole tree for a reason. A command that has ended is
// os.ErrProcessDone.
func (c *command) kill(why dsec.Outcome) error {
	return c.use(func(r Running) error {
		c.mu.Lock()
		if c.cause == "" {
			c.cause = why
		}
		c.mu.Unlock()
		return r.Kill()
	})
}

// use calls f with the running process, which is not released before f returns.
func (c *command) use(f func(Running) error) error {
	c.alive.RLock()
	defer c.alive.RUnlock()
	if c.run == nil {
		return os.ErrProcessDone
	}
	return f(c.run)
}

// cutBytes is how much of a command's arguments, and of its environment, is
// remembered.
const cutBytes = 16 << 10

// cut gives the part of a command that its status shows.
func cut(c dsec.Command) dsec.Command {
	if len(c.Shell) > cutBytes {
		c.Shell = string([]byte(c.Shell[:cutBytes]))
	}
	left := cutBytes
	for i, a := range c.Argv {
		if left -= len(a) + 16; left < 0 {
			c.Argv = append([]string(nil), c.Argv[:i]...)
			if i == 0 {
				c.Argv = []string{string([]byte(a[:cutBytes/2]))}
			}
			break
		}
	}
	left = cutBytes
	for k, v := range c.Env {
		left -= len(k) + len(v) + 32
	}
	if left < 0 {
		c.Env = nil
	}
	return c
}
