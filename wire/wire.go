// Package wire is the frames between a host and the guest of one sandbox, both
// ends. Client is the host's: it gives dsec.Commands, dsec.Files and dsec.Ports
// over a connection that it makes when it is first needed and makes again when
// it breaks. Serve is the guest's: it answers one connection from a Handler.
//
// The package moves bytes and keeps no state of commands; that is package
// guest's, which outlives every connection. It does not know what kind of
// stream it runs over: a Unix socket, a virtio-serial port and vsock are alike.
//
// A connection begins with one Hello each way. Then the host opens streams,
// numbered from 1 and never used twice in a connection, each with one Request;
// the guest ends each with one Response. In between both may send Data within
// the credit the other has given. A message that does not fit in a frame goes
// on in the next one of its stream. See frame.go for the layout.
//
// Invariants:
//   - A reader that stops stalls its own stream only: what arrives for it is
//     bounded by the credit it gave, and the goroutine that reads the
//     connection never waits for anything but the connection.
//   - Nothing the peer sends makes memory grow beyond the stated limits, or
//     ends the program. A peer that breaks a rule loses its connection.
//   - A request that was written whole is never sent again unless it only reads
//     or carries a step.
//   - An idle Client holds one goroutine, one descriptor and 256 bytes of
//     buffer, or nothing at all with Options.IdleAfter.
//
// Lock order: link.wmu is never taken with link.mu or Client.mu held; Client.mu
// before link.mu.
//
// Read next: package guest, which implements Handler.
package wire

import (
	"context"
	"iter"

	"github.com/dsec-go/dsec"
)

// Version is the version of the protocol. Ends of different versions refuse
// each other with Unsupported.
const Version = 1

// Limits of the protocol.
const (
	maxPayload  = dsec.MaxChunk + 1024 // of one frame
	window      = 256 << 10            // credit of a stream to begin with, and the most outstanding
	frameCost   = 64                   // credit that a Data frame costs beyond its bytes
	chunk       = 64 << 10             // data that we put in one frame
	maxRequest  = 20 << 20             // bytes of a request over all its frames
	maxResponse = 1 << 20              // bytes of a response over all its frames, but for
	maxBig      = 10 << 20             // the answers of Run and Read
	maxStreams  = 16384                // open at once in a connection
	maxText     = 4 << 10              // bytes of an error's text
)

// Handler is what a guest offers. The methods that take a dsec.Call see no
// sandbox in it. All must be safe for concurrent use.
type Handler interface {
	Commands() dsec.Commands
	Files() dsec.Files
	Ports() dsec.Ports

	// Activity reports what runs now.
	Activity(ctx context.Context) (dsec.Activity, error)

	// Activities yields what runs now and again after each change, until ctx
	// ends. Changes in quick succession may be yielded as one.
	Activities(ctx context.Context) iter.Seq[dsec.Activity]

	// Forget says that the answers of steps are safe with the host and need
	// not be kept.
	Forget(ctx context.Context, steps []dsec.Step) error

	// Listen opens a port of the sandbox's loopback whose connections the host
	// takes with Accept; to open it again is nothing new. Conflict if the
	// workload has the port.
	Listen(ctx context.Context, port int) error

	// Accept waits for the next connection to such a port and calls take with it.
	// If that fails, it is the next one still. Connections that nobody waits for
	// stay in the kernel's queue.
	Accept(ctx context.Context, port int, take func(dsec.PortConn) error) error

	// StopClocks stops the times after which commands are ended, and holds back
	// the start of others: the host is making the workload stand still.
	// StartClocks lets all go on from there. Both may be called again.
	StopClocks(ctx context.Context) error
	StartClocks(ctx context.Context) error
}

// method names an operation on the wire. The values never change meaning
// within a Version.
type method uint8

const (
	mStart method = iota + 1
	mRun
	mAttach
	mRead
	mWrite
	mResize
	mSignal
	mWait
	mList
	mStat
	mListFiles
	mReadFile
	mWriteFile
	mMkdir
	mMove
	mRemove
	mChmod
	mChown
	mSymlink
	mWatch
	mPack
	mUnpack
	mDial
	mActivity
	mSubscribe
	mForget
	mStopClocks
	mStartClocks
	mListen
	mAccept
)
