package trajectory

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"sync"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
)

// foreign knows which sandboxes ended in the archives of other nodes: of each
// sandbox four bytes, so that a cluster's week fits in memory. An archive is read
// once, when somebody first asks for what this node does not have.
type foreign struct {
	seed maphash.Seed // set by Open

	mu    sync.Mutex
	known map[blob.Digest][]uint32 // sums of the sandboxes that ended there, sorted
}

func (f *foreign) sum(id dsec.SandboxID) uint32 { return uint32(maphash.String(f.seed, string(id))) }

// learn notes the sandboxes of an archive.
func (f *foreign) learn(d blob.Digest, x *index) []uint32 {
	sums := make([]uint32, 0, len(x.Sections))
	for i := range x.Sections {
		if s := &x.Sections[i]; s.Over {
			sums = append(sums, f.sum(s.ID))
		}
	}
	slices.Sort(sums)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.known[d] = sums
	return sums
}

// keep forgets archives that are not listed any more.
func (f *foreign) keep(listed map[blob.Digest]bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for d := range f.known {
		if !listed[d] {
			delete(f.known, d)
		}
	}
}

// foreignSection finds the end of a trajectory in the archives of other nodes,
// or of this one before it lost its journal.
func (l *Log) foreignSection(ctx context.Context, id dsec.SandboxID) (*section, blob.Digest, error) {
	if l.cfg.Archives == nil {
		return nil, "", errNoChain
	}
	all, err := l.cfg.Archives.Archives(ctx)
	if err != nil {
		return nil, "", err
	}
	own := map[blob.Digest]bool{}
	l.mu.RLock()
	for _, a := range l.archives {
		own[a.segment] = true
	}
	l.mu.RUnlock()
	f, sum := &l.foreign, l.foreign.sum(id)
	listed := make(map[blob.Digest]bool, len(all))
	defer func() {
		if len(listed) == len(all) {
			f.keep(listed)
		}
	}()
	for _, name := range all {
		seg, err := blob.Parse(name)
		if err != nil {
			return nil, "", fmt.Errorf("list of archives: %w", err)
		}
		listed[seg] = true
		if own[seg] {
			continue // archived has what is in it
		}
		f.mu.Lock()
		sums, known := f.known[seg]
		f.mu.Unlock()
		if !known {
			x, err := l.indexes.get(ctx, seg)
			if errors.Is(err, blob.ErrNotFound) {
				continue // dropped meanwhile
			}
			if err != nil {
				return nil, "", err
			}
			sums = f.learn(seg, x)
		}
		if _, ok := slices.BinarySearch(sums, sum); !ok {
			continue
		}
		s, err := l.ending(ctx, seg, id)
		if errors.Is(err, blob.ErrNotFound) {
			continue
		}
		if err != nil || s != nil {
			return s, seg, err
		}
	}
	return nil, "", errNoChain
}
