// Package s3 keeps blobs in a bucket of an S3-compatible server: Store is a blob.Store and a
// blob.Stager. It does not create buckets, offer local files, cache or check what it reads:
// that is for the decorators of package blob. Package blob/store opens one by its URL.
//
// The keys are the paths of a blob.Folder, with the same contents:
//
//	<prefix>/format             names the layout and its version
//	<prefix>/sha256/ab/<hex>    one object a blob
//	<prefix>/staging/<random>   blobs whose digest is not known yet
//
// so that a server which shows a bucket as a folder shows a blob.Folder.
//
// Invariants:
//
//   - A key under sha256 appears whole or not at all: it is one PUT whose body the server
//     checks against the digest in the request, or a multipart upload that is completed only
//     when the digest of everything sent is the right one.
//   - Writers of one blob may race. Where the server honours If-None-Match the second is
//     told; elsewhere it replaces the object by its equal.
//   - Whatever a call waits for, it waits at most Config.Stall for the next sign of life.
//
// Single requests of Put and Stage are repeated as Config.Retry says, since only they still
// have the bytes. Stat, Get, Delete and List ask once: blob.Retrying repeats those. A List goes
// on from the last key.
package s3

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"path"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/dsec-go/dsec/blob"
)

const (
	format      = "dsec blob folder 1\n"
	formatName  = "format"
	blobsName   = "sha256"
	stagingName = "staging"
)

// Store is the blobs of one prefix of a bucket. It holds idle connections and nothing else.
type Store struct {
	core minio.Core
	cfg  Config

	// unconditional is set once the server has said that it does not know If-None-Match.
	unconditional atomic.Bool

	pageSize int // of a listing
}

var (
	_ blob.Store  = (*Store)(nil)
	_ blob.Stager = (*Store)(nil)
)

// Check reads the format of the store and writes it where there is none. It is the first
// thing to do with a new store, to learn whether address and credentials are right; a node
// that starts again may go without.
func (s *Store) Check(ctx context.Context) error {
	b, err := s.readFormat(ctx)
	if errors.Is(err, blob.ErrNotFound) {
		var body = []byte(format)
		err = s.do(ctx, s.cfg.Stall, func(ctx context.Context, w *watch) error {
			return s.putOnce(ctx, w, s.name(formatName), body, blob.Of(body).Hex())
		})
		if err == nil {
			return nil
		}
	}
	if err != nil {
		return fmt.Errorf("check %s: %w", s, err)
	}
	if string(b) != format {
		return fmt.Errorf("check %s: unknown format %.40q", s, b)
	}
	return nil
}

func (s *Store) readFormat(ctx context.Context) (b []byte, err error) {
	err = s.do(ctx, s.cfg.Stall, func(ctx context.Context, _ *watch) error {
		r, _, _, err := s.core.GetObject(ctx, s.cfg.Bucket, s.name(formatName), minio.GetObjectOptions{})
		if err != nil {
			return err
		}
		defer r.Close()
		b, err = io.ReadAll(io.LimitReader(r, 1<<10))
		return err
	})
	return b, err
}

// String names the place without anything secret.
func (s *Store) String() string { return "s3://" + path.Join(s.cfg.Bucket, s.cfg.Prefix) }

// Stat implements blob.Store.
func (s *Store) Stat(ctx context.Context, d blob.Digest) (blob.Info, error) {
	if err := begin(ctx, d); err != nil {
		return blob.Info{}, err
	}
	info, err := s.stat(ctx, s.key(d))
	if err != nil {
		return blob.Info{}, about("stat", d, err)
	}
	return blob.Info{Digest: d, Size: info.Size}, nil
}

func (s *Store) stat(ctx context.Context, key string) (info minio.ObjectInfo, err error) {
	err = s.once(ctx, s.cfg.Stall, func(ctx context.Context, _ *watch) error {
		info, err = s.core.StatObject(ctx, s.cfg.Bucket, key, minio.StatObjectOptions{})
		return err
	})
	return info, err
}

