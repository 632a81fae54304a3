package bench

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/image"
)

// The budgets of images that come from a store, see DESIGN of images.
const (
	lazyOfEager   = 0.3  // of a cold environment, time
	lazyOfUnpack  = 0.1  // likewise
	fetchedFirst  = 3.0  // bytes fetched of bytes touched, nothing known
	fetchedAgain  = 1.5  // likewise, with a recorded profile
	writtenOfPull = 0.45 // bytes written locally in a burst
	neverHurt     = 1.0  // time with profiles, of that without
	hardlyHurt    = 1.1  // likewise, with profiles that are of another task
)

// ImageOptions size a run of Images. Program and Connect are required; other zero
// fields have defaults.
type ImageOptions struct {
	Program, Guest string // of dsec and dsec-guest
	Connect        func(url, token string) (dsec.Services, error)
	Dir            string // an existing folder for everything
	Log            func(format string, args ...any)

	Envs    int           // environments; default 64
	N       int           // sandboxes; default 256
	Many    int           // at a time; default 16
	Size    int64         // of the files of one environment; default 64 MiB
	Touched float64       // share of its bytes that a task reads; default 0.08
	Debian  string        // a root file system as a tar, under the files of each environment; default none
	Latency time.Duration // of the store; default 1 ms
	Rate    int64         // of the store, bytes a second; default 200 MB
	Packed  bool          // the store has chunks compressed; default plain
	Unpacks int           // sandboxes of the unpacked variant, which is counted up to N; default at most 32
}

// noticed is how long after its first sandbox a layer has its profile, and fetchedDir what a
// node's data folder calls what it fetched.
const (
	noticed    = 45 * time.Second
	fetchedDir = "cache"
)

func (o ImageOptions) withDefaults() ImageOptions {
	def(&o.Envs, 64)
	def(&o.N, 256)
	def(&o.Many, 16)
	def(&o.Size, 64<<20)
	def(&o.Touched, 0.08)
	def(&o.Latency, time.Millisecond)
	def(&o.Rate, 200_000_000)
	def(&o.Unpacks, min(o.N, 32))
	if o.Log == nil {
		o.Log = func(string, ...any) {}
	}
	return o
}

// imageBench is one run: environments in a store, and what starts from it.
type imageBench struct {
	o       ImageOptions
	store   string // folder of the store
	envs    []environment
	report  *Report
	limited *blob.Limited
}

// environment is one of them, in every form that a variant starts from.
type environment struct {
	name    string
	digest  string
	tar     blob.Digest // its compressed tar, in a store of its own
	plain   int64       // bytes of files
	packed  int64       // of the compressed tar
	touched int64       // bytes that its task reads
}

// Images measures a burst of sandboxes in environments that a node has never
// seen, on a store with latency and a bound to its rate: read when they are
// touched, all in the cache, pulled first, and unpacked for each sandbox. Each
// variant is a node of its own with an empty folder, in one run.
func Images(ctx context.Context, o ImageOptions) (_ *Report, err error) {
	o = o.withDefaults()
	b := &imageBench{o: o, store: filepath.Join(o.Dir, "store"), report: NewReport("image")}
	if l := load(); l > quietLoad*float64(b.report.Host.CPUs) {
		b.report.Note("The host was busy before the run began: %.1f processes wanted to run.", l)
	}
	if err := b.prepare(ctx); err != nil {
		return nil, err
	}
	lazy, cached, err := b.lazy(ctx)
	if err != nil {
		return nil, fmt.Errorf("lazy: %w", err)
	}
	learned, misled, other, err := b.learned(ctx)
	if err != nil {
		return nil, fmt.Errorf("learned: %w", err)
	}
	eager, err := b.eager(ctx)
	if err != nil {
		return nil, fmt.Errorf("eager: %w", err)
	}
	unpack, err := b.unpack(ctx)
	if err != nil {
		return nil, fmt.Errorf("unpack: %w", err)
	}
	r := b.report
	r.Hold("a burst of lazy environments, of pulling them first", lazy.took.Seconds()/eager.took.Seconds(), AtMost, lazyOfEager, "ratio")
	r.Hold("a burst of lazy environments, of unpacking for each sandbox", lazy.took.Seconds()/unpack.took.Seconds(), AtMost, lazyOfUnpack, "ratio")
	r.Hold("bytes written locally, lazy, of pulling first", float64(lazy.written)/float64(eager.written), AtMost, writtenOfPull, "ratio")
	r.Hold("a burst of lazy environments with profiles, of one without", learned.took.Seconds()/lazy.took.Seconds(), AtMost, neverHurt, "ratio")
	r.Hold("a burst of lazy environments with profiles, of pulling them first", learned.took.Seconds()/eager.took.Seconds(), AtMost, lazyOfEager, "ratio")
	r.Hold("a burst of lazy environments with profiles, of unpacking for each sandbox", learned.took.Seconds()/unpack.took.Seconds(), AtMost, lazyOfUnpack, "ratio")
	r.Hold("a burst with profiles of another task, of one without profiles", misled.took.Seconds()/other.took.Seconds(), AtMost, hardlyHurt, "ratio")
	if lazy.fetched > 0 && learned.fetched > 0 {
		r.Hold("bytes fetched, of bytes touched, with a profile", float64(learned.fetched)/float64(b.touched()), AtMost, fetchedAgain, "ratio")
		r.Hold("bytes fetched, of bytes touched, nothing known", float64(lazy.fetched)/float64(b.touched()), AtMost, fetchedFirst, "ratio")
	} else {
		r.Note("What was fetched is not known: the node does not keep parts of blobs.")
	}
	for _, v := range []variant{lazy, learned, misled, other, cached, eager, unpack} {
		v.add(r)
	}
	stored, err := taken(b.store)
	if err != nil {
		return nil, err
	}
	var packed int64
	for _, e := range b.envs {
		packed += e.packed
	}
	r.Value("store", mb(stored), "MB")
	r.Value("store, of the compressed tars that went in", float64(stored)/float64(packed), "ratio")
	r.Value("touched by the tasks, each environment once", mb(b.touched()), "MB")
	r.Note("%d sandboxes, %d at a time, over %d environments of %s each, of which a task reads %.0f %%; the store answers after %v and gives %s a second.",
		o.N, o.Many, o.Envs, size(b.envs[0].plain), 100*float64(b.envs[0].touched)/float64(b.envs[0].plain), o.Latency, size(o.Rate))
	r.Note("Unpacked were %d sandboxes; time and bytes are counted up to %d.", o.Unpacks, o.N)
	return r, nil
}

