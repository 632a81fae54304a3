package dsec

import (
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Environment says what a sandbox's root is composed of. Each part is an image
// name, "name@version" or "name" for its newest version. The parts are
// versioned independently and compose in any combination: base lowest, then
// the workspace, then the toolkits in order, then the sandbox's own writable
// layer.
type Environment struct {
	Base      string
	Workspace string   // none when empty
	Toolkits  []string // at most MaxToolkits
}

// Parts lists the named layers from the lowest up.
func (e Environment) Parts() []string {
	parts := []string{e.Base}
	if e.Workspace != "" {
		parts = append(parts, e.Workspace)
	}
	return append(parts, e.Toolkits...)
}

// Spec is what a caller wants: plain, copyable data. The zero value of every
// field but Environment.Base is valid and means its default.
type Spec struct {
	Kind        Kind        // default Container
	Environment Environment // Base is required
	Resources   Resources
	TTL         time.Duration     // ended this long after its creation; default DefaultTTL
	Idle        time.Duration     // ended after this long without a call or a running command; default none
	User        string            // of commands that name none: name, uid, or uid:gid; default: the image's, else root
	Cwd         string            // of commands that name none; default: the image's, else /
	Env         map[string]string // added to the image's; a command's own wins
	Hostname    string            // default: the first 12 characters of the ID; of a copy, 12 random ones of it
	Labels      map[string]string // the caller's own words, for listing
	Job         JobID             // the job it belongs to; default none
	Project     ProjectID         // the tenant; default: the token's project
	Network     Network           // default NetworkNone
	API         *Delegation       // lets what runs in it drive other sandboxes; default none

	// From is the ID of a snapshot whose state it begins with, or, of a sandbox
	// that a fork made, the parent's; default none. Kind, Environment and
	// Resources are the snapshot's then, and may be left out or must be equal;
	// User, Cwd, Env, Network and API must be left out.
	From string
}

// Network names what a sandbox may reach.
type Network string

// NetworkNone is loopback only: nothing outside is reachable in either
// direction, save ports dialled through the node.
const NetworkNone Network = "none"

// Resources are limits, not reservations: a node admits more than it has and
// refuses by its real load.
type Resources struct {
	CPU    float64 // cores; default DefaultCPU
	Memory int64   // bytes, swap included; default DefaultMemory
	Disk   int64   // bytes of the writable layer; default DefaultDisk
	Pids   int     // processes and threads; default DefaultPids
}

// Defaults and limits of a Spec.
const (
	DefaultCPU    = 1.0
	DefaultMemory = 1 << 30
	DefaultDisk   = 10 << 30
	DefaultPids   = 1024
	DefaultTTL    = time.Hour

	MinCPU    = 0.01
	MaxCPU    = 1024
	MinMemory = 4 << 20
	MaxMemory = 64 << 40
	MinDisk   = 1 << 20
	MaxDisk   = 1 << 50
	MinPids   = 4
	MaxPids   = 4 << 20
	MinTTL    = time.Second
	MaxTTL    = 30 * 24 * time.Hour

	MaxToolkits   = 16
	MaxLabels     = 64
	MaxLabelBytes = 256      // of a key, and of a value
	MaxEnvBytes   = 1 << 20  // all names and values of a Spec or a command
	MaxArgBytes   = 16 << 20 // all arguments of one command; the kernel's own limit may be lower
	MaxPathBytes  = 4096
	MaxKeyBytes   = 256
)

// WithDefaults gives s with every empty field set to its default. Fields whose
// default comes from the image stay empty.
//
// What a Spec with From leaves out of Kind, Environment and Resources is the
// snapshot's, which only the node knows: it stays empty too.
func (s Spec) WithDefaults() Spec {
	if s.From == "" {
		def(&s.Kind, Container)
		def(&s.Resources.CPU, DefaultCPU)
		def(&s.Resources.Memory, DefaultMemory)
		def(&s.Resources.Disk, DefaultDisk)
		def(&s.Resources.Pids, DefaultPids)
	}
	def(&s.TTL, DefaultTTL)
	def(&s.Network, NetworkNone)
	if s.API != nil {
		api := s.API.withDefaults()
		s.API = &api
	}
	return s
}

func def[T comparable](p *T, v T) {
	var zero T
	if *p == zero {
		*p = v
	}
}

// Check validates s after WithDefaults. Every fault is Invalid, named with its
// field and the allowed range. References are checked at admission, not here.
func (s Spec) Check() error {
	s = s.WithDefaults()
	if err := s.checkMachine(); err != nil {
		return err
	}
	if s.TTL < MinTTL || s.TTL > MaxTTL {
		return Errorf(Invalid, "ttl %v is not between %v and %v", s.TTL, MinTTL, MaxTTL)
	}
	if s.Idle != 0 && (s.Idle < MinTTL || s.Idle > MaxTTL) {
		return Errorf(Invalid, "idle %v is not 0 (none) or between %v and %v", s.Idle, MinTTL, MaxTTL)
	}
	if s.Network != NetworkNone {
		return Errorf(Unsupported, "network %q: this build has only %q", clip(string(s.Network)), NetworkNone)
	}
	if s.Hostname != "" && !hostnameRE().MatchString(s.Hostname) {
		return Errorf(Invalid, "hostname %q is not 1 to 63 letters, digits and inner hyphens", clip(s.Hostname))
	}
	if err := CheckCwd(s.Cwd); err != nil {
		return err
	}
	if err := CheckEnv(s.Env); err != nil {
		return err
	}
	if s.API != nil {
		if err := s.API.check(); err != nil {
			return err
		}
	}
	return checkLabels(s.Labels)
}

// checkMachine is Check for what a snapshot stands in for.
func (s Spec) checkMachine() error {
	if s.From != "" {
		if err := s.checkFrom(); err != nil || s.Environment.Base == "" {
			return err
		}
		s.From = ""
		s = s.WithDefaults() // what is given must be right, the rest is the snapshot's
	}
	if err := s.Kind.Check(); err != nil {
		return err
	}
	if err := s.Environment.check(); err != nil {
		return err
	}
	return s.Resources.check()
}

func (s Spec) checkFrom() error {
	if err := SnapshotID(s.From).Check(); err != nil {
		return err
	}
	for what, set := range map[string]bool{
		"user": s.User != "", "working directory": s.Cwd != "", "environment variables": len(s.Env) > 0, "API": s.API != nil,
	} {
		if set {
			return Errorf(Invalid, "a sandbox made from a snapshot has the %s of the snapshot", what)
		}
	}
	if s.Environment.Base == "" && (s.Environment.Workspace != "" || len(s.Environment.Toolkits) > 0) {
		return Errorf(Invalid, "environment has no base image")
	}
	return nil
}

// Compiled when first used: a guest, of which a node has thousands, never does.
var (
	hostnameRE = sync.OnceValue(func() *regexp.Regexp {
		return regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?$`)
	})
	imageRE = sync.OnceValue(func() *regexp.Regexp {
		return regexp.MustCompile(`^[a-z0-9]+([._/-][a-z0-9]+)*(@[A-Za-z0-9][A-Za-z0-9._-]{0,127})?$`)
	})
)

// CheckImageName reports whether s is "name" or "name@version": a name of
// lower-case letters, digits and single . _ / - between them, up to 200 bytes.
func CheckImageName(s string) error {
	if len(s) > 200 || !imageRE().MatchString(s) {
		return Errorf(Invalid, "image name %q is not name or name@version (lower-case letters, digits, and . _ / - between them)", clip(s))
	}
	return nil
}

// LatestVersion stands for the newest version of an image.
const LatestVersion = "latest"

// CheckNewImageName is CheckImageName for a name that is to be given: a version
// that stands for the newest one cannot be one.
func CheckNewImageName(s string) error {
	if err := CheckImageName(s); err != nil {
		return err
	}
	if _, version := SplitImageName(s); version == LatestVersion {
		return Errorf(Invalid, "image name %q: version %s stands for the newest one and cannot be given", clip(s), LatestVersion)
	}
	return nil
}

// SplitImageName cuts "name@version"; version is empty when s has none.
func SplitImageName(s string) (name, version string) {
	name, version, _ = strings.Cut(s, "@")
	return name, version
}

func (e Environment) check() error {
	if e.Base == "" {
		return Errorf(Invalid, "environment has no base image")
	}
	if len(e.Toolkits) > MaxToolkits {
		return Errorf(Invalid, "environment has %d toolkits, more than %d", len(e.Toolkits), MaxToolkits)
	}
	for _, p := range e.Parts() {
		if err := CheckImageName(p); err != nil {
			return err
		}
	}
	return nil
}

func (r Resources) check() error {
	switch {
	case !(r.CPU >= MinCPU && r.CPU <= MaxCPU): // also refuses NaN
		return Errorf(Invalid, "cpu %v is not between %v and %v cores", r.CPU, MinCPU, MaxCPU)
	case r.Memory < MinMemory || r.Memory > MaxMemory:
		return Errorf(Invalid, "memory %s is not between %s and %s", byteText(r.Memory), byteText(MinMemory), byteText(MaxMemory))
	case r.Disk < MinDisk || r.Disk > MaxDisk:
		return Errorf(Invalid, "disk %s is not between %s and %s", byteText(r.Disk), byteText(MinDisk), byteText(MaxDisk))
	case r.Pids < MinPids || r.Pids > MaxPids:
		return Errorf(Invalid, "pids %d is not between %d and %d", r.Pids, MinPids, MaxPids)
	}
	return nil
}

// byteText gives n for people without losing any of it: 512MiB, or 1000B.
func byteText(n int64) string {
	unit := 0
	for n != 0 && n%1024 == 0 && unit < 5 {
		n, unit = n/1024, unit+1
	}
	return strconv.FormatInt(n, 10) + [...]string{"B", "KiB", "MiB", "GiB", "TiB", "PiB"}[unit]
}

// CheckCwd accepts "" and absolute paths.
func CheckCwd(p string) error {
	if p == "" {
		return nil
	}
	if p[0] != '/' {
		return Errorf(Invalid, "working directory %q is not absolute", clip(p))
	}
	return CheckPath(p)
}

// CheckPath accepts any non-empty path without NUL up to MaxPathBytes.
func CheckPath(p string) error {
	switch {
	case p == "":
		return Errorf(Invalid, "path is empty")
	case len(p) >= MaxPathBytes:
		return Errorf(Invalid, "path of %d bytes is longer than %d", len(p), MaxPathBytes-1)
	case strings.IndexByte(p, 0) >= 0:
		return Errorf(Invalid, "path %q contains NUL", clip(p))
	}
	return nil
}

// CheckEnv validates environment variables: names not empty, without "=" and
// NUL, values without NUL, at most MaxEnvBytes in all.
func CheckEnv(env map[string]string) error {
	n := 0
	for _, k := range slices.Sorted(maps.Keys(env)) {
		v := env[k]
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.IndexByte(v, 0) >= 0 {
			return Errorf(Invalid, "environment variable %q is not a name and a value without NUL", clip(k))
		}
		n += len(k) + len(v) + 2
	}
	if n > MaxEnvBytes {
		return Errorf(Invalid, "environment of %d bytes is larger than %d", n, MaxEnvBytes)
	}
	return nil
}

func checkLabels(labels map[string]string) error {
	if len(labels) > MaxLabels {
		return Errorf(Invalid, "%d labels are more than %d", len(labels), MaxLabels)
	}
	for k, v := range labels {
		if k == "" || len(k) > MaxLabelBytes || len(v) > MaxLabelBytes {
			return Errorf(Invalid, "label %q: key and value have 1 and 0 to %d bytes", clip(k), MaxLabelBytes)
		}
	}
	return nil
}
