package bench

import (
	"context"
	"io"
)

// Runc lets the tests drive a contestant.
type Runc struct{ c contestant }

// NewRunc prepares dir for runc with the base image that program is in.
func NewRunc(ctx context.Context, dir, program string) (Runc, error) {
	base, err := baseTar(program)
	if err != nil {
		return Runc{}, err
	}
	r, err := newRunc(ctx, dir, base)
	return Runc{r}, err
}

func (r Runc) Prepare(ctx context.Context, from, to int) error { return r.c.prepare(ctx, from, to) }
func (r Runc) Create(ctx context.Context, n int) error {
	_, err := r.c.create(ctx, n)
	return err
}
func (r Runc) Exec(ctx context.Context, n int, out io.Writer, argv ...string) error {
	return r.c.exec(ctx, n, out, argv...)
}
func (r Runc) Destroy(ctx context.Context, n int) error { return r.c.destroy(ctx, n) }
func (r Runc) Close() error                             { return r.c.close() }

// WriteBase writes the base image with program in it as a layer.
func WriteBase(ctx context.Context, dir, program string) (string, error) {
	base, err := baseTar(program)
	if err != nil {
		return "", err
	}
	return writeLayer(ctx, dir, "base", base)
}

// What is tested as it is.
var (
	Limits       = limits
	ParseMeminfo = parseMeminfo
	ParsePss     = parsePss
	ParseParent  = parseParent
	TreePss      = treePss
	Parallel     = parallel
)

// Judge fills in a row's verdict.
func Judge(r *Row) { r.judge() }

func init() { dropCaches = func() error { return nil } }
