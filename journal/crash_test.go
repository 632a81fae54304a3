package journal_test

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"testing"

	"github.com/dsec-go/dsec/journal"
	"github.com/dsec-go/dsec/journal/journaltest"
)

// model is what the journal under test has been asked, and so what may be left of it.
type model struct {
	mu       sync.Mutex
	payloads [][]byte // by number; the last may be an attempt that failed or is under way
	appended uint64   // numbers that Append has returned
	synced   uint64   // numbers that Sync has acknowledged
}

// state stands for what a projection would know after records 1 to seq.
func (m *model) state(seq uint64) []byte {
	h := sha256.New()
	for _, p := range m.payloads[1 : seq+1] {
		fmt.Fprintf(h, "%d:", len(p))
		h.Write(p)
	}
	return h.Sum(nil)
}

// check opens a journal after a crash and compares it with the model. Records up to least
// must be there, those up to the last attempt may be.
//
// Then it goes on: what recovery has cut must not come back after one more power cut.
func (m *model) check(fs *journaltest.CrashFS, least uint64, r *rand.Rand) error {
	j, err := journal.Open("j", journal.Options{FS: fs, SegmentSize: segmentSize})
	if err != nil {
		return err
	}
	defer j.Close()
	last, err := m.replay(j)
	if err != nil {
		return err
	}
	if last < least {
		return fmt.Errorf("records end at %d, want at least %d", last, least)
	}
	if s := j.Stats(); s.Last != last || s.Durable != last {
		return fmt.Errorf("stats say %+v, replay ended at %d", s, last)
	}
	next := &model{payloads: append(slices.Clone(m.payloads[:last+1]), []byte("after the crash"))}
	if _, _, err := j.Append(kindOf(next.payloads[last+1]), next.payloads[last+1]); err != nil {
		return err
	}
	again, err := journal.Open("j", journal.Options{FS: fs.PowerCut(r), SegmentSize: segmentSize})
	if err != nil {
		return fmt.Errorf("after one more power cut: %w", err)
	}
	defer again.Close()
	if got, err := next.replay(again); err != nil || got < last {
		return fmt.Errorf("after one more power cut: records end at %d, want at least %d: %w", got, last, err)
	}
	return nil
}

// replay compares all that j has with the model and returns the last number.
func (m *model) replay(j *journal.Journal) (uint64, error) {
	var last uint64
	parts := 0
	err := j.Replay(context.Background(), 1, func(r journal.Record) error {
		if r.Snapshot {
			parts++
			last = r.Seq
			if parts > 2 || int(r.Kind) != parts {
				return fmt.Errorf("snapshot record %d has kind %d", parts, r.Kind)
			}
			if r.Kind == 1 && string(r.Payload) != string(m.state(r.Seq)) {
				return fmt.Errorf("snapshot at %d is of another state", r.Seq)
			}
			return nil
		}
		if r.Seq != last+1 {
			return fmt.Errorf("record %d follows %d", r.Seq, last)
		}
		last = r.Seq
		if last >= uint64(len(m.payloads)) || string(r.Payload) != string(m.payloads[last]) || r.Kind != kindOf(r.Payload) {
			return fmt.Errorf("record %d was never written", last)
		}
		return nil
	})
	if err == nil && parts != 0 && parts != 2 {
		err = fmt.Errorf("snapshot has %d records, want 2", parts)
	}
	return last, err
}

func kindOf(payload []byte) journal.Kind { return journal.Kind(len(payload) % 1000) }

const segmentSize = 3000

// TestCrash runs random calls and crashes before every operation that reaches the disk.
func TestCrash(t *testing.T) {
	seeds := uint64(120)
	if testing.Short() {
		seeds = 30
	}
	for seed := range seeds {
		if !crashRun(t, seed) {
			return
		}
	}
}

