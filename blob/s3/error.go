package s3

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/dsec-go/dsec/blob"
)

var (
	errStalled  = errors.New("no sign of life from the server")
	errExists   = errors.New("object exists")
	errBadRange = errors.New("server refuses the range")

	// errNoConditions: the server does not know a header of ours, most likely.
	errNoConditions = errors.New("server does not implement this")
)

// kinds are the answers of servers that mean something to a caller. What is not here goes
// by its status.
var kinds = map[string]error{
	"NoSuchKey": blob.ErrNotFound,

	// Named so that a blob in a missing bucket is not taken for one that is not there.
	"NoSuchBucket": errRefused,

	"NoSuchUpload":         blob.ErrNotFound,
	"PreconditionFailed":   errExists,
	"InvalidRange":         errBadRange,
	"NotImplemented":       errNoConditions,
	"AccessDenied":         blob.ErrDenied,
	"RequestTimeTooSkewed": blob.ErrDenied, // somebody has to set a clock

	"QuotaExceeded":       blob.ErrFull,
	"InsufficientStorage": blob.ErrFull,
	"XMinioStorageFull":   blob.ErrFull,
	"StorageFull":         blob.ErrFull,

	// The body arrived otherwise than it was sent, or not whole.
	"BadDigest":                  blob.ErrUnavailable,
	"XAmzContentSHA256Mismatch":  blob.ErrUnavailable,
	"IncompleteBody":             blob.ErrUnavailable,
	"RequestTimeout":             blob.ErrUnavailable,
	"OperationAborted":           blob.ErrUnavailable,
	"ConditionalRequestConflict": blob.ErrUnavailable,
}

// explain says what an error of a request means. ctx is the caller's, wctx the watched one.
func (s *Store) explain(ctx, wctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if errors.Is(context.Cause(wctx), errStalled) {
		return fmt.Errorf("%w: %w", blob.ErrUnavailable, errStalled)
	}
	var answer minio.ErrorResponse
	if errors.As(err, &answer) {
		return fmt.Errorf("%w: server says %s (%d): %w", kindOf(answer), answer.Code, answer.StatusCode, err)
	}
	var unknownCA x509.UnknownAuthorityError
	var badCert *tls.CertificateVerificationError
	var network *url.Error
	var netErr net.Error
	var half *xml.SyntaxError
	switch {
	case errors.As(err, &unknownCA), errors.As(err, &badCert), strings.Contains(err.Error(), "HTTP response to HTTPS client"):
		return err // somebody has to set this up; asking again is of no use
	case errors.As(err, &network), errors.As(err, &netErr), errors.Is(err, io.ErrUnexpectedEOF), errors.As(err, &half):
		return fmt.Errorf("%w: %w", blob.ErrUnavailable, err)
	}
	return err
}

var errRefused = errors.New("request refused")

func kindOf(a minio.ErrorResponse) error {
	if kind, ok := kinds[a.Code]; ok {
		return kind
	}
	switch code := a.StatusCode; {
	case code == http.StatusUnauthorized, code == http.StatusForbidden:
		return blob.ErrDenied
	case code == http.StatusInsufficientStorage:
		return blob.ErrFull
	case code == http.StatusRequestTimeout, code == http.StatusTooManyRequests, code == http.StatusConflict, code >= 500:
		return blob.ErrUnavailable
	}
	return errRefused
}

// watch ends a request when nothing has moved for a while.
type watch struct {
	limit  time.Duration
	timer  *time.Timer
	cancel context.CancelCauseFunc
}

func (s *Store) watch(ctx context.Context, limit time.Duration) (context.Context, *watch) {
	ctx, cancel := context.WithCancelCause(ctx)
	w := &watch{limit: limit, cancel: cancel}
	w.timer = time.AfterFunc(limit, func() { cancel(errStalled) })
	return ctx, w
}

func (w *watch) kick() { w.timer.Reset(w.limit) }

// rest is for as long as nobody waits for the server.
func (w *watch) rest() { w.timer.Stop() }

func (w *watch) stop() {
	w.timer.Stop()
	w.cancel(nil)
}

// once makes one request and says what its error means.
func (s *Store) once(ctx context.Context, limit time.Duration, op func(context.Context, *watch) error) error {
	wctx, w := s.watch(ctx, limit)
	defer w.stop()
	return s.explain(ctx, wctx, op(wctx, w))
}

// do makes a request until it succeeds or Config.Retry is over.
func (s *Store) do(ctx context.Context, limit time.Duration, op func(context.Context, *watch) error) error {
	return s.cfg.Retry.Do(ctx, func(ctx context.Context) error { return s.once(ctx, limit, op) })
}
