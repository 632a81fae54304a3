package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"github.com/dsec-go/dsec"
)

// Pull imports an image from an OCI registry by reference. Credentials are
// those that docker and podman keep for the user of this process. Registries
// on loopback and private addresses are spoken to without TLS.
func (l *Library) Pull(ctx context.Context, ref string, opts Options) (Layer, error) {
	layer, err := l.pull(ctx, ref, opts)
	return layer, fault("image.Pull", err)
}

func (l *Library) pull(ctx context.Context, ref string, opts Options) (Layer, error) {
	r, err := name.ParseReference(ref)
	if err != nil {
		return Layer{}, dsec.Errorf(dsec.Invalid, "reference %.200q: %w", ref, err)
	}
	w, err := l.newWork(ctx, opts)
	if err != nil {
		return Layer{}, err
	}
	defer w.abort()
	w.opts.Ref = "" // of archives
	auth, err := authn.Resolve(ctx, authn.DefaultKeychain, r.Context())
	if err != nil {
		return Layer{}, online(err)
	}
	puller, err := remote.NewPuller(remote.WithContext(ctx), remote.WithAuth(auth))
	if err != nil {
		return Layer{}, err
	}
	root, err := puller.Get(ctx, r)
	if err != nil {
		return Layer{}, online(err)
	}
	// Layers are read without the library's help, which would not go on where
	// a connection broke.
	t, err := transport.NewWithContext(ctx, r.Context().Registry, auth, remote.DefaultTransport,
		[]string{r.Context().Scope(transport.PullScope)})
	if err != nil {
		return Layer{}, online(err)
	}
	o := &registry{repo: r.Context(), puller: puller, root: root, client: &http.Client{Transport: t}}
	img, err := w.resolve(ctx, o, root.Descriptor)
	if err != nil {
		return Layer{}, err
	}
	// The registry has let us read the config, and so what it names.
	if l, ok := w.existing(ctx, w.ociIdentity(img.digest)); ok {
		return l, nil
	}
	return w.convert(ctx, o, img)
}

// A registry is one repository of a registry.
type registry struct {
	repo   name.Repository
	puller *remote.Puller
	root   *remote.Descriptor // fetched to learn its digest
	client *http.Client
}

func (o *registry) open(ctx context.Context, d v1.Descriptor) (io.ReadCloser, error) {
	if d.Digest == o.root.Digest {
		return io.NopCloser(bytes.NewReader(o.root.Manifest)), nil
	}
	ref := o.repo.Digest(d.Digest.String())
	if d.MediaType.IsImage() || d.MediaType.IsIndex() {
		m, err := o.puller.Get(ctx, ref)
		if err != nil {
			return nil, online(err)
		}
		return io.NopCloser(bytes.NewReader(m.Manifest)), nil
	}
	r := &download{ctx: ctx, o: o, digest: d.Digest.String()}
	if err := r.connect(); err != nil {
		if err := r.retry(err); err != nil {
			return nil, err
		}
	}
	return r, nil
}

const (
	maxAttempts  = 4 // to connect, without a byte in between
	firstBackoff = 100 * time.Millisecond
)

// A download reads one blob, over as many connections as it takes. What it
// reads is checked by its reader.
type download struct {
	ctx    context.Context
	o      *registry
	digest string
	off    int64
	body   io.ReadCloser
	failed int // attempts since the last byte
}

func (d *download) Read(p []byte) (int, error) {
	for {
		n, err := d.body.Read(p)
		d.off += int64(n)
		if n > 0 {
			d.failed = 0
		}
		if err == nil || err == io.EOF {
			return n, err
		}
		if n > 0 {
			return n, nil // the same error comes again
		}
		if err := d.retry(err); err != nil {
			return 0, err
		}
	}
}

func (d *download) Close() error { return d.body.Close() }

// retry connects anew after an error, if it is one that may pass.
func (d *download) retry(err error) error {
	for {
		if k := kindOf(online(err)); k != dsec.Unavailable {
			return online(err)
		}
		if d.failed++; d.failed >= maxAttempts || d.ctx.Err() != nil {
			return online(err)
		}
		select {
		case <-time.After(firstBackoff << d.failed):
		case <-d.ctx.Done():
			return context.Cause(d.ctx)
		}
		d.body.Close()
		if err = d.connect(); err == nil {
			return nil
		}
	}
}

// connect asks for what follows off. On error body can still be closed.
func (d *download) connect() error {
	d.body = http.NoBody
	u := url.URL{
		Scheme: d.o.repo.Scheme(), Host: d.o.repo.RegistryStr(),
		Path: "/v2/" + d.o.repo.RepositoryStr() + "/blobs/" + d.digest,
	}
	req, err := http.NewRequestWithContext(d.ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return err
	}
	if d.off > 0 {
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-", d.off))
	}
	res, err := d.o.client.Do(req)
	if err != nil {
		return online(err)
	}
	if err := transport.CheckError(res, http.StatusOK, http.StatusPartialContent); err != nil {
		res.Body.Close()
		return online(err)
	}
	d.body = res.Body
	if d.off > 0 && res.StatusCode == http.StatusOK {
		// A registry without ranges begins again.
		if _, err := io.CopyN(io.Discard, res.Body, d.off); err != nil {
			return online(err)
		}
	}
	return nil
}

// online gives an error of the client a kind: what it cannot tell is a matter
// of the network, or of the registry, which may work the next time.
func online(err error) error {
	if k := kindOf(err); k != dsec.Internal {
		return &dsec.Error{Kind: k, Err: err}
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return &dsec.Error{Kind: dsec.Unavailable, Err: err}
}
