package journal_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/dsec-go/dsec/journal"
	"github.com/dsec-go/dsec/journal/journaltest"
)

// ledger is an owner whose state counts each of its records once: the numbers that it appended, in
// order. Its places are those of the records that hold them.
type ledger struct {
	kind  journal.Kind
	owner *journal.Owner
	cut   bool

	mu      sync.Mutex
	entries []ledgerEntry
	first   int             // how many the checkpoint under way covers
	moving  []journal.Place // of those
	saves   int
	fail    error
	unread  []error                // places, old or new, that could not be read in moved
	hook    atomic.Pointer[func()] // called when it saves
}

type ledgerEntry struct {
	n     uint64
	place journal.Place
}

func newLedger(t testing.TB, j *journal.Journal, kind journal.Kind) *ledger {
	t.Helper()
	l := &ledger{kind: kind, cut: true}
	var err error
	if l.owner, err = j.Own(journal.Claim{Kinds: []journal.Kind{kind}, Save: l.save, Moved: l.moved}); err != nil {
		t.Fatal(err)
	}
	return l
}

func (l *ledger) replay(t testing.TB) {
	t.Helper()
	err := l.owner.Replay(t.Context(), func(r journal.Record) error {
		n := binary.LittleEndian.Uint64(r.Payload)
		l.entries = append(l.entries, ledgerEntry{n, r.Place})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func (l *ledger) append() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := uint64(len(l.entries))
	_, place, err := l.owner.Append(l.kind, l.payload(n))
	if err == nil {
		l.entries = append(l.entries, ledgerEntry{n, place})
	}
	return err
}

func (l *ledger) payload(n uint64) []byte {
	return append(binary.LittleEndian.AppendUint64(nil, n), strings.Repeat(fmt.Sprint(l.kind), int(n%50))...)
}

func (l *ledger) save(s *journal.Section) error {
	if f := l.hook.Load(); f != nil {
		(*f)()
	}
	l.mu.Lock()
	if l.cut {
		s.Cut()
	}
	l.saves++
	l.first, l.moving = len(l.entries), nil
	err := l.fail
	l.mu.Unlock()
	for n := range l.first {
		p, err := s.Add(l.kind, l.payload(uint64(n)))
		if err != nil {
			return err
		}
		l.moving = append(l.moving, p)
	}
	return err
}

func (l *ledger) moved() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, p := range l.moving {
		for _, p := range []journal.Place{l.entries[i].place, p} {
			if _, err := l.owner.ReadAt(p); err != nil {
				l.unread = append(l.unread, err)
			}
		}
		l.entries[i].place = p
	}
}

// check reports whether the entries are 0 to n-1, each readable at its place.
func (l *ledger) check(n int) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.unread) > 0 {
		return fmt.Errorf("kind %d: places in Moved: %w", l.kind, errors.Join(l.unread...))
	}
	if len(l.entries) != n {
		return fmt.Errorf("kind %d: %d entries, want %d", l.kind, len(l.entries), n)
	}
	for i, e := range l.entries {
		if e.n != uint64(i) {
			return fmt.Errorf("kind %d: entry %d is %d", l.kind, i, e.n)
		}
		if b, err := l.owner.ReadAt(e.place); err != nil || string(b) != string(l.payload(e.n)) {
			return fmt.Errorf("kind %d: entry %d reads %q, %w", l.kind, i, b, err)
		}
	}
	return nil
}

func wantEntries(t testing.TB, l *ledger, n int) {
	t.Helper()
	if err := l.check(n); err != nil {
		t.Error(err)
	}
}

