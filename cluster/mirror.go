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

	"github.com/google/btree"
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
	images   map[imageKey][]imageRecord     // newest first
	tags     map[imageKey]map[string]string // tag -> version

	// What the keys of images are found by. Lists are replaced, never changed:
	// readers may hold the old ones.
	owners map[string][]imageKey   // of a name, everybody's first
	owned  map[dsec.ProjectID]int  // how many names a project has
	sorted *btree.BTreeG[imageKey] // as listed
}

func newState() *state {
	return &state{
		nodes: map[string]nodeRecord{}, numbers: map[uint16]string{}, live: map[string]liveRecord{},
		tokens: map[string]dsec.Token{}, projects: map[dsec.ProjectID]project{}, images: map[imageKey][]imageRecord{},
		tags: map[imageKey]map[string]string{}, owners: map[string][]imageKey{}, owned: map[dsec.ProjectID]int{},
		sorted: btree.NewG(32, imageKey.before),
	}
}

// before is the order of lists: by name, everybody's before a project's.
func (k imageKey) before(o imageKey) bool {
	return cmp.Or(cmp.Compare(k.name, o.name), cmp.Compare(k.project, o.project)) < 0
}

// imageKey is the name of an image, without version, and whose it is; everybody's has no project.
type imageKey struct {
	project dsec.ProjectID
	name    string
}

type imageRecord struct {
	Entry
	created  int64 // revision: the order of versions does not hang on clocks
	modified int64 // revision: moves when a tag comes to stand for it
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
	if err := m.load(ctx); err != nil {
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
			if m.load(ctx) == nil {
				break
			}
		}
	}
}

// loadPage is how many keys are read at a time: one answer is held whole by etcd
// and by us.
const loadPage = 10_000

// load reads everything, as it was at one revision.
func (m *mirror) load(ctx context.Context) error {
	s, end := newState(), clientv3.GetPrefixRangeEnd(root)
	var revision int64
	for from, more := root, true; more; {
		pctx, cancel := context.WithTimeout(ctx, callLimit)
		got, err := m.client.Get(pctx, from, clientv3.WithRange(end), clientv3.WithLimit(loadPage), clientv3.WithRev(revision))
		cancel()
		if err != nil {
			return err
		}
		if revision == 0 {
			revision = got.Header.Revision
		}
		for _, kv := range got.Kvs {
			s.put(string(kv.Key), kv.Value, kv.CreateRevision, kv.ModRevision)
		}
		if more = got.More && len(got.Kvs) > 0; more {
			from = string(got.Kvs[len(got.Kvs)-1].Key) + "\x00"
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.state = s
	m.moved(revision)
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
			m.state.put(string(e.Kv.Key), e.Kv.Value, e.Kv.CreateRevision, e.Kv.ModRevision)
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
func (s *state) put(key string, value []byte, created, modified int64) {
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
		r := imageRecord{created: created, modified: modified}
		if json.Unmarshal(value, &r.Entry) == nil && r.Ref() == ref && r.Project == k.project {
			s.addImage(k, r)
		}
	} else if k, ref, ok := cutTag(key); ok {
		var t tagRecord
		if json.Unmarshal(value, &t) == nil {
			if s.tags[k] == nil {
				s.tags[k] = map[string]string{}
			}
			_, tag := dsec.SplitImageName(ref)
			s.tags[k][tag] = t.Version
		}
	}
}

func (s *state) addImage(k imageKey, r imageRecord) {
	// A new slice: readers may hold the old one.
	list := append(slices.Clone(s.images[k]), r)
	slices.SortFunc(list, func(a, b imageRecord) int {
		return cmp.Or(-cmp.Compare(a.created, b.created), cmp.Compare(a.Version, b.Version))
	})
	s.images[k] = list
	s.owned[k.project]++
	if len(list) > 1 {
		return
	}
	s.sorted.ReplaceOrInsert(k)
	all := append(slices.Clone(s.owners[k.name]), k)
	slices.SortFunc(all, func(a, b imageKey) int { return cmp.Compare(a.project, b.project) })
	s.owners[k.name] = all
}

func (s *state) dropImage(k imageKey, ref string) {
	had := s.images[k]
	list := slices.DeleteFunc(slices.Clone(had), func(r imageRecord) bool { return r.Ref() == ref })
	if len(list) == len(had) {
		return
	}
	if s.owned[k.project]--; s.owned[k.project] == 0 {
		delete(s.owned, k.project)
	}
	if len(list) > 0 {
		s.images[k] = list
		return
	}
	delete(s.images, k)
	s.sorted.Delete(k)
	rest := slices.DeleteFunc(slices.Clone(s.owners[k.name]), func(o imageKey) bool { return o == k })
	if s.owners[k.name] = rest; len(rest) == 0 {
		delete(s.owners, k.name)
	}
}

// tagged gives an image with the tags that stand for it.
func (s *state) tagged(k imageKey, r imageRecord) Entry {
	e := r.Entry
	for tag, version := range s.tags[k] {
		if version == r.Version {
			e.Tags = append(e.Tags, tag)
		}
	}
	slices.Sort(e.Tags)
	return e
}

// cutImage takes the key of an image apart.
func cutImage(key string) (imageKey, string, bool) { return cutName(key, keyImages, keyOwn) }

// cutTag takes the key of a tag apart.
func cutTag(key string) (imageKey, string, bool) { return cutName(key, keyTags, keyOwnTags) }

// cutName takes a key below one of two folders apart, of everybody's names and of projects'.
func cutName(key, all, own string) (k imageKey, ref string, ok bool) {
	if ref, ok = strings.CutPrefix(key, all); !ok {
		if ref, ok = strings.CutPrefix(key, own); !ok {
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
func (k imageKey) key(version string) string { return k.below(keyImages, keyOwn) + version }

// tag is where a tag of an image is written.
func (k imageKey) tag(name string) string { return k.below(keyTags, keyOwnTags) + name }

func (k imageKey) below(all, own string) string {
	if k.project == "" {
		return all + k.name + "@"
	}
	return own + escape(k.project) + "/" + k.name + "@"
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
		s.dropImage(k, ref)
	} else if k, ref, ok := cutTag(key); ok {
		_, tag := dsec.SplitImageName(ref)
		if delete(s.tags[k], tag); len(s.tags[k]) == 0 {
			delete(s.tags, k)
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
