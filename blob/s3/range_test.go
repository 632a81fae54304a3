package s3_test

import (
	"errors"
	"fmt"
	"math"
	"testing"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/blob/s3"
)

func TestContentRange(t *testing.T) {
	for _, test := range []struct {
		header         string
		off, n, length int64
		want           int64
		err            error
	}{
		{"bytes 0-9/100", 0, 10, 10, 10, nil},
		{"bytes 90-99/100", 90, -1, 10, 10, nil},
		{"bytes 90-99/100", 90, 10, 10, 10, nil},
		{"", 0, 10, 10, 10, nil}, // all of it
		{"bytes 90-99/100", 90, 11, 10, 0, blob.ErrRange},
		{"bytes 90-99/100", 90, math.MaxInt64, 10, 0, blob.ErrRange},
		{"", 0, 10, 100, 0, errors.ErrUnsupported}, // ranges are ignored
		{"", 5, -1, 100, 0, errors.ErrUnsupported},
		{"bytes 0-9/100", 10, 10, 10, 0, errors.ErrUnsupported},
		{"bytes 0-8/100", 0, 10, 9, 0, errors.ErrUnsupported},
		{"bytes 9-0/100", 9, 10, 10, 0, errors.ErrUnsupported},
		{"bytes 0-9/*", 0, 10, 10, 0, errors.ErrUnsupported},
		{"bytes */100", 0, 10, 10, 0, errors.ErrUnsupported},
		{"lines 0-9/100", 0, 10, 10, 0, errors.ErrUnsupported},
	} {
		got, err := s3.CheckRange(test.header, test.off, test.n, test.length)
		if got != test.want || !errors.Is(err, test.err) {
			t.Errorf("%+v: %d, %v", test, got, err)
		}
	}
}

func FuzzContentRange(f *testing.F) {
	f.Add("bytes 0-9/100", int64(0), int64(10), int64(10))
	f.Add("bytes */100", int64(100), int64(-1), int64(0))
	f.Add("", int64(0), int64(5), int64(5))
	f.Fuzz(func(t *testing.T, header string, off, n, length int64) {
		got, err := s3.CheckRange(header, off, n, length)
		if err != nil {
			return
		}
		if n >= 0 && got != n {
			t.Errorf("%d bytes are taken for %d", got, n)
		}
		var from, to, size int64
		if _, err := fmt.Sscanf(header, "bytes %d-%d/%d", &from, &to, &size); err == nil && (from != off || to-from+1 != got || to >= size) {
			t.Errorf("%q is taken for %d bytes at %d", header, got, off)
		}
	})
}
