package journal

import (
	"context"
	"fmt"
	"maps"
	"slices"
)

// Claim is what an owner says of itself to Own.
type Claim struct {
	// Kinds are the owner's alone.
	Kinds []Kind

	// Save adds, for a checkpoint that any owner may have asked for, records that have the effect
	// of all of the owner's up to a cut: see Section.Cut. The owner copies its state under the lock
	// that it holds over Append and the change of that state, lets go of it, and adds. An error
	// ends the checkpoint; nothing has changed then, and the next one begins anew.
	Save func(*Section) error

	// Moved is called when what the last Save added is in force: the places that Add returned can be
	// read. The places of records up to the cut end when it returns. nil if the owner keeps none.
	Moved func()
}

// Owner is the journal as one of several owners has it. It is safe for concurrent use.
//
// An owner first replays what it has, then appends. Until it has replayed its state is not what its
// records say, so Save is not called: a checkpoint copies the records.
//
// No call may be made with a lock held that Save or Moved takes, but for Append and AppendMany, Last
// and ReadAt.
type Owner struct {
	j        *Journal
	claim    Claim
	replayed bool // under j.mu
}

// Own makes the caller the owner of kinds of records. A kind that has an owner is ErrKind.
func (j *Journal) Own(c Claim) (*Owner, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for i, k := range c.Kinds {
		if k >= KindLost || j.owners[k] != nil || slices.Contains(c.Kinds[:i], k) {
			return nil, fmt.Errorf("own journal records of kind %d: %w", k, ErrKind)
		}
	}
	o := &Owner{j: j, claim: c}
	o.claim.Kinds = slices.Clone(c.Kinds)
	for _, k := range c.Kinds {
		j.owners[k] = o
	}
	return o, nil
}

// Append adds a record and returns its number and place. It does not wait for the disk.
func (o *Owner) Append(kind Kind, payload []byte) (uint64, Place, error) {
	var places [1]Place
	seq, err := o.append([]Entry{{kind, payload}}, places[:])
	return seq, places[0], err
}

// AppendMany adds records as Journal.AppendMany does.
func (o *Owner) AppendMany(entries []Entry) (last uint64, places []Place, err error) {
	places = make([]Place, len(entries))
	if last, err = o.append(entries, places); err != nil {
		return 0, nil, err
	}
	return last, places, nil
}

// AppendSync adds a record and waits until it is durable. After an error of Sync the record may
// still be there.
func (o *Owner) AppendSync(ctx context.Context, kind Kind, payload []byte) (uint64, Place, error) {
	seq, place, err := o.Append(kind, payload)
	if err != nil {
		return 0, Place{}, err
	}
	return seq, place, o.j.Sync(ctx, seq)
}

func (o *Owner) append(entries []Entry, places []Place) (uint64, error) {
	for _, e := range entries {
		if !slices.Contains(o.claim.Kinds, e.Kind) {
			return 0, fmt.Errorf("append kind %d to journal: %w", e.Kind, ErrKind)
		}
	}
	o.j.mu.Lock()
	replayed := o.replayed
	o.j.mu.Unlock()
	if !replayed {
		return 0, fmt.Errorf("append to journal before replay of kinds %d", o.claim.Kinds)
	}
	return o.j.append(entries, places)
}

// Sync returns when record seq and all before it, of all owners, survive a power cut.
func (o *Owner) Sync(ctx context.Context, seq uint64) error { return o.j.Sync(ctx, seq) }

// ReadAt returns the payload of the record at p.
func (o *Owner) ReadAt(p Place) ([]byte, error) { return o.j.ReadAt(p) }

// Last returns the number of the last record of any owner.
func (o *Owner) Last() uint64 { return o.j.Last() }

