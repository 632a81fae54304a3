package journal_test

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec/journal"
)

const benchPayload = 200

func benchJournal(b *testing.B) *journal.Journal {
	j, err := journal.Open(b.TempDir(), journal.Options{})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { j.Close() })
	return j
}

func BenchmarkAppend(b *testing.B) {
	j := benchJournal(b)
	payload := make([]byte, benchPayload)
	for b.Loop() {
		if _, err := j.Append(1, payload); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkAppendFloor is the write alone.
func BenchmarkAppendFloor(b *testing.B) {
	f, err := os.Create(filepath.Join(b.TempDir(), "floor"))
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	p := make([]byte, benchPayload+24)
	var off int64
	for b.Loop() {
		if _, err := unix.Pwrite(int(f.Fd()), p, off); err != nil {
			b.Fatal(err)
		}
		off += int64(len(p))
	}
}

func BenchmarkAppendSync(b *testing.B) {
	j := benchJournal(b)
	payload := make([]byte, benchPayload)
	for b.Loop() {
		if _, err := j.AppendSync(b.Context(), 1, payload); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkAppendSyncShared is what group commit is for.
func BenchmarkAppendSyncShared(b *testing.B) {
	j := benchJournal(b)
	payload := make([]byte, benchPayload)
	b.SetParallelism(32)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if _, err := j.AppendSync(b.Context(), 1, payload); err != nil {
				b.Error(err)
				return
			}
		}
	})
}

// BenchmarkAppendSyncFloor is a write and a fdatasync alone.
func BenchmarkAppendSyncFloor(b *testing.B) {
	f, err := os.Create(filepath.Join(b.TempDir(), "floor"))
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	p := make([]byte, benchPayload+24)
	var off int64
	for b.Loop() {
		if _, err := unix.Pwrite(int(f.Fd()), p, off); err != nil {
			b.Fatal(err)
		}
		if err := unix.Fdatasync(int(f.Fd())); err != nil {
			b.Fatal(err)
		}
		off += int64(len(p))
	}
}
