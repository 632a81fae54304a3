package fuse

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// Bounds of a server.
const (
	maxIdle  = 2  // goroutines that listen and have nothing to do
	maxBytes = 64 // reads that have a buffer; more wait for one
)

// Server answers the kernel's requests for one mount.
type Server struct {
	dev    *os.File
	folder Folder
	log    *slog.Logger

	idle atomic.Int64
	wg   sync.WaitGroup
	room chan struct{} // one for each read that has a buffer
	bufs sync.Pool     // of *[]byte of maxRead

	mu     sync.Mutex
	flying map[uint64]context.CancelFunc // reads by the number of their request
}

// Serve answers what comes through an open /dev/fuse, which stays the caller's, until
// nothing is mounted from it any more. The log gets what the kernel should not have sent.
func Serve(dev *os.File, folder Folder, log *slog.Logger) *Server {
	s := &Server{dev: dev, folder: folder, log: log, room: make(chan struct{}, maxBytes), flying: map[uint64]context.CancelFunc{}}
	s.bufs.New = func() any { b := make([]byte, maxRead); return &b }
	s.wg.Go(s.listen)
	return s
}

// Wait returns when nothing is mounted any more.
func (s *Server) Wait() { s.wg.Wait() }

// Resend has the kernel ask again for all that was asked and not answered: by the server
// before this one. It is errors.ErrUnsupported before Linux 6.9.
func Resend(dev *os.File) error {
	b := make([]byte, outHeaderSize)
	binary.NativeEndian.PutUint32(b, outHeaderSize)
	binary.NativeEndian.PutUint32(b[4:], notifyResend)
	if _, err := unix.Write(int(dev.Fd()), b); err != nil {
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) {
			err = fmt.Errorf("%w: %w", errors.ErrUnsupported, err)
		}
		return fmt.Errorf("have requests sent again: %w", err)
	}
	return nil
}

// listen takes requests and answers them itself. The last who listens starts another one
// before it does, so that one always does.
func (s *Server) listen() {
	buf := make([]byte, requestBuf)
	for {
		s.idle.Add(1)
		n, err := unix.Read(int(s.dev.Fd()), buf)
		if s.idle.Add(-1) == 0 && err == nil {
			s.wg.Go(s.listen)
		}
		switch {
		case err == nil:
			s.handle(buf[:n])
			if s.idle.Load() >= maxIdle {
				return
			}
		case errors.Is(err, unix.ENODEV): // nothing is mounted
			return
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOENT):
			// ENOENT: what was to be read was called off meanwhile.
		default:
			s.log.Error("read from /dev/fuse", "err", err)
			return
		}
	}
}

func (s *Server) handle(b []byte) {
	r, err := decode(b)
	if err != nil {
		s.log.Error("decode FUSE request", "err", err)
		if r.unique != 0 {
			s.fail(r, unix.EIO)
		}
		return
	}
	switch r.op {
	case opForget, opBatchForget: // nothing is remembered, and no answer wanted
	case opInterrupt:
		s.interrupt(r)
	case opInit:
		s.reply(r, initReply(r))
	case opRead:
		s.read(r)
	case opLookup:
		if f, ok := s.folder.Lookup(r.name); ok && r.node == RootNode {
			s.reply(r, entryReply(f))
		} else {
			s.fail(r, unix.ENOENT)
		}
	case opGetattr, opOpen:
		s.node(r)
	case opOpendir:
		s.reply(r, openReply(0))
	case opReaddir:
		s.reply(r, readdirReply(s.sorted(), r.off, min(r.size, maxRead)))
	case opStatfs:
		s.reply(r, statfsReply(s.folder.Files()))
	case opRelease, opReleasedir, opDestroy:
		s.reply(r, nil)
	default:
		s.fail(r, unix.ENOSYS)
	}
}

func (s *Server) sorted() []File {
	files := s.folder.Files()
	slices.SortFunc(files, func(a, b File) int { return strings.Compare(a.Name, b.Name) })
	return files
}

func (s *Server) node(r request) {
	f, ok := File{Node: RootNode}, r.node == RootNode
	if !ok {
		f, ok = s.folder.File(r.node)
	}
	switch {
	case !ok:
		s.fail(r, unix.ESTALE)
	case r.op == opOpen:
		s.reply(r, openReply(openDirectIO|openNoFlush))
	default:
		s.reply(r, attrReply(f))
	}
}

// read answers a READ. It can be called off as long as it has not been answered.
func (s *Server) read(r request) {
	if r.size > maxRead || r.off > 1<<62 {
		s.fail(r, unix.EINVAL)
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	s.mu.Lock()
	s.flying[r.unique] = cancel
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.flying, r.unique)
		s.mu.Unlock()
	}()
	var buf *[]byte
	take := func() ([]byte, error) {
		select {
		case s.room <- struct{}{}:
		case <-ctx.Done():
			return nil, unix.EINTR
		}
		buf = s.bufs.Get().(*[]byte)
		return (*buf)[:r.size], nil
	}
	n, err := s.folder.Read(ctx, Read{Node: r.node, Off: int64(r.off), Size: int(r.size), Pid: int(r.pid), Buf: take})
	var errno syscall.Errno
	switch {
	case err == nil && n == 0:
		s.reply(r, nil)
	case err == nil:
		s.reply(r, (*buf)[:n])
	case ctx.Err() != nil:
		s.fail(r, unix.EINTR)
	case errors.As(err, &errno) && errno > 0 && errno < 512: // others the kernel does not take
		s.fail(r, errno)
	default:
		s.fail(r, unix.EIO)
	}
	if buf != nil {
		s.bufs.Put(buf)
		<-s.room
	}
}

// interrupt calls a read off. One that is not known was answered, or comes through another
// listener in this moment: the kernel asks again as long as there is such a request.
func (s *Server) interrupt(r request) {
	s.mu.Lock()
	cancel, ok := s.flying[r.target]
	s.mu.Unlock()
	if ok {
		cancel()
		return
	}
	s.fail(r, unix.EAGAIN)
}

func (s *Server) reply(r request, body []byte) {
	var h [outHeaderSize]byte
	binary.NativeEndian.PutUint32(h[:], uint32(outHeaderSize+len(body)))
	binary.NativeEndian.PutUint64(h[8:], r.unique)
	parts := [][]byte{h[:], body}
	if len(body) == 0 {
		parts = parts[:1]
	}
	_, err := unix.Writev(int(s.dev.Fd()), parts)
	// ENOENT: it was called off, or asked again of a successor and answered there.
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENODEV) {
		s.log.Error("answer FUSE request", "op", uint32(r.op), "err", err)
	}
}

func (s *Server) fail(r request, errno syscall.Errno) {
	var h [outHeaderSize]byte
	binary.NativeEndian.PutUint32(h[:], outHeaderSize)
	binary.NativeEndian.PutUint32(h[4:], uint32(-int32(errno)))
	binary.NativeEndian.PutUint64(h[8:], r.unique)
	_, err := unix.Write(int(s.dev.Fd()), h[:])
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENODEV) {
		s.log.Error("refuse FUSE request", "op", uint32(r.op), "err", err)
	}
}
