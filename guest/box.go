package guest

import (
	"os"
	"syscall"
	"time"
)

// Process is what a Box starts. Stdin, Stdout and Stderr are never nil and stay
// the caller's; the Box gives them to the process as 0, 1 and 2 and nothing
// else.
type Process struct {
	Path   string // of the program, absolute
	Argv   []string
	Env    []string
	Dir    string // absolute
	UID    uint32
	GID    uint32
	Groups []uint32

	Stdin, Stdout, Stderr *os.File

	// TTY says that Stdin is a terminal, which becomes the controlling one of
	// a new session. Without it the process leads a new group or session, as
	// the Box likes.
	TTY bool
}

// Box starts the processes of commands, each with a tree of its own that can be
// ended as one. It is safe for concurrent use.
type Box interface {
	// Start runs p. An error that wraps a syscall.Errno tells why not: those
	// of execve (ENOENT, EACCES, ENOEXEC, E2BIG, ...) become outcomes of the
	// command, EAGAIN and ENOMEM are Exhausted. Nothing is left of a failed
	// Start.
	Start(p Process) (Running, error)
}

// Running is a process that was started, and all that came of it.
type Running interface {
	// Pid is that of the leader as the sandbox sees it.
	Pid() int

	// Wait returns once the leader has ended, and reaps it. It is called once.
	Wait() (Exit, error)

	// Kill ends the whole tree, children that left the session included.
	// It may be called at any time, by anyone, until Release.
	Kill() error

	// Signal goes to the leader's process group.
	Signal(sig syscall.Signal) error

	// OOMKilled reports whether the kernel ended a process of the tree for
	// want of memory. It is valid after Wait.
	OOMKilled() bool

	// Release gives back what the Box holds, after Wait. What still runs of
	// the tree goes on.
	Release()
}

// Exit is how a leader ended.
type Exit struct {
	Code   int            // of one that exited by itself
	Signal syscall.Signal // of one that was killed; else 0
	CPU    time.Duration  // user and system, with the children it waited for
	MaxRSS int64          // bytes
}