// Owners that are absent, or have not replayed, lose nothing by the checkpoints of another.
func TestOwners(t *testing.T) {
	disk := journaltest.NewCrashFS()
	j := open(t, disk, 1000)
	a, b := newLedger(t, j, 1), newLedger(t, j, 2)
	if _, err := j.Own(journal.Claim{Kinds: []journal.Kind{3, 2}}); !errors.Is(err, journal.ErrKind) {
		t.Errorf("kind 2 owned twice: %v, want ErrKind", err)
	}
	if _, err := j.Own(journal.Claim{Kinds: []journal.Kind{0xfffe}}); !errors.Is(err, journal.ErrKind) {
		t.Errorf("reserved kind: %v, want ErrKind", err)
	}
	if err := a.append(); err == nil {
		t.Error("an owner appends before it has replayed")
	}
	a.replay(t)
	b.replay(t)
	if err := a.owner.Checkpoint(t.Context()); err != nil {
		t.Errorf("checkpoint of an empty journal: %v", err)
	}
	if _, _, err := a.owner.Append(2, nil); !errors.Is(err, journal.ErrKind) {
		t.Errorf("append of another's kind: %v, want ErrKind", err)
	}
	for range 60 {
		if err := errors.Join(a.append(), b.append()); err != nil {
			t.Fatal(err)
		}
	}
	old := a.entries[0].place
	if err := a.owner.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	if a.saves != 1 || b.saves != 1 {
		t.Errorf("%d and %d saves, want 1 and 1", a.saves, b.saves)
	}
	if _, err := j.ReadAt(old); !errors.Is(err, journal.ErrGone) {
		t.Errorf("read at a place before the checkpoint: %v, want ErrGone", err)
	}
	if _, err := j.ReadAt(journal.Place{}); !errors.Is(err, journal.ErrGone) {
		t.Errorf("read at the zero place: %v, want ErrGone", err)
	}
	if err := j.Checkpoint(t.Context(), 1, add(1, "")); !errors.Is(err, journal.ErrKind) {
		t.Errorf("checkpoint beside the owners: %v, want ErrKind", err)
	}
	if err := errors.Join(a.append(), b.append()); err != nil {
		t.Fatal(err)
	}
	wantEntries(t, a, 61)
	wantEntries(t, b, 61)

	// One that fails changes nothing.
	b.fail = errors.New("not now")
	if err := a.owner.Checkpoint(t.Context()); !errors.Is(err, b.fail) {
		t.Errorf("%v, want the error of Save", err)
	}
	wantEntries(t, a, 61)
	j.Close()
	if _, err := j.ReadAt(a.entries[0].place); !errors.Is(err, journal.ErrClosed) {
		t.Errorf("read from a closed journal: %v, want ErrClosed", err)
	}

	for range 2 {
		j = open(t, disk, 1000)
		a = newLedger(t, j, 1)
		a.replay(t)
		if err := a.owner.Checkpoint(t.Context()); err != nil { // b is absent
			t.Fatal(err)
		}
		b = newLedger(t, j, 2)
		if err := a.owner.Checkpoint(t.Context()); err != nil { // and now has not replayed
			t.Fatal(err)
		}
		b.replay(t)
		wantEntries(t, a, 61)
		wantEntries(t, b, 61)
		j.Close()
	}
}

// Records appended while a checkpoint runs count once, whether the saved state has them or not.
func TestCut(t *testing.T) {
	for _, cut := range []bool{true, false} {
		disk := journaltest.NewCrashFS()
		j := open(t, disk, 2000)
		a, b := newLedger(t, j, 1), newLedger(t, j, 2)
		a.replay(t)
		b.replay(t)
		b.cut = cut
		inner := a.claimBefore(b, t)
		for range 10 {
			if err := errors.Join(a.append(), b.append()); err != nil {
				t.Fatal(err)
			}
		}
		if err := b.owner.Checkpoint(t.Context()); err != nil {
			t.Fatal(err)
		}
		if *inner != 1 {
			t.Fatalf("%d saves of a, want 1", *inner)
		}
		wantEntries(t, b, 11)
		after := disk.PowerCut(rand.New(rand.NewPCG(1, 1))) // what the snapshot has must be in the log
		j.Close()
		j = open(t, after, 2000)
		b = newLedger(t, j, 2)
		b.replay(t)
		want := 11
		if !cut {
			want = 12 // without a cut the record comes again
		}
		if len(b.entries) != want {
			t.Errorf("cut %v: %d entries, want %d", cut, len(b.entries), want)
		}
		if cut {
			if err := b.append(); err != nil {
				t.Fatal(err)
			}
			if err := b.check(12); err != nil {
				t.Error(err)
			}
		}
		j.Close()
	}
}