func (b *imageBench) compress() string {
	if b.o.Packed {
		return "zstd"
	}
	return "none"
}

// slowStore is the store as nodes far from it see it.
func (b *imageBench) slowStore() string {
	return fmt.Sprintf("file://%s?compress=%s&latency=%v&rate=%d", b.store, b.compress(), b.o.Latency, b.o.Rate)
}

func (b *imageBench) touched() (n int64) {
	for i := range min(b.o.N, len(b.envs)) {
		n += b.envs[i].touched
	}
	return n
}

func mb(n int64) float64 { return float64(n) / 1e6 }

// size gives bytes for people.
func size(n int64) string {
	if n >= 1e9 {
		return number(float64(n)/1e9) + " GB"
	}
	return number(mb(n)) + " MB"
}

// prepare makes the environments and imports them on a node of their own.
func (b *imageBench) prepare(ctx context.Context) (err error) {
	n, err := b.node(ctx, "import", "file://"+b.store+"?compress="+b.compress())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.close()) }()
	tars, err := blob.OpenFolder(filepath.Join(b.o.Dir, "tars"))
	if err != nil {
		return err
	}
	b.limited = blob.NewLimited(tars, blob.Limits{Latency: b.o.Latency, BytesPerSecond: b.o.Rate, Exact: true})
	for i := range b.o.Envs {
		b.o.Log("making environment %d of %d", i+1, b.o.Envs)
		e, err := b.make(ctx, n, tars, i)
		if err != nil {
			return fmt.Errorf("make environment: %w", err)
		}
		b.envs = append(b.envs, e)
	}
	return nil
}

// variant is what one way of starting took.
type variant struct {
	name             string
	took             time.Duration
	each             *Sample
	written, fetched int64
}

func (v variant) add(r *Report) {
	r.Value(v.name+": burst", v.took.Seconds(), "s")
	r.Add(v.name+": a sandbox with its task", v.each)
	r.Value(v.name+": written locally", mb(v.written), "MB")
	if v.fetched > 0 {
		r.Value(v.name+": fetched", mb(v.fetched), "MB")
	}
}

// lazy bursts on a node that reads the store when it must, and then once more
// when all is there.
func (b *imageBench) lazy(ctx context.Context) (lazy, cached variant, err error) {
	n, err := b.node(ctx, "lazy", b.slowStore())
	if err != nil {
		return lazy, cached, err
	}
	defer func() { err = errors.Join(err, n.close()) }()
	for _, e := range b.envs {
		if err := n.adopt(ctx, e); err != nil {
			return lazy, cached, err
		}
	}
	if lazy, err = b.burst(ctx, n, "lazy", readSome, nil); err != nil {
		return lazy, cached, err
	}
	b.o.Log("reading all of the environments")
	if err := parallel(ctx, b.o.Many, 0, len(b.envs), func(ctx context.Context, i int) error {
		return n.task(ctx, b.envs[i].name, readAll)
	}); err != nil {
		return lazy, cached, err
	}
	cached, err = b.burst(ctx, n, "cached", readSome, nil)
	return lazy, cached, err
}

