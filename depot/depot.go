// Package depot is the process of a node that has the data of layers: it fetches metadata whole
// and data in parts, shows data blobs as files of a FUSE folder, and tells dsec up, through a
// Client, from which files a layer is mounted.
//
// It does not mount layers (rootfs does, in dsec up), know names or sandboxes, or fetch by
// itself: how parts are fetched, checked and kept is package lazy's.
//
// Invariants:
//   - Nothing of a layer is told before its manifest and metadata are here, checked.
//   - A file that was told is good for as long as anybody has it open, and a path in the FUSE
//     folder for as long as there is a depot: what was dropped is fetched again.
//   - Killing the process at any time costs nobody a read. The connections to the kernel lie
//     in the holder; a successor takes them and has what was in hand sent again. What it must
//     know of a file it finds in its folder, where that was written before the file was told.
//   - No read of one layer waits for the store's answer to another's, up to the bounds of lazy.
//
// Read next: server.go, then folder.go.
package depot

import (
	"github.com/dsec-go/dsec/lazy"
)

// Layer is what a layer is mounted from.
type Layer struct {
	Meta string   // EROFS metadata image
	Data []string // data devices, in the order of its device table
	Lazy bool     // some of Data are in the FUSE folder
}

// Form is how the files of a layer will be used.
type Form string

// The forms.
const (
	Mount Form = "mount" // they are opened once, now: complete blobs are told as plain files
	Files Form = "files" // they are opened again by their paths, at any time: only FUSE has those
)

// Stats are figures of the process that runs now.
type Stats struct {
	lazy.Stats

	Layers int   // that were asked for
	Opened int64 // reads through FUSE
	Pid    int

	Waited int64 // nanoseconds that processes waited for the store, all in all; see Ledger
}

// protocol is the version of what client and server say.
const protocol = 1

// Requests, one JSON value a line in each direction.
const (
	opHello    = "hello"    // answers; the connection's end is the server's
	opLayer    = "layer"    // Digest, Form
	opStats    = "stats"    //
	opCached   = "cached"   // Digests
	opProfile  = "profile"  // Digest: what was read first, if that is known by now
	opPrefetch = "prefetch" // Digest, Profile
	opKeep     = "keep"     // Digests: the layers in use; others may be forgotten
	opRetire   = "retire"   // the process ends, its mount stays
	opEnd      = "end"      // the process ends, and its mount with it
)

type request struct {
	V       int      `json:"v"`
	Op      string   `json:"op"`
	Digest  string   `json:"digest,omitempty"`
	Digests []string `json:"digests,omitempty"`
	Form    Form     `json:"form,omitempty"`
	Profile []byte   `json:"profile,omitempty"`
}

type response struct {
	Error   string           `json:"error,omitempty"`
	Kind    string           `json:"kind,omitempty"` // of Error
	Label   string           `json:"label,omitempty"`
	Layer   *Layer           `json:"layer,omitempty"`
	Stats   *Stats           `json:"stats,omitempty"`
	Cached  map[string]int64 `json:"cached,omitempty"`
	Profile []byte           `json:"profile,omitempty"`
}

// Names in the folder of a depot.
const (
	socketName = "data.sock"
	layersName = "layers" // a file for each layer that was told, see registry.go
	wholeName  = "whole"  // manifests, metadata, chunk tables
	partsName  = "parts"  // of package lazy
)

// fusePrefix begins the names of connections in the holder.
const fusePrefix = "fuse/"