// A log that ends before a cut has lost records, whatever the hint says: their numbers must not be
// given again.
func TestCutMissing(t *testing.T) {
	snap := snapshotWithCut(t)
	disk := journaltest.NewCrashFS()
	j := open(t, disk, 0)
	appendSync(t, j, "1")
	appendSync(t, j, "2")
	appendSync(t, j, "3")
	j.Close()
	disk.Corrupt("j/0000000000000003.snap", func([]byte) []byte { return snap })
	if _, err := journal.Open("j", journal.Options{FS: disk}); !errors.Is(err, journal.ErrCorrupt) {
		t.Errorf("%v, want ErrCorrupt", err)
	}
}

// claimBefore makes b append one record when a saves, which is before b does.
func (l *ledger) claimBefore(b *ledger, t *testing.T) *int {
	n := new(int)
	var err error
	l.onSave(func() {
		*n++
		if err = b.append(); err != nil {
			t.Error(err)
		}
	})
	return n
}

func (l *ledger) onSave(f func()) { l.hook.Store(&f) }

// All at once, with readers, faults and crashes: nothing is lost, nothing counts twice, and a place
// that is gone has been replaced.
func TestOwnersConcurrent(t *testing.T) {
	for seed := range uint64(6) {
		disk := journaltest.NewCrashFS()
		faulty := journaltest.NewFaulty(disk)
		j := open(t, faulty, 3000)
		owners := []*ledger{newLedger(t, j, 1), newLedger(t, j, 7), newLedger(t, j, 9)}
		for _, l := range owners {
			l.replay(t)
		}
		const each = 120
		stop := make(chan struct{})
		var readers, writers sync.WaitGroup
		for i, l := range owners {
			readers.Go(func() {
				r := rand.New(rand.NewPCG(seed, uint64(i)))
				for {
					select {
					case <-stop:
						return
					default:
					}
					l.mu.Lock()
					if len(l.entries) == 0 {
						l.mu.Unlock()
						continue
					}
					e := &l.entries[r.IntN(len(l.entries))]
					n, place := e.n, e.place
					l.mu.Unlock()
					b, err := l.owner.ReadAt(place)
					switch {
					case errors.Is(err, journal.ErrGone):
						l.mu.Lock()
						if e := l.entries[n]; e.place == place {
							t.Errorf("place of entry %d is gone and not replaced", n)
						}
						l.mu.Unlock()
					case err != nil || string(b) != string(l.payload(n)):
						t.Errorf("entry %d reads %q, %v", n, b, err)
					}
				}
			})
			writers.Go(func() {
				for n := 0; n < each; n++ {
					if err := l.append(); err != nil {
						t.Error(err)
						return
					}
					if n%40 == 7*i {
						if n > 80 {
							faulty.FailAt(journaltest.SnapshotRename, 1, syscall.ENOSPC)
						}
						if err := l.owner.Checkpoint(t.Context()); err != nil && !errors.Is(err, syscall.ENOSPC) {
							t.Error(err)
						}
					}
				}
			})
		}
		writers.Wait()
		close(stop)
		readers.Wait()
		for _, l := range owners {
			wantEntries(t, l, each)
		}
		if err := j.Sync(t.Context(), j.Last()); err != nil {
			t.Fatal(err)
		}
		for _, after := range []*journaltest.CrashFS{disk.Kill(), disk.PowerCut(rand.New(rand.NewPCG(seed, 9)))} {
			j := open(t, after, 3000)
			for _, k := range []journal.Kind{1, 7, 9} {
				l := newLedger(t, j, k)
				l.replay(t)
				wantEntries(t, l, each)
			}
			j.Close()
		}
		j.Close()
	}
}

