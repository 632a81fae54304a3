package s3

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"sync"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/dsec-go/dsec/blob"
)

// maxParts is how many parts an object may have anywhere.
const maxParts = 10_000

// slowest is what a server must manage when it puts parts together or copies, which it
// does without a sign of life.
const slowest = 16 << 20 // bytes a second

// slowestLine is what a line must carry for a part that is in the buffers of this host.
const slowestLine = 1 << 20 // bytes a second

// abortTimeout is how long a failed Put waits to clean up behind itself.
const abortTimeout = 5 * time.Second

var errUsed = errors.New("staged blob is committed or aborted already")

// Put implements blob.Store. What fits into one part is one request; more is sent in
// parts, several at a time, while r is read.
func (s *Store) Put(ctx context.Context, d blob.Digest, r io.Reader) error {
	if err := begin(ctx, d); err != nil {
		return err
	}
	switch err := s.present(ctx, s.key(d)); {
	case err == nil:
		return nil
	case !errors.Is(err, blob.ErrNotFound):
		return about("put", d, err)
	}
	u := s.upload(ctx, s.key(d))
	defer u.abort() //nolint:errcheck // Sweep finds what stays
	if _, err := io.CopyBuffer(struct{ io.Writer }{u}, ctxReader{ctx, r}, make([]byte, 256<<10)); err != nil {
		return about("put", d, err)
	}
	if got := u.digest(); got != d {
		return fmt.Errorf("blob %s: content is %s: %w", d, got, blob.ErrCorrupt)
	}
	if err := u.complete(ctx, d); err != nil {
		return about("put", d, err)
	}
	return nil
}

// present returns nil if there is an object under key.
func (s *Store) present(ctx context.Context, key string) error {
	return s.do(ctx, s.cfg.Stall, func(ctx context.Context, _ *watch) error {
		_, err := s.core.StatObject(ctx, s.cfg.Bucket, key, minio.StatObjectOptions{})
		return err
	})
}

// Stage implements blob.Stager. The bytes wait in memory until they are more than a part,
// then under a key of their own, from which Commit has the server copy them. ctx governs
// the writes too.
func (s *Store) Stage(ctx context.Context) (blob.Staged, error) {
	if ctx.Err() != nil {
		return nil, fmt.Errorf("stage blob: %w", context.Cause(ctx))
	}
	return &staged{u: s.upload(ctx, s.name(stagingName+"/"+rand.Text()))}, nil
}

type staged struct {
	u    *upload
	used error
}

func (w *staged) Write(p []byte) (int, error) {
	if w.used != nil {
		return 0, w.used
	}
	n, err := w.u.Write(p)
	if err != nil {
		w.u.abort() //nolint:errcheck // Sweep finds what stays
		w.used = fmt.Errorf("write staged blob: %w", err)
		return n, w.used
	}
	return n, nil
}

func (w *staged) Commit(ctx context.Context) (blob.Info, error) {
	if w.used != nil {
		return blob.Info{}, w.used
	}
	w.used = errUsed
	defer w.u.abort() //nolint:errcheck // Sweep finds what stays
	info := blob.Info{Digest: w.u.digest(), Size: w.u.size}
	if err := begin(ctx, info.Digest); err != nil {
		return blob.Info{}, err
	}
	if err := w.publish(ctx, info); err != nil {
		return blob.Info{}, about("commit", info.Digest, err)
	}
	return info, nil
}

func (w *staged) publish(ctx context.Context, info blob.Info) error {
	u, s := w.u, w.u.s
	key := s.key(info.Digest)
	if u.id == "" { // all in memory yet
		u.key = key
		return u.complete(ctx, info.Digest)
	}
	switch err := s.present(ctx, key); {
	case err == nil:
		return nil
	case !errors.Is(err, blob.ErrNotFound):
		return err
	}
	if err := u.complete(ctx, info.Digest); err != nil {
		return err
	}
	defer s.remove(context.WithoutCancel(ctx), u.key) //nolint:errcheck // Sweep finds it
	return s.do(ctx, s.patience(info.Size), func(ctx context.Context, _ *watch) error {
		_, err := s.core.ComposeObject(ctx, minio.CopyDestOptions{Bucket: s.cfg.Bucket, Object: key},
			minio.CopySrcOptions{Bucket: s.cfg.Bucket, Object: u.key})
		return err
	})
}

