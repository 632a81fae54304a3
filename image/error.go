package image

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"syscall"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/erofs"
)

// ErrCorrupt is in the chain of every error about bytes that do not match their
// digest or are not in the format they claim.
var ErrCorrupt = errors.New("corrupt")

// errPacked is about a layer that is not stored as files that can be mounted.
var errPacked = fmt.Errorf("%w: packed layers are mounted through the data process", errors.ErrUnsupported)

func isCorrupt(err error) bool {
	return errors.Is(err, ErrCorrupt) || errors.Is(err, erofs.ErrCorrupt) || errors.Is(err, blob.ErrCorrupt)
}

// fault gives err, which may come from any package below, as a *dsec.Error of
// the right kind. In an import corrupt bytes are the caller's (Invalid).
func fault(op string, err error) error {
	if err == nil {
		return nil
	}
	var e *dsec.Error
	if !errors.As(err, &e) {
		err = &dsec.Error{Kind: kindOf(err), Err: err}
	}
	return dsec.WithOp(op, "", err)
}

// Gone gives an error of reading a layer that is known its kind: what the store
// has not any more, or has otherwise, is Lost.
func Gone(err error) error {
	if e := (*dsec.Error)(nil); err != nil && !errors.As(err, &e) && errors.Is(err, blob.ErrNotFound) {
		return &dsec.Error{Kind: dsec.Lost, Err: err}
	}
	return stored("", err)
}

func kindOf(err error) dsec.ErrorKind {
	if e := (*dsec.Error)(nil); errors.As(err, &e) {
		return e.Kind
	}
	var status *transport.Error
	var bad *name.ErrBadName
	var network net.Error
	switch {
	case errors.Is(err, ErrCorrupt), errors.Is(err, erofs.ErrCorrupt), errors.Is(err, erofs.ErrInvalid),
		errors.Is(err, erofs.ErrTooBig), errors.Is(err, blob.ErrCorrupt), errors.Is(err, blob.ErrDigest),
		errors.As(err, &bad):
		return dsec.Invalid
	case errors.Is(err, erofs.ErrUnsupported), errors.Is(err, errors.ErrUnsupported):
		return dsec.Unsupported
	case errors.Is(err, erofs.ErrChanged):
		return dsec.Conflict
	case errors.Is(err, blob.ErrNotFound), errors.Is(err, fs.ErrNotExist):
		return dsec.NotFound
	case errors.Is(err, blob.ErrFull), errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return dsec.Exhausted
	case errors.As(err, &status):
		return kindOfStatus(status.StatusCode)
	case dsec.KindOf(err) != dsec.Internal: // a context's end
		return dsec.KindOf(err)
	case errors.Is(err, blob.ErrDenied):
		return dsec.Denied
	case errors.Is(err, blob.ErrUnavailable):
		return dsec.Unavailable
	case errors.As(err, &network):
		return dsec.Unavailable
	}
	return dsec.Internal
}

func kindOfStatus(code int) dsec.ErrorKind {
	switch {
	case code == http.StatusNotFound:
		return dsec.NotFound
	case code == http.StatusUnauthorized, code == http.StatusForbidden:
		return dsec.Denied
	case code == http.StatusTooManyRequests:
		return dsec.Exhausted
	case code >= 500:
		return dsec.Unavailable
	}
	return dsec.Invalid
}