// Replay calls fn for each of the owner's records, in order: what it saved for the last checkpoint,
// then what it appended behind its cut; and KindLost for records that are gone, which may have been
// the owner's. An error of fn ends the replay and is returned as it is.
// No checkpoint runs meanwhile, so fn must not ask for one; places stay good.
func (o *Owner) Replay(ctx context.Context, fn func(Record) error) error {
	o.j.checkpoint.Lock()
	defer o.j.checkpoint.Unlock()
	err := o.j.Replay(ctx, 0, func(r Record) error {
		if r.Kind != KindLost && !slices.Contains(o.claim.Kinds, r.Kind) {
			return nil
		}
		return fn(r)
	})
	if err != nil {
		return err
	}
	o.j.mu.Lock()
	o.replayed = true
	o.j.mu.Unlock()
	return nil
}

// Checkpoint has all owners save what they have and forgets the records before. One that begins
// after the call, whoever asked for it, serves all who wait.
func (o *Owner) Checkpoint(ctx context.Context) error {
	j := o.j
	j.mu.Lock()
	want := j.begun + 1
	j.mu.Unlock()
	j.checkpoint.Lock()
	defer j.checkpoint.Unlock()

	j.mu.Lock()
	if j.finished >= want {
		j.mu.Unlock()
		return nil
	}
	if j.next == 1 {
		j.mu.Unlock()
		return nil // there are no records
	}
	j.begun++
	this := j.begun
	var present []*Owner // in the order of their kinds, for what is written to be the same each time
	for _, k := range slices.Sorted(maps.Keys(j.owners)) {
		if w := j.owners[k]; w.replayed && !slices.Contains(present, w) {
			present = append(present, w)
		}
	}
	j.mu.Unlock()

	save := func(s *Snapshot) error {
		if err := j.carry(ctx, s, present); err != nil {
			return err
		}
		for _, w := range present {
			part := &Section{snapshot: s, owner: w}
			if err := w.claim.Save(part); err != nil {
				return fmt.Errorf("save records of kinds %d: %w", w.claim.Kinds, err)
			}
			for _, k := range w.claim.Kinds {
				if part.cut > s.upTo {
					s.cuts[k] = part.cut
				}
			}
		}
		return nil
	}
	moved := func() {
		for _, w := range present {
			if w.claim.Moved != nil {
				w.claim.Moved()
			}
		}
	}
	if err := j.compact(ctx, everything, save, moved); err != nil {
		return err
	}
	j.mu.Lock()
	j.finished = this
	j.mu.Unlock()
	return nil
}

// carry copies the records that none of the present owners saves. Those are the records of owners
// that are not there, or not yet.
func (j *Journal) carry(ctx context.Context, s *Snapshot, present []*Owner) error {
	j.mu.Lock()
	rest := j.seen
	j.mu.Unlock()
	for _, w := range present {
		for _, k := range w.claim.Kinds {
			rest.remove(k)
		}
	}
	if rest == (kindSet{}) {
		return nil
	}
	return j.Replay(ctx, 0, func(r Record) error {
		if r.Seq > s.upTo || r.Kind != KindLost && !rest.has(r.Kind) {
			return nil
		}
		_, err := s.add(r.Kind, r.Payload)
		return err
	})
}

// Section takes what one owner saves for a checkpoint. It belongs to the call of Save.
type Section struct {
	snapshot *Snapshot
	owner    *Owner
	cut      uint64
}

// Cut says that what is added has the effect of all of the owner's records up to now, and returns
// the number of the last one: Replay gives only those behind it. Called while the owner holds the
// lock under which it copies its state, this makes every record count once. Without it, or for an
// owner that copies its state in pieces and calls it before the first, records appended during
// Save may be in what is added and come again; they can be told by their number.
//
// Only the first call counts.
func (s *Section) Cut() uint64 {
	if s.cut == 0 {
		s.cut = s.owner.j.Last()
	}
	return s.cut
}

// Add adds one record, and returns where it can be read once Moved has been called.
func (s *Section) Add(kind Kind, payload []byte) (Place, error) {
	if !slices.Contains(s.owner.claim.Kinds, kind) {
		return Place{}, fmt.Errorf("add kind %d to snapshot: %w", kind, ErrKind)
	}
	return s.snapshot.Add(kind, payload)
}
