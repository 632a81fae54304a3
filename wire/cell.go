package wire

import (
	"context"
	"time"

	"github.com/dsec-go/dsec"
)

// What follows is for guests that run commands in cells: rooms with a pristine
// root, fresh namespaces and control groups of their own. It knows no runtimes
// and no languages; package driver/fncall does.

// Warm is a program that waits, with everything loaded, for forking itself into
// cells. It speaks the protocol of guest/warm.go on descriptor 3.
type Warm struct {
	Name string // by which calls name it
	Argv []string
	Env  map[string]string // added to the machine's
}

// CellFile is one file.
type CellFile struct {
	Path string // relative
	Mode uint32
	Data []byte
}

// CellCall is one command and its room.
type CellCall struct {
	Warm  string   // a fork of this program runs it; empty: Argv is executed
	Argv  []string // of a warm program: what it gets
	Env   map[string]string
	User  string
	Dir   string     // working folder, made if missing, given to User
	Files []CellFile // put below Dir before
	Stdin []byte

	Wall, CPU time.Duration // 0: none
	Memory    int64
	Output    int64 // most of each stream; more ends the command
	Pids      int

	Build   string // a staged folder, read-only at BuildAt
	BuildAt string
	Collect string // a folder, made before and given to User, whose files are wanted back; at most MaxCollect bytes
}

// MaxCollect is the most bytes of files that a call gives back.
const MaxCollect = maxBig - 1<<20 - 2*64<<10

// CellEnd says what ended a command in a cell.
type CellEnd string

// The ends of a command in a cell.
const (
	CellExited  CellEnd = "exited" // by itself or by a signal
	CellWall    CellEnd = "wall"
	CellCPU     CellEnd = "cpu"
	CellMemory  CellEnd = "memory"
	CellOutput  CellEnd = "output"
	CellNoStart CellEnd = "not-started" // Code is 126 or 127, Detail says why
)

// CellResult is what became of a command in a cell.
type CellResult struct {
	End     CellEnd
	Code    int    // when it exited by itself
	Signal  string // that ended it; else empty
	Detail  string
	Out     []byte
	Err     []byte
	Stdout  dsec.StreamStat
	Stderr  dsec.StreamStat
	Wall    time.Duration
	CPU     time.Duration
	Memory  int64
	Files   []CellFile // of Collect
	TooMuch bool       // the files of Collect are more than MaxCollect
	Broken  bool       // the machine has lost something that cells need
}

// CellHandler is a Handler that has cells. Without it the calls are
// Unsupported.
type CellHandler interface {
	Warm(ctx context.Context, w Warm) error
	Stage(ctx context.Context, name string, files []CellFile) error
	CallCell(ctx context.Context, c CellCall) (CellResult, error)
}

// The methods of cells. They are numbered apart from the others.
const (
	mWarm method = iota + 200
	mStage
	mCallCell
)

// Warm starts a program that forks itself into cells.
func (c *Client) Warm(ctx context.Context, w Warm) error {
	_, err := c.call(ctx, request{m: mWarm, args: appendWarm(nil, w), idempotent: true})
	return err
}

// Stage keeps files under a name, for cells that name them as their Build.
func (c *Client) Stage(ctx context.Context, name string, files []CellFile) error {
	_, err := c.call(ctx, request{m: mStage, args: appendCellFiles(appendString(nil, name), files), idempotent: true})
	return err
}

// CallCell runs one command in a cell of its own. It is not sent again when
// the connection breaks.
func (c *Client) CallCell(ctx context.Context, call CellCall) (CellResult, error) {
	p, err := c.call(ctx, request{m: mCallCell, args: appendCellCall(nil, &call), limit: maxBig})
	if err != nil {
		return CellResult{}, err
	}
	d := decoder{b: p}
	r := d.cellResult()
	return r, guestFault(d.err())
}

// cell answers the methods of cells.
func (v *server) cell(ctx context.Context, m method, d *decoder) ([]byte, error) {
	h, can := v.h.(CellHandler)
	if !can {
		return nil, dsec.Errorf(dsec.Unsupported, "guest has no method %d", m)
	}
	switch m {
	case mWarm:
		w := d.warm()
		if err := badArgs(d); err != nil {
			return nil, err
		}
		return ok(), h.Warm(ctx, w)
	case mStage:
		name, files := d.str(), d.cellFiles()
		if err := badArgs(d); err != nil {
			return nil, err
		}
		return ok(), h.Stage(ctx, name, files)
	case mCallCell:
		c := d.cellCall()
		if err := badArgs(d); err != nil {
			return nil, err
		}
		r, err := h.CallCell(ctx, c)
		if err != nil {
			return nil, err
		}
		return appendCellResult(make([]byte, 1, 256+len(r.Out)+len(r.Err)), &r), nil
	}
	return nil, dsec.Errorf(dsec.Unsupported, "guest has no method %d", m)
}