func (w *staged) Abort() error {
	if w.used != nil {
		return nil
	}
	w.used = errUsed
	return w.u.abort()
}

// upload is an object being written. Write and complete belong to one goroutine, which
// hashes and cuts; each part is sent by a goroutine of its own.
type upload struct {
	s      *Store
	ctx    context.Context // ends with that of the Put or Stage, with a part that failed, and with abort
	cancel context.CancelCauseFunc
	key    string
	id     string // of the multipart upload; "" as long as one part is enough
	hash   hash.Hash
	size   int64
	buf    []byte
	done   bool

	slots chan struct{} // parts on the way, at most Config.Parallel
	wg    sync.WaitGroup
	mu    sync.Mutex
	parts []minio.CompletePart // by number - 1
	err   error                // the first of a part
}

func (s *Store) upload(ctx context.Context, key string) *upload {
	ctx, cancel := context.WithCancelCause(ctx)
	return &upload{s: s, ctx: ctx, cancel: cancel, key: key, hash: sha256.New(), slots: make(chan struct{}, s.cfg.Parallel)}
}

func (u *upload) digest() blob.Digest { return blob.FromHash(u.hash) }

func (u *upload) Write(p []byte) (n int, err error) {
	for len(p) > 0 {
		if int64(len(u.buf)) == u.s.cfg.PartSize {
			if err := u.send(); err != nil {
				return n, err
			}
		}
		if u.buf == nil {
			u.buf = make([]byte, 0, min(int64(len(p)), u.s.cfg.PartSize))
		}
		m := int(min(int64(len(p)), u.s.cfg.PartSize-int64(len(u.buf))))
		u.buf = append(u.buf, p[:m]...)
		u.hash.Write(p[:m])
		u.size += int64(m)
		n, p = n+m, p[m:]
	}
	return n, nil
}

// send gives the buffer to a goroutine. It waits while Config.Parallel are on the way.
func (u *upload) send() error {
	if u.id == "" {
		if err := u.begin(); err != nil {
			return err
		}
	}
	select {
	case u.slots <- struct{}{}:
	case <-u.ctx.Done():
		return context.Cause(u.ctx)
	}
	u.mu.Lock()
	err, n := u.err, len(u.parts)+1
	u.parts = append(u.parts, minio.CompletePart{PartNumber: n})
	u.mu.Unlock()
	if err == nil && n > maxParts {
		err = fmt.Errorf("blob of more than %d parts of %d bytes: %w", maxParts, u.s.cfg.PartSize, errors.ErrUnsupported)
	}
	if err != nil {
		<-u.slots
		return err
	}
	body := u.buf
	u.buf = nil
	u.wg.Go(func() {
		defer func() { <-u.slots }()
		etag, err := u.sendPart(n, body)
		u.mu.Lock()
		defer u.mu.Unlock()
		u.parts[n-1].ETag = etag
		if u.err == nil && err != nil {
			u.err = err
			u.cancel(err)
		}
	})
	return nil
}

func (u *upload) begin() error {
	return u.s.do(u.ctx, u.s.cfg.Stall, func(ctx context.Context, _ *watch) (err error) {
		u.id, err = u.s.core.NewMultipartUpload(ctx, u.s.cfg.Bucket, u.key, minio.PutObjectOptions{})
		return err
	})
}

func (u *upload) sendPart(n int, body []byte) (etag string, err error) {
	sum := sha256.Sum256(body)
	err = u.s.do(u.ctx, u.s.cfg.Stall, func(ctx context.Context, w *watch) error {
		part, err := u.s.core.PutObjectPart(ctx, u.s.cfg.Bucket, u.key, u.id, n, &lively{w, bytes.NewReader(body)}, int64(len(body)),
			minio.PutObjectPartOptions{Sha256Hex: hex.EncodeToString(sum[:]), DisableContentSha256: true})
		etag = part.ETag
		return err
	})
	if err != nil {
		err = fmt.Errorf("send part %d: %w", n, err)
	}
	return etag, err
}

