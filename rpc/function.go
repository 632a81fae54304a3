package rpc

import (
	"errors"
	"strings"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

// FunctionToWire gives f for the wire.
func FunctionToWire(f dsec.Function) *dsecv1.Function {
	w := &dsecv1.Function{
		Environment: &dsecv1.Environment{
			Base: f.Environment.Base, Workspace: f.Environment.Workspace, Toolkits: f.Environment.Toolkits,
		},
		Project: string(f.Project), Runtime: string(f.Runtime), Preload: f.Preload, Source: f.Source, Stdin: f.Stdin, User: f.User,
		Limits: functionLimitsToWire(f.Limits),
	}
	for _, x := range f.Files {
		file := &dsecv1.FunctionFile{Mode: x.Mode, Data: x.Data}
		file.Path, file.PathBytes = name(x.Path)
		w.Files = append(w.Files, file)
	}
	w.Args, w.ArgsBytes = names(f.Args)
	w.Env, w.EnvBytes = env(f.Env)
	return w
}

// FunctionFromWire is the inverse of FunctionToWire. It does not check.
func FunctionFromWire(w *dsecv1.Function) dsec.Function {
	e := w.GetEnvironment()
	f := dsec.Function{
		Environment: dsec.Environment{Base: e.GetBase(), Workspace: e.GetWorkspace(), Toolkits: e.GetToolkits()},
		Project:     dsec.ProjectID(w.GetProject()), Runtime: dsec.Runtime(w.GetRuntime()), Preload: w.GetPreload(),
		Source: w.GetSource(), Stdin: w.GetStdin(), User: w.GetUser(),
		Args: unnames(w.GetArgs(), w.GetArgsBytes()), Env: unenv(w.GetEnv(), w.GetEnvBytes()),
		Limits: functionLimitsFromWire(w.GetLimits()),
	}
	for _, x := range w.GetFiles() {
		f.Files = append(f.Files, dsec.FunctionFile{Path: unname(x.GetPath(), x.GetPathBytes()), Mode: x.GetMode(), Data: x.GetData()})
	}
	return f
}

func functionLimitsToWire(l dsec.FunctionLimits) *dsecv1.FunctionLimits {
	if l == (dsec.FunctionLimits{}) {
		return nil
	}
	return &dsecv1.FunctionLimits{Cpu: span(l.CPU), Wall: span(l.Wall), Memory: l.Memory, Output: l.Output, Pids: count(l.Pids)}
}

func functionLimitsFromWire(w *dsecv1.FunctionLimits) dsec.FunctionLimits {
	return dsec.FunctionLimits{
		CPU: unspan(w.GetCpu()), Wall: unspan(w.GetWall()), Memory: w.GetMemory(), Output: w.GetOutput(), Pids: int(w.GetPids()),
	}
}

// FunctionResultToWire gives r for the wire.
func FunctionResultToWire(r dsec.FunctionResult) *dsecv1.FunctionResult {
	return &dsecv1.FunctionResult{
		Outcome: string(r.Outcome), Limit: r.Limit, Code: count(r.Code), Signal: r.Signal, Detail: strings.ToValidUTF8(r.Detail, "\uFFFD"),
		Stdout: r.Out, Stderr: r.Err, StdoutTotal: r.Stdout.Total, StderrTotal: r.Stderr.Total,
		Wall: span(r.Wall), Cpu: span(r.CPU), Memory: r.Memory, Warm: r.Warm,
	}
}

// FunctionResultFromWire is the inverse of FunctionResultToWire.
func FunctionResultFromWire(w *dsecv1.FunctionResult) dsec.FunctionResult {
	return dsec.FunctionResult{
		Outcome: dsec.FunctionOutcome(w.GetOutcome()), Limit: w.GetLimit(), Code: int(w.GetCode()), Signal: w.GetSignal(), Detail: w.GetDetail(),
		Out: w.GetStdout(), Err: w.GetStderr(),
		Stdout: dsec.StreamStat{Total: w.GetStdoutTotal(), Kept: int64(len(w.GetStdout()))},
		Stderr: dsec.StreamStat{Total: w.GetStderrTotal(), Kept: int64(len(w.GetStderr()))},
		Wall:   unspan(w.GetWall()), CPU: unspan(w.GetCpu()), Memory: w.GetMemory(), Warm: w.GetWarm(),
	}
}

// FunctionBatchToWire gives b for the wire.
func FunctionBatchToWire(b dsec.FunctionBatch) *dsecv1.FunctionsBatchRequest {
	w := &dsecv1.FunctionsBatchRequest{Function: FunctionToWire(b.Function), AtATime: count(b.AtATime)}
	for _, c := range b.Cases {
		x := &dsecv1.FunctionCase{Source: c.Source, Stdin: c.Stdin, Limits: functionLimitsToWire(c.Limits)}
		x.Args, x.ArgsBytes = names(c.Args)
		x.Env, x.EnvBytes = env(c.Env)
		w.Cases = append(w.Cases, x)
	}
	return w
}

// FunctionBatchFromWire is the inverse of FunctionBatchToWire.
func FunctionBatchFromWire(w *dsecv1.FunctionsBatchRequest) dsec.FunctionBatch {
	b := dsec.FunctionBatch{Function: FunctionFromWire(w.GetFunction()), AtATime: int(w.GetAtATime())}
	for _, x := range w.GetCases() {
		b.Cases = append(b.Cases, dsec.FunctionCase{
			Source: x.Source, Stdin: x.Stdin, Args: unnames(x.GetArgs(), x.GetArgsBytes()), Env: unenv(x.GetEnv(), x.GetEnvBytes()),
			Limits: functionLimitsFromWire(x.GetLimits()),
		})
	}
	return b
}

// FunctionItemToWire gives i for the wire. The text of an Internal stays here.
func FunctionItemToWire(i dsec.FunctionItem) *dsecv1.FunctionItem {
	w := &dsecv1.FunctionItem{Index: count(i.Index)}
	if i.Err == nil {
		w.Result = FunctionResultToWire(i.Result)
		return w
	}
	kind, text := dsec.KindOf(i.Err), i.Err.Error()
	if kind == dsec.Internal {
		text = internalText
	}
	w.ErrorKind, w.Error = kind.String(), strings.ToValidUTF8(text, "\uFFFD")
	return w
}

// FunctionItemFromWire is the inverse of FunctionItemToWire.
func FunctionItemFromWire(w *dsecv1.FunctionItem) dsec.FunctionItem {
	i := dsec.FunctionItem{Index: int(w.GetIndex())}
	if w.GetErrorKind() != "" {
		i.Err = &dsec.Error{Kind: dsec.ParseErrorKind(w.GetErrorKind()), Err: errors.New(w.GetError())}
		return i
	}
	i.Result = FunctionResultFromWire(w.GetResult())
	return i
}
