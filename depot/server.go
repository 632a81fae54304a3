package depot

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/fuse"
	"github.com/dsec-go/dsec/hold"
	"github.com/dsec-go/dsec/image"
	"github.com/dsec-go/dsec/lazy"
)

// Config is what a depot is made of.
type Config struct {
	Dir    string // its own, on a file system with sparse files
	Mount  string // folder for the FUSE mount; absolute and clean
	Holder string // folder of the node's holder

	Store blob.Store    // where layers are
	Bytes int64         // of chunks kept
	Limit time.Duration // of one read; default lazy.DefaultLimit

	// InPlace tells plain data blobs as the store's own files, unverified. The store has
	// to be a blob.LocalPather.
	InPlace bool

	// Layers is how many are known at most, but for those in use: each costs memory, two open
	// files and, forgotten, its chunks. Default DefaultLayers.
	Layers int

	// NoteFor is how long what is read of a layer is noted; default NoteFor.
	NoteFor time.Duration

	Label string // told to who greets the depot: what it is made of
	Log   *slog.Logger
}

// DefaultLayers is how many layers a depot knows.
const DefaultLayers = 2048

// takeover is how long a successor waits for the one before it to be gone.
const takeover = 20 * time.Second

// server is the process's state.
type server struct {
	cfg     Config
	library *image.Library
	whole   near
	cache   *lazy.Cache
	folder  *folder
	flights singleflight.Group
	life    context.Context
	stop    context.CancelFunc
	packs   chan struct{} // one for each pack of pages that is being brought
	packing chan struct{} // one for the pack that is being made

	mu    sync.Mutex
	conns map[string]*os.File // connections to the kernel, by their names in the holder
}

// near are the whole blobs of a depot. What is here is known without asking the store, so that
// layers used before can be used while it is away.
type near struct {
	*blob.Cached
	here *blob.Folder
}

// Stat implements blob.Store.
func (n near) Stat(ctx context.Context, d blob.Digest) (blob.Info, error) {
	if info, err := n.here.Stat(ctx, d); err == nil {
		return info, nil
	}
	return n.Cached.Stat(ctx, d)
}

// Run is the whole of the process. It returns when it was told to end, or ctx ends, which
// leaves the mount for a successor.
func Run(ctx context.Context, c Config) error {
	if c.Limit == 0 {
		c.Limit = lazy.DefaultLimit
	}
	if c.Layers == 0 {
		c.Layers = DefaultLayers
	}
	if c.NoteFor == 0 {
		c.NoteFor = NoteFor
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	s := &server{cfg: c, life: ctx, stop: stop, packs: make(chan struct{}, packsAtATime), packing: make(chan struct{}, 1), conns: map[string]*os.File{}}
	if err := s.open(ctx); err != nil {
		return fmt.Errorf("open depot: %w", err)
	}
	holder, err := hold.Dial(c.Holder)
	if err != nil {
		return fmt.Errorf("open depot: %w", err)
	}
	defer holder.Close()
	// From here on reads that wait since the last process are answered.
	if err := s.takeConnections(holder); err != nil {
		return fmt.Errorf("open depot: %w", err)
	}
	go s.keepConnections(ctx, holder)
	l, err := listen(c.Dir)
	if err != nil {
		return fmt.Errorf("open depot: %w", err)
	}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				if errors.Is(err, net.ErrClosed) {
					return
				}
				time.Sleep(10 * time.Millisecond) // out of descriptors
				continue
			}
			go s.serve(ctx, conn)
		}
	}()
	c.Log.Info("depot serves", "layers", s.folder.count(), "cached", s.cache.Stats().Cached)
	<-ctx.Done()
	return l.Close()
}

// open opens what lies in the folder. The process before may still be on its way out.
func (s *server) open(ctx context.Context) (err error) {
	c := s.cfg
	conf := lazy.Config{Store: c.Store, Dir: filepath.Join(c.Dir, partsName), Bytes: c.Bytes, Limit: c.Limit}
	for until := time.Now().Add(takeover); ; {
		if s.cache, err = lazy.Open(conf); err == nil {
			break
		}
		if !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(until) || ctx.Err() != nil {
			return err
		}
		time.Sleep(5 * time.Millisecond)
	}
	here, err := blob.OpenFolder(filepath.Join(c.Dir, wholeName))
	if err != nil {
		return err
	}
	bound := int64(0)
	if c.Bytes > 0 {
		bound = max(c.Bytes/8, 64<<20)
	}
	s.whole = near{blob.NewCached(here, c.Store, blob.CacheOptions{Bytes: bound}), here}
	s.library = image.New(s.whole, image.LibraryOptions{})
	r, err := openRegistry(filepath.Join(c.Dir, layersName), s.whole, s.cache, c.Limit)
	if err != nil {
		return err
	}
	spent, err := OpenLedger(c.Dir)
	if err != nil {
		return err
	}
	s.folder = &folder{registry: r, cache: s.cache, limit: c.Limit, spent: spent, log: c.Log, noted: notes{after: c.NoteFor}}
	return nil
}

