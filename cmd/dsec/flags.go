package main

import (
	"encoding"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/alecthomas/kong"

	"github.com/dsec-go/dsec"
)

// exactString keeps the bytes of an argument as they are: the parser's own
// mapping goes through JSON, which replaces what is not UTF-8.
func exactString(ctx *kong.DecodeContext, target reflect.Value) error {
	t, err := ctx.Scan.PopValue("string")
	if err != nil {
		return err
	}
	s, ok := t.Value.(string)
	if !ok { // a default that is no text
		s = fmt.Sprint(t.Value)
	}
	target.SetString(s)
	return nil
}

// word takes the next word as a flag's value, also one that begins with a
// hyphen: what is wrong with "-1" is better said by who knows its meaning.
func word(ctx *kong.DecodeContext) (string, error) {
	t := ctx.Scan.Pop()
	if t.IsEOL() {
		return "", fmt.Errorf("needs a value")
	}
	return fmt.Sprint(t.Value), nil
}

// textual decodes what parses itself.
func textual(ctx *kong.DecodeContext, target reflect.Value) error {
	s, err := word(ctx)
	if err != nil {
		return err
	}
	return target.Addr().Interface().(encoding.TextUnmarshaler).UnmarshalText([]byte(s))
}

// number decodes a whole number.
func number(ctx *kong.DecodeContext, target reflect.Value) error {
	s, err := word(ctx)
	if err != nil {
		return err
	}
	n, err := strconv.ParseInt(s, 10, target.Type().Bits())
	if err != nil {
		return dsec.Errorf(dsec.Invalid, "%q is not a whole number, or too large", s)
	}
	target.SetInt(n)
	return nil
}