// complete makes the object visible. d is the digest of all that was written.
func (u *upload) complete(ctx context.Context, d blob.Digest) error {
	s := u.s
	defer context.AfterFunc(ctx, func() { u.cancel(context.Cause(ctx)) })()
	if u.id == "" {
		err := s.do(u.ctx, s.cfg.Stall, func(ctx context.Context, w *watch) error {
			return s.putOnce(ctx, w, u.key, u.buf, d.Hex())
		})
		u.done = err == nil
		return err
	}
	if err := u.send(); err != nil {
		return err
	}
	u.wg.Wait()
	if u.err != nil {
		return u.err
	}
	err := s.do(u.ctx, s.patience(u.size), func(ctx context.Context, _ *watch) error {
		_, err := s.core.CompleteMultipartUpload(ctx, s.cfg.Bucket, u.key, u.id, u.parts, s.condition())
		return s.conditional(err)
	})
	switch {
	case err == nil:
		u.done = true
	case errors.Is(err, errExists):
		return nil // by somebody else; abort gives ours back
	case errors.Is(err, blob.ErrNotFound):
		// The upload is gone: an earlier try was heard after all, or somebody swept.
		if serr := s.present(u.ctx, u.key); serr == nil {
			u.done, err = true, nil
		} else {
			err = fmt.Errorf("upload is gone: %w: %v", blob.ErrUnavailable, err)
		}
	}
	return err
}

// abort ends the goroutines and gives back what the server holds. After complete, and a
// second time, it does nothing. Parts on the way are not cut off as long as they go well: a
// server may keep what arrives while it throws the upload away.
func (u *upload) abort() error {
	u.wg.Wait()
	u.cancel(errUsed)
	if u.done || u.id == "" {
		return nil
	}
	u.done = true
	ctx := context.WithoutCancel(u.ctx) // what is given up must be given back too
	err := u.s.once(ctx, min(u.s.cfg.Stall, abortTimeout), func(ctx context.Context, _ *watch) error {
		return u.s.core.AbortMultipartUpload(ctx, u.s.cfg.Bucket, u.key, u.id)
	})
	if errors.Is(err, blob.ErrNotFound) {
		return nil
	}
	return err
}

// putOnce sends one whole object. The server compares the body with sum.
func (s *Store) putOnce(ctx context.Context, w *watch, key string, body []byte, sum string) error {
	opts := s.condition()
	opts.DisableContentSha256 = true // the sum stands in the request, not in each chunk
	_, err := s.core.PutObject(ctx, s.cfg.Bucket, key, &lively{w, bytes.NewReader(body)}, int64(len(body)), "", sum, opts)
	err = s.conditional(err)
	if errors.Is(s.explain(ctx, ctx, err), errExists) {
		return nil
	}
	return err
}

// condition says that nothing may be replaced, where the server can be told.
func (s *Store) condition() minio.PutObjectOptions {
	opts := minio.PutObjectOptions{ContentType: "application/octet-stream"}
	if !s.unconditional.Load() {
		opts.SetMatchETagExcept("*")
	}
	return opts
}

// conditional notes that the server does not know conditions, so that it is asked again
// without.
func (s *Store) conditional(err error) error {
	var answer minio.ErrorResponse
	if errors.As(err, &answer) && kindOf(answer) == errNoConditions && s.unconditional.CompareAndSwap(false, true) {
		return fmt.Errorf("%w: %w", blob.ErrUnavailable, err)
	}
	return err
}

// patience is how long to wait for an answer about size bytes.
func (s *Store) patience(size int64) time.Duration {
	return s.cfg.Stall + time.Duration(size/slowest)*time.Second
}

// lively is a body whose reading is a sign of life. When all of it is read it still has to
// get out of the buffers of this host.
type lively struct {
	w *watch
	r *bytes.Reader
}

func (l *lively) Read(p []byte) (int, error) {
	n, err := l.r.Read(p)
	if l.r.Len() > 0 {
		l.w.kick()
	} else {
		l.w.timer.Reset(l.w.limit + time.Duration(l.r.Size())*time.Second/slowestLine)
	}
	return n, err
}

// ctxReader ends a copy when its context ends.
type ctxReader struct {
	ctx context.Context
	r   io.Reader
}

func (c ctxReader) Read(p []byte) (int, error) {
	if c.ctx.Err() != nil {
		return 0, context.Cause(c.ctx)
	}
	return c.r.Read(p)
}
