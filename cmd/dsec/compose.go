package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/cluster"
	"github.com/dsec-go/dsec/depot"
	"github.com/dsec-go/dsec/edge"
	"github.com/dsec-go/dsec/jail"
	"github.com/dsec-go/dsec/job"
	"github.com/dsec-go/dsec/journal"
	"github.com/dsec-go/dsec/rootfs"
	"github.com/dsec-go/dsec/snapshot"
	"github.com/dsec-go/dsec/swap"
	"github.com/dsec-go/dsec/trajectory"
)

// node is everything below the listener, made in the order of openNode and
// closed in the reverse.
type node struct {
	name      string
	log       *slog.Logger
	telemetry *telemetry
	data      *dataFolder
	cluster   *cluster.Cluster
	key       *dsec.IDKey
	place     dsec.Place
	store     storeConfig
	images    *images
	disks     *disks
	inside    *inside
	kinds     *kinds
	snapshots *snapshot.Store
	edge      *edge.Node
	recorder  atomic.Pointer[trajectory.Recorder] // nil when nothing is recorded
	jobs      *job.Jobs

	trajectories *trajectory.Log
	limits       []error  // of the host, that could not be raised
	closers      []closer // in the order of making
	goingDown    bool     // close ends what a node that comes back would want
}

type closer struct {
	what  string
	close func() error
}

