package dsec

import (
	"context"
	"iter"
	"strings"
	"time"
)

// Command is what to run in a sandbox. Exactly one of Argv and Shell is set.
type Command struct {
	Argv    []string          // program and arguments; the program is looked up in the PATH of the command's environment
	Shell   string            // a line for the image's /bin/sh -c
	Cwd     string            // absolute; default the sandbox's
	User    string            // name, uid or uid:gid; default the sandbox's
	Env     map[string]string // added to the sandbox's
	Stdin   StdinMode         // default StdinNone
	TTY     *WinSize          // a terminal of this size instead of three pipes
	Timeout time.Duration     // wall time, after which the whole tree is killed; 0 means none
	Idle    time.Duration     // killed after this long without output; 0 means none
	Output  int64             // bytes kept of each stream; 0 means DefaultOutput
}

// StdinMode says what a command's standard input is.
type StdinMode string

// The modes of standard input.
const (
	StdinNone StdinMode = ""     // /dev/null
	StdinPipe StdinMode = "pipe" // fed by Write until it is closed
)

// WinSize is the size of a terminal in character cells.
type WinSize struct{ Rows, Cols uint16 }

// Limits of a command.
const (
	DefaultOutput  = 16 << 20         // bytes kept of each stream
	MaxOutput      = 1 << 30          // largest Command.Output
	OutputTail     = 64 << 10         // last bytes kept of each stream beyond its limit
	MaxTimeout     = MaxTTL           // largest Command.Timeout and Idle
	KillGrace      = 0 * time.Second  // a timed-out command is killed at once
	CommandsKept   = 1024             // finished commands without a step remembered per sandbox
	MaxChunk       = 256 << 10        // largest data of one Output, Write or file message
	DefaultWaitMax = 10 * time.Minute // longest a unary Wait blocks before the client asks again
)

// Check validates c. Every fault is Invalid.
func (c Command) Check() error {
	switch {
	case len(c.Argv) > 0 && c.Shell != "":
		return Errorf(Invalid, "command has both an argument list and a shell line")
	case len(c.Argv) == 0 && c.Shell == "":
		return Errorf(Invalid, "command is empty")
	case len(c.Argv) > 0 && c.Argv[0] == "":
		return Errorf(Invalid, "command names no program")
	case c.Stdin != StdinNone && c.Stdin != StdinPipe:
		return Errorf(Invalid, "stdin mode %q is not empty or pipe", clip(string(c.Stdin)))
	case c.Timeout < 0 || c.Timeout > MaxTimeout:
		return Errorf(Invalid, "timeout %v is not between 0 (none) and %v", c.Timeout, MaxTimeout)
	case c.Idle < 0 || c.Idle > MaxTimeout:
		return Errorf(Invalid, "idle timeout %v is not between 0 (none) and %v", c.Idle, MaxTimeout)
	case c.Output < 0 || c.Output > MaxOutput:
		return Errorf(Invalid, "output limit %s is not between 0 (default) and %s", byteText(c.Output), byteText(MaxOutput))
	}
	n := len(c.Shell)
	for _, a := range c.Argv {
		n += len(a) + 1
		if strings.IndexByte(a, 0) >= 0 {
			return Errorf(Invalid, "argument %q contains NUL", clip(a))
		}
	}
	if strings.IndexByte(c.Shell, 0) >= 0 {
		return Errorf(Invalid, "shell line contains NUL")
	}
	if n > MaxArgBytes {
		return Errorf(Invalid, "arguments of %d bytes are more than %d", n, MaxArgBytes)
	}
	if err := CheckCwd(c.Cwd); err != nil {
		return err
	}
	return CheckEnv(c.Env)
}

// Outcome says how a command ended.
type Outcome string

// The outcomes of a command.
const (
	StillRunning Outcome = "running"
	Exited       Outcome = "exited"        // by itself, with Code
	Signaled     Outcome = "signaled"      // by Signal
	TimedOut     Outcome = "timeout"       // killed at its Timeout
	Inactive     Outcome = "inactive"      // killed at its Idle timeout
	NotStarted   Outcome = "not-started"   // the program could not be executed; Code is 126 or 127
	Interrupted  Outcome = "interrupted"   // its guest is gone; whether it ran is not known
	OutOfMemory  Outcome = "out-of-memory" // killed by the kernel at the sandbox's memory limit
)

