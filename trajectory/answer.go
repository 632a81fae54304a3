package trajectory

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/dsec-go/dsec"
)

// commandParam is the request of a command. What is a default is left out, so
// that the same command always gives the same bytes.
type commandParam struct {
	Argv    []Text         `json:"argv,omitempty"`
	Shell   Text           `json:"shell,omitempty"`
	Cwd     Text           `json:"cwd,omitempty"`
	User    Text           `json:"user,omitempty"`
	Env     []Text         `json:"env,omitempty"` // NAME=value, in order
	Stdin   dsec.StdinMode `json:"stdin,omitempty"`
	TTY     *dsec.WinSize  `json:"tty,omitempty"`
	Timeout time.Duration  `json:"timeout,omitempty"` // nanoseconds
	Idle    time.Duration  `json:"idle,omitempty"`    // nanoseconds
	Output  int64          `json:"output,omitempty"`
	Input   string         `json:"input,omitempty"` // digest of what Run feeds it
}

func paramOf(c dsec.Command, input string) (json.RawMessage, error) {
	p := commandParam{
		Shell: Text(c.Shell), Cwd: Text(c.Cwd), User: Text(c.User), Stdin: c.Stdin, TTY: c.TTY,
		Timeout: c.Timeout, Idle: c.Idle, Output: c.Output, Input: input,
	}
	for _, a := range c.Argv {
		p.Argv = append(p.Argv, Text(a))
	}
	for _, name := range slices.Sorted(maps.Keys(c.Env)) {
		p.Env = append(p.Env, Text(name+"="+c.Env[name]))
	}
	return marshal(p)
}

// CommandOf gives the command of a record's request.
func CommandOf(request json.RawMessage) (dsec.Command, error) {
	var p commandParam
	if err := json.Unmarshal(request, &p); err != nil {
		return dsec.Command{}, fmt.Errorf("read the command of a record: %w", err)
	}
	c := dsec.Command{
		Shell: string(p.Shell), Cwd: string(p.Cwd), User: string(p.User), Stdin: p.Stdin, TTY: p.TTY,
		Timeout: p.Timeout, Idle: p.Idle, Output: p.Output,
	}
	for _, a := range p.Argv {
		c.Argv = append(c.Argv, string(a))
	}
	for _, v := range p.Env {
		if c.Env == nil {
			c.Env = map[string]string{}
		}
		name, value, _ := strings.Cut(string(v), "=")
		c.Env[name] = value
	}
	return c, nil
}

// commandAnswer is a CommandStatus without the command, which is in the request.
type commandAnswer struct {
	ID      dsec.CommandID   `json:"id,omitempty"`
	Outcome dsec.Outcome     `json:"outcome"`
	Code    int              `json:"code"`
	Signal  string           `json:"signal,omitempty"`
	Detail  string           `json:"detail,omitempty"`
	Pid     int              `json:"pid,omitempty"`
	Started int64            `json:"started,omitempty"` // nanoseconds since 1970
	Ended   int64            `json:"ended,omitempty"`
	Stdout  *dsec.StreamStat `json:"stdout,omitempty"`
	Stderr  *dsec.StreamStat `json:"stderr,omitempty"`
	CPU     time.Duration    `json:"cpu,omitempty"` // nanoseconds
	MaxRSS  int64            `json:"maxrss,omitempty"`
	Fetched int64            `json:"fetched,omitempty"` // bytes that its sandbox read lazily meanwhile
}

func answerOf(s dsec.CommandStatus) commandAnswer {
	return commandAnswer{
		ID: s.ID, Outcome: s.Outcome, Code: s.Code, Signal: s.Signal, Detail: s.Detail, Pid: s.Pid,
		Started: nanos(s.Started), Ended: nanos(s.Ended), Stdout: stat(s.Stdout), Stderr: stat(s.Stderr),
		CPU: s.CPU, MaxRSS: s.MaxRSS,
	}
}

func (a commandAnswer) status() dsec.CommandStatus {
	s := dsec.CommandStatus{
		ID: a.ID, Outcome: a.Outcome, Code: a.Code, Signal: a.Signal, Detail: a.Detail, Pid: a.Pid,
		Started: stamp(a.Started), Ended: stamp(a.Ended), CPU: a.CPU, MaxRSS: a.MaxRSS,
	}
	if a.Stdout != nil {
		s.Stdout = *a.Stdout
	}
	if a.Stderr != nil {
		s.Stderr = *a.Stderr
	}
	return s
}

func stat(s dsec.StreamStat) *dsec.StreamStat {
	if s == (dsec.StreamStat{}) {
		return nil
	}
	return &s
}

func nanos(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

func stamp(ns int64) time.Time {
	if ns == 0 {
		return time.Time{}
	}
	return time.Unix(0, ns).UTC()
}

// commandID reads only the ID of an answer.
func commandOf(answer json.RawMessage) dsec.CommandID {
	var a struct {
		ID dsec.CommandID `json:"id"`
	}
	json.Unmarshal(answer, &a) //nolint:errcheck // then it has none
	return a.ID
}

// StatusOf gives the status of the command that two records tell of.
func StatusOf(request, answer dsec.Record) (dsec.CommandStatus, error) {
	var a commandAnswer
	if err := json.Unmarshal(answer.Answer, &a); err != nil {
		return dsec.CommandStatus{}, fmt.Errorf("read the answer of record %d: %w", request.Seq, err)
	}
	c, err := CommandOf(request.Request)
	if err != nil {
		return dsec.CommandStatus{}, err
	}
	s := a.status()
	s.Command, s.Step = c, request.Step
	return s, nil
}

// FetchedOf gives the bytes of its images that a sandbox waited for during a
// command, from the record of its answer.
func FetchedOf(answer dsec.Record) int64 {
	var a commandAnswer
	json.Unmarshal(answer.Answer, &a) //nolint:errcheck // then none are known
	return a.Fetched
}

// recorded is an answer read back, with its request.
type recorded struct {
	request, answer *head
	raw             raw // of the answer
}

func (l *Log) recorded(ctx context.Context, id dsec.SandboxID, answer uint64) (recorded, error) {
	b, err := l.read(ctx, id, answer)
	if err != nil {
		return recorded{}, err
	}
	r, h, err := decode(b)
	if err != nil {
		return recorded{}, err
	}
	q, err := l.read(ctx, id, h.Of)
	if err != nil {
		return recorded{}, err
	}
	_, qh, err := decode(q)
	return recorded{qh, h, r}, err
}

// status gives the status of a recorded command.
func (r recorded) status() (dsec.CommandStatus, error) {
	return StatusOf(r.request.record(raw{}, nil), dsec.Record{Answer: r.answer.Answer})
}

// replayed is an answer of any other call; nothing if it has none.
func replayed[T any](ctx context.Context, l *Log, id dsec.SandboxID, answer uint64) (T, error) {
	var v T
	r, err := l.recorded(ctx, id, answer)
	if err == nil && len(r.answer.Answer) > 0 {
		err = json.Unmarshal(r.answer.Answer, &v)
	}
	return v, err
}