// Get implements blob.Store. A range costs one request, an empty one too.
func (s *Store) Get(ctx context.Context, d blob.Digest, off, n int64) (io.ReadCloser, error) {
	if err := begin(ctx, d); err != nil {
		return nil, err
	}
	if off < 0 || n == 0 || n > 0 && off+n < 0 {
		return s.empty(ctx, d, off, n)
	}
	var opts minio.GetObjectOptions
	switch {
	case n > 0:
		opts.Set("Range", fmt.Sprintf("bytes=%d-%d", off, off+n-1))
	case off > 0:
		opts.Set("Range", fmt.Sprintf("bytes=%d-", off))
	}
	wctx, w := s.watch(ctx, s.cfg.Stall)
	body, info, header, err := s.core.GetObject(wctx, s.cfg.Bucket, s.key(d), opts)
	if err != nil {
		err = s.explain(ctx, wctx, err)
		w.stop()
		if errors.Is(err, errBadRange) {
			return s.empty(ctx, d, off, n)
		}
		return nil, about("get", d, err)
	}
	w.rest()
	length := info.Size
	if off > 0 || n > 0 {
		if length, err = checkRange(header.Get("Content-Range"), off, n, info.Size); err != nil {
			body.Close()
			w.stop()
			return nil, about("get", d, err)
		}
	}
	return &reader{s: s, ctx: ctx, wctx: wctx, w: w, d: d, body: body, left: length}, nil
}

// empty answers a Get whose range has no bytes, or lies outside, which only the size tells.
func (s *Store) empty(ctx context.Context, d blob.Digest, off, n int64) (io.ReadCloser, error) {
	info, err := s.Stat(ctx, d)
	if err != nil {
		return nil, err
	}
	if off < 0 || off > info.Size || n > info.Size-off {
		return nil, outside(n, off, info.Size, d)
	}
	if n > 0 || n < 0 && off < info.Size {
		return nil, about("get", d, fmt.Errorf("server refuses the range %d+%d of %d: %w", off, n, info.Size, blob.ErrUnavailable))
	}
	return io.NopCloser(strings.NewReader("")), nil
}

func outside(n, off, size int64, d blob.Digest) error {
	return fmt.Errorf("blob %s: %d bytes at %d of %d: %w", d, n, off, size, blob.ErrRange)
}

// checkRange compares what the server sends with what was asked for and returns how many
// bytes that is. A server cuts a range that is too long without a word.
func checkRange(header string, off, n, length int64) (int64, error) {
	rest, ok := strings.CutPrefix(header, "bytes ")
	span, total, ok2 := strings.Cut(rest, "/")
	first, last, ok3 := strings.Cut(span, "-")
	if !ok || !ok2 || !ok3 {
		if header == "" && off == 0 && length == n {
			return n, nil // the whole object was asked for, by its size
		}
		return 0, fmt.Errorf("server does not answer with a range (Content-Range %.80q): %w", header, errors.ErrUnsupported)
	}
	from, err1 := strconv.ParseInt(first, 10, 64)
	to, err2 := strconv.ParseInt(last, 10, 64)
	size, err3 := strconv.ParseInt(total, 10, 64)
	if err1 != nil || err2 != nil || err3 != nil || from != off || to < from || to >= size {
		return 0, fmt.Errorf("server answers with another range (Content-Range %.80q): %w", header, errors.ErrUnsupported)
	}
	got := to - from + 1
	if n > size-off {
		return 0, fmt.Errorf("%d bytes at %d of %d: %w", n, off, size, blob.ErrRange)
	}
	if n >= 0 && got != n || n < 0 && got != size-off {
		return 0, fmt.Errorf("server answers with another range (Content-Range %.80q): %w", header, errors.ErrUnsupported)
	}
	return got, nil
}

// reader is the body of a Get. The watch runs only while somebody waits in Read.
type reader struct {
	s    *Store
	ctx  context.Context // of the Get, which governs the reads
	wctx context.Context
	w    *watch
	d    blob.Digest
	body io.ReadCloser
	left int64
}

func (r *reader) Read(p []byte) (int, error) {
	if r.ctx.Err() != nil {
		return 0, about("read", r.d, context.Cause(r.ctx))
	}
	if r.left == 0 {
		return 0, io.EOF
	}
	if int64(len(p)) > r.left {
		p = p[:r.left]
	}
	r.w.kick()
	n, err := r.body.Read(p)
	r.w.rest()
	r.left -= int64(n)
	switch {
	case r.left == 0 && (err == nil || err == io.EOF):
		return n, nil
	case err == io.EOF:
		err = io.ErrUnexpectedEOF
	case err == nil:
		return n, nil
	}
	return n, about("read", r.d, r.s.explain(r.ctx, r.wctx, err))
}

func (r *reader) Close() error {
	err := r.body.Close()
	r.w.stop()
	return err
}

// Delete implements blob.Store.
func (s *Store) Delete(ctx context.Context, d blob.Digest) error {
	if err := begin(ctx, d); err != nil {
		return err
	}
	if err := s.remove(ctx, s.key(d)); err != nil {
		return about("delete", d, err)
	}
	return nil
}