// StreamStat counts one output stream.
type StreamStat struct {
	Total int64 // bytes written by the command
	Kept  int64 // bytes of its beginning that can be read again
}

// Truncated reports whether bytes were dropped.
func (s StreamStat) Truncated() bool { return s.Total > s.Kept }

// CommandStatus is the record of one command.
type CommandStatus struct {
	ID       CommandID
	Step     Step
	Command  Command
	Outcome  Outcome
	Code     int    // exit status as a shell counts: 0-255, 124 timeout, 126/127 not started, 128+n signal n
	Signal   string // "KILL", "TERM", ... when Signaled
	Detail   string // for people: why it was not started
	Pid      int    // of its leader, as the sandbox sees it
	Started  time.Time
	Ended    time.Time // zero while running
	Stdout   StreamStat
	Stderr   StreamStat
	CPU      time.Duration // user and system time of its leader and waited-for children
	MaxRSS   int64         // bytes, of the largest process
	Replayed bool          // this answer was recorded by an earlier call of the same step
}

// Stream names an output stream.
type Stream uint8

// The output streams. A terminal has only Stdout.
const (
	Stdout Stream = 1
	Stderr Stream = 2
)

// Output is one event of a running or finished command, in the order in which
// the guest read them.
type Output struct {
	Stream Stream
	Offset int64  // of Data in that order, counting the bytes of both streams
	Data   []byte // valid until the next event
	Gap    int64  // bytes before Data that are not kept any more
	Status *CommandStatus
	// Status is set in the last event, exactly once, after the last byte.
}

// Result is the answer of Run: the status and what is kept of both streams.
type Result struct {
	CommandStatus
	Out []byte // beginning of standard output, at most MaxRunOutput
	Err []byte // beginning of standard error, at most MaxRunOutput
}

// MaxRunOutput is how much of each stream Run returns; the rest is paged with
// Read.
const MaxRunOutput = 4 << 20

// Commands runs things in sandboxes. A command's life is its own: a caller that
// goes away leaves it running, and whoever comes back attaches and reads from
// any offset. All methods are safe for concurrent use.
//
// Each is NotFound for an unknown sandbox or command and Conflict for a sandbox
// that has ended. A program that cannot be executed is an outcome (NotStarted);
// a missing user or working directory is Invalid, before anything runs.
type Commands interface {
	// Start runs c and returns at once. A known step gives the command of the
	// first call.
	Start(ctx context.Context, on Call, c Command) (CommandStatus, error)

	// Run starts c, feeds it stdin, and returns when it has ended: the common
	// case in one call. If the caller goes away the command runs on.
	Run(ctx context.Context, on Call, c Command, stdin []byte) (Result, error)

	// Attach yields output from offset on, then the status. It blocks while
	// the command runs. Any number of readers may be attached, none slows the
	// command down.
	Attach(ctx context.Context, on Call, id CommandID, offset int64) iter.Seq2[Output, error]

	// Read returns at most max bytes of one stream from offset on, as far as
	// they are kept; fewer when the command has not written more yet.
	Read(ctx context.Context, on Call, id CommandID, s Stream, offset int64, max int) ([]byte, error)

	// Write feeds standard input at offset, counted from its beginning, and
	// closes it after the last byte. It returns the new offset, and blocks
	// while the command does not read. Bytes below the current offset are
	// skipped, so a repeated Write is harmless; a gap is Invalid, a closed
	// input Conflict.
	Write(ctx context.Context, on Call, id CommandID, in StdinWrite) (int64, error)

	// Resize sets the size of the command's terminal; Invalid if it has none.
	Resize(ctx context.Context, on Call, id CommandID, size WinSize) error

	// Signal sends a signal ("TERM", "SIGTERM" or "15"). KILL ends the whole
	// tree; every other goes to the leader's process group. A finished command
	// is Conflict.
	Signal(ctx context.Context, on Call, id CommandID, sig string) error

	// Wait returns the status once the command has ended.
	Wait(ctx context.Context, on Call, id CommandID) (CommandStatus, error)

	// List returns the running commands and those still remembered, oldest
	// first.
	List(ctx context.Context, on Call) ([]CommandStatus, error)
}

// StdinWrite is one piece of standard input.
type StdinWrite struct {
	Offset int64
	Data   []byte // at most MaxChunk
	Close  bool   // no more will come
}
