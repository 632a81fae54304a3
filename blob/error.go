package blob

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"syscall"
)

// The errors a caller may look for. What a Store returns wraps them with the digest, and
// wraps what the system or the server said too: errors.Is(err, syscall.ENOSPC) holds where
// that was the reason.
var (
	ErrNotFound = errors.New("blob not found")
	ErrRange    = errors.New("range outside of blob")
	ErrCorrupt  = errors.New("blob corrupt")
	ErrDigest   = errors.New("malformed digest")

	// ErrDenied: the store does not let this caller do this. Asking again is of no use.
	ErrDenied = errors.New("blob store denies access")

	// ErrFull: no space or a quota is used up. Somebody has to make room first.
	ErrFull = errors.New("blob store full")

	// ErrUnavailable: the store does not answer, or answers that it cannot now. It says
	// nothing of the blob; what was asked for may even have been done. Retrying looks for it.
	ErrUnavailable = errors.New("blob store unavailable")
)

func corrupt(want, got Digest) error {
	return fmt.Errorf("blob %s: content is %s: %w", want, got, ErrCorrupt)
}

func notFound(d Digest) error {
	return fmt.Errorf("blob %s: %w", d, ErrNotFound)
}

// system adds to what a file system said what that means to the caller of a store. Errors
// of the disk itself count as unavailability: on a mount that is how a lost server looks.
func system(err error) error {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		return err
	}
	var kind error
	switch errno {
	case syscall.ENOSPC, syscall.EDQUOT, syscall.EFBIG:
		kind = ErrFull
	case syscall.EACCES, syscall.EPERM, syscall.EROFS:
		kind = ErrDenied
	case syscall.EIO, syscall.ESTALE, syscall.ETIMEDOUT, syscall.ENOTCONN, syscall.ECONNABORTED,
		syscall.ECONNREFUSED, syscall.ECONNRESET, syscall.EHOSTDOWN, syscall.EHOSTUNREACH,
		syscall.ENETDOWN, syscall.ENETUNREACH, syscall.EREMOTEIO, syscall.ESHUTDOWN, syscall.EAGAIN:
		kind = ErrUnavailable
	default:
		return err
	}
	return fmt.Errorf("%w: %w", kind, err)
}

// lookup wraps what the system said when it was asked for the file of d.
func (f *Folder) lookup(verb string, d Digest, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		if err := f.away(); err != nil {
			return fmt.Errorf("%s blob %s: %w", verb, d, err)
		}
		return notFound(d)
	}
	return fmt.Errorf("%s blob %s: %w", verb, d, system(err))
}

// begin is what every call starts with.
func begin(ctx context.Context, d Digest) error {
	if err := d.Check(); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return fmt.Errorf("blob %s: %w", d, context.Cause(ctx))
	}
	return nil
}
