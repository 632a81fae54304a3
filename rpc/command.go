package rpc

import (
	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/rpc/dsecv1"
)

// CommandToWire gives c for the wire.
func CommandToWire(c dsec.Command) *dsecv1.Command {
	w := &dsecv1.Command{
		User:    c.User,
		Stdin:   string(c.Stdin),
		Timeout: span(c.Timeout),
		Idle:    span(c.Idle),
		Output:  c.Output,
	}
	w.Argv, w.ArgvBytes = names(c.Argv)
	w.Shell, w.ShellBytes = name(c.Shell)
	w.Cwd, w.CwdBytes = name(c.Cwd)
	w.Env, w.EnvBytes = env(c.Env)
	if c.TTY != nil {
		w.Tty = sizeToWire(*c.TTY)
	}
	return w
}

// CommandFromWire is the inverse of CommandToWire. It does not check.
func CommandFromWire(w *dsecv1.Command) (dsec.Command, error) {
	c := dsec.Command{
		Argv:    unnames(w.GetArgv(), w.GetArgvBytes()),
		Shell:   unname(w.GetShell(), w.GetShellBytes()),
		Cwd:     unname(w.GetCwd(), w.GetCwdBytes()),
		User:    w.GetUser(),
		Env:     unenv(w.GetEnv(), w.GetEnvBytes()),
		Stdin:   dsec.StdinMode(w.GetStdin()),
		Timeout: unspan(w.GetTimeout()),
		Idle:    unspan(w.GetIdle()),
		Output:  w.GetOutput(),
	}
	if w.GetTty() != nil {
		size, err := sizeFromWire(w.GetTty())
		if err != nil {
			return c, err
		}
		c.TTY = &size
	}
	return c, nil
}

func sizeToWire(s dsec.WinSize) *dsecv1.WinSize {
	return &dsecv1.WinSize{Rows: uint32(s.Rows), Cols: uint32(s.Cols)}
}

func sizeFromWire(w *dsecv1.WinSize) (dsec.WinSize, error) {
	if w.GetRows() > 65535 || w.GetCols() > 65535 {
		return dsec.WinSize{}, dsec.Errorf(dsec.Invalid, "terminal of %d rows and %d columns is larger than 65535", w.GetRows(), w.GetCols())
	}
	return dsec.WinSize{Rows: uint16(w.GetRows()), Cols: uint16(w.GetCols())}, nil
}

// StatusToWire gives s for the wire.
func StatusToWire(s dsec.CommandStatus) *dsecv1.CommandStatus {
	w := &dsecv1.CommandStatus{
		Id:       string(s.ID),
		Command:  CommandToWire(s.Command),
		Outcome:  string(s.Outcome),
		Signal:   s.Signal,
		Detail:   s.Detail,
		Pid:      count(s.Pid),
		Started:  stamp(s.Started),
		Ended:    stamp(s.Ended),
		Stdout:   statToWire(s.Stdout),
		Stderr:   statToWire(s.Stderr),
		Cpu:      span(s.CPU),
		MaxRss:   s.MaxRSS,
		Replayed: s.Replayed,
	}
	if !s.Step.IsZero() {
		w.Step = &dsecv1.Step{Session: s.Step.Session, Number: s.Step.Number}
	}
	if s.Code != 0 || s.Outcome != dsec.StillRunning {
		code := count(s.Code)
		w.Code = &code // present when zero, for readers of JSON
	}
	return w
}

// StatusFromWire is the inverse of StatusToWire.
func StatusFromWire(w *dsecv1.CommandStatus) (dsec.CommandStatus, error) {
	c, err := CommandFromWire(w.GetCommand())
	return dsec.CommandStatus{
		ID:       dsec.CommandID(w.GetId()),
		Step:     dsec.Step{Session: w.GetStep().GetSession(), Number: w.GetStep().GetNumber()},
		Command:  c,
		Outcome:  dsec.Outcome(w.GetOutcome()),
		Code:     int(w.GetCode()),
		Signal:   w.GetSignal(),
		Detail:   w.GetDetail(),
		Pid:      int(w.GetPid()),
		Started:  unstamp(w.GetStarted()),
		Ended:    unstamp(w.GetEnded()),
		Stdout:   dsec.StreamStat{Total: w.GetStdout().GetTotal(), Kept: w.GetStdout().GetKept()},
		Stderr:   dsec.StreamStat{Total: w.GetStderr().GetTotal(), Kept: w.GetStderr().GetKept()},
		CPU:      unspan(w.GetCpu()),
		MaxRSS:   w.GetMaxRss(),
		Replayed: w.GetReplayed(),
	}, err
}

func statToWire(s dsec.StreamStat) *dsecv1.StreamStat {
	if s == (dsec.StreamStat{}) {
		return nil
	}
	return &dsecv1.StreamStat{Total: s.Total, Kept: s.Kept}
}

// OutputToWire gives o for the wire. The data are not copied.
func OutputToWire(o dsec.Output) *dsecv1.Output {
	w := &dsecv1.Output{Offset: o.Offset, Gap: o.Gap}
	switch o.Stream {
	case dsec.Stdout:
		w.Data = &dsecv1.Output_Stdout{Stdout: o.Data}
	case dsec.Stderr:
		w.Data = &dsecv1.Output_Stderr{Stderr: o.Data}
	}
	if o.Status != nil {
		w.Status = StatusToWire(*o.Status)
	}
	return w
}

// OutputFromWire is the inverse of OutputToWire.
func OutputFromWire(w *dsecv1.Output) (dsec.Output, error) {
	o := dsec.Output{Offset: w.GetOffset(), Gap: w.GetGap()}
	switch d := w.GetData().(type) {
	case *dsecv1.Output_Stdout:
		o.Stream, o.Data = dsec.Stdout, d.Stdout
	case *dsecv1.Output_Stderr:
		o.Stream, o.Data = dsec.Stderr, d.Stderr
	}
	if w.GetStatus() != nil {
		s, err := StatusFromWire(w.GetStatus())
		if err != nil {
			return o, err
		}
		o.Status = &s
	}
	return o, nil
}

// The names of output streams on the wire.
const (
	streamOut = "stdout"
	streamErr = "stderr"
)

// streamText gives the name of an output stream on the wire.
func streamText(s dsec.Stream) string {
	switch s {
	case dsec.Stdout:
		return streamOut
	case dsec.Stderr:
		return streamErr
	}
	return ""
}

func streamFromText(s string) (dsec.Stream, error) {
	switch s {
	case streamOut:
		return dsec.Stdout, nil
	case streamErr:
		return dsec.Stderr, nil
	}
	return 0, dsec.Errorf(dsec.Invalid, "stream %q is not stdout or stderr", clip(s))
}

// ReadToWire gives a Read for the wire.
func ReadToWire(id dsec.CommandID, s dsec.Stream, offset int64, max int) *dsecv1.CommandsReadRequest {
	return &dsecv1.CommandsReadRequest{Id: string(id), Stream: streamText(s), Offset: offset, Max: count(max)}
}

// ResizeToWire gives a Resize for the wire.
func ResizeToWire(id dsec.CommandID, s dsec.WinSize) *dsecv1.CommandsResizeRequest {
	return &dsecv1.CommandsResizeRequest{Id: string(id), Size: sizeToWire(s)}
}