// openNode makes the parts of a node from its data folder. A failure closes
// what was made.
func openNode(ctx context.Context, u Up) (_ *node, err error) {
	n := &node{log: u.Log, name: u.Name}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.close())
		}
	}()
	where, err := openStore(u)
	if err != nil {
		return nil, err
	}
	if u.Guest == "" {
		if u.Guest, err = guestBeside(); err != nil {
			return nil, err
		}
	}
	if err := checkGuest(ctx, u.Guest); err != nil {
		return nil, err
	}
	if n.name == "" {
		n.name = hostName()
	}
	if n.data, err = openData(u.Data); err != nil {
		return nil, err
	}
	n.onClose("data folder", func() error { n.data.close(); return nil })
	n.onClose("swap", n.dropSwap)
	if u.Swap > 0 {
		if err := swap.Make(n.data.at(swapDir), u.Swap); err != nil {
			return nil, err
		}
	}
	n.limits = raiseLimits()
	n.telemetry = newTelemetry(u.Log)
	for _, dir := range []string{tempDir, verifiedDir} {
		if err := os.MkdirAll(n.data.at(dir), 0o700); err != nil {
			return nil, fmt.Errorf("make folder: %w", err)
		}
	}

	// What the cluster agrees on: tokens, image names, who this node is.
	if n.cluster, err = cluster.OpenEmbedded(ctx, n.data.at(etcdDir), etcdLog(u.Log)); err != nil {
		return nil, fmt.Errorf("open cluster: %w", err)
	}
	n.onClose("cluster", n.cluster.Close)
	key, err := n.cluster.IDKey(ctx)
	if err != nil {
		return nil, err
	}
	n.key = &key
	registration, err := n.cluster.Register(ctx, cluster.NodeOptions{Name: n.name, Address: u.Listen, Instance: n.data.instance})
	if err != nil {
		return nil, err
	}
	n.place = registration.Place()
	n.onClose("registration", func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		return registration.Close(ctx)
	})

	// What sandboxes are made of: blobs, images of them, mounts of those.
	blobs, err := where.open(ctx)
	if err != nil {
		return nil, fmt.Errorf("open blobs: %w", err)
	}
	library, err := n.openLibrary(where, blobs)
	if err != nil {
		return nil, err
	}
	n.images = newImages(library, n.cluster)
	n.images.profiles = profiles{n.cluster.Profiles(), blobs}
	n.store, n.images.shared = where, where.way != wayOwn
	layers := rootfs.NewLayers(n.images)
	n.onClose("layers", func() error {
		if n.images.lazy == nil || n.goingDown {
			layers.Forget() // else they are the next process's
		}
		return nil
	})
	var fetched edge.Ledger
	if where.way != wayOwn && canSpawn() {
		if n.images.lazy, err = openLazyData(u, n.data.path, where, layers); err != nil {
			return nil, fmt.Errorf("open lazy data: %w", err)
		}
		ledger, err := depot.OpenLedger(where.lazy)
		if err != nil {
			return nil, err
		}
		fetched = ledger
		n.telemetry.registry.MustRegister(newDepotMetrics(&n.images.lazy.Client))
		n.images.cached = func(ctx context.Context, digests []string) map[string]int64 {
			got, _ := n.images.lazy.Cached(ctx, digests) //nolint:errcheck // then nothing is shown
			return got
		}
	}
	n.onClose("lazy data", n.closeLazyData)
	n.disks = &disks{dir: n.data.at(diskDir), layers: layers}
	if u.Snapshots == "" {
		u.Snapshots = n.data.at(snapshotDir)
	}
	states, err := blob.OpenFolder(u.Snapshots)
	if err != nil {
		return nil, fmt.Errorf("open snapshots: %w", err)
	}
	if n.snapshots, err = snapshot.Open(ctx, states, n.cluster.Snapshots(), n.data.at(draftDir)); err != nil {
		return nil, err
	}
	if err := cleanTemp(n.data.at(tempDir)); err != nil {
		return nil, err
	}

	// What runs them.
	guestLog, err := os.OpenFile(n.data.at("guest.log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open guest log: %w", err)
	}
	defer guestLog.Close() // whoever was started with it has its own
	n.kinds, err = openKinds(kindConfig{
		data: n.data.path, instance: n.data.instance, guest: u.Guest, pool: u.Pool, warm: u.Warm, guestLog: guestLog, log: u.Log,
	})
	if err != nil {
		return nil, err
	}
	n.onClose("drivers", n.kinds.close)
	functions := n.fnDriver(u.Guest)
	n.onClose("fncall driver", functions.Close)

	// Who they are and how long they live.
	records, err := journal.Open(n.data.at(journalDir), journal.Options{})
	if errors.Is(err, journal.ErrCorrupt) {
		return nil, fmt.Errorf("%w; \"dsec mend-journal\" says what it costs to start without what is damaged", err)
	}
	if err != nil {
		return nil, err
	}
	n.onClose("journal", records.Close)
	if n.trajectories, err = n.openLog(ctx, records); err != nil {
		return nil, err
	}
	if err := n.openJobs(records); err != nil {
		return nil, err
	}
	n.inside = newInside(n.key)
	n.edge, err = edge.Open(ctx, edge.Config{
		Name:      n.name,
		Keys:      n.key,
		Place:     n.place,
		Drivers:   append(slices.Clone(n.kinds.drivers), functions),
		Absent:    n.kinds.absent,
		Journal:   &edge.Log{Journal: records},
		Names:     names{n.images},
		Roots:     roots{layers, n.images, n.disks},
		Host:      edge.ProcHost{Data: n.data.path},
		Committer: n.images,
		Snapshots: n.snapshots,
		Temp:      n.data.at(tempDir),
		Quota:     n.cluster.Ledger(),
		Door:      n.inside,
		Ledger:    fetched,
		Measure:   edge.MeasureUpper,
		Features:  func() []dsec.FeatureStatus { return append(hostFeatures(n.data.path), n.kinds.features(u.Guest)...) },
		Events:    n.told(n.recorded(n.unnamed(n.telemetry.edgeEvents()))),
	})
	if err != nil {
		return nil, fmt.Errorf("open edge: %w", err)
	}
	n.images.inUse = func(ctx context.Context) (map[string]int, error) { return n.layersInUse(ctx, layers) }
	if n.images.lazy != nil {
		n.images.lazy.keepInUse(func() []string {
			return slices.AppendSeq(layers.InUse(), maps.Keys(n.edge.Layers()))
		})
	}
	n.telemetry.watchNode(n.edge)
	n.onClose("edge", n.edge.Close)
	n.onClose("api of sandboxes", n.inside.end)
	if !u.Unrecorded {
		if err := n.record(ctx); err != nil {
			return nil, err
		}
	}
	n.fence()
	n.kinds.prepare()
	return n, nil
}

