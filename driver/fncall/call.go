package fncall

import (
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/wire"
)

//go:embed warm.py
var warmPython string

// Where a call finds a build.
const (
	buildDir    = "/build"
	buildTarget = buildDir + "/main"
)

// Limits of a compilation, which are not those of the call.
const (
	compileWall   = 60 * time.Second
	compileCPU    = 60 * time.Second
	compileMemory = driver.CompileMemory
	compilePids   = 256
	compileOutput = 256 << 10
)

// runtimes is how each runtime works: the command that builds Runtime.Source,
// and the one that runs it.
var runtimes = map[dsec.Runtime]struct {
	compile []string
	run     []string
	env     map[string]string // of the compilation; what the image says of the same names comes first
}{
	dsec.RuntimePython: {run: []string{"python3", "main.py"}},
	dsec.RuntimeBash:   {run: []string{"bash", "main.sh"}},
	dsec.RuntimeShell:  {run: []string{"sh", "main.sh"}},
	dsec.RuntimeNode:   {run: []string{"node", "main.js"}},
	dsec.RuntimeC:      {compile: []string{"gcc", "-O2", "-o", buildTarget, "main.c", "-lm"}, run: []string{buildTarget}},
	dsec.RuntimeCpp:    {compile: []string{"g++", "-O2", "-o", buildTarget, "main.cpp"}, run: []string{buildTarget}},
	dsec.RuntimeGo: {
		compile: []string{"go", "build", "-o", buildTarget, "main.go"}, run: []string{buildTarget},
		env: map[string]string{"GOCACHE": "/tmp/.gocache", "GOFLAGS": "-mod=mod", "GOPROXY": "off", "GOTOOLCHAIN": "local", "CGO_ENABLED": "0"},
	},
}

// warmName names the warm program of a list of modules.
func warmName(preload []string) string { return "python3 " + strings.Join(preload, " ") }

// Prepare implements driver.Caller.
func (m *machine) Prepare(ctx context.Context, r dsec.Runtime, preload []string) error {
	if r != dsec.RuntimePython {
		return nil
	}
	name := warmName(preload)
	m.mu.Lock()
	ready := m.ready[name]
	m.mu.Unlock()
	if ready {
		return nil
	}
	err := m.celler().Warm(ctx, wire.Warm{Name: name, Argv: append([]string{"python3", "-X", "utf8", "-c", warmPython}, preload...)})
	switch dsec.KindOf(err) {
	case dsec.Unsupported:
		return lacks(r, "python3")
	case dsec.Invalid:
		return dsec.Errorf(dsec.Invalid, "preload %s: %w", strings.Join(preload, ", "), err)
	}
	if err != nil {
		return err
	}
	m.mu.Lock()
	m.ready[name] = true
	m.mu.Unlock()
	return nil
}

// lacks is a runtime that the environment has not.
func lacks(r dsec.Runtime, program string) error {
	return dsec.Errorf(dsec.Unsupported, "the environment has no runtime %s: there is no program %s in its PATH", r, program)
}

// Compile implements driver.Caller.
func (m *machine) Compile(ctx context.Context, f dsec.Function) (*driver.Build, dsec.FunctionResult, error) {
	how := runtimes[f.Runtime]
	if how.compile == nil {
		return nil, dsec.FunctionResult{}, dsec.Errorf(dsec.Invalid, "runtime %s compiles nothing", f.Runtime)
	}
	env := maps.Clone(how.env)
	for _, pair := range m.env { // an image may bring a filled cache along
		name, _, _ := strings.Cut(pair, "=")
		delete(env, name)
	}
	res, err := m.call(ctx, wire.CellCall{
		Argv: how.compile, Env: env, User: f.User, Dir: dsec.FunctionDir, Files: cellFiles(f, f.Runtime.Source()),
		Wall: compileWall, CPU: compileCPU, Memory: compileMemory, Pids: compilePids, Output: compileOutput,
		Collect: buildDir,
	})
	if err != nil {
		return nil, dsec.FunctionResult{}, err
	}
	r := outcome(res)
	switch {
	case res.End == wire.CellNoStart:
		return nil, r, lacks(f.Runtime, how.compile[0])
	case res.TooMuch:
		return nil, r, dsec.Errorf(dsec.Exhausted, "the build is larger than %d MiB", wire.MaxCollect>>20)
	case r.Outcome != dsec.FunctionOK:
		r.Detail = compileDetail(r)
		r.Outcome, r.Limit = dsec.FunctionCompile, ""
		return nil, r, nil
	case !slices.ContainsFunc(res.Files, func(f wire.CellFile) bool { return buildDir+"/"+f.Path == buildTarget }):
		r.Outcome, r.Detail = dsec.FunctionCompile, "the compiler made no program"
		return nil, r, nil
	}
	h := sha256.New()
	for _, f := range res.Files {
		fmt.Fprintf(h, "%q %o %d\n", f.Path, f.Mode, len(f.Data))
		h.Write(f.Data) //nolint:errcheck // a hash
	}
	return &driver.Build{Digest: hex.EncodeToString(h.Sum(nil)), Files: res.Files}, r, nil
}

