package journaltest

import (
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"

	"github.com/dsec-go/dsec/journal"
)

// sector is the unit that a disk writes whole or not at all.
const sector = 512

// CrashFS is a file system in memory that knows what of it is durable. PowerCut returns what
// could be left after a power cut now, Kill what is left after the process dies. It is as
// mean as POSIX allows: content is durable only after Sync, names only after SyncDir, and
// what is not may still be there in part, sector by sector and in any order.
type CrashFS struct {
	// Before is called before each operation that changes something, with no lock held.
	// Set it before the file system is used.
	Before func()

	mu      sync.Mutex
	names   map[string]*inode // as the process sees them
	durable map[string]*inode
	pending []naming // since the last SyncDir
	locks   map[string]bool
}

// naming is one change of names: from goes, to comes.
type naming struct {
	from, to string // either may be empty
	node     *inode // what to becomes
}

type inode struct {
	data    []byte // as the process sees it
	durable []byte
	pending []change // since the last Sync
}

// change is a write, or a truncation if data is nil.
type change struct {
	off  int64
	data []byte
}

var _ journal.FS = (*CrashFS)(nil)

// NewCrashFS returns an empty file system.
func NewCrashFS() *CrashFS {
	return &CrashFS{names: map[string]*inode{}, durable: map[string]*inode{}, locks: map[string]bool{}}
}

// Kill returns a copy as it is after the process has died: everything written is there.
func (c *CrashFS) Kill() *CrashFS {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := NewCrashFS()
	copies := map[*inode]*inode{}
	dup := func(i *inode) *inode {
		if copies[i] == nil {
			copies[i] = &inode{data: bytes.Clone(i.data), durable: bytes.Clone(i.durable), pending: slices.Clone(i.pending)}
		}
		return copies[i]
	}
	for name, i := range c.names {
		n.names[name] = dup(i)
	}
	for name, i := range c.durable {
		n.durable[name] = dup(i)
	}
	for _, p := range c.pending {
		if p.node != nil {
			p.node = dup(p.node)
		}
		n.pending = append(n.pending, p)
	}
	return n
}

// PowerCut returns a copy as it may be after a power cut. r decides what that which was not
// synced has come to.
func (c *CrashFS) PowerCut(r *rand.Rand) *CrashFS {
	c.mu.Lock()
	defer c.mu.Unlock()
	names := maps.Clone(c.durable)
	mode, cut := r.IntN(4), r.IntN(len(c.pending)+1)
	for i, p := range c.pending {
		if mode == 0 || mode == 1 && i >= cut || mode == 2 && r.IntN(2) == 0 {
			continue
		}
		if p.from != "" {
			delete(names, p.from)
		}
		if p.to != "" {
			names[p.to] = p.node
		}
	}
	n := NewCrashFS()
	for _, name := range slices.Sorted(maps.Keys(names)) { // sorted: the same r gives the same
		data := names[name].powerCut(r)
		i := &inode{data: data, durable: bytes.Clone(data)}
		n.names[name], n.durable[name] = i, i
	}
	return n
}

func (i *inode) powerCut(r *rand.Rand) []byte {
	mode, cut := r.IntN(4), r.IntN(len(i.pending)+1)
	data := bytes.Clone(i.durable)
	for k, p := range i.pending {
		switch {
		case mode == 0, mode == 1 && k >= cut:
			return data
		case mode == 3 || k < cut:
			data = p.apply(data)
		case p.data == nil:
			return data // writes behind a truncation need it
		default:
			// Some sectors of it, as the disk would have them.
			for off := p.off; off < p.off+int64(len(p.data)); {
				end := min(p.off+int64(len(p.data)), (off/sector+1)*sector)
				if r.IntN(2) == 0 {
					data = change{off, p.data[off-p.off : end-p.off]}.apply(data)
				}
				off = end
			}
		}
	}
	return data
}

func (p change) apply(b []byte) []byte {
	end := p.off + int64(len(p.data))
	if p.data == nil && end <= int64(len(b)) {
		return b[:end:end]
	}
	if grow := end - int64(len(b)); grow > 0 {
		b = append(b, make([]byte, grow)...)
	}
	copy(b[p.off:], p.data)
	return b
}

