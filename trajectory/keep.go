package trajectory

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/journal"
)

// The kinds of a Log's records in the node's journal.
const (
	KindRecord  journal.Kind = 2 // a record of a trajectory
	KindControl journal.Kind = 3 // a control, as JSON
)

// checkpointBytes is how much a Log appends before it asks for a checkpoint.
const checkpointBytes = 64 << 20

// Journal is the node's write-ahead log as a Log needs it: *journal.Owner.
type Journal interface {
	Append(kind journal.Kind, payload []byte) (uint64, journal.Place, error)
	Sync(ctx context.Context, seq uint64) error
	ReadAt(at journal.Place) ([]byte, error)
	Checkpoint(ctx context.Context) error
}

// control is what the journal holds beside records.
type control struct {
	V  int            `json:"v"`
	Op string         `json:"op"`
	ID dsec.SandboxID `json:"id,omitempty"`

	// chain, in checkpoints: a sandbox whose tail follows as records.
	Who     dsec.Who  `json:"who,omitzero"`
	Default *defaults `json:"default,omitempty"`
	Next    uint64    `json:"next,omitempty"` // number of the first record of the tail
	Base    string    `json:"base,omitempty"` // hash of the one before
	Extents []extent  `json:"extents,omitempty"`
	Open    []openRow `json:"open,omitempty"` // requests before Next without an answer before Next

	// sealed: records of a living sandbox are in a segment now.
	Extent *extent `json:"extent,omitempty"`

	// archived: ended sandboxes are in a segment; also in checkpoints.
	// dropped: it was deleted.
	Segment blob.Digest      `json:"segment,omitempty"`
	At      int64            `json:"at,omitempty"`
	IDs     []dsec.SandboxID `json:"ids,omitempty"`
}

const (
	opChain    = "chain"
	opSealed   = "sealed"
	opArchived = "archived"
	opDropped  = "dropped"
)

// openRow is a request without an answer.
type openRow struct {
	Seq  uint64        `json:"n"`
	Op   dsec.RecordOp `json:"op"`
	Step dsec.Step     `json:"step"` // as the guest knows it
}

func (c control) encode() []byte {
	c.V = FormatVersion
	b, err := marshal(c)
	if err != nil {
		panic(fmt.Sprintf("trajectory: encode %s: %v", c.Op, err)) // it has nothing that could fail
	}
	return b
}

// Open makes the Log of a node: it replays what the journal has of it. Run must
// be called once for it to seal and archive. The caller closes the journal.
func Open(ctx context.Context, j *journal.Journal, cfg Config) (*Log, error) {
	l := &Log{
		cfg:      cfg,
		indexes:  indexes{store: cfg.Store},
		foreign:  foreign{seed: maphash.MakeSeed(), known: map[blob.Digest][]uint32{}},
		full:     make(chan struct{}, 1),
		chains:   map[dsec.SandboxID]*chain{},
		archived: map[dsec.SandboxID]blob.Digest{},
		unclosed: map[dsec.SandboxID]endParam{},
	}
	set(&l.cfg.SealBytes, 256<<10)
	set(&l.cfg.ArchiveEvery, time.Minute)
	set(&l.cfg.ArchiveBytes, 8<<20)
	set(&l.cfg.Keep, 7*24*time.Hour)
	if l.cfg.Fault == nil {
		l.cfg.Fault = func(error) {}
	}
	saver := &saver{l: l}
	owner, err := j.Own(journal.Claim{Kinds: []journal.Kind{KindRecord, KindControl}, Save: saver.save, Moved: saver.moved})
	if err != nil {
		return nil, fmt.Errorf("open trajectories: %w", err)
	}
	l.cfg.Journal = owner
	if err := owner.Replay(ctx, func(r journal.Record) error { return l.replay(ctx, r) }); err != nil {
		return nil, fmt.Errorf("replay trajectories: %w", err)
	}
	return l, nil
}

func set[T comparable](p *T, v T) {
	var zero T
	if *p == zero {
		*p = v
	}
}

