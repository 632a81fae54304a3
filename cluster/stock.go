package cluster

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/dsec-go/dsec"
)

// Stock counts what the layers that image names stand for take in the store: each blob once, however
// many names need it. What a layer consists of it asks once and remembers, about 50 bytes a blob, until
// no name stands for it.
//
// Usage knows the present names of all projects, also those that the caller does not see: a blob that
// another project shares is not his alone.
//
// A project's share is what its names and those of projects below need, without what everybody's names
// need as well: who builds on the operator's images pays for his own bytes.
type Stock struct {
	names  Names
	ledger *Ledger
	parts  PartsFunc

	admit sync.Mutex // held while a name is checked and put; before mu

	mu     sync.Mutex
	layers map[string]*layer // by digest
	ids    map[string]uint32 // of blobs, by digest
	blobs  []stocked         // by id; those of forgotten layers stay, they are few
}

// PartsFunc tells which blobs a layer has in the store; NotFound when there is no such layer.
type PartsFunc func(ctx context.Context, digest string) ([]dsec.ImagePart, error)

type layer struct {
	parts []uint32
	kinds []string // literals of the caller
	names int      // as of the last count
}

type stocked struct {
	digest string
	size   int64
	names  int32
}

// manifestReads is how many layers are asked about at a time.
const manifestReads = 16

// Stock returns a count of what the names of the cluster need.
func (c *Cluster) Stock(parts PartsFunc) *Stock {
	return &Stock{names: c.Names(), ledger: c.ledger, parts: parts, layers: map[string]*layer{}, ids: map[string]uint32{}}
}

// Usage tells what layers take; Cached is the caller's to fill in. A layer that is not in the store
// has no entry. An error is that of a layer which could not be asked about; the next call asks for what
// is missing only.
func (s *Stock) Usage(ctx context.Context, digests []string) (map[string]*dsec.ImageUsage, error) {
	if err := s.learn(ctx, digests, ""); err != nil {
		return nil, err
	}
	now := s.names.Layers()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.count(now)
	all := map[string]*dsec.ImageUsage{}
	for _, d := range digests {
		l := s.layers[d]
		if l == nil {
			continue
		}
		u := &dsec.ImageUsage{}
		for i, id := range l.parts {
			b := s.blobs[id]
			if b.names <= 1 && !slices.Contains(l.parts[:i], id) {
				u.Unique += b.size
			}
			u.Parts = append(u.Parts, dsec.ImagePart{Kind: l.kinds[i], Digest: b.digest, Size: b.size, Names: int(b.names)})
		}
		all[d] = u
	}
	return all, nil
}

// Used tells what each project has, itself and all below it.
func (s *Stock) Used(ctx context.Context) (map[dsec.ProjectID]int64, error) {
	if err := s.learn(ctx, nil, ""); err != nil {
		return nil, err
	}
	used := map[dsec.ProjectID]int64{}
	for p, ids := range s.sets("") {
		used[p] = s.sum(ids)
	}
	return used, nil
}

// Room is Exhausted when a project, or one above it, has nothing left of its quota of images. Else it
// gives the smallest of those quotas, 0 for none: more a single image cannot take.
func (s *Stock) Room(ctx context.Context, p dsec.ProjectID) (most int64, err error) {
	for above := range p.Line() {
		q, err := s.ledger.Quota(above)
		if err != nil {
			return 0, err
		}
		if q.Images == 0 {
			continue
		}
		if most == 0 || q.Images < most {
			most = q.Images
		}
		if err := s.learn(ctx, nil, above); err != nil {
			return 0, err
		}
		if used := s.sum(s.sets(above)[above]); used >= q.Images {
			return 0, full(above, used, q.Images, 0)
		}
	}
	return most, nil
}

// Put names an image if its project and those above it have room for what it adds to what they have;
// else it is Exhausted. Of several at once that do not fit together, those go in that come first.
func (s *Stock) Put(ctx context.Context, e Entry) error {
	s.admit.Lock()
	defer s.admit.Unlock()
	for above := range e.Project.Line() {
		q, err := s.ledger.Quota(above)
		if err != nil {
			return err
		}
		if q.Images == 0 {
			continue
		}
		if err := s.learn(ctx, []string{e.Digest}, above); err != nil {
			return err
		}
		ids := s.sets(above)
		used := s.sum(ids[above])
		s.mu.Lock()
		var more int64
		seen := map[uint32]bool{}
		if l := s.layers[e.Digest]; l != nil {
			for _, id := range l.parts {
				if !ids[above][id] && !ids[""][id] && !seen[id] {
					seen[id] = true
					more += s.blobs[id].size
				}
			}
		}
		s.mu.Unlock()
		if more > 0 && used+more > q.Images {
			return full(above, used, q.Images, more)
		}
	}
	return s.names.Put(ctx, e)
}

