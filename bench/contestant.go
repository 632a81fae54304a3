package bench

import (
	"context"
	"io"
)

// contestant is one way to run sandboxes. Boxes are named by the caller's
// numbers. It is safe for concurrent use with different numbers.
type contestant interface {
	// name is what reports call it.
	name() string

	// prepare does what is not timed: files and mounts of boxes from to to-1.
	prepare(ctx context.Context, from, to int) error

	// create returns when a command can be run in the box.
	create(ctx context.Context, n int) error

	// exec runs a program of the base image, hands its output to out, which
	// may be nil, and returns once it has exited with 0.
	exec(ctx context.Context, n int, out io.Writer, argv ...string) error

	// destroy returns when nothing of the box is left.
	destroy(ctx context.Context, n int) error

	// close destroys what is left.
	close() error
}
