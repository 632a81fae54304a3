package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/dsec-go/dsec"
)

// fnCmd groups the commands on functions.
type fnCmd struct {
	Run   fnRunCmd   `cmd:"" help:"Run a program once where nothing of it is left."`
	Batch fnBatchCmd `cmd:"" help:"Run a program on many inputs, built once; print a line of JSON for each."`
}

// functions gives the service, or why there is none.
func (a *app) functions() (dsec.Services, error) {
	s, err := a.services()
	if err == nil && s.Functions == nil {
		err = lacking("functions")
	}
	return s, err
}

// fnFlags say what is called, where and within which limits.
type fnFlags struct {
	Image     string   `help:"Base image, name or name@version (no default)." placeholder:"NAME"`
	Workspace string   `help:"Workspace image on top of it (default none)." placeholder:"NAME"`
	Toolkit   []string `help:"Toolkit image on top of both; may be repeated (default none)." placeholder:"NAME" sep:"none"`
	Runtime   string   `help:"python3, bash, sh, c, c++, go or node (default by the name of the file)." placeholder:"NAME"`
	Preload   []string `help:"Python module that is imported before the call; may be repeated (default none)." placeholder:"MODULE"`
	File      []string `help:"Further file beside the program, as PATH or NAME=PATH; may be repeated (default none)." placeholder:"FILE" sep:"none"`
	User      string   `short:"u" help:"User name, uid or uid:gid (default the image's, else root)." placeholder:"USER"`
	Env       []string `short:"e" help:"Environment variable; NAME alone takes it from here. May be repeated (default none)." placeholder:"NAME=VALUE" sep:"none"`
	Time      span     `help:"End it after this long (default 30s)." placeholder:"TIME" positive:""`
	CPUTime   span     `name:"cpu-time" help:"End it after so much CPU time of all its processes (default 10s)." placeholder:"TIME" positive:""`
	Memory    byteSize `help:"Memory it may use, files included (default 256M)." placeholder:"SIZE" positive:""`
	Output    byteSize `help:"Most of each output stream; more ends it (default 1M, at most 4M)." placeholder:"SIZE" positive:""`
	Pids      int      `help:"Processes and threads it may have (default 64)." placeholder:"N" positive:""`
	Project   string   `help:"Project it is of (default the token's)." placeholder:"ID"`
}

// suffixes give the runtime of a file's name.
var suffixes = map[string]dsec.Runtime{
	".py": dsec.RuntimePython, ".sh": dsec.RuntimeShell, ".bash": dsec.RuntimeBash, ".c": dsec.RuntimeC, ".cc": dsec.RuntimeCpp,
	".cpp": dsec.RuntimeCpp, ".cxx": dsec.RuntimeCpp, ".go": dsec.RuntimeGo, ".js": dsec.RuntimeNode, ".mjs": dsec.RuntimeNode,
}

// function gives the dsec.Function that the flags describe.
func (f *fnFlags) function(a *app, source string) (dsec.Function, error) {
	env, err := pairs("environment variable", f.Env, a.Getenv)
	if err != nil {
		return dsec.Function{}, err
	}
	fn := dsec.Function{
		Environment: dsec.Environment{Base: f.Image, Workspace: f.Workspace, Toolkits: f.Toolkit},
		Project:     dsec.ProjectID(f.Project), Runtime: dsec.Runtime(f.Runtime), Preload: f.Preload, Env: env, User: f.User,
		Limits: dsec.FunctionLimits{
			CPU: time.Duration(f.CPUTime), Wall: time.Duration(f.Time), Memory: int64(f.Memory), Output: int64(f.Output), Pids: f.Pids,
		},
	}
	if fn.Environment.Base == "" {
		return fn, dsec.Errorf(dsec.Invalid, "fn needs an image: dsec fn run --image NAME FILE")
	}
	if fn.Runtime == "" {
		if fn.Runtime = suffixes[strings.ToLower(filepath.Ext(source))]; fn.Runtime == "" {
			return fn, dsec.Errorf(dsec.Invalid, "the name %s says no runtime: name one with --runtime", source)
		}
	}
	if fn.Source, err = os.ReadFile(a.local(source)); err != nil {
		return fn, err
	}
	for _, x := range f.File {
		name, path, ok := strings.Cut(x, "=")
		if !ok {
			name, path = filepath.Base(x), x
		}
		info, err := os.Stat(a.local(path))
		if err != nil {
			return fn, err
		}
		data, err := os.ReadFile(a.local(path))
		if err != nil {
			return fn, err
		}
		fn.Files = append(fn.Files, dsec.FunctionFile{Path: name, Mode: uint32(info.Mode().Perm()), Data: data})
	}
	return fn, fn.Check()
}