// learned bursts on a node that has profiles of all environments and nothing else of
// them: with the task that the profiles are of, and with another, which has its own
// baseline on a node without profiles.
func (b *imageBench) learned(ctx context.Context) (learned, misled, other variant, err error) {
	n, err := b.node(ctx, "learned", b.slowStore())
	if err != nil {
		return learned, misled, other, err
	}
	defer func() { err = errors.Join(err, n.close()) }()
	for _, e := range b.envs {
		if err := n.adopt(ctx, e); err != nil {
			return learned, misled, other, err
		}
	}
	run := func(name, line string) (v variant) {
		if err == nil {
			v, err = b.burst(ctx, n, name, line, nil)
		}
		if err == nil {
			err = b.restart(ctx, n)
		}
		return v
	}
	// The list of a layer is closed some seconds after its first sandbox.
	err = parallel(ctx, b.o.Many, 0, len(b.envs), func(ctx context.Context, i int) error { return n.task(ctx, b.envs[i].name, readSome) })
	if err == nil {
		b.o.Log("waiting for the profiles")
		select {
		case <-time.After(noticed):
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
	}
	if err == nil {
		err = b.restart(ctx, n)
	}
	learned, misled = run("learned", readSome), run("misled", readOther)
	if err != nil {
		return learned, misled, other, err
	}
	other, err = b.other(ctx)
	return learned, misled, other, err
}

// other bursts with the other task on a node that knows nothing.
func (b *imageBench) other(ctx context.Context) (_ variant, err error) {
	n, err := b.node(ctx, "other", b.slowStore())
	if err != nil {
		return variant{}, err
	}
	defer func() { err = errors.Join(err, n.close()) }()
	for _, e := range b.envs {
		if err := n.adopt(ctx, e); err != nil {
			return variant{}, err
		}
	}
	return b.burst(ctx, n, "other", readOther, nil)
}

// eager bursts on a node that pulls an environment whole before its first
// sandbox, once, at the speed that the store gives: what its own folder then has
// are the same bytes as the store's, checked.
func (b *imageBench) eager(ctx context.Context) (_ variant, err error) {
	// Packed blobs are pulled as they are, into a folder that the node then reads.
	store, folder := "", filepath.Join(b.o.Dir, "eager", "data", "blobs")
	if b.o.Packed {
		folder = filepath.Join(b.o.Dir, "eager", "near")
		store = "file://" + folder + "?compress=zstd"
	}
	n, err := b.node(ctx, "eager", store)
	if err != nil {
		return variant{}, err
	}
	defer func() { err = errors.Join(err, n.close()) }()
	from, err := blob.OpenFolder(b.store)
	if err != nil {
		return variant{}, err
	}
	far := blob.NewLimited(from, blob.Limits{Latency: b.o.Latency, BytesPerSecond: b.o.Rate, Exact: true})
	near, err := blob.OpenFolder(folder)
	if err != nil {
		return variant{}, err
	}
	library := image.New(from, image.LibraryOptions{})
	pulls := make([]func() error, len(b.envs))
	for i, e := range b.envs {
		pulls[i] = sync.OnceValue(func() error {
			l, err := library.Stat(ctx, blob.Digest(e.digest))
			if err != nil {
				return err
			}
			parts := l.Manifest.Parts()
			if err := parallel(ctx, 4, 0, len(parts), func(ctx context.Context, j int) error {
				return blob.Copy(ctx, near, far, parts[j].Digest)
			}); err != nil {
				return err
			}
			if err := blob.Copy(ctx, near, far, l.Digest); err != nil {
				return err
			}
			return n.adopt(ctx, e)
		})
	}
	return b.burst(ctx, n, "eager", readSome, func(i int) error { return pulls[i]() })
}

// burst creates the sandboxes, runs the task of each, and stops it.
func (b *imageBench) burst(ctx context.Context, n *imageNode, name, line string, first func(env int) error) (variant, error) {
	b.o.Log("%s: a burst of %d", name, b.o.N)
	if err := dropCaches(); err != nil { // what was just written is cold, for all alike
		return variant{}, err
	}
	before, err := taken(n.server.config.Dir)
	if err != nil {
		return variant{}, err
	}
	fetched := n.fetched(ctx)
	v := variant{name: name, each: Millis()}
	var mu sync.Mutex
	begin := time.Now()
	err = parallel(ctx, b.o.Many, 0, b.o.N, func(ctx context.Context, i int) error {
		begin := time.Now()
		env := i % len(b.envs)
		if first != nil {
			if err := first(env); err != nil {
				return err
			}
		}
		if err := n.task(ctx, b.envs[env].name, line); err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		v.each.Took(time.Since(begin))
		return nil
	})
	if err != nil {
		return v, err
	}
	v.took = time.Since(begin)
	after, err := taken(n.server.config.Dir)
	v.written, v.fetched = after-before, n.fetched(ctx)-fetched
	return v, err
}
