package trajectory

import (
	"bytes"
	"context"
	"encoding/json"
	"slices"
	"strings"

	"github.com/dsec-go/dsec"
)

// defaults is what commands of a sandbox get that do not say it themselves, as
// far as its Spec names it.
type defaults struct {
	Cwd  string            `json:"cwd,omitempty"`
	User string            `json:"user,omitempty"`
	Env  map[string]string `json:"env,omitempty"`

	// Branch is, of a copy, beyond the numbers under which the guest may know
	// requests of the original: it has them in its memory.
	Branch uint64 `json:"branch,omitempty"`
}

func (d *defaults) zero() bool {
	return d.Cwd == "" && d.User == "" && len(d.Env) == 0 && d.Branch == 0
}

// defaultsOf reads them from the record of a creation.
func defaultsOf(create json.RawMessage) defaults {
	var p struct {
		Spec   dsec.Spec
		Origin *lineage
	}
	json.Unmarshal(create, &p) //nolint:errcheck // then nothing is a default
	d := defaults{Cwd: p.Spec.Cwd, User: p.Spec.User, Env: p.Spec.Env}
	if p.Origin != nil {
		d.Branch = p.Origin.Branch
	}
	return d
}

// defaultMkdir is the mode of a folder that is made without one.
const defaultMkdir = 0o755

// plain gives a request as it is compared: a default that is named is left out,
// and of a terminal there is only that it is one. Its size and TERM are those of
// whoever looks at it, and another one looks when a trainer comes back.
func (d *defaults) plain(op dsec.RecordOp, request json.RawMessage) json.RawMessage {
	switch op {
	case dsec.RecordMkdir:
		var p pathParam
		if !names(request, "mode") || json.Unmarshal(request, &p) != nil || p.Mode != defaultMkdir {
			return request
		}
		p.Mode = 0
		return remarshal(p, request)
	case dsec.RecordCommand:
	default:
		return request
	}
	if !names(request, "tty", "output") && (d.zero() || !names(request, "cwd", "user", "env")) {
		return request // as nearly all
	}
	var p commandParam
	if json.Unmarshal(request, &p) != nil {
		return request
	}
	if string(p.Cwd) == d.Cwd {
		p.Cwd = ""
	}
	if string(p.User) == d.User {
		p.User = ""
	}
	if p.Output == dsec.DefaultOutput {
		p.Output = 0
	}
	terminal := p.TTY != nil
	if terminal {
		p.TTY = &dsec.WinSize{}
	}
	p.Env = slices.DeleteFunc(p.Env, func(t Text) bool {
		name, value, _ := strings.Cut(string(t), "=")
		if terminal && name == "TERM" {
			return true
		}
		v, ok := d.Env[name]
		return ok && v == value
	})
	return remarshal(p, request)
}

// names reports whether a request may have one of these parameters.
func names(request json.RawMessage, names ...string) bool {
	for _, n := range names {
		if bytes.Contains(request, []byte(`"`+n+`":`)) {
			return true
		}
	}
	return false
}

func remarshal(p any, request json.RawMessage) json.RawMessage {
	b, err := marshal(p)
	if err != nil {
		return request
	}
	return b
}

// defaults gives those of a sandbox that is not a chain's any more.
func (l *Log) defaults(ctx context.Context, id dsec.SandboxID) (*defaults, error) {
	if c := l.chain(id); c != nil {
		return &c.defaults, nil // fixed with the first record
	}
	b, err := l.read(ctx, id, 1)
	if err != nil {
		return nil, err
	}
	_, h, err := decode(b)
	if err != nil {
		return nil, err
	}
	d := defaultsOf(h.Request)
	return &d, nil
}

// asRecorded gives the command of a step as it was first asked for. The guest
// compares as well, and knows no defaults.
func (c commands) asRecorded(ctx context.Context, on dsec.Call, b begun, cmd dsec.Command) (dsec.Command, error) {
	if !b.again {
		return cmd, nil
	}
	raw, err := c.r.log.read(ctx, on.Sandbox, b.flight.request)
	if err != nil {
		return cmd, err
	}
	_, h, err := decode(raw)
	if err != nil {
		return cmd, err
	}
	return CommandOf(h.Request)
}
