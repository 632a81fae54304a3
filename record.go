package dsec

import (
	"context"
	"encoding/json"
	"io"
	"iter"
	"time"
)

// Record is one entry of a sandbox's trajectory: a request, an answer, or a
// change that nobody asked for. Records of a sandbox are numbered from 1
// without gaps and chained by hashes.
type Record struct {
	Seq  uint64
	Time time.Time     // wall clock of the node
	Mono time.Duration // clock of the node that is never set, since its boot
	Op   RecordOp
	Of   uint64 // of an answer: the record of its request; 0 otherwise

	// Alone means request and answer in one.
	Alone bool `json:",omitempty"`

	Who  Who
	Step Step // as the caller named it; the zero Step otherwise

	// Request holds the parameters by name. Contents of files and of standard
	// input are in Body if they are small, else in a blob that Blob names.
	Request json.RawMessage `json:",omitempty"`

	// Answer is a CommandStatus, a FileInfo or what else the call returned.
	// Error is set instead when it failed; a failed call changed nothing.
	Answer json.RawMessage `json:",omitempty"`
	Error  *RecordError    `json:",omitempty"`

	Body string // bytes in the record or in the blob: BodyOutput, BodyContent or none
	Size int64  // of the body
	Blob string // digest of the blob that has the body, if the record has not

	Prev string // SHA-256 of the record before, of the sandbox's ID for the first; hexadecimal
	Hash string // SHA-256 of this record as stored; hexadecimal
	Raw  []byte `json:"-"` // this record as stored, see docs/formats/trajectory.md
}

// RecordOp names what a record is about.
type RecordOp string

// The operations that records tell of. Each that a caller asks for has two
// records, the request and its answer.
const (
	RecordCreate  RecordOp = "create"
	RecordCommand RecordOp = "command"
	RecordStdin   RecordOp = "stdin"
	RecordResize  RecordOp = "resize"
	RecordSignal  RecordOp = "signal"
	RecordWrite   RecordOp = "write"
	RecordMkdir   RecordOp = "mkdir"
	RecordMove    RecordOp = "move"
	RecordRemove  RecordOp = "remove"
	RecordChmod   RecordOp = "chmod"
	RecordChown   RecordOp = "chown"
	RecordSymlink RecordOp = "symlink"
	RecordUnpack  RecordOp = "unpack"
	RecordDial    RecordOp = "dial"   // a connection to a port; its answer sums it up
	RecordExtend  RecordOp = "extend" // of the time to live
	RecordLabel   RecordOp = "label"
	RecordCommit  RecordOp = "commit"
	RecordPause   RecordOp = "pause"
	RecordResume  RecordOp = "resume"
	RecordSave    RecordOp = "snapshot"
	RecordFork    RecordOp = "fork"
	RecordInput   RecordOp = "input" // of keyboard and pointer
	RecordStop    RecordOp = "stop"  // somebody asked for the end
	RecordEnd     RecordOp = "end"   // the end and its cause; the last record
)

// The kinds of body.
const (
	BodyOutput  = "output"  // what a command printed, both streams in order
	BodyContent = "content" // what was written to a file or to standard input
)

// RecordError is the error that a call ended with.
type RecordError struct {
	Kind string
	Text string
}

// Who is on whose behalf a record was made.
type Who struct {
	Project ProjectID `json:",omitempty"`
	Token   string    `json:",omitempty"` // name, never the secret
	Job     JobID     `json:",omitempty"` // of the sandbox
}

// Head is the end of a trajectory as its keeper knows it: what the last record
// must be. Without it nobody could tell that records are missing at the end.
type Head struct {
	Seq  uint64
	Hash string
	Over bool // the sandbox has ended; no more will come
}

// Trajectories reads what was recorded. A sandbox's trajectory can be read
// longer than the sandbox lives, and longer than its node where the blob store
// is shared. All methods are safe for concurrent use.
type Trajectories interface {
	// Head gives the end of a trajectory. NotFound if there is none.
	Head(ctx context.Context, id SandboxID) (Head, error)

	// Records yields a trajectory from record after+1 on, to its present end.
	Records(ctx context.Context, id SandboxID, after uint64) iter.Seq2[Record, error]

	// Body returns the body of a record: content as it is, output as frames
	// (see OutputReader).
	Body(ctx context.Context, id SandboxID, seq uint64) (io.ReadCloser, error)
}
