package dsec

import (
	"context"
	"io"
	"iter"
	"time"
)

// FileType is the type of a file.
type FileType string

// The types of file.
const (
	TypeFile    FileType = "file"
	TypeDir     FileType = "dir"
	TypeSymlink FileType = "symlink"
	TypeDevice  FileType = "device"
	TypePipe    FileType = "pipe"
	TypeSocket  FileType = "socket"
)

// FileInfo describes one file of a sandbox. Names are bytes: any but / and NUL.
type FileInfo struct {
	Path    string
	Type    FileType
	Mode    uint32 // permission bits with setuid, setgid and sticky: 07777
	UID     uint32
	GID     uint32
	Size    int64
	ModTime time.Time
	Target  string // of a symlink
	Nlink   uint64
}

// FileOp is common to the calls that touch one path.
type FileOp struct {
	Path string // absolute, or relative to the sandbox's working directory
	User string // whose rights apply and who owns what is made; default the sandbox's user
}

// ReadRange selects a part of a file.
type ReadRange struct {
	Offset int64
	Length int64 // 0 means to the end
}

// WriteOptions say how a file is written. The zero value replaces the file as
// one: readers see the old content or the new, never a mixture.
type WriteOptions struct {
	Mode    uint32 // default 0644, or that of the file replaced
	Parents bool   // make missing parent folders
	At      *int64 // write in place at this offset instead of replacing
	Append  bool   // write in place at the end
}

// WatchEvent is one change below a watched folder.
type WatchEvent struct {
	Op   WatchOp
	Path string
	To   string // of a rename within the watched tree
}

// WatchOp names a change.
type WatchOp string

// The changes that a watch reports.
const (
	OpReady    WatchOp = "ready" // the watch is set; first event
	OpCreate   WatchOp = "create"
	OpWrite    WatchOp = "write"
	OpRemove   WatchOp = "remove"
	OpRename   WatchOp = "rename"
	OpChmod    WatchOp = "chmod"
	OpOverflow WatchOp = "overflow" // events were dropped; look again
)

// Files works on a sandbox's files, natively: never through a shell of the
// image. Errors are NotFound, Exists, Denied (the user's rights), Invalid (not a
// folder, not empty, a bad path), Exhausted (disk full). All methods are safe
// for concurrent use.
type Files interface {
	// Stat describes a file without following a last symlink.
	Stat(ctx context.Context, on Call, f FileOp) (FileInfo, error)

	// List yields what is in a folder and depth levels below it (1 means the
	// folder alone), parents before children, names in byte order.
	List(ctx context.Context, on Call, f FileOp, depth int) iter.Seq2[FileInfo, error]

	// Read returns the bytes of a regular file. Close ends it early.
	Read(ctx context.Context, on Call, f FileOp, r ReadRange) (io.ReadCloser, error)

	// Write stores all of r. A failed write leaves the old file.
	Write(ctx context.Context, on Call, f FileOp, opt WriteOptions, r io.Reader) (FileInfo, error)

	// Mkdir makes a folder and its missing parents; an existing folder is
	// success.
	Mkdir(ctx context.Context, on Call, f FileOp, mode uint32) error

	// Move renames to the absolute path to, replacing a file there.
	Move(ctx context.Context, on Call, f FileOp, to string) error

	// Remove deletes a file or a whole tree. Missing is NotFound; the root is
	// Invalid.
	Remove(ctx context.Context, on Call, f FileOp) error

	// Chmod sets permission bits, following symlinks.
	Chmod(ctx context.Context, on Call, f FileOp, mode uint32) error

	// Chown sets the owner, "user", "user:group" or numbers, not following a
	// last symlink.
	Chown(ctx context.Context, on Call, f FileOp, owner string) error

	// Symlink makes a symbolic link to target.
	Symlink(ctx context.Context, on Call, f FileOp, target string) error

	// Watch yields changes of a folder, with all below it if recursive, until
	// ctx ends.
	Watch(ctx context.Context, on Call, f FileOp, opt WatchOptions) iter.Seq2[WatchEvent, error]

	// Pack returns a tar of the tree at the path; member names are relative to
	// it.
	Pack(ctx context.Context, on Call, f FileOp) (io.ReadCloser, error)

	// Unpack extracts a tar into the folder, made if missing. Members cannot
	// leave it, whatever they are named or link to.
	Unpack(ctx context.Context, on Call, f FileOp, r io.Reader) error
}

// WatchOptions say what a Watch reports.
type WatchOptions struct {
	Recursive bool
}

// Ports reaches TCP ports inside a sandbox from outside, whatever its network.
type Ports interface {
	// Dial connects to a port on the sandbox's loopback. Nothing listening is
	// Unavailable. The connection supports half-close: CloseWrite.
	Dial(ctx context.Context, on Call, port int) (PortConn, error)
}

// PortConn is a connection to a port of a sandbox.
type PortConn interface {
	io.ReadWriteCloser
	CloseWrite() error
}
