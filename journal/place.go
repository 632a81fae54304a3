package journal

import (
	"fmt"
	"sync"
	"sync/atomic"
)

// Place is where a record lies, for ReadAt. Places can be compared. The zero Place is that of no
// record. A Place means nothing to another Open: Replay gives new ones.
type Place struct {
	file uint32
	size uint32 // of the whole record
	off  uint64
}

// ReadAt returns the payload of the record at p: one read of the disk, with no lock held. The
// record is ErrGone once a checkpoint has removed its file; its owner has been told the new place
// before that, so that a reader who lost the race looks the place up again.
func (j *Journal) ReadAt(p Place) ([]byte, error) {
	f, err := j.files.acquire(p.file)
	if err != nil {
		return nil, fmt.Errorf("read journal record: %w", err)
	}
	defer f.release()
	b := make([]byte, p.size)
	if _, err := f.ReadAt(b, int64(p.off)); err != nil {
		return nil, fmt.Errorf("read journal record in %s at offset %d: %w", f.name, p.off, unexpected(err))
	}
	rec, n, want, ok := parseRecord(b)
	if !ok || n != len(b)-recordSize || sum(f.salt, b[4:recordSize], b[recordSize:]) != want {
		return nil, &CorruptError{File: f.name, Offset: int64(p.off), Seq: rec.seq, Reason: "wrong sum"}
	}
	return b[recordSize:], nil
}

// openFile is a file that records are read from. It is open as long as somebody uses it.
type openFile struct {
	File
	id    uint32
	name  string // full path; of a snapshot the one that it gets
	salt  uint64
	users atomic.Int32
}

// release ends one use.
func (f *openFile) release() {
	if f.users.Add(-1) == 0 {
		f.File.Close()
	}
}

// fileTable finds open files by what is in a Place. Its lock is the last one taken.
type fileTable struct {
	mu     sync.RWMutex
	last   uint32
	open   map[uint32]*openFile
	closed bool
}

// adopt gives f a number. Its one user is the caller. It is not found before publish.
func (t *fileTable) adopt(f File, name string, salt uint64) *openFile {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.last++
	o := &openFile{File: f, id: t.last, name: name, salt: salt}
	o.users.Store(1)
	return o
}

func (t *fileTable) publish(f *openFile) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.open == nil {
		t.open = map[uint32]*openFile{}
	}
	t.open[f.id] = f
}

// acquire begins a use of a file.
func (t *fileTable) acquire(id uint32) (*openFile, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if t.closed {
		return nil, ErrClosed
	}
	f := t.open[id]
	if f == nil {
		return nil, ErrGone
	}
	f.users.Add(1) // under the lock, so never after the last release
	return f, nil
}

// forget ends the use that adopt began; who reads meanwhile goes on.
func (t *fileTable) forget(f *openFile) {
	t.mu.Lock()
	delete(t.open, f.id)
	t.mu.Unlock()
	f.release()
}

// close makes acquire say why it finds nothing.
func (t *fileTable) close() {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
}
