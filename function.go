package dsec

import (
	"context"
	"iter"
	"path"
	"slices"
	"strings"
	"time"
)

// Runtime names what a function's source is written for. The image has the
// programs: a runtime that it lacks is Unsupported, by name.
type Runtime string

// The runtimes. Those that compile do it once for all cases of a batch.
const (
	RuntimePython Runtime = "python3" // warm: Preload is imported before the call comes
	RuntimeBash   Runtime = "bash"
	RuntimeShell  Runtime = "sh"
	RuntimeC      Runtime = "c"   // gcc
	RuntimeCpp    Runtime = "c++" // g++
	RuntimeGo     Runtime = "go"
	RuntimeNode   Runtime = "node"
)

// Runtimes lists every runtime in the order they are documented.
var Runtimes = []Runtime{RuntimePython, RuntimeBash, RuntimeShell, RuntimeC, RuntimeCpp, RuntimeGo, RuntimeNode}

// Compiled reports whether r's source is built before it runs.
func (r Runtime) Compiled() bool { return r == RuntimeC || r == RuntimeCpp || r == RuntimeGo }

// Source is the name that a program of r has in the working folder.
func (r Runtime) Source() string {
	switch r {
	case RuntimePython:
		return "main.py"
	case RuntimeBash, RuntimeShell:
		return "main.sh"
	case RuntimeC:
		return "main.c"
	case RuntimeCpp:
		return "main.cpp"
	case RuntimeGo:
		return "main.go"
	case RuntimeNode:
		return "main.js"
	}
	return ""
}

// Function is one call without state: a program, its input and its limits. It
// sees the environment as its images have it, and what it leaves is gone.
type Function struct {
	Environment Environment
	Project     ProjectID // the tenant; default: the token's project
	Runtime     Runtime
	Preload     []string // modules that are imported already; Python only
	Source      []byte   // the program; a file with the name Runtime.Source
	Files       []FunctionFile
	Args        []string
	Stdin       []byte
	Env         map[string]string // added to the image's
	User        string            // default: the image's, else root, which has no capability in a call
	Limits      FunctionLimits
}

// FunctionFile is a file beside the program.
type FunctionFile struct {
	Path string // relative to the working folder
	Mode uint32 // permission bits; default 0644
	Data []byte
}

// FunctionLimits bound one call. The zero value of each means its default.
type FunctionLimits struct {
	CPU    time.Duration // of all its processes; default DefaultFunctionCPU
	Wall   time.Duration // default DefaultFunctionWall
	Memory int64         // bytes, files that it writes included (at most half); default DefaultFunctionMemory
	Output int64         // bytes of each stream; default DefaultFunctionOutput
	Pids   int           // processes and threads; default DefaultFunctionPids
}

// Defaults and limits of a Function.
const (
	DefaultFunctionCPU    = 10 * time.Second
	DefaultFunctionWall   = 30 * time.Second
	DefaultFunctionMemory = 256 << 20
	DefaultFunctionOutput = 1 << 20
	DefaultFunctionPids   = 64

	MinFunctionTime   = time.Millisecond
	MaxFunctionCPU    = time.Hour
	MaxFunctionWall   = time.Hour
	MinFunctionMemory = 8 << 20
	MaxFunctionMemory = 64 << 30
	MaxFunctionOutput = 4 << 20
	MaxFunctionPids   = 4096

	MaxFunctionBytes   = 16 << 20 // source, files, input, arguments and variables of a call
	MaxFunctionFiles   = 256
	MaxFunctionCases   = 10_000
	MaxPreload         = 64
	MaxFunctionAtATime = 64 // cases of one batch that run at once
	FunctionDir        = "/work"
)

// WithDefaults gives l with every empty field set to its default.
func (l FunctionLimits) WithDefaults() FunctionLimits {
	def(&l.CPU, DefaultFunctionCPU)
	def(&l.Wall, DefaultFunctionWall)
	def(&l.Memory, DefaultFunctionMemory)
	def(&l.Output, DefaultFunctionOutput)
	def(&l.Pids, DefaultFunctionPids)
	return l
}