func crashRun(t *testing.T, seed uint64) bool {
	rng := rand.New(rand.NewPCG(seed, 1))
	crashes := rand.New(rand.NewPCG(seed, 2))
	m := &model{payloads: [][]byte{nil}}
	disk := journaltest.NewCrashFS()
	failed := false
	var crashMu sync.Mutex
	disk.Before = func() {
		crashMu.Lock()
		defer crashMu.Unlock()
		m.mu.Lock()
		defer m.mu.Unlock()
		if failed {
			return
		}
		for range 2 {
			if err := m.check(disk.PowerCut(crashes), m.synced, crashes); err != nil {
				failed = true
				t.Errorf("seed %d: power cut after %d records, %d synced: %v", seed, m.appended, m.synced, err)
				return
			}
		}
		if crashes.IntN(4) == 0 {
			// A kill loses nothing that Append returned, and a power cut soon after it nothing
			// that the new process has replayed.
			if err := m.check(disk.Kill(), m.appended, crashes); err != nil {
				failed = true
				t.Errorf("seed %d: kill after %d records: %v", seed, m.appended, err)
			}
		}
	}
	faulty := journaltest.NewFaulty(disk)
	open := func() *journal.Journal {
		j, err := journal.Open("j", journal.Options{FS: faulty, SegmentSize: segmentSize})
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		return j
	}
	j := open()
	ctx := t.Context()
	sync := func(seq uint64) {
		if err := j.Sync(ctx, seq); err != nil {
			t.Fatalf("seed %d: sync %d: %v", seed, seq, err)
		}
		m.mu.Lock()
		m.synced = max(m.synced, seq)
		m.mu.Unlock()
	}
	for range 40 {
		switch op := rng.IntN(20); {
		case op < 12:
			payload := make([]byte, rng.IntN(900))
			if rng.IntN(20) == 0 {
				payload = make([]byte, 4000)
			}
			for i := range payload {
				payload[i] = byte(rng.Uint32())
			}
			if rng.IntN(10) == 0 {
				ops := []journaltest.Op{journaltest.JournalWrite, journaltest.JournalCreate}
				faulty.FailAt(ops[rng.IntN(2)], 1, syscall.ENOSPC)
			}
			m.mu.Lock()
			m.payloads = append(m.payloads[:m.appended+1], payload)
			m.mu.Unlock()
			seq, _, err := j.Append(kindOf(payload), payload)
			if errors.Is(err, journal.ErrWrite) && errors.Is(err, syscall.ENOSPC) {
				continue
			}
			m.mu.Lock()
			m.appended++
			if err != nil || seq != m.appended {
				t.Fatalf("seed %d: append %d: %d, %v", seed, m.appended, seq, err)
			}
			m.mu.Unlock()
			if rng.IntN(3) == 0 {
				sync(seq)
			}
		case op < 15 && m.appended > 0:
			sync(1 + rng.Uint64N(m.appended))
		case op < 18 && m.appended > 0:
			upTo := max(j.Stats().Snapshot, m.appended-min(m.appended-1, rng.Uint64N(4)))
			state := m.state(upTo)
			err := j.Checkpoint(ctx, upTo, func(s *journal.Snapshot) error {
				_, err1 := s.Add(1, state)
				_, err2 := s.Add(2, make([]byte, rng.IntN(2000)))
				return errors.Join(err1, err2)
			})
			if err != nil && !errors.Is(err, syscall.ENOSPC) { // a fault left from above
				t.Fatalf("seed %d: checkpoint %d: %v", seed, upTo, err)
			}
		case op == 18:
			if err := j.Close(); err != nil {
				t.Fatalf("seed %d: close: %v", seed, err)
			}
			m.mu.Lock()
			m.synced = m.appended
			m.mu.Unlock()
			faulty = journaltest.NewFaulty(disk)
			j = open()
		default:
			if last, err := m.replay(j); err != nil || last != m.appended {
				t.Fatalf("seed %d: replay to %d of %d: %v", seed, last, m.appended, err)
			}
		}
	}
	j.Close()
	return !failed
}

// FuzzRecover puts arbitrary bytes where the journal expects its files. Open may refuse them;
// if it does not, what it makes of them must be stable.
func FuzzRecover(f *testing.F) {
	disk := journaltest.NewCrashFS()
	j, err := journal.Open("j", journal.Options{FS: disk, SegmentSize: segmentSize})
	if err != nil {
		f.Fatal(err)
	}
	for i := range 5 {
		if _, _, err := j.AppendSync(context.Background(), journal.Kind(i), make([]byte, i*10)); err != nil {
			f.Fatal(err)
		}
	}
	whole := disk.Content("j/0000000000000001.log")
	if err := j.Checkpoint(context.Background(), 3, add(1, "state")); err != nil {
		f.Fatal(err)
	}
	j.Close()
	snap, hint := disk.Content("j/0000000000000003.snap"), disk.Content("j/durable")
	f.Add(whole, []byte(nil), []byte(nil))
	f.Add(whole[:len(whole)-3], []byte(nil), hint)
	f.Add(whole, snap, hint)
	f.Add(whole[:50], snap[:60], hint[:5])
	f.Add(append(slices.Clone(whole), make([]byte, 200)...), []byte(nil), hint)
	f.Add(append(slices.Clone(whole[:len(whole)-9]), make([]byte, 200)...), []byte(nil), hint[:3])
	f.Add(whole, snapshotWithCut(f), hint)
	f.Add(binary.LittleEndian.AppendUint64(whole, 6), []byte(nil), hint)
	f.Fuzz(func(t *testing.T, seg, snap, hint []byte) {
		disk := journaltest.NewCrashFS()
		disk.Corrupt("j/0000000000000001.log", func([]byte) []byte { return seg })
		if len(snap) > 0 {
			disk.Corrupt("j/0000000000000003.snap", func([]byte) []byte { return snap })
		}
		disk.Corrupt("j/durable", func([]byte) []byte { return hint })
		var before []string
		for round := range 2 {
			j, err := journal.Open("j", journal.Options{FS: disk, SegmentSize: segmentSize})
			if err != nil {
				if round > 0 || !errors.Is(err, journal.ErrCorrupt) && !errors.Is(err, journal.ErrVersion) {
					t.Fatal(err)
				}
				if string(disk.Content("j/0000000000000001.log")) != string(seg) {
					t.Fatal("a refused file was changed")
				}
				return
			}
			var got []string
			err = j.Replay(t.Context(), 0, func(r journal.Record) error {
				got = append(got, show(r))
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			if round > 0 && fmt.Sprint(got) != fmt.Sprint(before) {
				t.Fatalf("second open: %v, first %v", got, before)
			}
			seq, _, err := j.AppendSync(t.Context(), 7, []byte("more"))
			if err != nil {
				t.Fatal(err)
			}
			before = append(got, show(journal.Record{Seq: seq, Kind: 7, Payload: []byte("more")}))
			if err := j.Close(); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// snapshotWithCut is a snapshot of records up to 3 that has the effect of the fourth, too.
func snapshotWithCut(t testing.TB) []byte {
	disk := journaltest.NewCrashFS()
	j := open(t, disk, 0)
	l := newLedger(t, j, 1)
	l.replay(t)
	for range 3 {
		if err := l.append(); err != nil {
			t.Fatal(err)
		}
	}
	l.onSave(func() {
		if err := l.append(); err != nil {
			t.Error(err)
		}
	})
	if err := l.owner.Checkpoint(context.Background()); err != nil {
		t.Fatal(err)
	}
	return disk.Content("j/0000000000000003.snap")
}

// show is a record without its place.
func show(r journal.Record) string { return fmt.Sprint(r.Seq, r.Kind, r.Snapshot, r.Payload) }