// replay applies one record of the journal; nothing else runs yet.
func (l *Log) replay(ctx context.Context, r journal.Record) error {
	if r.Kind == journal.KindLost {
		l.gaps = true
		return nil
	}
	if r.Kind == KindControl {
		var c control
		if err := json.Unmarshal(r.Payload, &c); err != nil {
			return fmt.Errorf("decode control record %d: %w", r.Seq, err)
		}
		if c.V != FormatVersion {
			return fmt.Errorf("control record of format %d, this build reads %d", c.V, FormatVersion)
		}
		return l.apply(ctx, c)
	}
	b := slices.Clone(r.Payload)
	raw, h, err := decode(b)
	if err != nil {
		return err
	}
	if l.archived[raw.id] != "" {
		return nil // it was archived while the checkpoint was written
	}
	c := l.chains[raw.id]
	if c == nil {
		if h.Seq != 1 {
			return l.gap("the journal has record %d of sandbox %s and none before", h.Seq, raw.id)
		}
		c = newChain(raw.id)
		l.chains[raw.id] = c
	}
	switch {
	case h.Seq <= c.seq:
		return nil // a checkpoint had it
	case h.Seq != c.seq+1 || raw.prev != c.head:
		return l.gap("record %d of sandbox %s does not follow from record %d", h.Seq, raw.id, c.seq)
	}
	c.take(h, b, r.Place)
	if h.Op == dsec.RecordEnd {
		l.over.Add(c.bytes)
	}
	return nil
}

// gap says that a record has none to follow from. In a journal that has lost
// records a trajectory goes up to there, and the sandbox is ended.
func (l *Log) gap(format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	if !l.gaps {
		return err
	}
	l.cfg.Fault(fmt.Errorf("the journal has lost records: %w", err))
	return nil
}

func (l *Log) apply(ctx context.Context, k control) error {
	switch k.Op {
	case opArchived:
		ids := k.IDs
		if len(ids) == 0 { // a checkpoint's
			x, err := readIndex(ctx, l.cfg.Store, k.Segment)
			if err != nil {
				// It was there. Losing old trajectories must not keep the node down.
				l.cfg.Fault(fmt.Errorf("trajectories of ended sandboxes are lost: %w", err))
				return nil
			}
			for _, s := range x.Sections {
				ids = append(ids, s.ID)
			}
		}
		for _, id := range ids {
			delete(l.chains, id)
			l.archived[id] = k.Segment
		}
		if !slices.ContainsFunc(l.archives, func(a archive) bool { return a.segment == k.Segment }) {
			l.archives = append(l.archives, archive{k.Segment, time.Unix(0, k.At)})
		}
	case opDropped:
		l.forgetArchive(k.Segment)
	case opChain:
		return l.applyChain(ctx, k)
	case opSealed:
		c := l.chains[k.ID]
		if c == nil || k.Extent == nil || k.Extent.Last < c.tailFirst() || k.Extent.Last > c.seq {
			return nil // a checkpoint had it
		}
		return c.sealed(*k.Extent, k.Base)
	default:
		return fmt.Errorf("control record of unknown kind %q", k.Op)
	}
	return nil
}

func (l *Log) applyChain(ctx context.Context, k control) error {
	c := newChain(k.ID)
	c.who = k.Who
	if k.Default != nil {
		c.defaults = *k.Default
	}
	if k.Next > 1 {
		h, err := parseHash(k.Base)
		if err != nil {
			return err
		}
		c.seq, c.head, c.base, c.extents = k.Next-1, h, h, k.Extents
	}
	for _, e := range k.Extents {
		s, err := l.indexes.section(ctx, e.Segment, k.ID, e.First)
		if err != nil {
			return fmt.Errorf("read the trajectory of %s: %w", k.ID, err)
		}
		c.learn(s)
	}
	for _, o := range k.Open {
		if c.open == nil {
			c.open = map[uint64]openRef{}
		}
		c.open[o.Seq] = openRef{op: o.Op, step: o.Step}
	}
	l.chains[k.ID] = c
	return nil
}

// learn takes the steps and commands of a segment.
func (c *chain) learn(s *section) {
	for _, row := range s.Steps {
		if c.steps == nil {
			c.steps = map[dsec.Step]stepRef{}
		}
		step := dsec.Step{Session: row.Session, Number: row.Number}
		ref := c.steps[step]
		ref.request = row.Request
		if row.Sum != 0 {
			ref.sum = row.Sum
		}
		if row.Answer != 0 {
			ref.answer = row.Answer
		}
		c.steps[step] = ref
	}
	for _, row := range s.Commands {
		if c.commands == nil {
			c.commands = map[dsec.CommandID]uint64{}
		}
		c.commands[row.ID] = row.Answer
	}
}

func parseHash(s string) (h linkHash, err error) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != len(h) {
		return h, fmt.Errorf("%q is no hash", clip(s))
	}
	copy(h[:], b)
	return h, nil
}

// sealed moves the beginning of the tail to an extent. Requires: c.mu held, or
// nothing else runs yet.
func (c *chain) sealed(e extent, base string) error {
	h, err := parseHash(base)
	if err != nil {
		return err
	}
	first := c.tailFirst()
	n := e.Last + 1 - first
	c.bytes -= c.bytes * int64(n) / int64(len(c.tail)) // about; it only decides when to seal again
	c.tail = slices.Clone(c.tail[n:])
	c.base = h
	c.extents = append(c.extents, e)
	return nil
}

