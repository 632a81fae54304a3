package dsec

import (
	"context"
	"iter"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// Project is a tenant. What one has, no other sees, save those above it:
// projects nest by their names, "a/b" is below "a". Images are seen the other
// way: a project uses its own, those of projects above it, and everybody's.
type Project struct {
	Name    ProjectID
	Quota   Quota
	Used    Share     // now, by it and all below it
	Created time.Time // zero for one that came with the cluster
}

// Quota bounds what a project and all below it have at once. Zero does not
// bound; whatever is set, the quotas of the projects above count as well.
type Quota struct {
	Sandboxes int           // alive
	CPU       float64       // cores, the limits of its sandboxes added up
	Memory    int64         // bytes, likewise
	Images    int64         // bytes in the store of what its image names need, each blob once, without what everybody's names need
	TTL       time.Duration // longest that a create or an Extend may ask for
}

// Share is what a project uses of its quota.
type Share struct {
	Sandboxes int
	CPU       float64
	Memory    int64
	Images    int64 // bytes, as Quota counts them
}

// Check validates q. Every fault is Invalid.
func (q Quota) Check() error {
	if q.Sandboxes < 0 || !(q.CPU >= 0 && q.CPU < 1<<40) || q.Memory < 0 || q.Images < 0 || q.TTL < 0 {
		return Errorf(Invalid, "a quota cannot be negative or without end; 0 does not bound")
	}
	return nil
}

// Projects manages the tenants. A caller without RightAdmin sees its own project
// and manages those below it.
type Projects interface {
	// Create makes a project of a name and a quota; what else p holds is not
	// looked at. The project above it must exist, with a quota that is no
	// smaller. It is Exists for a name that is taken.
	Create(ctx context.Context, p Project) (Project, error)

	// List returns all projects, by name, with what they use.
	List(ctx context.Context) ([]Project, error)

	// SetQuota changes the quota of a project below the caller's, or of any for an
	// operator. It must lie within that of the project above and hold those of the
	// projects below. What lives beyond it lives on, images stay; it is the next
	// create or import that is refused.
	SetQuota(ctx context.Context, name ProjectID, q Quota) error

	// Remove ends a project, its tokens and its image names. It is Conflict while
	// it has living sandboxes or projects below it.
	Remove(ctx context.Context, name ProjectID) error
}

// Delegation lets what runs in a sandbox drive other sandboxes. It finds the API
// on its loopback and a token in its environment, as DSEC_URL and DSEC_TOKEN.
// The token counts there alone, ends with the sandbox, and is of a project of
// its own, SandboxProject; so do the sandboxes that were made with it.
type Delegation struct {
	Rights []Right // of the creator's; default RightSandboxes
	Quota  Quota   // default DefaultAPISandboxes sandboxes, bounded by the projects above
	Port   int     // on the loopback; default DefaultAPIPort
}

// Defaults of a Delegation.
const (
	DefaultAPIPort      = 7070
	DefaultAPISandboxes = 16
)

// Variables of commands in a sandbox with a Delegation.
const (
	EnvURL   = "DSEC_URL"
	EnvToken = "DSEC_TOKEN"
)

func (d Delegation) withDefaults() Delegation {
	if len(d.Rights) == 0 {
		d.Rights = []Right{RightSandboxes}
	}
	d.Rights = slices.Compact(slices.Sorted(slices.Values(d.Rights)))
	def(&d.Quota.Sandboxes, DefaultAPISandboxes)
	def(&d.Port, DefaultAPIPort)
	return d
}

func (d Delegation) check() error {
	for _, r := range d.Rights {
		if r != RightSandboxes && r != RightImages && r != RightDelegate {
			return Errorf(Invalid, "right %q of the sandbox's API is not one of sandboxes, images, delegate", clip(string(r)))
		}
	}
	if d.Port < 1 || d.Port > 65535 {
		return Errorf(Invalid, "port %d of the sandbox's API is not between 1 and 65535", d.Port)
	}
	return d.Quota.Check()
}

// Limits of the names of projects.
const (
	MaxProjectDepth = 8
	MaxProjectBytes = 320
)

// ownerMark begins the part of a name that stands for a sandbox. No project that
// somebody makes can have it.
const ownerMark = "@"

var projectRE = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,62}$`) })

// Check reports whether p can be the name of a project that somebody makes: one
// to MaxProjectDepth parts, joined by slashes.
func (p ProjectID) Check() error {
	parts := strings.Split(string(p), "/")
	if len(p) > MaxProjectBytes || len(parts) > MaxProjectDepth {
		return Errorf(Invalid, "project name %q: at most %d parts and %d bytes", clip(string(p)), MaxProjectDepth, MaxProjectBytes)
	}
	for _, s := range parts {
		if !projectRE().MatchString(s) {
			return Errorf(Invalid, "project name %q: use at most 63 of a-z 0-9 . _ -, beginning with a letter or digit, in parts joined by /", clip(string(p)))
		}
	}
	return nil
}

// Within reports whether p is q or below it.
func (p ProjectID) Within(q ProjectID) bool {
	rest, ok := strings.CutPrefix(string(p), string(q))
	return ok && (rest == "" || q != "" && rest[0] == '/')
}

// Parent is the project above p; empty for one at the top.
func (p ProjectID) Parent() ProjectID {
	i := strings.LastIndexByte(string(p), '/')
	return p[:max(i, 0)]
}

// Depth is the number of parts of p.
func (p ProjectID) Depth() int {
	if p == "" {
		return 0
	}
	return strings.Count(string(p), "/") + 1
}

// Line yields p and all above it, the nearest first.
func (p ProjectID) Line() iter.Seq[ProjectID] {
	return func(yield func(ProjectID) bool) {
		for ; p != ""; p = p.Parent() {
			if !yield(p) {
				return
			}
		}
	}
}

// SandboxProject is the project of what is made through the API of a sandbox
// that is of project p.
func SandboxProject(p ProjectID, id SandboxID) ProjectID {
	if p == "" {
		return ProjectID(ownerMark + string(id))
	}
	return p + "/" + ProjectID(ownerMark+string(id))
}

// Owner gives the sandbox whose SandboxProject p is, if it is one.
func (p ProjectID) Owner() (SandboxID, bool) {
	id, ok := strings.CutPrefix(string(p[strings.LastIndexByte(string(p), '/')+1:]), ownerMark)
	return SandboxID(id), ok
}