// takeConnections serves the connections that lie in the holder and makes a new one if none
// of them is mounted.
func (s *server) takeConnections(h *hold.Client) error {
	names, err := h.List(fusePrefix)
	if err != nil {
		return err
	}
	for _, name := range names {
		dev, err := h.Get(name)
		if err != nil {
			return err
		}
		if err := fuse.Resend(dev); err != nil {
			// Nothing is mounted from it any more, or the kernel cannot send again: then
			// its end is what ends the reads that wait.
			s.cfg.Log.Warn("a connection is given up", "name", name, "err", err)
			dev.Close()
			if err := h.Drop(name); err != nil && !errors.Is(err, hold.ErrNone) {
				return err
			}
			continue
		}
		s.take(h, name, dev)
	}
	alive, err := s.mounted()
	if err != nil || alive {
		return err
	}
	if err := os.MkdirAll(s.cfg.Mount, 0o700); err != nil && !errors.Is(err, unix.ENOTCONN) && !errors.Is(err, os.ErrExist) {
		return err
	}
	dev, err := fuse.Mount(s.cfg.Mount)
	if err != nil {
		return err
	}
	name := fusePrefix + strconv.FormatInt(time.Now().UnixNano(), 36)
	if err := h.Put(name, dev); err != nil {
		dev.Close()
		return errors.Join(err, fuse.Unmount(s.cfg.Mount))
	}
	s.take(h, name, dev)
	return nil
}

// mounted reports whether what is mounted is served. What is not is taken away: it is of a
// boot, or a holder, that is no more.
func (s *server) mounted() (bool, error) {
	for {
		there, err := fuse.Mounted(s.cfg.Mount)
		if err != nil || !there {
			return false, err
		}
		answer := make(chan error, 1)
		go func() {
			var st unix.Statfs_t
			answer <- unix.Statfs(s.cfg.Mount, &st)
		}()
		select {
		case err = <-answer:
		case <-time.After(takeover):
			err = unix.ETIMEDOUT
		}
		if err == nil {
			return true, nil
		}
		s.cfg.Log.Info("a stale mount is taken away", "path", s.cfg.Mount, "err", err)
		if err := fuse.Unmount(s.cfg.Mount); err != nil {
			return false, err
		}
	}
}

// take serves one connection until nothing is mounted from it.
func (s *server) take(h *hold.Client, name string, dev *os.File) {
	s.mu.Lock()
	s.conns[name] = dev
	s.mu.Unlock()
	served := fuse.Serve(dev, s.folder, s.cfg.Log)
	go func() {
		served.Wait()
		s.mu.Lock()
		delete(s.conns, name)
		s.mu.Unlock()
		h.Drop(name) //nolint:errcheck // it holds nothing of worth
		dev.Close()
	}()
}

// keepConnections gives them to another holder when theirs dies.
func (s *server) keepConnections(ctx context.Context, h *hold.Client) {
	for {
		select {
		case <-h.Gone():
		case <-ctx.Done():
			return
		}
		next, err := hold.Dial(s.cfg.Holder)
		if err != nil {
			select {
			case <-time.After(50 * time.Millisecond): // dsec up starts one
			case <-ctx.Done():
				return
			}
			continue
		}
		s.mu.Lock()
		for name, dev := range s.conns {
			if err := next.Put(name, dev); err != nil {
				s.cfg.Log.Error("hold a connection", "err", err)
			}
		}
		s.mu.Unlock()
		h = next
	}
}

func (s *server) serve(ctx context.Context, conn net.Conn) {
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	in := bufio.NewScanner(conn)
	in.Buffer(nil, 2*MaxProfile)
	out := json.NewEncoder(conn)
	for in.Scan() {
		var q request
		err := json.Unmarshal(in.Bytes(), &q)
		var a response
		if err == nil && q.V != protocol {
			err = dsec.Errorf(dsec.Unsupported, "version %d of the depot's protocol", q.V)
		}
		if err == nil {
			a, err = s.answer(ctx, q)
		}
		if err != nil {
			err = image.Gone(err)
			a = response{Error: err.Error(), Kind: dsec.KindOf(err).String()}
		}
		if out.Encode(a) != nil {
			return
		}
		if q.Op == opRetire || q.Op == opEnd {
			s.stop()
		}
	}
}