// layersInUse gives what sandboxes use and what snapshots lie on. It lets go of
// mounts that nobody uses, and of copies of disk images.
func (n *node) layersInUse(ctx context.Context, layers *rootfs.Layers) (map[string]int, error) {
	saved, err := n.snapshots.List(ctx)
	if err != nil {
		return nil, err
	}
	layers.Forget()
	used := n.edge.Layers()
	n.disks.forget(used)
	for _, s := range saved {
		for _, d := range s.Layers {
			used[d]++
		}
	}
	return used, nil
}

func (n *node) onClose(what string, f func() error) {
	n.closers = append(n.closers, closer{what, f})
}

// close ends the parts, the last made first. Sandboxes run on.
func (n *node) close() error {
	var errs []error
	for i := len(n.closers) - 1; i >= 0; i-- {
		if err := n.closers[i].close(); err != nil {
			errs = append(errs, fmt.Errorf("close %s: %w", n.closers[i].what, err))
		}
	}
	n.closers = nil
	return errors.Join(errs...)
}

// closeLazyData leaves the processes beside this one to the next, or ends them.
// A node is taken down by whoever comes, who need not know of its store.
func (n *node) closeLazyData() error {
	if n.images.lazy != nil {
		n.images.lazy.close()
	}
	if !n.goingDown {
		return nil
	}
	return endLazyData(n.data.path)
}

// dropSwap gives up the node's own swap when it goes down. Before that the
// memory of paused sandboxes is in it.
func (n *node) dropSwap() error {
	if !n.goingDown {
		return nil
	}
	return swap.Remove(n.data.at(swapDir))
}

// alive is how many sandboxes there are.
func (n *node) alive() int { return n.edge.Counts().Alive }

// unfenced are the edge's services with what is recorded of them.
func (n *node) unfenced() dsec.Services {
	if r := n.recorder.Load(); r != nil {
		return r.Services()
	}
	return n.edge.Services()
}

// services are the node's contracts before tokens are asked for.
func (n *node) services() dsec.Services {
	s := n.jobs.Fence(n.unfenced())
	if n.store.way != wayOwn {
		s.Nodes = nodesWithStore{nodes: s.Nodes, where: n.store, lazy: n.images.lazy}
	}
	s.Images, s.Tokens, s.Projects = n.images, n.cluster.Tokens(), stocked{n.cluster.Projects(), n.images.stock}
	return s
}

// operatorTokenName is the token that dsec up leaves in the context file.
const operatorTokenName = "operator"

// operatorToken gives the secret of the operator's token: the one kept with
// the data as long as it is valid, else a new one.
func (n *node) operatorToken(ctx context.Context) (string, error) {
	b, err := os.ReadFile(n.data.at(tokenFile))
	if err == nil {
		secret := strings.TrimSpace(string(b))
		if _, err := n.cluster.Tokens().Authenticate(secret); err == nil {
			return secret, nil
		}
	}
	secret, err := n.cluster.Tokens().Renew(ctx, dsec.Token{
		Name: operatorTokenName, Project: cluster.DefaultProject, Rights: []dsec.Right{dsec.RightAdmin},
	})
	if err != nil {
		return "", fmt.Errorf("make operator token: %w", err)
	}
	if err := n.data.write(tokenFile, secret); err != nil {
		return "", fmt.Errorf("keep operator token: %w", err)
	}
	return secret, nil
}

var notHost = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`[^a-z0-9._-]+`) })

// hostName gives this host's name in the form that the cluster takes.
func hostName() string {
	h, err := os.Hostname()
	if err != nil {
		return "local"
	}
	h = strings.Trim(notHost().ReplaceAllString(strings.ToLower(h), "-"), "-._")
	if h == "" {
		return "local"
	}
	return h[:min(len(h), 63)]
}

// hostFeatures gathers what the mechanisms found out about this host; probes
// write below dir.
func hostFeatures(dir string) []dsec.FeatureStatus {
	return append(append(jail.Features(), swap.Feature()), rootfs.Features(dir)...)
}
