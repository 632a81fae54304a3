package cluster

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/dsec-go/dsec"
)

// state is all keys, decoded.
type state struct {
	nodes    map[string]nodeRecord
	numbers  map[uint16]string
	live     map[string]liveRecord
	tokens   map[string]dsec.Token // by hash
	projects map[dsec.ProjectID]project
	images   map[imageKey][]imageRecord // newest first
}

// imageKey is the name of an image, without version, and whose it is; everybody's has no project.
type imageKey struct {
	project dsec.ProjectID
	name    string
}

type imageRecord struct {
	Entry
	created int64 // revision: the order of versions does not hang on clocks
}

// mirror keeps a state current with one watch.
type mirror struct {
	client *clientv3.Client
	cancel context.CancelFunc
	done   chan struct{}

	mu       sync.RWMutex
	state    *state
	revision int64         // all changes up to it are in state
	changed  chan struct{} // closed and replaced when revision moves
}

func openMirror(ctx context.Context, client *clientv3.Client) (*mirror, error) {
	m := &mirror{client: client, done: make(chan struct{}), changed: make(chan struct{})}
	loadCtx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	if err := m.load(loadCtx); err != nil {
		return nil, err
	}
	// The watch belongs to the Cluster, not to the call that opens it.
	ctx, m.cancel = context.WithCancel(context.WithoutCancel(ctx))
	go m.run(ctx)
	return m, nil
}

func (m *mirror) close() {
	m.cancel()
	<-m.done
}

// run follows the changes. The client's watch survives lost connections; when it ends all
// the same, because the revisions it needs are compacted, everything is loaded anew.
func (m *mirror) run(ctx context.Context) {
	defer close(m.done)
	const pause = 200 * time.Millisecond
	for {
		// Without a leader an old server would serve an old state for ever.
		wctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
		for resp := range m.client.Watch(wctx, root, clientv3.WithPrefix(), clientv3.WithRev(m.at()+1)) {
			if resp.Err() != nil {
				break
			}
			m.apply(resp.Events)
		}
		cancel()
		for {
			select {
			case <-ctx.Done():
				return
			case <-time.After(pause):
			}
			lctx, cancel := context.WithTimeout(ctx, callLimit)
			err := m.load(lctx)
			cancel()
			if err == nil {
				break
			}
		}
	}
}