func (s *server) answer(ctx context.Context, q request) (response, error) {
	d := blob.Digest(q.Digest)
	if q.Digest != "" && d.Check() != nil {
		return response{}, dsec.Errorf(dsec.Invalid, "digest %.80q", q.Digest)
	}
	switch q.Op {
	case opHello, opRetire:
		return response{Label: s.cfg.Label}, nil
	case opEnd:
		return response{}, s.unmount()
	case opLayer:
		l, err := s.layer(ctx, d, q.Form)
		return response{Layer: l}, err
	case opStats:
		return response{Stats: &Stats{
			Stats: s.cache.Stats(), Layers: s.folder.count(), Opened: s.folder.opened.Load(), Pid: os.Getpid(), Waited: s.folder.waited.Load(),
		}}, nil
	case opCached:
		return response{Cached: s.cached(q.Digests)}, nil
	case opProfile:
		if s.folder.noted.spoilt(d) {
			return response{}, dsec.Errorf(dsec.Lost, "the profile of layer %s is damaged, or its pages are gone", d)
		}
		n := s.folder.noted.take(d)
		if n == nil {
			return response{}, nil
		}
		b, err := s.pack(ctx, n)
		return response{Profile: b}, err
	case opKeep:
		inUse := map[blob.Digest]bool{}
		for _, d := range q.Digests {
			inUse[blob.Digest(d)] = true
		}
		if n := s.folder.forget(inUse, s.cfg.Layers, fresh); n > 0 {
			s.cfg.Log.Info("layers that nobody uses are forgotten", "count", n)
		}
		return response{}, nil
	case opPrefetch:
		return response{}, s.prefetch(ctx, d, q.Profile)
	}
	return response{}, dsec.Errorf(dsec.Unsupported, "request %.40q of the depot", q.Op)
}

// unmount takes the mount away, and with it what the holder has of it.
func (s *server) unmount() error {
	err := fuse.Unmount(s.cfg.Mount)
	h, herr := hold.Dial(s.cfg.Holder)
	if herr != nil {
		return err // nobody holds anything
	}
	defer h.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	for name := range s.conns {
		h.Drop(name) //nolint:errcheck // it ends with this process
	}
	return err
}

// cached gives how many bytes of layers are here.
func (s *server) cached(layers []string) map[string]int64 {
	out := map[string]int64{}
	for _, l := range layers { // the same may be asked for twice
		var n int64
		for _, d := range s.folder.data(blob.Digest(l)) {
			n += s.cache.Cached(d.Digest)
		}
		out[l] = n
	}
	return out
}

// layer has what is needed to mount a layer at hand. Calls for the same share the work.
func (s *server) layer(ctx context.Context, d blob.Digest, form Form) (*Layer, error) {
	got, err, _ := s.flights.Do(string(d)+string(form), func() (any, error) { return s.prepare(ctx, d, form) })
	if err != nil {
		return nil, err
	}
	return got.(*Layer), nil
}

func (s *server) prepare(ctx context.Context, d blob.Digest, form Form) (*Layer, error) {
	l, err := s.library.Stat(ctx, d)
	if err != nil {
		return nil, err
	}
	m := l.Manifest
	if err := s.folder.add(d, m.Data); err != nil {
		return nil, err
	}
	out := &Layer{}
	// A mount keeps what it has opened. Who comes back by the path finds it only if it stays.
	release := s.whole.Hold(m.Meta.Digest)
	if form == Files {
		s.folder.hold(d, release)
	} else {
		defer release()
	}
	if out.Meta, err = s.whole.LocalPath(ctx, m.Meta.Digest); err != nil {
		return nil, fmt.Errorf("metadata image: %w", err)
	}
	var blobs []blob.Digest
	for _, data := range m.Data {
		blobs = append(blobs, data.Digest)
		if s.cfg.InPlace && data.Packed == nil {
			path, err := s.inPlace(ctx, data.Part)
			if err != nil {
				return nil, fmt.Errorf("data: %w", err)
			}
			out.Data = append(out.Data, path)
			continue
		}
		k := s.folder.get(node(data.Digest))
		if err := s.folder.ready(ctx, k); err != nil {
			return nil, fmt.Errorf("data: %w", err)
		}
		path := filepath.Join(s.cfg.Mount, data.Digest.Hex())
		lazily := true
		if form == Mount {
			if plain, release, ok := s.cache.Path(data.Digest); ok {
				// The kernel's own opening keeps it from here on; see lazy. Until it is
				// mounted, this does.
				time.AfterFunc(time.Minute, release)
				path, lazily = plain, false
			}
		}
		out.Data, out.Lazy = append(out.Data, path), out.Lazy || lazily
	}
	if out.Lazy {
		s.folder.noted.begin(d, blobs)
	}
	return out, nil
}

// inPlace gives the store's own file of a blob after a look at its size.
func (s *server) inPlace(ctx context.Context, p image.Part) (string, error) {
	local, ok := s.cfg.Store.(blob.LocalPather)
	if !ok {
		return "", dsec.Errorf(dsec.Unsupported, "the store has no files")
	}
	info, err := s.cfg.Store.Stat(ctx, p.Digest)
	if err == nil && info.Size != p.Size {
		err = fmt.Errorf("blob %s has %d bytes, should have %d: %w", p.Digest, info.Size, p.Size, image.ErrCorrupt)
	}
	if err != nil {
		return "", err
	}
	return local.LocalPath(ctx, p.Digest)
}
