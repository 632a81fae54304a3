package s3

import (
	"context"
	"time"

	"github.com/dsec-go/dsec/blob"
)

// SetPageSize makes a listing ask for so many keys at a time.
func (s *Store) SetPageSize(n int) { s.pageSize = n }

// CheckRange is the reader of what a server says it sends.
var CheckRange = checkRange

// TouchNow touches a blob however young it is.
func (s *Store) TouchNow(ctx context.Context, d blob.Digest) error { return s.touch(ctx, d, 0) }

// Written is when the server wrote a blob last.
func (s *Store) Written(ctx context.Context, d blob.Digest) (time.Time, error) {
	info, err := s.stat(ctx, s.key(d))
	return info.LastModified, err
}