func compileDetail(r dsec.FunctionResult) string {
	switch r.Outcome {
	case dsec.FunctionTimeout:
		return "the compiler was ended at its limit of " + compileWall.String() + " (" + r.Limit + ")"
	case dsec.FunctionMemory:
		return fmt.Sprintf("the compiler was ended at its memory limit of %d MiB", compileMemory>>20)
	case dsec.FunctionOutput:
		return "the compiler printed too much"
	case dsec.FunctionSignal:
		return "the compiler was ended by signal " + r.Signal
	}
	return fmt.Sprintf("the compiler ended with status %d", r.Code)
}

// Call implements driver.Caller.
func (m *machine) Call(ctx context.Context, f dsec.Function, b *driver.Build) (dsec.FunctionResult, error) {
	how := runtimes[f.Runtime]
	l := f.Limits.WithDefaults()
	c := wire.CellCall{
		Argv: append(slices.Clone(how.run), f.Args...), Env: f.Env, User: f.User, Dir: dsec.FunctionDir, Stdin: f.Stdin,
		Wall: l.Wall, CPU: l.CPU, Memory: l.Memory, Output: l.Output, Pids: l.Pids,
	}
	switch {
	case how.compile != nil && b == nil:
		return dsec.FunctionResult{}, dsec.Errorf(dsec.Invalid, "a call of runtime %s without its build", f.Runtime)
	case b != nil:
		c.Build, c.BuildAt = b.Digest, buildDir
		c.Files = cellFiles(f, "")
	default:
		c.Files = cellFiles(f, f.Runtime.Source())
	}
	warm := f.Runtime == dsec.RuntimePython
	if warm {
		if err := m.Prepare(ctx, f.Runtime, f.Preload); err != nil {
			return dsec.FunctionResult{}, err
		}
		c.Warm = warmName(f.Preload)
		c.Argv = append([]string{dsec.FunctionDir + "/" + f.Runtime.Source()}, f.Args...)
	}
	res, err := m.call(ctx, c)
	if b != nil && dsec.KindOf(err) == dsec.NotFound {
		if err = m.celler().Stage(ctx, b.Digest, b.Files); err == nil {
			res, err = m.call(ctx, c)
		}
	}
	if err != nil {
		return dsec.FunctionResult{}, err
	}
	if res.End == wire.CellNoStart && b == nil {
		return dsec.FunctionResult{}, lacks(f.Runtime, how.run[0])
	}
	r := outcome(res)
	r.Warm = warm
	return r, nil
}

// call runs one command in a cell. What leaves the machine in doubt is
// driver.ErrBroken.
func (m *machine) call(ctx context.Context, c wire.CellCall) (wire.CellResult, error) {
	res, err := m.celler().CallCell(ctx, c)
	switch kind := dsec.KindOf(err); {
	case err != nil && (kind == dsec.Unavailable || kind == dsec.Conflict || kind == dsec.Lost || kind == dsec.Internal),
		err != nil && kind == dsec.NotFound && c.Warm != "":
		return res, errors.Join(dsec.Errorf(dsec.Unavailable, "the call's machine failed: %w", err), driver.ErrBroken)
	case err == nil && res.Broken:
		return res, errors.Join(dsec.Errorf(dsec.Unavailable, "the call's machine failed: %s", res.Detail), driver.ErrBroken)
	}
	return res, err
}

// cellFiles are the files of f, its source among them.
func cellFiles(f dsec.Function, source string) []wire.CellFile {
	out := make([]wire.CellFile, 0, len(f.Files)+1)
	for _, x := range f.Files {
		out = append(out, wire.CellFile{Path: x.Path, Mode: x.Mode, Data: x.Data})
	}
	if source != "" {
		out = append(out, wire.CellFile{Path: source, Data: f.Source})
	}
	return out
}

// outcome says what the end of a command means for a call.
func outcome(c wire.CellResult) dsec.FunctionResult {
	r := dsec.FunctionResult{
		Code: c.Code, Signal: c.Signal, Detail: c.Detail, Out: c.Out, Err: c.Err, Stdout: c.Stdout, Stderr: c.Stderr,
		Wall: c.Wall, CPU: c.CPU, Memory: c.Memory,
	}
	switch c.End {
	case wire.CellWall, wire.CellCPU:
		r.Outcome, r.Limit, r.Code, r.Signal = dsec.FunctionTimeout, dsec.LimitWall, 124, ""
		if c.End == wire.CellCPU {
			r.Limit = dsec.LimitCPU
		}
	case wire.CellMemory:
		r.Outcome, r.Code = dsec.FunctionMemory, 137
	case wire.CellOutput:
		r.Outcome, r.Code, r.Signal = dsec.FunctionOutput, 137, ""
	default:
		switch {
		case c.Signal != "":
			r.Outcome = dsec.FunctionSignal
			r.Code = 128 + signalNumber(c.Signal)
		case c.Code != 0:
			r.Outcome = dsec.FunctionExit
		default:
			r.Outcome = dsec.FunctionOK
		}
	}
	return r
}