// saver is a Log's part in a checkpoint of the journal.
type saver struct {
	l   *Log
	new []newPlaces // of the checkpoint under way
}

type newPlaces struct {
	c     *chain
	first uint64
	at    []journal.Place
}

// save adds archives and chains. Chains are copied one after the other, so what
// is appended meanwhile may come again in a replay, which tells by the number.
func (s *saver) save(to *journal.Section) error {
	to.Cut()
	s.new = nil
	s.l.mu.RLock()
	archives := slices.Clone(s.l.archives)
	chains := make([]*chain, 0, len(s.l.chains))
	for _, c := range s.l.chains {
		chains = append(chains, c)
	}
	s.l.mu.RUnlock()
	for _, a := range archives {
		if _, err := to.Add(KindControl, control{Op: opArchived, Segment: a.segment, At: a.at.UnixNano()}.encode()); err != nil {
			return err
		}
	}
	for _, c := range chains {
		if err := s.chain(to, c); err != nil {
			return err
		}
	}
	return nil
}

func (s *saver) chain(to *journal.Section, c *chain) error {
	c.mu.Lock()
	first, tail := c.tailFirst(), slices.Clone(c.tail)
	k := control{Op: opChain, ID: c.id, Who: c.who, Next: first, Base: c.base.String(), Extents: slices.Clone(c.extents)}
	if first > 1 && !c.defaults.zero() {
		k.Default = &c.defaults
	}
	for seq, o := range c.open {
		if seq < first {
			k.Open = append(k.Open, openRow{seq, o.op, o.step})
		}
	}
	c.mu.Unlock()
	// A request before the tail whose answer is in it is open at its beginning.
	records := make([][]byte, len(tail))
	for i, at := range tail {
		b, err := s.l.cfg.Journal.ReadAt(at)
		if err != nil {
			return fmt.Errorf("copy record %d of sandbox %s: %w", first+uint64(i), c.id, err)
		}
		records[i] = b
		_, h, err := decode(b)
		if err != nil {
			return err
		}
		if h.Of != 0 && h.Of < first {
			k.Open = append(k.Open, openRow{h.Of, h.Op, c.guestStep(h.step(), h.Of)})
		}
	}
	if _, err := to.Add(KindControl, k.encode()); err != nil {
		return err
	}
	places := newPlaces{c: c, first: first, at: make([]journal.Place, len(tail))}
	for i, b := range records {
		at, err := to.Add(KindRecord, b)
		if err != nil {
			return err
		}
		places.at[i] = at
	}
	s.new = append(s.new, places)
	return nil
}

// moved takes the places that save was given.
func (s *saver) moved() {
	for _, n := range s.new {
		n.c.mu.Lock()
		tailFirst := n.c.tailFirst()
		for i, at := range n.at {
			if seq := n.first + uint64(i); seq >= tailFirst {
				n.c.tail[seq-tailFirst] = at
			}
		}
		n.c.mu.Unlock()
	}
	s.new = nil
}

// Run seals long tails, archives what has ended and deletes what is too old,
// until ctx ends.
func (l *Log) Run(ctx context.Context) error {
	tick := time.NewTicker(l.cfg.ArchiveEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-l.full:
		}
		if err := l.Tidy(ctx); err != nil && ctx.Err() == nil {
			l.cfg.Fault(err)
		}
	}
}

// Tidy does once what Run does again and again.
func (l *Log) Tidy(ctx context.Context) error {
	l.tidying.Lock()
	defer l.tidying.Unlock()
	l.mu.Lock()
	unclosed := l.unclosed
	l.unclosed = map[dsec.SandboxID]endParam{}
	l.mu.Unlock()
	for id, e := range unclosed {
		l.Ended(id, e.State, e.Cause, e.Detail)
	}
	return errors.Join(l.sealGrown(ctx), l.archiveEnded(ctx), l.expire(ctx, time.Now()), l.compact(ctx))
}

// compact asks for a checkpoint when much was appended.
func (l *Log) compact(ctx context.Context) error {
	if l.appended.Load() < checkpointBytes {
		return nil
	}
	l.appended.Store(0)
	return l.cfg.Journal.Checkpoint(ctx)
}