// Corrupt changes a file below the process and durably.
func (c *CrashFS) Corrupt(name string, change func([]byte) []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := c.names[name]
	if i == nil {
		i = &inode{}
		c.names[name], c.durable[name] = i, i
	}
	i.data = change(bytes.Clone(i.data))
	i.durable, i.pending = bytes.Clone(i.data), nil
}

// Names returns the names of all files.
func (c *CrashFS) Names() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Sorted(maps.Keys(c.names))
}

// Content returns what is in a file.
func (c *CrashFS) Content(name string) []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	if i := c.names[name]; i != nil {
		return bytes.Clone(i.data)
	}
	return nil
}

func (c *CrashFS) before() {
	if c.Before != nil {
		c.Before()
	}
}

// MkdirAll implements journal.FS. Folders are there by themselves.
func (c *CrashFS) MkdirAll(string) error { return nil }

// ReadDir implements journal.FS.
func (c *CrashFS) ReadDir(dir string) ([]string, error) {
	var names []string
	for _, name := range c.Names() {
		if filepath.Dir(name) == dir {
			names = append(names, filepath.Base(name))
		}
	}
	return names, nil
}

// Create implements journal.FS.
func (c *CrashFS) Create(name string) (journal.File, error) {
	c.before()
	c.mu.Lock()
	defer c.mu.Unlock()
	i := &inode{}
	c.names[name] = i
	c.pending = append(c.pending, naming{to: name, node: i})
	return &crashFile{c, i}, nil
}

// Open implements journal.FS.
func (c *CrashFS) Open(name string) (journal.File, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := c.names[name]
	if i == nil {
		return nil, fmt.Errorf("open %s: %w", name, fs.ErrNotExist)
	}
	return &crashFile{c, i}, nil
}

// Remove implements journal.FS.
func (c *CrashFS) Remove(name string) error {
	c.before()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.names[name] == nil {
		return fmt.Errorf("remove %s: %w", name, fs.ErrNotExist)
	}
	delete(c.names, name)
	c.pending = append(c.pending, naming{from: name})
	return nil
}

// Rename implements journal.FS.
func (c *CrashFS) Rename(from, to string) error {
	c.before()
	c.mu.Lock()
	defer c.mu.Unlock()
	i := c.names[from]
	if i == nil {
		return fmt.Errorf("rename %s: %w", from, fs.ErrNotExist)
	}
	delete(c.names, from)
	c.names[to] = i
	c.pending = append(c.pending, naming{from: from, to: to, node: i})
	return nil
}

// SyncDir implements journal.FS.
func (c *CrashFS) SyncDir(string) error {
	c.before()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.durable, c.pending = maps.Clone(c.names), nil
	return nil
}

// Lock implements journal.FS.
func (c *CrashFS) Lock(name string) (io.Closer, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.locks[name] {
		return nil, fmt.Errorf("lock %s: %w", name, journal.ErrLocked)
	}
	c.locks[name] = true
	return closer(func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.locks, name)
	}), nil
}

type closer func()

func (f closer) Close() error { f(); return nil }

type crashFile struct {
	c *CrashFS
	i *inode
}

func (f *crashFile) ReadAt(p []byte, off int64) (int, error) {
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	return bytes.NewReader(f.i.data).ReadAt(p, off)
}

func (f *crashFile) WriteAt(p []byte, off int64) (int, error) {
	f.c.before()
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	f.change(change{off, append(make([]byte, 0, len(p)), p...)})
	return len(p), nil
}

func (f *crashFile) Truncate(size int64) error {
	f.c.before()
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	f.change(change{off: size})
	return nil
}

func (f *crashFile) change(p change) {
	f.i.data = p.apply(f.i.data)
	f.i.pending = append(f.i.pending, p)
}

func (f *crashFile) Sync() error {
	f.c.before()
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	f.i.durable, f.i.pending = bytes.Clone(f.i.data), nil
	return nil
}

func (f *crashFile) Size() (int64, error) {
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	return int64(len(f.i.data)), nil
}

func (f *crashFile) Close() error { return nil }
