// Package fuse serves a flat folder of large immutable files to the kernel: what EROFS, and
// virtual machines, read the data of layers from while it is not on this host yet. It speaks
// the part of the protocol of /dev/fuse that such a folder needs and no other.
//
// It does not fetch, cache or check anything: that is the Folder's, see package lazy. It
// offers no writes, no links, no attributes of files but a size.
//
// Invariants:
//   - A server remembers nothing between two requests that a request does not say. So a
//     successor in another process takes the open /dev/fuse and goes on: Resend has the kernel
//     ask again for what the dead one had in hand.
//   - Somebody always listens: reads that wait for their data, however many, do not keep
//     others, or the calling off of a read, from being heard.
//   - Answers are whole or errors, never short before the end of a file.
//
// Files are opened with direct I/O, since EROFS above keeps the pages; a mapping of a file,
// which virtual machines make, is in the page cache nevertheless.
//
// Read next: server.go, then docs/decisions/images.md.
package fuse

import (
	"context"
)

// File is one file of a Folder.
type File struct {
	Name string
	Node uint64 // not 0 or RootNode; the same file has the same in every process
	Size int64
}

// RootNode is the folder itself.
const RootNode = 1

// Read asks for bytes of a file.
type Read struct {
	Node uint64
	Off  int64
	Size int
	Pid  int // the thread that asked, in the namespace of who mounted; 0: the kernel does not know

	// Buf gives Size bytes to be filled, once. It may have to wait for memory, so it is
	// called when the data are at hand: then no reader waits for another's.
	Buf func() ([]byte, error)
}

// Folder is what a server shows. Its methods are called from many goroutines. Errors with
// a syscall.Errno in their chain reach the reader as that, the end of the context as
// EINTR, all others as EIO.
type Folder interface {
	// Lookup gives a file by its name; ok is false if there is none.
	Lookup(name string) (f File, ok bool)

	// File gives a file by its node.
	File(node uint64) (f File, ok bool)

	// Files lists all.
	Files() []File

	// Read fills r.Buf(), or as much of it as the file has from r.Off on. The context ends
	// when nobody waits for the answer any more.
	Read(ctx context.Context, r Read) (n int, err error)
}
