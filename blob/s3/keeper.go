package s3

import (
	"context"
	"crypto/rand"
	"errors"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/dsec-go/dsec/blob"
)

// freshEnough is how young an object may be for Touch to leave it: the server copies it
// onto itself otherwise.
const freshEnough = 5 * time.Minute

// Touch implements blob.Keeper. An object's only time is that of its last write, so the
// server is asked to copy it onto itself, which moves no bytes over the network.
func (s *Store) Touch(ctx context.Context, d blob.Digest) error {
	return s.touch(ctx, d, freshEnough)
}

func (s *Store) touch(ctx context.Context, d blob.Digest, fresh time.Duration) error {
	if err := begin(ctx, d); err != nil {
		return err
	}
	key := s.key(d)
	info, err := s.stat(ctx, key)
	if err != nil {
		return about("touch", d, err)
	}
	if age := time.Since(info.LastModified); age >= 0 && age < fresh {
		return nil
	}
	if err := s.copy(ctx, key, key, info.Size); err != nil {
		return about("touch", d, err)
	}
	now, err := s.stat(ctx, key)
	if err != nil {
		return about("touch", d, err)
	}
	if now.LastModified.After(info.LastModified) || fresh == 0 {
		return nil
	}
	// Some servers change what is said of the object and not its time. They write it
	// anew from another one.
	aside := s.name(stagingName + "/" + rand.Text())
	defer s.remove(context.WithoutCancel(ctx), aside) //nolint:errcheck // Sweep finds it
	if err := s.copy(ctx, aside, key, info.Size); err != nil {
		return about("touch", d, err)
	}
	if err := s.copy(ctx, key, aside, info.Size); err != nil {
		return about("touch", d, err)
	}
	return nil
}

// copy has the server write an object anew.
func (s *Store) copy(ctx context.Context, to, from string, size int64) error {
	return s.do(ctx, s.patience(size), func(ctx context.Context, _ *watch) error {
		_, err := s.core.ComposeObject(ctx, minio.CopyDestOptions{
			Bucket: s.cfg.Bucket, Object: to, ReplaceMetadata: true,
			// Without a change a copy onto itself is refused.
			UserMetadata: map[string]string{"dsec-touched": time.Now().UTC().Format(time.RFC3339Nano)},
		}, minio.CopySrcOptions{Bucket: s.cfg.Bucket, Object: from})
		return err
	})
}

// DeleteIdle implements blob.Keeper. No server has a request for both, so it looks and
// then deletes: a Touch that falls between the two is lost. Who touches a blob therefore
// looks for it again before it relies on it. Clocks that differ by more than the quarter of
// an hour that S3 allows are refused by the server.
func (s *Store) DeleteIdle(ctx context.Context, d blob.Digest, age time.Duration) (bool, error) {
	if err := begin(ctx, d); err != nil {
		return false, err
	}
	info, err := s.stat(ctx, s.key(d))
	if errors.Is(err, blob.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, about("delete", d, err)
	}
	switch since := time.Since(info.LastModified); {
	case since < -max(age, time.Minute):
		return false, s.touch(ctx, d, 0)
	case since < age:
		return false, nil
	}
	return true, s.Delete(ctx, d)
}