func appendList(b []byte, list []string) []byte {
	b = appendUint(b, uint64(len(list)))
	for _, s := range list {
		b = appendString(b, s)
	}
	return b
}

func (d *decoder) list() []string {
	n := d.count()
	if n == 0 {
		return nil
	}
	out := make([]string, 0, min(n, 1024))
	for range n {
		if d.bad {
			return nil
		}
		out = append(out, d.str())
	}
	return out
}

func appendMap(b []byte, m map[string]string) []byte {
	b = appendUint(b, uint64(len(m)))
	for k, v := range m {
		b = appendString(appendString(b, k), v)
	}
	return b
}

func (d *decoder) dict() map[string]string {
	n := d.count()
	if n == 0 {
		return nil
	}
	out := make(map[string]string, min(n, 1024))
	for range n {
		if d.bad {
			return nil
		}
		k := d.str()
		out[k] = d.str()
	}
	return out
}

func appendCellFiles(b []byte, files []CellFile) []byte {
	b = appendUint(b, uint64(len(files)))
	for _, f := range files {
		b = appendBytes(appendUint(appendString(b, f.Path), uint64(f.Mode)), f.Data)
	}
	return b
}

func (d *decoder) cellFiles() []CellFile {
	n := d.count()
	if n == 0 {
		return nil
	}
	out := make([]CellFile, 0, min(n, 1024))
	for range n {
		if d.bad {
			return nil
		}
		out = append(out, CellFile{Path: d.str(), Mode: uint32(d.uint()), Data: d.bytes()})
	}
	return out
}

func appendWarm(b []byte, w Warm) []byte {
	return appendMap(appendList(appendString(b, w.Name), w.Argv), w.Env)
}

func (d *decoder) warm() Warm { return Warm{Name: d.str(), Argv: d.list(), Env: d.dict()} }

func appendCellCall(b []byte, c *CellCall) []byte {
	b = appendMap(appendList(appendString(b, c.Warm), c.Argv), c.Env)
	b = appendString(appendString(b, c.User), c.Dir)
	b = appendBytes(appendCellFiles(b, c.Files), c.Stdin)
	for _, n := range []int64{int64(c.Wall), int64(c.CPU), c.Memory, c.Output, int64(c.Pids)} {
		b = appendInt(b, n)
	}
	return appendString(appendString(appendString(b, c.Build), c.BuildAt), c.Collect)
}

func (d *decoder) cellCall() CellCall {
	return CellCall{
		Warm: d.str(), Argv: d.list(), Env: d.dict(), User: d.str(), Dir: d.str(), Files: d.cellFiles(), Stdin: d.bytes(),
		Wall: time.Duration(d.int()), CPU: time.Duration(d.int()), Memory: d.int(), Output: d.int(), Pids: int(d.int()),
		Build: d.str(), BuildAt: d.str(), Collect: d.str(),
	}
}

func appendCellResult(b []byte, r *CellResult) []byte {
	b = appendInt(appendString(b, r.End), int64(r.Code))
	b = appendString(appendString(b, r.Signal), r.Detail)
	b = appendBytes(appendBytes(b, r.Out), r.Err)
	b = appendStat(appendStat(b, r.Stdout), r.Stderr)
	b = appendInt(appendInt(appendInt(b, int64(r.Wall)), int64(r.CPU)), r.Memory)
	return appendBool(appendBool(appendCellFiles(b, r.Files), r.TooMuch), r.Broken)
}

func (d *decoder) cellResult() CellResult {
	return CellResult{
		End: CellEnd(d.str()), Code: int(d.int()), Signal: d.str(), Detail: d.str(), Out: d.bytes(), Err: d.bytes(),
		Stdout: d.stat(), Stderr: d.stat(), Wall: time.Duration(d.int()), CPU: time.Duration(d.int()), Memory: d.int(),
		Files: d.cellFiles(), TooMuch: d.bool(), Broken: d.bool(),
	}
}