// load reads everything.
func (m *mirror) load(ctx context.Context) error {
	got, err := m.client.Get(ctx, root, clientv3.WithPrefix())
	if err != nil {
		return err
	}
	s := &state{
		nodes: map[string]nodeRecord{}, numbers: map[uint16]string{}, live: map[string]liveRecord{},
		tokens: map[string]dsec.Token{}, projects: map[dsec.ProjectID]project{}, images: map[imageKey][]imageRecord{},
	}
	for _, kv := range got.Kvs {
		s.put(string(kv.Key), kv.Value, kv.CreateRevision)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.state = s
	m.moved(got.Header.Revision)
	return nil
}

func (m *mirror) apply(events []*clientv3.Event) {
	if len(events) == 0 {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range events {
		if e.Type == clientv3.EventTypeDelete {
			m.state.delete(string(e.Kv.Key))
		} else {
			m.state.put(string(e.Kv.Key), e.Kv.Value, e.Kv.CreateRevision)
		}
	}
	// All events of one revision come together, and revisions in order.
	m.moved(events[len(events)-1].Kv.ModRevision)
}

// moved tells those who wait for a revision.
// Requires: m.mu held.
func (m *mirror) moved(revision int64) {
	m.revision = revision
	close(m.changed)
	m.changed = make(chan struct{})
}

func (m *mirror) at() int64 {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.revision
}

// wait returns when all changes up to revision are in.
func (m *mirror) wait(ctx context.Context, revision int64) error {
	for {
		m.mu.RLock()
		at, changed := m.revision, m.changed
		m.mu.RUnlock()
		if at >= revision {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// read calls fn with the present state, which it must neither change nor keep.
func (m *mirror) read(fn func(*state)) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	fn(m.state)
}

// put takes in one key. A value that cannot be decoded was written by a newer version: it is
// passed over, and the one it replaces is gone.
func (s *state) put(key string, value []byte, created int64) {
	s.delete(key)
	if name, ok := strings.CutPrefix(key, keyNodes); ok {
		decodeInto(s.nodes, name, value)
	} else if name, ok := strings.CutPrefix(key, keyLive); ok {
		decodeInto(s.live, name, value)
	} else if hash, ok := strings.CutPrefix(key, keyTokens); ok {
		decodeInto(s.tokens, hash, value)
	} else if name, ok := strings.CutPrefix(key, keyProjects); ok {
		decodeInto(s.projects, dsec.ProjectID(name), value)
	} else if n, ok := strings.CutPrefix(key, keyNumbers); ok {
		if n, err := strconv.ParseUint(n, 10, 16); err == nil {
			s.numbers[uint16(n)] = string(value)
		}
	} else if k, ref, ok := cutImage(key); ok {
		r := imageRecord{created: created}
		if json.Unmarshal(value, &r.Entry) == nil && r.Ref() == ref && r.Project == k.project {
			// A new slice: readers may hold the old one.
			list := append(slices.Clone(s.images[k]), r)
			slices.SortFunc(list, func(a, b imageRecord) int {
				return cmp.Or(-cmp.Compare(a.created, b.created), cmp.Compare(a.Version, b.Version))
			})
			s.images[k] = list
		}
	}
}

// cutImage takes the key of an image apart.
func cutImage(key string) (k imageKey, ref string, ok bool) {
	if ref, ok = strings.CutPrefix(key, keyImages); !ok {
		if ref, ok = strings.CutPrefix(key, keyOwn); !ok {
			return imageKey{}, "", false
		}
		var project string
		project, ref, _ = strings.Cut(ref, "/")
		k.project = dsec.ProjectID(strings.ReplaceAll(project, ":", "/"))
	}
	k.name, _ = dsec.SplitImageName(ref)
	return k, ref, true
}

// key is where a version of an image is written.
func (k imageKey) key(version string) string {
	if k.project == "" {
		return keyImages + k.name + "@" + version
	}
	return keyOwn + escape(k.project) + "/" + k.name + "@" + version
}

// escape gives a project as one part of a key: no name of one has a colon.
func escape(p dsec.ProjectID) string { return strings.ReplaceAll(string(p), "/", ":") }

func decodeInto[K comparable, V any](m map[K]V, key K, value []byte) {
	var v V
	if json.Unmarshal(value, &v) == nil {
		m[key] = v
	}
}

func (s *state) delete(key string) {
	if name, ok := strings.CutPrefix(key, keyNodes); ok {
		delete(s.nodes, name)
	} else if name, ok := strings.CutPrefix(key, keyLive); ok {
		delete(s.live, name)
	} else if hash, ok := strings.CutPrefix(key, keyTokens); ok {
		delete(s.tokens, hash)
	} else if name, ok := strings.CutPrefix(key, keyProjects); ok {
		delete(s.projects, dsec.ProjectID(name))
	} else if n, ok := strings.CutPrefix(key, keyNumbers); ok {
		if n, err := strconv.ParseUint(n, 10, 16); err == nil {
			delete(s.numbers, uint16(n))
		}
	} else if k, ref, ok := cutImage(key); ok {
		list := slices.DeleteFunc(slices.Clone(s.images[k]), func(r imageRecord) bool { return r.Ref() == ref })
		if len(list) == 0 {
			delete(s.images, k)
		} else {
			s.images[k] = list
		}
	}
}

// encode is json.Marshal for our own records, which always can be encoded.
func encode(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // a record type that JSON does not know: a mistake in this package
	}
	return string(b)
}