// fraction decodes a number.
func fraction(ctx *kong.DecodeContext, target reflect.Value) error {
	s, err := word(ctx)
	if err != nil {
		return err
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil {
		return dsec.Errorf(dsec.Invalid, "%q is not a number", s)
	}
	target.SetFloat(f)
	return nil
}

// helpText gives the help of a flag or argument with its default.
func helpText(v *kong.Value) string {
	if !v.HasDefault || v.IsBool() {
		return v.Help
	}
	return fmt.Sprintf("%s (default %s).", strings.TrimSuffix(v.Help, "."), v.Default)
}

// outputFlags are common to the commands that print data.
type outputFlags struct {
	JSON bool `name:"json" help:"Print JSON: durations in seconds, sizes in bytes, times in UTC."`
}

// byteSize is a flag that counts bytes: 1048576, 512M, 1.5G. Units are binary.
type byteSize int64

// UnmarshalText parses a size.
func (b *byteSize) UnmarshalText(text []byte) error {
	n, err := parseBytes(string(text))
	*b = byteSize(n)
	return err
}

func parseBytes(s string) (int64, error) {
	digits := strings.TrimRight(s, "KMGTPkmgtpiB")
	unit := strings.ToUpper(s[len(digits):])
	unit = strings.TrimSuffix(strings.TrimSuffix(unit, "B"), "I")
	shift := 0
	if unit != "" {
		i := strings.Index("KMGTP", unit)
		if len(unit) != 1 || i < 0 {
			return 0, dsec.Errorf(dsec.Invalid, "size %q has no unit of K, M, G, T or P", s)
		}
		shift = 10 * (i + 1)
	}
	f, err := strconv.ParseFloat(digits, 64)
	if err != nil || !(f >= 0 && f*float64(int64(1)<<shift) < 1<<62) {
		return 0, dsec.Errorf(dsec.Invalid, "size %q is not a number of bytes such as 512M or 2G", s)
	}
	return int64(f * float64(int64(1)<<shift)), nil
}

// span is a flag that measures time: 90s, 1h30m, 2d, or plain seconds.
type span time.Duration

// UnmarshalText parses a duration.
func (d *span) UnmarshalText(text []byte) error {
	s := string(text)
	if n, ok := strings.CutSuffix(s, "d"); ok {
		if days, err := strconv.ParseFloat(n, 64); err == nil && days >= 0 && days < 36500 {
			*d = span(days * 24 * float64(time.Hour))
			return nil
		}
	}
	if n, err := strconv.ParseFloat(s, 64); err == nil && n >= 0 && n < 1e9 {
		*d = span(n * float64(time.Second))
		return nil
	}
	v, err := time.ParseDuration(s)
	if err != nil || v < 0 {
		return dsec.Errorf(dsec.Invalid, "duration %q is not like 90s, 1h30m or 2d", s)
	}
	*d = span(v)
	return nil
}

// stepFlag is SESSION:N.
type stepFlag dsec.Step

// UnmarshalText parses a step. The session may hold colons, the number may not.
func (f *stepFlag) UnmarshalText(text []byte) error {
	s := string(text)
	i := strings.LastIndexByte(s, ':')
	if i > 0 {
		if n, err := strconv.ParseUint(s[i+1:], 10, 64); err == nil {
			*f = stepFlag{Session: s[:i], Number: n}
			return nil
		}
	}
	return dsec.Errorf(dsec.Invalid, "step %q is not SESSION:N", s)
}

// kindFlag is a kind. The empty word is none: a script whose variable is not set
// would get a weaker isolation than it asked for.
type kindFlag dsec.Kind

// UnmarshalText checks it.
func (f *kindFlag) UnmarshalText(text []byte) error {
	*f = kindFlag(text)
	return dsec.Kind(text).Check()
}

// pairs parses NAME=value words. A bare NAME takes its value from lookup, where
// there is one; of several values of a variable the last counts, as in a shell,
// while those of a label would leave open which was meant.
func pairs(what string, words []string, lookup func(string) string) (map[string]string, error) {
	if len(words) == 0 {
		return nil, nil
	}
	m := make(map[string]string, len(words))
	for _, w := range words {
		name, value, ok := strings.Cut(w, "=")
		if !ok && lookup != nil {
			value, ok = lookup(name), true
		}
		if !ok || name == "" {
			return nil, dsec.Errorf(dsec.Invalid, "%s %q is not NAME=value", what, w)
		}
		if old, twice := m[name]; twice && old != value && lookup == nil {
			return nil, dsec.Errorf(dsec.Invalid, "%s %s is given twice, as %q and %q", what, name, old, value)
		}
		m[name] = value
	}
	return m, nil
}

// apiFlags let what runs in a sandbox drive other sandboxes.
type apiFlags struct {
	API          bool     `name:"api" help:"Let what runs in it make and use sandboxes of its own: it finds DSEC_URL and DSEC_TOKEN set."`
	APIRights    []string `name:"api-rights" help:"What it may do: sandboxes, images, delegate; with --api (default sandboxes)." placeholder:"RIGHT" needs:"api"`
	APISandboxes int      `name:"api-sandboxes" help:"How many it may have at once; with --api (default 16)." placeholder:"N" needs:"api" positive:""`
	APICPU       float64  `name:"api-cpu" help:"Cores that all of them may have (default what its project has left)." placeholder:"CORES" needs:"api" positive:""`
	APIMemory    byteSize `name:"api-memory" help:"Memory that all of them may have (default likewise)." placeholder:"SIZE" needs:"api" positive:""`
	APIPort      int      `name:"api-port" help:"Port of its loopback; with --api (default 7070)." placeholder:"PORT" needs:"api" positive:""`
}

func (f *apiFlags) delegation() (*dsec.Delegation, error) {
	if !f.API {
		return nil, nil
	}
	d := &dsec.Delegation{Quota: dsec.Quota{Sandboxes: f.APISandboxes, CPU: f.APICPU, Memory: int64(f.APIMemory)}, Port: f.APIPort}
	for _, r := range f.APIRights {
		d.Rights = append(d.Rights, dsec.Right(r))
	}
	return d, nil
}

// specFlags say what sandbox is wanted.
type specFlags struct {
	Image     string   `help:"Base image: name, name@version; for run also a registry reference (no default)." placeholder:"NAME"`
	Workspace string   `help:"Workspace image on top of the base (default none)." placeholder:"NAME"`
	Toolkit   []string `help:"Toolkit image on top of both; may be repeated (default none)." placeholder:"NAME" sep:"none"`
	Kind      kindFlag `help:"How it is isolated: container, microvm, fullvm or fncall (default container)." placeholder:"KIND"`
	CPU       float64  `help:"Cores it may use (default 1)." placeholder:"CORES" positive:""`
	Memory    byteSize `help:"Memory it may use, as 512M or 2G (default 1G)." placeholder:"SIZE" positive:""`
	Disk      byteSize `help:"What it may write (default 10G)." placeholder:"SIZE" positive:""`
	Pids      int      `help:"Processes and threads it may have (default 1024)." placeholder:"N" positive:""`
	TTL       span     `name:"ttl" help:"Ended this long after its creation (default 1h)." placeholder:"TIME" positive:""`
	Idle      span     `help:"Ended after this long without use (default never)." placeholder:"TIME"`
	Job       string   `help:"Job it belongs to; one that nobody made has no lease (default none)." placeholder:"ID"`
	Label     []string `help:"Label k=v, for listing; may be repeated (default none)." placeholder:"K=V" sep:"none"`
	Network   string   `help:"What it may reach: none, which is loopback only (default none)." placeholder:"NAME"`
	Project   string   `help:"Project it is of (default the token's)." placeholder:"ID"`
	apiFlags
	Hostname string `help:"Its host name (default the start of its ID)." placeholder:"NAME"`
	Key      string `help:"Repeating a create with the same key gives the same sandbox (default none)." placeholder:"KEY"`
}

// spec gives the Spec that the flags describe. What is wrong with their values
// is found here, where they are as they were written.
func (f *specFlags) spec() (dsec.Spec, error) {
	labels, err := pairs("label", f.Label, nil)
	if err != nil {
		return dsec.Spec{}, err
	}
	spec := dsec.Spec{
		Kind:        dsec.Kind(f.Kind),
		Environment: dsec.Environment{Base: f.Image, Workspace: f.Workspace, Toolkits: f.Toolkit},
		Resources:   dsec.Resources{CPU: f.CPU, Memory: int64(f.Memory), Disk: int64(f.Disk), Pids: f.Pids},
		TTL:         time.Duration(f.TTL),
		Idle:        time.Duration(f.Idle),
		Hostname:    f.Hostname,
		Labels:      labels,
		Job:         dsec.JobID(f.Job),
		Network:     dsec.Network(f.Network),
		Project:     dsec.ProjectID(f.Project),
	}
	if spec.API, err = f.delegation(); err != nil {
		return dsec.Spec{}, err
	}
	known := spec
	known.Environment.Base = "any" // is checked when it is looked for
	return spec, known.Check()
}

// userFlags say as whom, where and with what environment commands run.
type userFlags struct {
	User string   `short:"u" help:"User name, uid or uid:gid (default the sandbox's, else the image's, else root)." placeholder:"USER"`
	Cwd  string   `short:"w" help:"Working directory (default the sandbox's, else the image's, else /)." placeholder:"DIR"`
	Env  []string `short:"e" help:"Environment variable; NAME alone takes it from here. May be repeated (default none)." placeholder:"NAME=VALUE" sep:"none"`
}

// commandFlags say how a command runs.
type commandFlags struct {
	userFlags
	Interactive bool     `short:"i" help:"Feed standard input to the command. Without it the command reads nothing."`
	TTY         bool     `name:"tty" short:"t" help:"Give the command a terminal."`
	Timeout     span     `help:"Kill it after this long; the exit status is then 124 (default never)." placeholder:"TIME"`
	Quiet       span     `name:"idle-timeout" help:"Kill it after this long without output (default never)." placeholder:"TIME"`
	Output      byteSize `help:"How much of each output stream is kept (default 16M)." placeholder:"SIZE" positive:""`
}