// A checkpoint that had begun serves nobody who asks later: it may not have what they appended.
func TestCheckpointAskedMeanwhile(t *testing.T) {
	j := open(t, journaltest.NewCrashFS(), 0)
	a := newLedger(t, j, 1)
	a.replay(t)
	if err := a.append(); err != nil {
		t.Fatal(err)
	}
	begun, release := make(chan struct{}), make(chan struct{})
	var once sync.Once
	a.onSave(func() { once.Do(func() { close(begun); <-release }) })
	var wg sync.WaitGroup
	ask := func(saves int) {
		if err := a.owner.Checkpoint(t.Context()); err != nil {
			t.Error(err)
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.saves < saves {
			t.Errorf("a checkpoint returned after %d saves, want %d", a.saves, saves)
		}
	}
	wg.Go(func() { ask(1) })
	<-begun
	for range 10 {
		wg.Go(func() { ask(2) })
	}
	close(release)
	wg.Wait()
}

// Power cuts and kills before every operation of a journal with owners: each comes back with a
// beginning of what it appended, without gaps or repetition, at least what was synced.
func TestOwnersCrash(t *testing.T) {
	for seed := range uint64(80) {
		rng, crashes := rand.New(rand.NewPCG(seed, 3)), rand.New(rand.NewPCG(seed, 4))
		disk := journaltest.NewCrashFS()
		var appended, synced [2]atomic.Int64
		var mu sync.Mutex
		failed := false
		check := func(c *journaltest.CrashFS, least *[2]atomic.Int64) error {
			j, err := journal.Open("j", journal.Options{FS: c, SegmentSize: 1500})
			if err != nil {
				return err
			}
			defer j.Close()
			for i := range 2 {
				l := newLedger(t, j, journal.Kind(i+1))
				l.replay(t)
				n := len(l.entries)
				if int64(n) < least[i].Load() || int64(n) > appended[i].Load()+1 {
					return fmt.Errorf("kind %d: %d entries, want %d to %d", l.kind, n, least[i].Load(), appended[i].Load()+1)
				}
				if err := l.check(n); err != nil {
					return err
				}
			}
			return nil
		}
		disk.Before = func() {
			mu.Lock()
			defer mu.Unlock()
			if failed {
				return
			}
			err := check(disk.PowerCut(crashes), &synced)
			if err == nil && crashes.IntN(3) == 0 {
				err = check(disk.Kill(), &appended)
			}
			if err != nil {
				failed = true
				t.Errorf("seed %d: %v", seed, err)
			}
		}
		j := open(t, disk, 1500)
		owners := []*ledger{newLedger(t, j, 1), newLedger(t, j, 2)}
		for i, l := range owners {
			l.replay(t)
			l.onSave(func() { // appends while the other saves, and the last also behind its own cut
				if rng.IntN(2) == 0 {
					if err := owners[1-i].append(); err != nil {
						t.Error(err)
					}
					appended[1-i].Add(1)
				}
			})
		}
		for range 40 {
			i := rng.IntN(2)
			switch rng.IntN(8) {
			case 0:
				if err := owners[i].owner.Checkpoint(t.Context()); err != nil {
					t.Fatal(err)
				}
			case 1, 2:
				a, b := appended[0].Load(), appended[1].Load()
				if err := j.Sync(t.Context(), j.Last()); err != nil {
					t.Fatal(err)
				}
				synced[0].Store(a)
				synced[1].Store(b)
			default:
				if err := owners[i].append(); err != nil {
					t.Fatal(err)
				}
				appended[i].Add(1)
			}
		}
		j.Close()
		if failed {
			return
		}
	}
}