// sealGrown moves long tails of living sandboxes to segments.
func (l *Log) sealGrown(ctx context.Context) error {
	l.mu.RLock()
	var grown []*chain
	for _, c := range l.chains {
		c.mu.Lock()
		if !c.over && c.bytes > l.cfg.SealBytes {
			grown = append(grown, c)
		}
		c.mu.Unlock()
	}
	l.mu.RUnlock()
	var errs []error
	for _, c := range grown {
		if err := l.seal(ctx, c); err != nil {
			errs = append(errs, fmt.Errorf("seal the trajectory of %s: %w", c.id, err))
		}
	}
	return errors.Join(errs...)
}

func (l *Log) seal(ctx context.Context, c *chain) error {
	c.mu.Lock()
	first, n, blobs := c.tailFirst(), len(c.tail), c.blobs
	c.blobs = nil
	c.mu.Unlock()
	staged, err := l.cfg.Store.Stage(ctx)
	if err != nil {
		return err
	}
	defer staged.Abort() //nolint:errcheck // nothing depends on it
	w, err := newSegmentWriter(staged)
	if err != nil {
		return err
	}
	s := section{ID: c.id, First: first, Blobs: blobs}
	if err := l.copyTail(ctx, w, c, &s, n); err != nil {
		return err
	}
	w.idx.Sections = []section{s}
	if err := w.finish(); err != nil {
		return err
	}
	info, err := staged.Commit(ctx)
	if err != nil {
		return err
	}
	e := extent{Segment: info.Digest, First: first, Last: s.last()}
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, _, err := l.cfg.Journal.Append(KindControl, control{Op: opSealed, ID: c.id, Extent: &e, Base: s.Head}.encode()); err != nil {
		return unwritable(err)
	}
	return c.sealed(e, s.Head)
}

// copyTail writes n records from s.First on to a segment and fills in what the
// section says of them.
func (l *Log) copyTail(ctx context.Context, w *segmentWriter, c *chain, s *section, n int) error {
	for i := range n {
		b, err := l.read(ctx, c.id, s.First+uint64(i))
		if err != nil {
			return err
		}
		r, h, err := decode(b)
		if err != nil {
			return err
		}
		at, err := w.add(b)
		if err != nil {
			return err
		}
		s.At = append(s.At, at)
		s.Head = h.record(r, b).Hash
		if !h.step().IsZero() && h.Op != dsec.RecordEnd {
			row := stepRow{Session: h.Session, Number: h.Step, Request: h.Seq}
			if h.Of == 0 {
				row.Sum = c.defaults.sum(h.Op, h.Request)
			} else if row.Request = h.Of; h.answersStep() {
				row.Answer = h.Seq
			}
			s.Steps = append(s.Steps, row)
		}
		if h.Op == dsec.RecordCommand && h.Of != 0 && h.answersStep() {
			if id := commandOf(h.Answer); id != "" {
				s.Commands = append(s.Commands, commandRow{id, h.Seq})
			}
		}
	}
	return nil
}

// archiveMany is the most ended sandboxes of one segment.
const archiveMany = 4096

// archiveEnded moves ended sandboxes to a segment.
func (l *Log) archiveEnded(ctx context.Context) error {
	for {
		l.mu.RLock()
		var ended []*chain
		for _, c := range l.chains {
			c.mu.Lock()
			if c.over && len(ended) < archiveMany {
				ended = append(ended, c)
			}
			c.mu.Unlock()
		}
		l.mu.RUnlock()
		if len(ended) == 0 {
			l.over.Store(0)
			return nil
		}
		if err := l.archiveSome(ctx, ended); err != nil {
			return fmt.Errorf("archive trajectories: %w", err)
		}
		if len(ended) < archiveMany {
			return nil
		}
	}
}