// fnRunCmd runs one call.
type fnRunCmd struct {
	fnFlags
	outputFlags
	Args []string `arg:"" passthrough:"partial" name:"file-and-args" help:"The program, and its arguments."`
}

// Help says how it ends.
func (c *fnRunCmd) Help() string {
	return `Standard input goes to the program whole. The exit status is the program's own;
124 when it was ended at a limit of time, 137 at its limit of memory or output,
128 and more by a signal, 125 when dsec itself failed.

  dsec fn run --image debian solve.py < input.txt
  dsec fn run --image debian --time 2s --memory 64M solve.c 17`
}

// Run calls the function.
func (c *fnRunCmd) Run(ctx context.Context, a *app) error {
	fn, err := c.function(a, c.Args[0])
	if err != nil {
		return err
	}
	fn.Args = c.Args[1:]
	if len(fn.Args) > 0 && fn.Args[0] == "--" {
		fn.Args = fn.Args[1:]
	}
	if fn.Stdin, err = a.allInput(); err != nil {
		return err
	}
	if err := fn.Check(); err != nil {
		return err
	}
	s, err := a.functions()
	if err != nil {
		return err
	}
	ctx, done := a.untilInterrupt(ctx)
	defer done()
	r, err := s.Functions.Call(ctx, fn)
	if err != nil {
		return orInterrupt(ctx, err)
	}
	if c.JSON {
		if err := a.json(r); err != nil {
			return err
		}
	} else if err := errors.Join(a.put(a.Stdout, r.Out), a.put(a.Stderr, r.Err)); err != nil {
		return err
	}
	return a.fnExit(r, fn.Limits.WithDefaults())
}

func (a *app) put(w io.Writer, b []byte) error {
	_, err := w.Write(b)
	return err
}

// allInput reads standard input, unless it is a terminal or far too much.
func (a *app) allInput() ([]byte, error) {
	if f, ok := a.Stdin.(*os.File); ok {
		if i, err := f.Stat(); err != nil || i.Mode()&os.ModeCharDevice != 0 {
			return nil, nil
		}
	}
	if a.Stdin == nil {
		return nil, nil
	}
	b, err := io.ReadAll(io.LimitReader(a.Stdin, dsec.MaxFunctionBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read standard input: %w", err)
	}
	return b, nil
}

// fnExit reports what the status alone does not say, and returns it.
func (a *app) fnExit(r dsec.FunctionResult, l dsec.FunctionLimits) error {
	say := func(format string, args ...any) { fmt.Fprintf(a.Stderr, "dsec: "+format+"\n", args...) }
	switch r.Outcome {
	case dsec.FunctionOK:
		return nil
	case dsec.FunctionTimeout:
		if r.Limit == dsec.LimitCPU {
			say("ended at its CPU time limit of %v", l.CPU)
		} else {
			say("ended at its time limit of %v", l.Wall)
		}
		return exitStatus(statusTimedOut)
	case dsec.FunctionMemory:
		say("ended at its memory limit of %s", size(l.Memory))
	case dsec.FunctionOutput:
		say("ended after more than %s of output", size(l.Output))
	case dsec.FunctionCompile:
		say("not compiled: %s", r.Detail)
		return exitStatus(max(r.Code, 1))
	}
	if r.Code == 0 {
		return nil
	}
	return exitStatus(r.Code)
}

// fnBatchCmd runs many calls.
type fnBatchCmd struct {
	fnFlags
	AtATime int    `name:"at-a-time" help:"Cases that run at once (default what the node finds good)." placeholder:"N" positive:""`
	Source  string `arg:"" name:"file" help:"The program."`
	Cases   string `arg:"" name:"cases" optional:"" help:"File with a case in each line; - or nothing is standard input."`
}

// Help explains the lines.
func (c *fnBatchCmd) Help() string {
	return `Each line of CASES is a JSON object, of which there may be 10000: what it sets
replaces what the flags say.

  {"stdin": "1 2\n", "args": ["-v"], "env": {"A": "b"}, "time": 1.5, "cpuTime": 1, "memory": 67108864}

"output" and "pids" are limits too, "source" replaces the program, and bytes that
are no text go in "stdinBase64". Each line printed is the end of one case, as soon
as it is over, with its index from 0.
The exit status is 0 if every case could run, however it ended.`
}

// fnCase is a line of a batch.
type fnCase struct {
	Source      *string           `json:"source"`
	Args        []string          `json:"args"`
	Stdin       *string           `json:"stdin"`
	StdinBase64 []byte            `json:"stdinBase64"`
	Env         map[string]string `json:"env"`
	Time        float64           `json:"time"`
	CPUTime     float64           `json:"cpuTime"`
	Memory      int64             `json:"memory"`
	Output      int64             `json:"output"`
	Pids        int               `json:"pids"`
}

func (c fnCase) toCase() dsec.FunctionCase {
	out := dsec.FunctionCase{Args: c.Args, Stdin: c.StdinBase64, Env: c.Env, Limits: dsec.FunctionLimits{
		Wall: time.Duration(c.Time * float64(time.Second)), CPU: time.Duration(c.CPUTime * float64(time.Second)),
		Memory: c.Memory, Output: c.Output, Pids: c.Pids,
	}}
	if c.Source != nil {
		out.Source = []byte(*c.Source)
	}
	if c.Stdin != nil {
		out.Stdin = []byte(*c.Stdin)
	}
	return out
}

// jsonFault says what is wrong with JSON, in its own terms.
func jsonFault(err error) string {
	var typ *json.UnmarshalTypeError
	switch {
	case errors.As(err, &typ) && typ.Field == "":
		return fmt.Sprintf("a case is an object, and this is of type %s", typ.Value)
	case errors.As(err, &typ):
		return fmt.Sprintf("%q cannot be of type %s", typ.Field, typ.Value)
	case errors.Is(err, io.ErrUnexpectedEOF):
		return "the object has no end: a case is one line"
	}
	return strings.TrimPrefix(err.Error(), "json: ")
}

// readCases reads a line of JSON for each case.
func readCases(r io.Reader) ([]dsec.FunctionCase, error) {
	var out []dsec.FunctionCase
	lines := bufio.NewReader(r)
	for n := 1; ; n++ {
		line, err := lines.ReadBytes('\n')
		if len(bytes.TrimSpace(line)) > 0 {
			d := json.NewDecoder(bytes.NewReader(line))
			d.DisallowUnknownFields()
			var c fnCase
			if err := d.Decode(&c); err != nil {
				return nil, dsec.Errorf(dsec.Invalid, "line %d of the cases: %s", n, jsonFault(err))
			}
			out = append(out, c.toCase())
		}
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read cases: %w", err)
		}
	}
}