// Check validates l after WithDefaults.
func (l FunctionLimits) Check() error {
	l = l.WithDefaults()
	switch {
	case l.CPU < MinFunctionTime || l.CPU > MaxFunctionCPU:
		return Errorf(Invalid, "cpu time limit %v is not between %v and %v", l.CPU, MinFunctionTime, MaxFunctionCPU)
	case l.Wall < MinFunctionTime || l.Wall > MaxFunctionWall:
		return Errorf(Invalid, "time limit %v is not between %v and %v", l.Wall, MinFunctionTime, MaxFunctionWall)
	case l.Memory < MinFunctionMemory || l.Memory > MaxFunctionMemory:
		return Errorf(Invalid, "memory limit %s is not between %s and %s", byteText(l.Memory), byteText(MinFunctionMemory), byteText(MaxFunctionMemory))
	case l.Output < 1 || l.Output > MaxFunctionOutput:
		return Errorf(Invalid, "output limit %s is not between 1B and %s", byteText(l.Output), byteText(MaxFunctionOutput))
	case l.Pids < 1 || l.Pids > MaxFunctionPids:
		return Errorf(Invalid, "pids %d is not between 1 and %d", l.Pids, MaxFunctionPids)
	}
	return nil
}

// Check validates f. References are checked when it is called.
func (f Function) Check() error {
	if err := f.Environment.check(); err != nil {
		return err
	}
	if !slices.Contains(Runtimes, f.Runtime) {
		return Errorf(Invalid, "runtime %q is not one of python3, bash, sh, c, c++, go, node", clip(string(f.Runtime)))
	}
	if len(f.Preload) > 0 && f.Runtime != RuntimePython {
		return Errorf(Invalid, "runtime %s preloads nothing: only python3 does", f.Runtime)
	}
	if len(f.Preload) > MaxPreload {
		return Errorf(Invalid, "%d modules to preload are more than %d", len(f.Preload), MaxPreload)
	}
	for _, m := range f.Preload {
		if !moduleName(m) {
			return Errorf(Invalid, "preload %q is not the name of a module", clip(m))
		}
	}
	if len(f.Files) > MaxFunctionFiles {
		return Errorf(Invalid, "%d files are more than %d", len(f.Files), MaxFunctionFiles)
	}
	size := len(f.Source) + len(f.Stdin)
	seen := map[string]bool{}
	for _, file := range f.Files {
		if err := checkFunctionPath(file.Path); err != nil {
			return err
		}
		if p := path.Clean(file.Path); p == f.Runtime.Source() {
			return Errorf(Invalid, "file %q has the name of the program itself", p)
		} else if seen[p] {
			return Errorf(Invalid, "file %q is given twice", clip(p))
		} else {
			seen[p] = true
		}
		if file.Mode > 0o777 {
			return Errorf(Invalid, "file %q: mode %o has more than permission bits", clip(file.Path), file.Mode)
		}
		size += len(file.Path) + len(file.Data)
	}
	for _, a := range f.Args {
		if strings.IndexByte(a, 0) >= 0 {
			return Errorf(Invalid, "argument %q contains NUL", clip(a))
		}
		size += len(a)
	}
	for k, v := range f.Env {
		size += len(k) + len(v)
	}
	if size > MaxFunctionBytes {
		return Errorf(Invalid, "a call of %d bytes (source, files, input, arguments, variables) is larger than %d", size, MaxFunctionBytes)
	}
	if strings.IndexByte(f.User, 0) >= 0 {
		return Errorf(Invalid, "user %q contains NUL", clip(f.User))
	}
	if err := CheckEnv(f.Env); err != nil {
		return err
	}
	return f.Limits.Check()
}

func checkFunctionPath(p string) error {
	if err := CheckPath(p); err != nil {
		return err
	}
	if clean := path.Clean(p); p[0] == '/' || clean == "." || clean == ".." || strings.HasPrefix(clean, "../") || strings.HasSuffix(p, "/") {
		return Errorf(Invalid, "file %q is not a path below the working folder", clip(p))
	}
	return nil
}

func moduleName(m string) bool {
	if m == "" || len(m) > 256 {
		return false
	}
	for part := range strings.SplitSeq(m, ".") {
		for i, c := range part {
			if c != '_' && (c < 'A' || c > 'Z') && (c < 'a' || c > 'z') && (i == 0 || c < '0' || c > '9') {
				return false
			}
		}
		if part == "" {
			return false
		}
	}
	return true
}

// FunctionOutcome says how a call ended.
type FunctionOutcome string

