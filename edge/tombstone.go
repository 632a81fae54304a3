package edge

import (
	"hash/fnv"

	"github.com/dsec-go/dsec"
)

// maxTombstones bounds what is remembered of forgotten sandboxes: some days at
// the pace of a busy node, in about 2 MiB.
const maxTombstones = 1 << 16

// tombstones remembers IDs whose records were forgotten in order, the oldest
// dropped first. Only a hash is kept: an ID reaches it with a valid tag, so
// nobody can choose one that collides.
type tombstones struct {
	ring []uint64
	next int // where the oldest is, once the ring is full
	set  map[uint64]struct{}
}

func tombstone(id dsec.SandboxID) uint64 {
	h := fnv.New64a()
	h.Write([]byte(id))
	return h.Sum64()
}

func (t *tombstones) add(h uint64) {
	if t.set == nil {
		t.set = map[uint64]struct{}{}
	}
	if _, known := t.set[h]; known {
		return
	}
	t.set[h] = struct{}{}
	if len(t.ring) < maxTombstones {
		t.ring = append(t.ring, h)
		return
	}
	delete(t.set, t.ring[t.next])
	t.ring[t.next] = h
	t.next = (t.next + 1) % maxTombstones
}

func (t *tombstones) has(id dsec.SandboxID) bool {
	_, ok := t.set[tombstone(id)]
	return ok
}

// list gives all, oldest first.
func (t *tombstones) list() []uint64 {
	return append(append([]uint64(nil), t.ring[t.next:]...), t.ring[:t.next]...)
}