func full(p dsec.ProjectID, used, quota, more int64) error {
	if more == 0 {
		return dsec.Errorf(dsec.Exhausted, "project %s has %d of the %d MiB of images of its quota", p, mib(used), mib(quota))
	}
	return dsec.Errorf(dsec.Exhausted, "project %s has %d of the %d MiB of images of its quota, %d more do not fit", p, mib(used), mib(quota), mib(more))
}

// mib rounds up: what does not fit must not look as if it did.
func mib(n int64) int64 { return (n + 1<<20 - 1) >> 20 }

// sets gives the blobs that project of, or each project if it is empty, has by itself and below. ""
// stands for everybody's, which are in no other set.
func (s *Stock) sets(of dsec.ProjectID) map[dsec.ProjectID]map[uint32]bool {
	owners := s.names.owners()
	s.mu.Lock()
	defer s.mu.Unlock()
	all := map[dsec.ProjectID]map[uint32]bool{"": {}}
	add := func(p dsec.ProjectID, l *layer) {
		set := all[p]
		if set == nil {
			set = map[uint32]bool{}
			all[p] = set
		}
		for _, id := range l.parts {
			set[id] = true
		}
	}
	for _, e := range owners {
		l := s.layers[e.digest]
		if l == nil {
			continue
		}
		if e.project == "" {
			add("", l)
		}
		for p := range e.project.Line() {
			if of == "" || p == of {
				add(p, l)
			}
		}
	}
	for p, set := range all {
		if p == "" {
			continue
		}
		for id := range all[""] {
			delete(set, id)
		}
	}
	return all
}

func (s *Stock) sum(ids map[uint32]bool) (n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id := range ids {
		n += s.blobs[id].size
	}
	return n
}

// learn asks about the layers that are not known yet: those of digests, of all names of a project and
// below it and of everybody's, or of all names.
func (s *Stock) learn(ctx context.Context, digests []string, of dsec.ProjectID) error {
	missing, owners := map[string]bool{}, s.names.owners()
	s.mu.Lock()
	for _, d := range digests {
		if s.layers[d] == nil {
			missing[d] = true
		}
	}
	for _, e := range owners {
		if s.layers[e.digest] == nil && (of == "" || e.project == "" || e.project.Within(of)) {
			missing[e.digest] = true
		}
	}
	s.mu.Unlock()
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(manifestReads)
	for d := range missing {
		g.Go(func() error {
			parts, err := s.parts(ctx, d)
			if err != nil && dsec.KindOf(err) == dsec.NotFound {
				return nil // a name of what is not there takes nothing
			}
			if err != nil {
				return fmt.Errorf("look at layer %s: %w", d, err)
			}
			s.add(d, parts)
			return nil
		})
	}
	return g.Wait()
}

func (s *Stock) add(digest string, parts []dsec.ImagePart) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.layers[digest] != nil {
		return
	}
	l := &layer{}
	for _, p := range parts {
		id, ok := s.ids[p.Digest]
		if !ok {
			id = uint32(len(s.blobs))
			s.ids[p.Digest] = id
			s.blobs = append(s.blobs, stocked{digest: p.Digest, size: p.Size})
		}
		l.parts, l.kinds = append(l.parts, id), append(l.kinds, p.Kind)
	}
	s.layers[digest] = l
}

// count brings up to date how many names need each blob; now says how many each layer has. Two names
// of one layer are two. Requires: s.mu held.
func (s *Stock) count(now map[string]int) {
	for d, l := range s.layers {
		if more := now[d] - l.names; more != 0 {
			seen := map[uint32]bool{}
			for _, id := range l.parts {
				if !seen[id] {
					seen[id] = true
					s.blobs[id].names += int32(more)
				}
			}
			l.names = now[d]
		}
		if l.names == 0 {
			delete(s.layers, d)
		}
	}
}