func (l *Log) archiveSome(ctx context.Context, ended []*chain) error {
	staged, err := l.cfg.Store.Stage(ctx)
	if err != nil {
		return err
	}
	defer staged.Abort() //nolint:errcheck // nothing depends on it
	w, err := newSegmentWriter(staged)
	if err != nil {
		return err
	}
	ids := make([]dsec.SandboxID, 0, len(ended))
	var size int64
	for _, c := range ended {
		c.mu.Lock()
		s := section{ID: c.id, First: c.tailFirst(), Over: true, Ended: c.ended, Blobs: c.blobs, Earlier: slices.Clone(c.extents)}
		n := len(c.tail)
		size += c.bytes
		c.mu.Unlock()
		if err := l.copyTail(ctx, w, c, &s, n); err != nil {
			return err
		}
		c.mu.Lock()
		s.Steps, s.Commands = c.rows()
		c.mu.Unlock()
		w.idx.Sections = append(w.idx.Sections, s)
		ids = append(ids, c.id)
	}
	if err := w.finish(); err != nil {
		return err
	}
	info, err := staged.Commit(ctx)
	if err != nil {
		return err
	}
	now := time.Now()
	if l.cfg.Archives != nil {
		if err := l.cfg.Archives.AddArchive(ctx, string(info.Digest), now); err != nil {
			return err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	k := control{Op: opArchived, Segment: info.Digest, At: now.UnixNano(), IDs: ids}
	if _, _, err := l.cfg.Journal.Append(KindControl, k.encode()); err != nil {
		return unwritable(err)
	}
	for _, id := range ids {
		delete(l.chains, id)
		l.archived[id] = info.Digest
	}
	l.archives = append(l.archives, archive{info.Digest, now})
	l.over.Add(-size)
	return nil
}

// rows gives all steps and commands of a chain. Requires: c.mu held.
func (c *chain) rows() (steps []stepRow, commands []commandRow) {
	for s, ref := range c.steps {
		steps = append(steps, stepRow{Session: s.Session, Number: s.Number, Request: ref.request, Answer: ref.answer, Sum: ref.sum})
	}
	slices.SortFunc(steps, func(a, b stepRow) int { return int(a.Request) - int(b.Request) })
	for id, a := range c.commands {
		commands = append(commands, commandRow{id, a})
	}
	slices.SortFunc(commands, func(a, b commandRow) int { return int(a.Answer) - int(b.Answer) })
	return steps, commands
}

// expire deletes archives that are older than Config.Keep, and bodies that
// only they name.
func (l *Log) expire(ctx context.Context, now time.Time) error {
	l.mu.RLock()
	var old, kept []archive
	for _, a := range l.archives {
		if now.Sub(a.at) > l.cfg.Keep {
			old = append(old, a)
		} else {
			kept = append(kept, a)
		}
	}
	l.mu.RUnlock()
	if len(old) == 0 {
		return nil
	}
	used, err := l.used(ctx, kept)
	if err != nil {
		return err
	}
	for _, a := range old {
		named, err := l.used(ctx, []archive{a})
		if err != nil && !errors.Is(err, blob.ErrNotFound) {
			return err
		}
		l.mu.Lock()
		_, _, err = l.cfg.Journal.Append(KindControl, control{Op: opDropped, Segment: a.segment}.encode())
		if err == nil {
			l.forgetArchive(a.segment)
		}
		l.mu.Unlock()
		if err != nil {
			return unwritable(err)
		}
		if l.cfg.Archives != nil {
			if err := l.cfg.Archives.DropArchive(ctx, string(a.segment), a.at); err != nil {
				return err
			}
		}
		for d := range named {
			if !used[d] {
				if err := l.cfg.Store.Delete(ctx, d); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// used gives the blobs that archives need, themselves included, and those that
// living sandboxes name.
func (l *Log) used(ctx context.Context, archives []archive) (map[blob.Digest]bool, error) {
	used := map[blob.Digest]bool{}
	var add func(s *section) error
	add = func(s *section) error {
		for _, b := range s.Blobs {
			used[blob.Digest(b)] = true
		}
		for _, e := range s.Earlier {
			used[e.Segment] = true
			earlier, err := l.indexes.section(ctx, e.Segment, s.ID, e.First)
			if err != nil {
				return err
			}
			if err := add(earlier); err != nil {
				return err
			}
		}
		return nil
	}
	for _, a := range archives {
		used[a.segment] = true
		x, err := l.indexes.get(ctx, a.segment)
		if err != nil {
			return nil, err
		}
		for i := range x.Sections {
			if err := add(&x.Sections[i]); err != nil {
				return nil, err
			}
		}
	}
	type part struct {
		id dsec.SandboxID
		e  extent
	}
	var parts []part
	l.mu.RLock()
	for _, c := range l.chains {
		c.mu.Lock()
		for _, b := range c.blobs {
			used[blob.Digest(b)] = true
		}
		for _, e := range c.extents {
			parts = append(parts, part{c.id, e})
		}
		c.mu.Unlock()
	}
	l.mu.RUnlock()
	for _, p := range parts {
		used[p.e.Segment] = true
		s, err := l.indexes.section(ctx, p.e.Segment, p.id, p.e.First)
		if err == nil {
			err = add(s)
		}
		if err != nil {
			return nil, err
		}
	}
	return used, nil
}

// forgetArchive takes an archive out of the tables. Requires: l.mu held, or
// nothing else runs yet.
func (l *Log) forgetArchive(d blob.Digest) {
	l.archives = slices.DeleteFunc(l.archives, func(a archive) bool { return a.segment == d })
	for id, seg := range l.archived {
		if seg == d {
			delete(l.archived, id)
		}
	}
}
