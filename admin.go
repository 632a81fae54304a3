package dsec

import (
	"context"
	"time"
)

// Right is one thing a token may do.
type Right string

// The rights of a token.
const (
	RightSandboxes Right = "sandboxes" // create, use and stop sandboxes of its project
	RightImages    Right = "images"    // import, commit and remove images
	RightDelegate  Right = "delegate"  // make projects below its own, and tokens of those that may no more than itself
	RightAdmin     Right = "admin"     // everything, tokens and nodes included
)

// Token is what the server knows of a token; the secret itself is shown once.
type Token struct {
	Name    string
	Project ProjectID
	Rights  []Right
	Created time.Time
	Expires time.Time // zero means never
}

// Tokens manages who may call. A caller without RightAdmin manages those of
// projects below its own, whose names begin with their project: "a/b/NAME".
type Tokens interface {
	// Issue makes a token and returns its secret, the only time it is seen. One
	// that may more than the caller, or longer, is Denied.
	Issue(ctx context.Context, t Token) (secret string, err error)
	// List returns all tokens, by name.
	List(ctx context.Context) ([]Token, error)
	// Revoke ends a token by name, within a second on every replica, and the
	// calls that it has under way some seconds later. It is Conflict for a token
	// with RightAdmin that no other with that right would outlast: nobody locks
	// himself out.
	Revoke(ctx context.Context, name string) error
}

// Node is one machine of the cluster as seen now.
type Node struct {
	Name      string
	Place     Place
	Version   string
	Kinds     []Kind
	Sandboxes int     // alive
	CPUs      int     // cores of the host
	Load      float64 // runnable processes, one minute
	Memory    int64   // bytes of the host
	Available int64   // bytes of memory that can be given out
	Disk      int64   // bytes of the data folder's file system
	DiskFree  int64
	Pressure  Pressure
	Features  []FeatureStatus
	Store     string // where its layers lie, without credentials; empty in its data folder
	Cache     int64  // bytes that it may keep of them; 0 without a bound
	Cached    int64  // bytes that it keeps
	Fetched   int64  // bytes that came from there since its process for data began
}

// Pressure is the share of time that work waited for a resource in the last
// ten seconds, 0 to 100.
type Pressure struct{ CPU, Memory, IO float64 }

// FeatureStatus is one host ability as probed.
type FeatureStatus struct {
	Name   string
	OK     bool
	Detail string // version, or what is missing
	Cost   string // what its absence costs
}

// Nodes shows the machines of the cluster.
type Nodes interface {
	Nodes(ctx context.Context) ([]Node, error)
}
