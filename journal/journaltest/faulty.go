// Package journaltest holds file systems for tests of what is built on a journal: Faulty
// fails where it is told to, CrashFS loses power. It is imported by tests only.
package journaltest

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"

	"github.com/dsec-go/dsec/journal"
)

// Op names an operation of a file system: the kind of file, a dot, and what is done to it.
// The kinds are "journal" (segments), "snapshot", "hint" (the file "durable") and "dir".
type Op string

// The operations that can fail. Each is counted on its own, from 1.
const (
	JournalCreate   Op = "journal.create"
	JournalWrite    Op = "journal.write" // half of the bytes are written
	JournalSync     Op = "journal.sync"
	JournalTruncate Op = "journal.truncate"
	JournalRemove   Op = "journal.remove"
	SnapshotCreate  Op = "snapshot.create"
	SnapshotWrite   Op = "snapshot.write" // half of the bytes are written
	SnapshotSync    Op = "snapshot.sync"
	SnapshotRename  Op = "snapshot.rename"
	HintWrite       Op = "hint.write"
	DirSync         Op = "dir.sync"
)

// Faulty is a file system that fails where it is told to: the third "journal.sync", for
// example. With nothing asked of it, it is the one below.
type Faulty struct {
	journal.FS

	mu     sync.Mutex
	counts map[Op]int
	faults map[Op]map[int]error
}

// NewFaulty returns fs with no faults yet.
func NewFaulty(fs journal.FS) *Faulty {
	return &Faulty{FS: fs, counts: map[Op]int{}, faults: map[Op]map[int]error{}}
}

// FailAt makes the nth op from now on fail with err, once. n = 1 is the next one.
func (f *Faulty) FailAt(op Op, n int, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.faults[op] == nil {
		f.faults[op] = map[int]error{}
	}
	f.faults[op][f.counts[op]+n] = err
}

// Count returns how often op has been reached.
func (f *Faulty) Count(op Op) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.counts[op]
}

func (f *Faulty) reach(op Op) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.counts[op]++
	n := f.counts[op]
	err, ok := f.faults[op][n]
	if !ok {
		return nil
	}
	delete(f.faults[op], n)
	if err == nil {
		err = errors.New("injected fault")
	}
	return fmt.Errorf("%s number %d: %w", op, n, err)
}

func op(name, verb string) Op {
	kind := "hint"
	switch {
	case strings.HasSuffix(name, ".log"):
		kind = "journal"
	case strings.Contains(name, ".snap"):
		kind = "snapshot"
	}
	return Op(kind + "." + verb)
}

// Create implements journal.FS.
func (f *Faulty) Create(name string) (journal.File, error) {
	if err := f.reach(op(name, "create")); err != nil {
		return nil, err
	}
	file, err := f.FS.Create(name)
	if err != nil {
		return nil, err
	}
	return faultyFile{file, f, name}, nil
}

// Open implements journal.FS.
func (f *Faulty) Open(name string) (journal.File, error) {
	file, err := f.FS.Open(name)
	if err != nil {
		return nil, err
	}
	return faultyFile{file, f, name}, nil
}

// Remove implements journal.FS.
func (f *Faulty) Remove(name string) error {
	if err := f.reach(op(name, "remove")); err != nil {
		return err
	}
	return f.FS.Remove(name)
}

// Rename implements journal.FS.
func (f *Faulty) Rename(from, to string) error {
	if err := f.reach(op(to, "rename")); err != nil {
		return err
	}
	return f.FS.Rename(from, to)
}

// SyncDir implements journal.FS.
func (f *Faulty) SyncDir(dir string) error {
	if err := f.reach(DirSync); err != nil {
		return err
	}
	return f.FS.SyncDir(dir)
}

// Lock implements journal.FS.
func (f *Faulty) Lock(name string) (io.Closer, error) { return f.FS.Lock(name) }

type faultyFile struct {
	journal.File
	f    *Faulty
	name string
}

func (f faultyFile) WriteAt(p []byte, off int64) (int, error) {
	if err := f.f.reach(op(f.name, "write")); err != nil {
		n, _ := f.File.WriteAt(p[:len(p)/2], off)
		return n, err
	}
	return f.File.WriteAt(p, off)
}

func (f faultyFile) Truncate(size int64) error {
	if err := f.f.reach(op(f.name, "truncate")); err != nil {
		return err
	}
	return f.File.Truncate(size)
}

func (f faultyFile) Sync() error {
	if err := f.f.reach(op(f.name, "sync")); err != nil {
		return err
	}
	return f.File.Sync()
}
