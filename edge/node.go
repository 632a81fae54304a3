package edge

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/driver"
)

// Config is what a Node is made of. Fields without a stated default are
// required.
type Config struct {
	Name    string      // of the node, for people
	Keys    *dsec.IDKey // of the cluster
	Place   dsec.Place  // this node and the present life of its table
	Boot    string      // names the present life of the kernel; default its boot id
	Drivers []driver.Driver
	Journal Journal
	Names   Names
	Roots   Roots
	Host    Host

	Quota     Quota                       // default: nothing is bounded
	Door      Door                        // default: Spec.API is Unsupported
	Committer Committer                   // default: Commit is Unsupported
	Snapshots Saved                       // default: snapshots are Unsupported, and what begins with one
	Temp      string                      // folder for states on their way; default the host's
	Absent    map[dsec.Kind]error         // why kinds without a driver have none; default unknown
	Ledger    Ledger                      // default: nobody knows what was fetched
	Measure   Measure                     // default: the drivers enforce disk limits
	Features  func() []dsec.FeatureStatus // default none
	Events    Events                      // default none
	Limits    Limits                      // default by the host
	Warm      WarmLimits                  // of machines for function calls; default by the host
	Keep      time.Duration               // how long ended records are kept; default 24 h
	DiskEvery time.Duration               // pause between two rounds of Measure; default 2 s
	Compact   int                         // appended records that lead to a checkpoint; default 20,000
}

// Limits bound what a node takes on. The zero value of each means its default.
type Limits struct {
	Sandboxes      int           // alive at once; default 10,000
	Starts         int           // under way at once; default two per core, at least 4
	Queue          int           // creates that wait for a start; default 512
	QueueWait      time.Duration // longest such wait; default 10 s
	StartTimeout   time.Duration // of one start, counted from when it left the queue; default 60 s
	StartMemory    int64         // bytes set aside for each start under way; default 16 MiB
	MemoryReserve  int64         // bytes that stay available; default 1/20 of the host's, at most 1 GiB
	DiskReserve    int64         // bytes that stay free; default 1/20 of the disk, at most 2 GiB
	TaskReserve    int           // processes and threads that stay free; default 1/16 of the host's
	MemoryPressure float64       // share of time waited for memory above which creates are refused; default 60
	CommitFreeze   time.Duration // longest that a workload stands still for a commit; default 30 s

	// When idle sandboxes are paused for their memory; see pressure.go.
	PausePressure float64       // share of time waited for memory from which it begins; default 15, negative never
	PauseRelief   float64       // share at which it ends; default a third of PausePressure
	PauseWater    int64         // bytes available below which it begins too; default 1/10 of the host's
	PauseIdle     time.Duration // how long idle a sandbox must be; default 10 s
}

func (l Limits) withDefaults(h HostSample) Limits {
	set(&l.Sandboxes, 10_000)
	set(&l.Starts, max(4, 2*runtime.GOMAXPROCS(0)))
	set(&l.Queue, 512)
	set(&l.QueueWait, 10*time.Second)
	set(&l.StartTimeout, time.Minute)
	set(&l.StartMemory, 16<<20)
	set(&l.MemoryReserve, min(h.Memory/20, 1<<30))
	set(&l.DiskReserve, min(h.Disk/20, 2<<30))
	set(&l.TaskReserve, h.MaxTasks/16)
	set(&l.MemoryPressure, 60)
	set(&l.CommitFreeze, 30*time.Second)
	set(&l.PausePressure, 15)
	set(&l.PauseRelief, l.PausePressure/3)
	set(&l.PauseWater, h.Memory/10)
	set(&l.PauseIdle, 10*time.Second)
	return l
}

func set[T comparable](p *T, v T) {
	var zero T
	if *p == zero {
		*p = v
	}
}

