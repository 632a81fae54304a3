package s3_test

import (
	"fmt"
	"io"
	"testing"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/blob/blobtest"
	"github.com/dsec-go/dsec/blob/s3/s3test"
)

func BenchmarkGateway(b *testing.B) {
	server := s3test.Gateway(b, b.TempDir())
	benchmark(b, open(b, server.Config(server.Addr, "bench")))
}

// BenchmarkFolder is what the disk below the servers of the others does.
func BenchmarkFolder(b *testing.B) {
	f, err := blob.OpenFolder(b.TempDir())
	if err != nil {
		b.Fatal(err)
	}
	benchmark(b, f)
}

// benchmark reads ranges one after the other, and moves whole blobs.
func benchmark(b *testing.B, s blob.Store) {
	const size = 64 << 20
	data := blobtest.Data(1, size)
	d, err := blob.PutBytes(b.Context(), s, data)
	if err != nil {
		b.Fatal(err)
	}
	for _, n := range []int64{4 << 10, 256 << 10, 1 << 20, 4 << 20, size} {
		b.Run(fmt.Sprintf("Get%dK", n>>10), func(b *testing.B) {
			b.SetBytes(n)
			for i := 0; b.Loop(); i++ {
				r, err := s.Get(b.Context(), d, int64(i)*n%(size-n+1), n)
				if err != nil {
					b.Fatal(err)
				}
				if _, err := io.Copy(io.Discard, r); err != nil {
					b.Fatal(err)
				}
				r.Close()
			}
		})
	}
	for _, n := range []int{4 << 10, 1 << 20, size} {
		b.Run(fmt.Sprintf("Put%dK", n>>10), func(b *testing.B) {
			b.SetBytes(int64(n))
			for i := 0; b.Loop(); i++ {
				b.StopTimer()
				data[0], data[1], data[2] = byte(i), byte(i>>8), byte(n>>12)
				b.StartTimer()
				if _, err := blob.PutBytes(b.Context(), s, data[:n]); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
