package edge

import (
	"context"
	"os"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/snapshot"
)

// Ledger knows, by control group, what processes have waited for: bytes of
// layers that were not on the node when they were read. Its methods are cheap.
type Ledger interface {
	Get(group string) (fetched int64, waited time.Duration)
	// Take gives it and forgets it.
	Take(group string) (fetched int64, waited time.Duration)
	// Keep forgets all groups but some.
	Keep(groups []string)
}

// Journal is the node's write-ahead log as the edge needs it. Package journal
// has the real one, made to fit by Log; it must be safe for concurrent use.
type Journal interface {
	// Append adds a record and returns without waiting for the disk. A record
	// whose Append returned survives the end of this process.
	Append(payload []byte) error

	// Replay calls f with every record since the last checkpoint, the
	// checkpoint's own first, and with nil where records are gone that may have
	// been any. The payload is f's for the call only.
	Replay(f func(payload []byte) error) error

	// Own says once, before Replay, how the table is saved: save adds records
	// that stand for all appended before it was called, and saved is called when
	// they have replaced those. Records appended while save runs may or may not
	// be reflected in what it adds, and are replayed after it. Both are called
	// with none of the journal's locks that Append needs.
	Own(save func(add func(payload []byte) error) error, saved func()) error

	// Checkpoint has save called and lets go of what it replaces. Others who
	// share the journal may have it called too.
	Checkpoint() error
}

// Names resolves what a Spec's environment names.
type Names interface {
	// Resolve gives the image that "name" or "name@version" is to a project;
	// NotFound if there is none, or only another project's.
	Resolve(ctx context.Context, project dsec.ProjectID, name string) (dsec.Image, error)

	// Register makes img known under its name and version, to its project or
	// to all; Exists if taken.
	Register(ctx context.Context, img dsec.Image) error
}

// Roots makes the layers of an environment mountable.
type Roots interface {
	// Acquire gives a detached read-only mount for each digest, lowest first,
	// shared with the other sandboxes of the node. release gives them back and
	// may be called twice.
	Acquire(ctx context.Context, digests []string) (layers []*os.File, release func(), err error)
}

// FileRoots is Roots for kinds that mount an environment themselves.
type FileRoots interface {
	// AcquireFiles gives the verified local files of each layer, lowest first,
	// which stay until release is called; it may be called twice.
	AcquireFiles(ctx context.Context, digests []string) (layers []driver.LayerFiles, release func(), err error)

	// AcquireDisk gives the path of a disk image, which stays until release is
	// called; it may be called twice.
	AcquireDisk(ctx context.Context, digest string) (path string, release func(), err error)
}

// ByDigest is Names that finds an image by its digest too, with Config and Role
// set, whatever names it has.
type ByDigest interface {
	ByDigest(ctx context.Context, digest string) (dsec.Image, error)
}

// Saved keeps the states of sandboxes: a snapshot.Store.
type Saved interface {
	// Put keeps the files of a folder and gives the state its ID and size.
	Put(ctx context.Context, st snapshot.State, dir string) (snapshot.State, error)
	// Get finds a state; NotFound if there is none.
	Get(ctx context.Context, id dsec.SnapshotID) (snapshot.State, error)
	// Fetch writes the files of a state into an empty folder.
	Fetch(ctx context.Context, id dsec.SnapshotID, dir string) error
	// List gives all, newest first. The slice is the caller's.
	List(ctx context.Context) ([]dsec.Snapshot, error)
	// Remove deletes a state.
	Remove(ctx context.Context, id dsec.SnapshotID) error
}

// Quota holds projects to what they may have. Every living sandbox is counted
// once, by Take or Keep, until Give. It is called for every create: it must be
// quick, and exact under concurrency.
type Quota interface {
	// Take counts a sandbox that is to be created; Exhausted, with the project
	// and the limit, when it does not fit.
	Take(id dsec.SandboxID, s *dsec.Spec) error
	// Keep counts one that is there.
	Keep(id dsec.SandboxID, s *dsec.Spec)
	// Give takes back what was counted.
	Give(id dsec.SandboxID, s *dsec.Spec)
	// Extend is Invalid when a sandbox may not have s.TTL to live.
	Extend(s *dsec.Spec) error
}

// Door is the API as it is reached from inside sandboxes.
type Door interface {
	// Token gives the secret of a sandbox, always the same.
	Token(id dsec.SandboxID) string
	// Serve takes over a connection that was made inside a sandbox and closes it
	// in the end. It may wait for room.
	Serve(id dsec.SandboxID, c dsec.PortConn)
}

// CommitSource is what a Committer makes a layer from.
type CommitSource struct {
	Dir    string   // folder of the writable layer, frozen until Read is called
	Read   func()   // says that Dir has been read; may be called more than once, or never
	IDBase uint32   // host uid that is the sandbox's uid 0
	Layers []string // digests of what lies below, lowest first
	Base   *dsec.Image
	// Base is the workspace that the sandbox has already, nil if none: the new
	// image must stand in for both.
	Name, Version string
}

// Committer writes a layer from a sandbox's writable layer. It returns an
// image with Digest, Size, Stored and Entries set. What it wrote must stay
// until the name is registered, or a collection some time later.
type Committer interface {
	Commit(ctx context.Context, src CommitSource) (dsec.Image, error)
}

// Preparer is a Committer that makes what it will read quick to read, while the
// workload still runs.
type Preparer interface {
	Prepare(ctx context.Context, src CommitSource)
}

// DoneNotifier is a machine that calls back when it is gone. Without it the
// edge keeps one waiting goroutine for the machine.
type DoneNotifier interface {
	// AfterDone calls f once the machine is gone, at once if it is. f does not
	// block.
	AfterDone(f func())
}

// Measure says how many bytes a machine's writable layer takes. It is called
// on hosts without disk quota, for one machine at a time.
type Measure func(ctx context.Context, m driver.Machine) (int64, error)