// Node is one node's edge. It is safe for concurrent use.
type Node struct {
	cfg     Config
	events  Events
	limits  Limits
	drivers map[dsec.Kind]driver.Driver
	gauge   gauge
	intern  interner
	clock   *clock
	timers  *timers
	gate    gate
	enders  chan struct{} // slots of ends that nobody waits for
	reclaim *reclaims

	functions *functions // nil without a driver of kind fncall

	life context.Context // of what outlives a request: ends, keyed creates; Close ends it
	kill context.CancelCauseFunc
	work sync.WaitGroup // guarded by mu: what life governs

	logMu    sync.Mutex // held over append and the change of the table that it describes
	appended int        // records since the last checkpoint; guarded by logMu
	broken   atomic.Bool
	saving   saving        // a checkpoint under way
	settled  chan struct{} // closed when Open has adopted all

	labeling sync.Mutex // over Label

	mu       sync.RWMutex
	byID     map[dsec.SandboxID]*entry
	keys     map[keyID]*entry
	creating map[keyID]*creation
	flights  map[string]*flight // keyed calls under way, by operation and key
	order    []*entry           // by ord, oldest first
	nextOrd  uint64
	alive    int // entries that are not ended, and creates in the queue
	tombs    tombstones
	open     bool // all that the last process left is accounted for
	closing  bool // no new creates
	closed   bool // no new work
}

// entry is one sandbox of the table. What is not set once is guarded by mu.
type entry struct {
	id      dsec.SandboxID
	ord     uint64
	clock   *clock // of the node
	earlier bool   // of an earlier epoch; set before anything runs

	mu       sync.Mutex
	rec      *record
	machine  driver.Machine          // nil while creating and once ended
	release  func()                  // gives the layers back; may be nil
	cancel   context.CancelCauseFunc // of the creation, nil afterwards
	ending   *ending                 // nil until an end was asked for
	over     chan struct{}           // closed at the end; nil until somebody waits
	lastUsed int64
	calls    int32 // in progress
	running  int32 // commands, as the guest tells; unknown (-1) counts as busy
	commit   bool  // a commit, a snapshot or a fork is under way
	turn     *turn // a pause or resume under way
	disk     int64 // as measured last
	measured int64 // when

	due  int64 // guarded by timers.mu
	slot int   // guarded by timers.mu
}

// keyID is a client's key of a creation. Keys of different projects have
// nothing to do with each other.
type keyID struct {
	project dsec.ProjectID
	key     string
}

// enderSlots is how many ends that nobody waits for run at once.
const enderSlots = 32

// Open makes a Node: it replays the journal, adopts the machines that outlived
// the last process, and brings both to agree, as the package comment says.
// ctx governs the opening only.
func Open(ctx context.Context, cfg Config) (*Node, error) {
	begin := time.Now()
	n, err := newNode(cfg)
	if err != nil {
		return nil, err
	}
	if err := n.cfg.Journal.Own(n.save, n.saved); err != nil {
		return nil, fmt.Errorf("own journal: %w", err)
	}
	old, err := n.replay()
	if err != nil {
		return nil, fmt.Errorf("replay journal: %w", err)
	}
	n.prune(begin)
	if err := n.adopt(ctx, old, begin); err != nil {
		n.halt() // and no checkpoint: the table is half adopted
		return nil, err
	}
	close(n.settled)
	n.mu.Lock()
	n.open = true
	n.mu.Unlock()
	n.endOrphans("")
	return n, nil
}

func newNode(cfg Config) (*Node, error) {
	switch {
	case cfg.Keys == nil:
		return nil, errors.New("open edge: no ID key")
	case cfg.Journal == nil || cfg.Names == nil || cfg.Roots == nil || cfg.Host == nil:
		return nil, errors.New("open edge: journal, names, roots and host are needed")
	case len(cfg.Drivers) == 0:
		return nil, errors.New("open edge: no driver")
	}
	set(&cfg.Keep, 24*time.Hour)
	set(&cfg.DiskEvery, 2*time.Second)
	set(&cfg.Compact, 20_000)
	if cfg.Boot == "" {
		b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
		if err != nil {
			return nil, fmt.Errorf("read boot id: %w", err)
		}
		cfg.Boot = strings.TrimSpace(string(b))
	}
	n := &Node{
		cfg:      cfg,
		events:   cfg.Events.withDefaults(),
		drivers:  map[dsec.Kind]driver.Driver{},
		clock:    newClock(),
		enders:   make(chan struct{}, enderSlots),
		reclaim:  newReclaims(),
		byID:     map[dsec.SandboxID]*entry{},
		keys:     map[keyID]*entry{},
		creating: map[keyID]*creation{},
		flights:  map[string]*flight{},
		settled:  make(chan struct{}),
	}
	for _, d := range cfg.Drivers {
		if n.drivers[d.Kind()] != nil {
			return nil, fmt.Errorf("open edge: two drivers of kind %s", d.Kind())
		}
		n.drivers[d.Kind()] = d
	}
	n.timers = newTimers(n.clock.nano)
	n.gauge.host = cfg.Host
	sample, err := n.gauge.sample()
	if err != nil {
		return nil, fmt.Errorf("measure host: %w", err)
	}
	n.limits = cfg.Limits.withDefaults(sample)
	n.gate = newGate(n.limits)
	if n.drivers[dsec.FnCall] != nil {
		n.functions = &functions{n, newWarm(n, cfg.Warm)}
	}
	n.life, n.kill = context.WithCancelCause(context.Background())
	return n, nil
}

