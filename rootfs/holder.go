package rootfs

import (
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Holder keeps layer mounts by name for the next process, which then shares superblock and
// page cache with the sandboxes that run: package hold.
type Holder interface {
	Put(name string, f *os.File) error
	Get(name string) (*os.File, error)
	List(prefix string) ([]string, error)
	Drop(name string) error
}

// heldPrefix begins the names of layers in a holder; the digest and the way follow.
const heldPrefix = "layer/"

func heldName(digest string, l Layer) string {
	way := "/plain"
	if l.Lazy {
		way = "/lazy"
	}
	return heldPrefix + digest + way
}

// Adopt makes the table keep its mounts in h from now on and takes over those that are there,
// from an earlier process, as idle ones. It is called before the table is used, and again
// with another holder when that one has died. A mount that cannot be kept is this process's
// alone.
func (l *Layers) Adopt(h Holder) error {
	names, err := h.List(heldPrefix)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.holder = h
	for _, s := range l.table {
		select {
		case <-s.ready:
		default:
			continue // its mount goes to the new holder
		}
		if s.held != "" && s.err == nil {
			h.Put(s.held, s.mount) //nolint:errcheck // see above
		}
	}
	for _, name := range names {
		digest, _, _ := strings.Cut(strings.TrimPrefix(name, heldPrefix), "/")
		if l.table[digest] != nil {
			continue
		}
		m, err := h.Get(name)
		if err != nil {
			continue
		}
		if !usable(m) {
			m.Close()
			h.Drop(name) //nolint:errcheck // it is of no use to the next either
			continue
		}
		s := &shared{ready: make(chan struct{}), mount: m, held: name}
		close(s.ready)
		l.table[digest] = s
		l.idle = append(l.idle, digest)
	}
	return nil
}

// usable reports whether a mount can be cloned, which one of an old kernel's attic cannot.
func usable(m *os.File) bool {
	c, err := idmapped(m, nil)
	if err != nil {
		return false
	}
	defer c.Close()
	var st unix.Statfs_t
	return unix.Fstatfs(int(c.Fd()), &st) == nil && st.Type == unix.EROFS_SUPER_MAGIC_V1
}

// hold gives a mount to the holder.
func (l *Layers) hold(digest string, layer Layer, m *os.File) (name string) {
	l.mu.Lock()
	h := l.holder
	l.mu.Unlock()
	if h == nil || !usable(m) {
		return ""
	}
	name = heldName(digest, layer)
	if h.Put(name, m) != nil {
		return ""
	}
	return name
}

// letGo takes a mount from the holder. Requires: l.mu held.
func (l *Layers) letGo(s *shared) {
	if s.held != "" && l.holder != nil {
		l.holder.Drop(s.held) //nolint:errcheck // a dead holder has dropped it
	}
}