// The outcomes of a call.
const (
	FunctionOK      FunctionOutcome = "ok"            // status 0
	FunctionExit    FunctionOutcome = "exit"          // another status, in Code
	FunctionTimeout FunctionOutcome = "timeout"       // at a limit of time, named in Limit
	FunctionMemory  FunctionOutcome = "memory"        // killed by the kernel at its memory limit
	FunctionOutput  FunctionOutcome = "output"        // it printed more than its limit
	FunctionSignal  FunctionOutcome = "signal"        // a signal, in Signal
	FunctionCompile FunctionOutcome = "compile-error" // the source was not built; the streams are the compiler's
)

// The limits that a FunctionTimeout names.
const (
	LimitWall = "wall"
	LimitCPU  = "cpu"
)

// FunctionResult is what became of a call.
type FunctionResult struct {
	Outcome FunctionOutcome
	Limit   string // with FunctionTimeout: LimitWall or LimitCPU
	Code    int    // as a shell counts: 128+n for signal n, 124 for a timeout
	Signal  string // "SEGV", ... with FunctionSignal
	Detail  string // for people
	Out     []byte
	Err     []byte
	Stdout  StreamStat // Total is what was read until the end: a call that prints too much is ended
	Stderr  StreamStat
	Wall    time.Duration
	CPU     time.Duration // of all its processes
	Memory  int64         // bytes, the peak of all its processes and files
	Warm    bool          // an interpreter that was running already answered
}

// FunctionCase is one run of a batch: what it sets replaces what the batch's
// Function has.
type FunctionCase struct {
	Source []byte // cases of the same source share its build
	Args   []string
	Stdin  []byte
	Env    map[string]string
	Limits FunctionLimits // each field that is set
}

// FunctionBatch is many calls of one function.
type FunctionBatch struct {
	Function Function
	Cases    []FunctionCase
	AtATime  int // cases that run at once; default what the node finds good, at most MaxFunctionAtATime
}

// Case gives the function that case i calls.
func (b FunctionBatch) Case(i int) Function {
	f, c := b.Function, b.Cases[i]
	if c.Source != nil {
		f.Source = c.Source
	}
	if c.Args != nil {
		f.Args = c.Args
	}
	if c.Stdin != nil {
		f.Stdin = c.Stdin
	}
	if c.Env != nil {
		f.Env = c.Env
	}
	over(&f.Limits.CPU, c.Limits.CPU)
	over(&f.Limits.Wall, c.Limits.Wall)
	over(&f.Limits.Memory, c.Limits.Memory)
	over(&f.Limits.Output, c.Limits.Output)
	over(&f.Limits.Pids, c.Limits.Pids)
	return f
}

func over[T comparable](p *T, v T) {
	var zero T
	if v != zero {
		*p = v
	}
}

// Check validates b with all its cases.
func (b FunctionBatch) Check() error {
	if len(b.Cases) == 0 || len(b.Cases) > MaxFunctionCases {
		return Errorf(Invalid, "a batch has 1 to %d cases, not %d", MaxFunctionCases, len(b.Cases))
	}
	if b.AtATime < 0 || b.AtATime > MaxFunctionAtATime {
		return Errorf(Invalid, "%d cases at a time is not between 0 (default) and %d", b.AtATime, MaxFunctionAtATime)
	}
	for i := range b.Cases {
		if err := b.Case(i).Check(); err != nil {
			return Errorf(Invalid, "case %d: %w", i, err)
		}
	}
	return nil
}

// FunctionItem is the end of one case of a batch.
type FunctionItem struct {
	Index  int
	Result FunctionResult
	Err    error // of this case alone; then there is no Result
}

// Functions calls functions. A call belongs to no sandbox and is not recorded:
// it has no effect outside of itself, so whoever got no answer calls again. It
// therefore takes neither a step nor a key; both are Unsupported. All methods
// are safe for concurrent use.
type Functions interface {
	// Call runs f. How it ended is in the result; an error means that it did
	// not run or that its end is not known: Invalid for a bad call, NotFound
	// for an image that does not exist, Unsupported for a runtime that the
	// image lacks, Exhausted when the node has no room. A caller that goes away
	// ends the call.
	Call(ctx context.Context, f Function) (FunctionResult, error)

	// Batch runs every case and yields each as it ends, in that order, with its
	// index. A case that cannot run has an error of its own; the sequence ends
	// with an error only when the batch as a whole cannot go on. A source is
	// built once.
	Batch(ctx context.Context, b FunctionBatch) iter.Seq2[FunctionItem, error]
}