// Services offers what a node has; Images and Tokens come from elsewhere.
func (n *Node) Services() dsec.Services {
	s := dsec.Services{Sandboxes: n, Commands: commands{n}, Files: files{n}, Ports: ports{n}, Nodes: n, Snapshots: snapshots{n}, Screens: screens{n}}
	if n.functions != nil {
		s.Functions = n.functions
	}
	return s
}

// spawn runs f in a goroutine that Close waits for. It reports false, and runs
// nothing, on a closed node.
func (n *Node) spawn(f func()) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return false
	}
	n.work.Go(f)
	return true
}

// Run does what time asks for: ends sandboxes, forgets old records, compacts
// the journal, watches disks. It returns when ctx or the node ends.
func (n *Node) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	defer context.AfterFunc(n.life, stop)()
	var loops sync.WaitGroup
	defer loops.Wait()
	defer stop()
	loops.Go(func() { n.timers.run(ctx, n.fire) })
	loops.Go(func() { n.runReclaims(ctx) })
	loops.Go(func() { n.watchPressure(ctx) })
	if n.cfg.Measure != nil {
		loops.Go(func() { n.watchDisk(ctx) })
	}
	second := time.NewTicker(time.Second)
	defer second.Stop()
	var pruned, maintained time.Time
	pause := time.Duration(0)
	for {
		select {
		case <-ctx.Done():
			return nil
		case now := <-second.C:
			if now.Sub(pruned) >= time.Minute {
				pruned = now
				n.prune(n.clock.now())
			}
			if now.Sub(maintained) < pause {
				continue
			}
			maintained = now
			if pause = min(2*pause+time.Second, maxPause); n.maintain() {
				pause = 0
			}
		}
	}
}

// maxPause is the longest pause between two attempts to write a checkpoint.
const maxPause = time.Minute

// Close ends the edge and leaves its machines running: creates under way fail
// and leave nothing, ends under way are finished by the next Open. It may be
// called twice.
func (n *Node) Close() error {
	if n.halt() || n.broken.Load() {
		return nil
	}
	// A short journal makes the next start fast; without it nothing is lost.
	return n.checkpoint()
}

// halt ends everything that runs and waits for it. It reports whether that
// had been done before.
func (n *Node) halt() bool {
	n.mu.Lock()
	was := n.closed
	n.closing, n.closed = true, true
	n.mu.Unlock()
	n.kill(errClosing)
	if n.functions != nil {
		n.functions.close()
	}
	n.work.Wait()
	return was
}

var errClosing = dsec.Errorf(dsec.Unavailable, "the node is closing")

// Down ends every sandbox with cause node-down, then closes the node.
func (n *Node) Down(ctx context.Context) error {
	n.mu.Lock()
	n.closing = true
	all := append([]*entry(nil), n.order...)
	n.mu.Unlock()
	var ends []*ending
	for _, e := range all {
		if end := n.end(e, judge(dsec.CauseNodeDown, "the node was taken down"), nobodyWaits); end != nil {
			ends = append(ends, end)
		}
	}
	var errs []error
	for _, end := range ends {
		select {
		case <-end.done:
			if end.err != nil {
				errs = append(errs, end.err)
			}
		case <-ctx.Done():
			errs = append(errs, fmt.Errorf("take node down: %w", context.Cause(ctx)))
			return errors.Join(append(errs, n.Close())...)
		}
	}
	return errors.Join(append(errs, n.Close())...)
}

// Layers gives the digests of the layers that living sandboxes use: what a
// collection must keep. A create registers here before it mounts anything.
func (n *Node) Layers() map[string]int {
	n.mu.RLock()
	defer n.mu.RUnlock()
	used := map[string]int{}
	for _, e := range n.order {
		e.mu.Lock()
		if !e.rec.state.Ended() {
			for _, d := range *e.rec.layers {
				used[d]++
			}
		}
		e.mu.Unlock()
	}
	if n.functions != nil {
		n.functions.inUse(used)
	}
	return used
}
