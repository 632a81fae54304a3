package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
)

// Files are a layer's local files, ready to be mounted.
type Files struct {
	Layer
	Meta string   // the metadata image
	Data []string // the data blobs, in the order of the device table
}

// Open returns the files of a layer. The size of each is checked every time and
// its content the first time on this node; calls that need the same check share
// it. A blob that is missing, too short or altered is an error that names it,
// and Internal. A store without local files is Unsupported, and so is a layer
// whose data is packed unless the library has a folder for plain copies: packed
// layers are read through the node's data process.
func (l *Library) Open(ctx context.Context, digest blob.Digest) (Files, error) {
	f, err := l.open(ctx, digest)
	if err != nil {
		return Files{}, stored("image.Open", fmt.Errorf("layer %s: %w", digest, err))
	}
	return f, nil
}

func (l *Library) open(ctx context.Context, digest blob.Digest) (Files, error) {
	m, err := l.manifest(ctx, digest)
	if err != nil {
		return Files{}, err
	}
	f := Files{Layer: Layer{Digest: digest, Manifest: m}}
	if f.Meta, err = l.file(ctx, m.Meta); err != nil {
		return Files{}, fmt.Errorf("metadata image: %w", err)
	}
	for _, d := range m.Data {
		path, err := l.data(ctx, d)
		if err != nil {
			return Files{}, fmt.Errorf("data: %w", err)
		}
		f.Data = append(f.Data, path)
	}
	return f, nil
}

// data returns the path of a data blob's plain bytes.
func (l *Library) data(ctx context.Context, d Data) (string, error) {
	if d.Packed == nil {
		return l.file(ctx, d.Part)
	}
	return l.unpacked(ctx, d)
}

// file returns the path of a part after checking it.
func (l *Library) file(ctx context.Context, p Part) (string, error) {
	files, ok := l.store.(blob.LocalPather)
	if !ok {
		return "", dsec.Errorf(dsec.Unsupported, "the blob store has no local files")
	}
	return l.checked(ctx, files, p)
}

// checked returns the path of a part in files after checking it.
func (l *Library) checked(ctx context.Context, files blob.LocalPather, p Part) (string, error) {
	path, err := files.LocalPath(ctx, p.Digest)
	if errors.Is(err, blob.ErrNotFound) {
		err = fmt.Errorf("%w: %w", ErrCorrupt, err) // the manifest is there, so it should be
	}
	if err != nil {
		return "", err
	}
	look, err := p.inspect(path)
	if err != nil {
		return "", err
	}
	if l.wasVerified(p.Digest, look) {
		return path, nil
	}
	// The check goes on when one of those who wait for it goes away.
	wait := l.flight.DoChan(string(p.Digest), func() (any, error) {
		return nil, l.verify(context.WithoutCancel(ctx), path, p)
	})
	select {
	case r := <-wait:
		return path, r.Err
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
}

// inspect describes a file such that a change of content changes it.
func inspect(path string) (look string, size int64) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return "", -1
	}
	return fmt.Sprintf("1 %d %d %d %d.%09d\n", st.Dev, st.Ino, st.Size, st.Mtim.Sec, st.Mtim.Nsec), st.Size
}

// inspect also checks that the file is there and has the part's size.
func (p Part) inspect(path string) (string, error) {
	look, size := inspect(path)
	if size < 0 {
		return "", fmt.Errorf("blob %s is gone: %w", p.Digest, ErrCorrupt)
	}
	if size != p.Size {
		return "", fmt.Errorf("blob %s has %d bytes, should have %d: %w", p.Digest, size, p.Size, ErrCorrupt)
	}
	return look, nil
}

func (l *Library) verify(ctx context.Context, path string, p Part) error {
	before, err := p.inspect(path)
	if err != nil {
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("blob %s: %w", p.Digest, err)
	}
	defer f.Close()
	if err := newSource(ctx, f, nil).hashed().check(p.Digest, p.Size); err != nil {
		return fmt.Errorf("blob %w", err)
	}
	after, err := p.inspect(path)
	if err != nil || after != before {
		return fmt.Errorf("blob %s changed while it was checked: %w", p.Digest, ErrCorrupt)
	}
	l.trust(p.Digest, path)
	return nil
}

// trust notes that a file, as it is now, has the content it should.
func (l *Library) trust(d blob.Digest, path string) {
	look, size := inspect(path)
	if size < 0 {
		return
	}
	l.mu.Lock()
	l.verified[d] = look
	l.mu.Unlock()
	l.remember(d, look)
}

func (l *Library) wasVerified(d blob.Digest, look string) bool {
	l.mu.Lock()
	known := l.verified[d]
	l.mu.Unlock()
	if known == look {
		return true
	}
	if l.opts.Verified == "" {
		return false
	}
	b, err := os.ReadFile(filepath.Join(l.opts.Verified, d.Hex()))
	return err == nil && string(b) == look
}

// remember writes the mark of a checked file. A mark that is missing or torn by
// a crash costs one more check and nothing else, so errors do not matter and
// nothing is synced.
func (l *Library) remember(d blob.Digest, look string) {
	if l.opts.Verified == "" {
		return
	}
	tmp := filepath.Join(l.opts.Verified, d.Hex()+".tmp")
	err := os.MkdirAll(l.opts.Verified, 0o700)
	if err == nil {
		err = os.WriteFile(tmp, []byte(look), 0o600)
	}
	if err == nil {
		err = os.Rename(tmp, filepath.Join(l.opts.Verified, d.Hex()))
	}
	if err != nil {
		os.Remove(tmp) //nolint:errcheck // see above
	}
}

// forget drops the mark of a deleted blob.
func (l *Library) forget(d blob.Digest) {
	l.mu.Lock()
	delete(l.verified, d)
	delete(l.used, d)
	delete(l.idle, d)
	l.mu.Unlock()
	if x := l.fileIndex(); x != nil {
		x.forget(d)
	}
	if l.opts.Verified != "" {
		os.Remove(filepath.Join(l.opts.Verified, d.Hex())) //nolint:errcheck // often absent
	}
}