func (s *Store) remove(ctx context.Context, key string) error {
	err := s.once(ctx, s.cfg.Stall, func(ctx context.Context, _ *watch) error {
		return s.core.RemoveObject(ctx, s.cfg.Bucket, key, minio.RemoveObjectOptions{})
	})
	if errors.Is(err, blob.ErrNotFound) {
		return nil
	}
	return err
}

// List implements blob.Store. Other objects under the prefix are passed over.
func (s *Store) List(ctx context.Context) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		for object, err := range s.list(ctx, s.name(blobsName)+"/") {
			if err != nil {
				yield(blob.Info{}, fmt.Errorf("list blobs: %w", err))
				return
			}
			d, err := blob.Parse("sha256:" + path.Base(object.Key))
			if err != nil || object.Key != s.key(d) {
				continue
			}
			if !yield(blob.Info{Digest: d, Size: object.Size}, nil) {
				return
			}
		}
	}
}

// list yields the objects under a prefix in the order of their keys, a page at a time. One
// that fails is asked for again, from the last key on.
func (s *Store) list(ctx context.Context, prefix string) iter.Seq2[minio.ObjectInfo, error] {
	return func(yield func(minio.ObjectInfo, error) bool) {
		var after string
		var owner bool
		opts := minio.ListObjectsOptions{Prefix: prefix, Recursive: true, MaxKeys: s.pageSize, FetchOwner: &owner}
		for more := true; more; {
			n := 0
			err := s.do(ctx, s.cfg.Stall, func(ctx context.Context, w *watch) error {
				more = false
				opts.StartAfter = after
				for object := range s.core.ListObjectsIter(ctx, s.cfg.Bucket, opts) {
					if object.Err != nil {
						return object.Err
					}
					w.rest()
					if after = object.Key; !yield(object, nil) {
						return nil
					}
					if n++; n >= s.pageSize {
						more = true
						return nil
					}
					w.kick()
				}
				return ctx.Err() // it ends without a word then
			})
			if err != nil {
				yield(minio.ObjectInfo{}, err)
				return
			}
		}
	}
}

// Sweep removes what dead writers have left: staged blobs and uploads that nobody has
// completed, begun longer than age ago by the server's clock as this host sees it. It lists,
// so it belongs into garbage collection and not into the start of a node.
func (s *Store) Sweep(ctx context.Context, age time.Duration) error {
	before := time.Now().Add(-age)
	for object, err := range s.list(ctx, s.name(stagingName)+"/") {
		if err == nil && object.LastModified.Before(before) {
			err = s.remove(ctx, object.Key)
		}
		if err != nil {
			return fmt.Errorf("sweep %s: %w", s, err)
		}
	}
	var key, id string
	for {
		var page minio.ListMultipartUploadsResult
		err := s.do(ctx, s.cfg.Stall, func(ctx context.Context, _ *watch) (err error) {
			page, err = s.core.ListMultipartUploads(ctx, s.cfg.Bucket, s.name(""), key, id, "", 1000)
			return err
		})
		if err != nil {
			return fmt.Errorf("sweep %s: list uploads: %w", s, err)
		}
		for _, u := range page.Uploads {
			if !strings.HasPrefix(u.Key, s.name("")) || !u.Initiated.Before(before) {
				continue
			}
			err := s.once(ctx, s.cfg.Stall, func(ctx context.Context, _ *watch) error {
				return s.core.AbortMultipartUpload(ctx, s.cfg.Bucket, u.Key, u.UploadID)
			})
			if err != nil && !errors.Is(err, blob.ErrNotFound) {
				return fmt.Errorf("sweep %s: abort upload of %s: %w", s, u.Key, err)
			}
		}
		if !page.IsTruncated || page.NextKeyMarker == key && page.NextUploadIDMarker == id {
			return nil
		}
		key, id = page.NextKeyMarker, page.NextUploadIDMarker
	}
}

// name is a key below the prefix; name("") is what all keys begin with.
func (s *Store) name(key string) string {
	if s.cfg.Prefix == "" {
		return key
	}
	return s.cfg.Prefix + "/" + key
}

func (s *Store) key(d blob.Digest) string {
	h := d.Hex()
	return s.name(blobsName + "/" + h[:2] + "/" + h)
}

func begin(ctx context.Context, d blob.Digest) error {
	if err := d.Check(); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return fmt.Errorf("blob %s: %w", d, context.Cause(ctx))
	}
	return nil
}

func about(verb string, d blob.Digest, err error) error {
	return fmt.Errorf("%s blob %s: %w", verb, d, err)
}
