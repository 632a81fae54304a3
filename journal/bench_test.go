package journal_test

import (
	"bytes"
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
		if _, _, err := j.Append(1, payload); err != nil {
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
		if _, _, err := j.AppendSync(b.Context(), 1, payload); err != nil {
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
			if _, _, err := j.AppendSync(b.Context(), 1, payload); err != nil {
				b.Error(err)
				return
			}
		}
	})
}

// BenchmarkAppendSyncFloor is a write and a fdatasync alone, in a file that has its bytes already.
func BenchmarkAppendSyncFloor(b *testing.B) { syncFloor(b, 256<<10) }

// BenchmarkAppendSyncGrowing is the same in a file that grows with each write.
func BenchmarkAppendSyncGrowing(b *testing.B) { syncFloor(b, 0) }

func syncFloor(b *testing.B, room int64) {
	f, err := os.Create(filepath.Join(b.TempDir(), "floor"))
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	p := bytes.Repeat([]byte{1}, benchPayload+24)
	zeros := make([]byte, room)
	var off, end int64
	for b.Loop() {
		if room > 0 && off+int64(len(p)) > end {
			if _, err := unix.Pwrite(int(f.Fd()), zeros, end); err != nil {
				b.Fatal(err)
			}
			end += room
		}
		if _, err := unix.Pwrite(int(f.Fd()), p, off); err != nil {
			b.Fatal(err)
		}
		if err := unix.Fdatasync(int(f.Fd())); err != nil {
			b.Fatal(err)
		}
		off += int64(len(p))
	}
}

func BenchmarkReadAt(b *testing.B) {
	j := benchJournal(b)
	places := make([]journal.Place, 1000)
	for i := range places {
		var err error
		if _, places[i], err = j.Append(1, make([]byte, benchPayload)); err != nil {
			b.Fatal(err)
		}
	}
	i := 0
	for b.Loop() {
		if _, err := j.ReadAt(places[i%len(places)]); err != nil {
			b.Fatal(err)
		}
		i++
	}
}

// BenchmarkReadAtFloor is one read of a record's bytes into memory made for it.
func BenchmarkReadAtFloor(b *testing.B) {
	f, err := os.Create(filepath.Join(b.TempDir(), "floor"))
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(make([]byte, 1000*(benchPayload+24))); err != nil {
		b.Fatal(err)
	}
	i := 0
	for b.Loop() {
		p := make([]byte, benchPayload+24)
		if _, err := unix.Pread(int(f.Fd()), p, int64(i%1000*len(p))); err != nil {
			b.Fatal(err)
		}
		i++
	}
}
