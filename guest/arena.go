package guest

import (
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// arenaChunk is the unit in which commands get room in the arena. What is not
// written of one takes no space.
const arenaChunk = 64 << 10

// arena is one file without a name that holds the output of all commands, so
// that their number is not bounded by descriptors. It is made when it is first
// needed.
type arena struct {
	dir int // folder of the file; -1 for memory

	mu   sync.Mutex
	f    *os.File
	next uint32
	free []uint32
}

// alloc gives a chunk. The error is that of making the file.
func (a *arena) alloc() (uint32, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.f == nil {
		f, err := a.open()
		if err != nil {
			return 0, err
		}
		a.f = f
	}
	if n := len(a.free); n > 0 {
		c := a.free[n-1]
		a.free = a.free[:n-1]
		return c, nil
	}
	a.next++
	return a.next - 1, nil
}

func (a *arena) open() (*os.File, error) {
	if a.dir >= 0 {
		fd, err := unix.Openat(a.dir, ".", unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
		if err != nil {
			return nil, os.NewSyscallError("openat", err)
		}
		return os.NewFile(uintptr(fd), "output"), nil
	}
	fd, err := unix.MemfdCreate("output", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	return os.NewFile(uintptr(fd), "output"), nil
}

// release gives chunks and their space back.
func (a *arena) release(chunks []uint32) {
	if len(chunks) == 0 {
		return
	}
	a.mu.Lock()
	f := a.f
	a.mu.Unlock()
	for _, c := range chunks {
		// Where holes cannot be made the space is used again by the next owner.
		unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(c)*arenaChunk, arenaChunk) //nolint:errcheck
	}
	a.mu.Lock()
	a.free = append(a.free, chunks...)
	a.mu.Unlock()
}

func (a *arena) close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.f != nil {
		a.f.Close()
		a.f = nil
	}
}

func (a *arena) writeAt(p []byte, chunk uint32, off int) error {
	_, err := a.f.WriteAt(p, int64(chunk)*arenaChunk+int64(off))
	return err
}

func (a *arena) readAt(p []byte, chunk uint32, off int) error {
	_, err := a.f.ReadAt(p, int64(chunk)*arenaChunk+int64(off))
	return err
}

// span is a growing run of bytes in the arena. Its owner locks it, but what has
// been written never changes, so readers need the chunks' numbers only.
type span struct {
	a      *arena
	chunks []uint32
	size   int64
}

// write appends p. On an error nothing of p counts.
func (s *span) write(p []byte) error {
	at := s.size
	for len(p) > 0 {
		i, off := int(at/arenaChunk), int(at%arenaChunk)
		if i == len(s.chunks) {
			c, err := s.a.alloc()
			if err != nil {
				return err
			}
			s.chunks = append(s.chunks, c)
		}
		n := min(len(p), arenaChunk-off)
		if err := s.a.writeAt(p[:n], s.chunks[i], off); err != nil {
			return err
		}
		p, at = p[n:], at+int64(n)
	}
	s.size = at
	return nil
}

// read fills p from offset at on; p must lie within what is written.
func (s *span) read(p []byte, at int64) error {
	for len(p) > 0 {
		i, off := int(at/arenaChunk), int(at%arenaChunk)
		n := min(len(p), arenaChunk-off)
		if err := s.a.readAt(p[:n], s.chunks[i], off); err != nil {
			return err
		}
		p, at = p[n:], at+int64(n)
	}
	return nil
}