// fnLine is how the end of a case is printed.
type fnLine struct {
	Index       int     `json:"index"`
	Outcome     string  `json:"outcome,omitempty"`
	Limit       string  `json:"limit,omitempty"`
	Code        int     `json:"code"`
	Signal      string  `json:"signal,omitempty"`
	Detail      string  `json:"detail,omitempty"`
	Out         string  `json:"out"`
	Err         string  `json:"err"`
	Encoding    string  `json:"encoding,omitempty"` // base64 where out or err is no text
	StdoutTotal int64   `json:"stdoutTotal"`
	StderrTotal int64   `json:"stderrTotal"`
	Wall        float64 `json:"wall"`
	CPU         float64 `json:"cpu"`
	Memory      int64   `json:"memory"`
	Error       string  `json:"error,omitempty"`
}

func lineOf(i dsec.FunctionItem) fnLine {
	if i.Err != nil {
		return fnLine{Index: i.Index, Error: explain(i.Err)}
	}
	r := i.Result
	l := fnLine{
		Index: i.Index, Outcome: string(r.Outcome), Limit: r.Limit, Code: r.Code, Signal: r.Signal, Detail: r.Detail,
		Out: string(r.Out), Err: string(r.Err), StdoutTotal: r.Stdout.Total, StderrTotal: r.Stderr.Total,
		Wall: r.Wall.Seconds(), CPU: r.CPU.Seconds(), Memory: r.Memory,
	}
	if !utf8.Valid(r.Out) || !utf8.Valid(r.Err) {
		l.Encoding = "base64"
		l.Out, l.Err = base64.StdEncoding.EncodeToString(r.Out), base64.StdEncoding.EncodeToString(r.Err)
	}
	return l
}

// Run calls the function for each case.
func (c *fnBatchCmd) Run(ctx context.Context, a *app) error {
	fn, err := c.function(a, c.Source)
	if err != nil {
		return err
	}
	in := a.Stdin
	if c.Cases != "" && c.Cases != "-" {
		f, err := os.Open(a.local(c.Cases))
		if err != nil {
			return err
		}
		defer f.Close()
		in = f
	}
	batch := dsec.FunctionBatch{Function: fn, AtATime: c.AtATime}
	if batch.Cases, err = readCases(in); err != nil {
		return err
	}
	if err := batch.Check(); err != nil {
		return err
	}
	s, err := a.functions()
	if err != nil {
		return err
	}
	ctx, done := a.untilInterrupt(ctx)
	defer done()
	failed := 0
	out := json.NewEncoder(a.Stdout)
	out.SetEscapeHTML(false)
	for item, err := range s.Functions.Batch(ctx, batch) {
		if err != nil {
			return orInterrupt(ctx, err)
		}
		if item.Err != nil {
			failed++
		}
		if err := out.Encode(lineOf(item)); err != nil {
			return err
		}
	}
	if failed > 0 {
		return fmt.Errorf("%d of %d cases could not run", failed, len(batch.Cases))
	}
	return nil
}
