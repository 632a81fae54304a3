package journal_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/dsec-go/dsec/journal"
	"github.com/dsec-go/dsec/journal/journaltest"
)

const first = "j/0000000000000001.log"

func open(t testing.TB, fs journal.FS, size int64) *journal.Journal {
	t.Helper()
	j, err := journal.Open("j", journal.Options{FS: fs, SegmentSize: size})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	return j
}

func appendSync(t testing.TB, j *journal.Journal, payload string) {
	t.Helper()
	if _, _, err := j.AppendSync(t.Context(), 1, []byte(payload)); err != nil {
		t.Fatal(err)
	}
}

// add writes one record into a snapshot.
func add(kind journal.Kind, payload string) func(*journal.Snapshot) error {
	return func(s *journal.Snapshot) error {
		_, err := s.Add(kind, []byte(payload))
		return err
	}
}

// replay returns what j has from from on, as "number:payload", snapshots as "number=payload".
func replay(t testing.TB, j *journal.Journal, from uint64) string {
	t.Helper()
	var b strings.Builder
	err := j.Replay(t.Context(), from, func(r journal.Record) error {
		sign := ":"
		if r.Snapshot {
			sign = "="
		}
		fmt.Fprintf(&b, "%d%s%s ", r.Seq, sign, r.Payload)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(b.String())
}

func TestHost(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	o := journal.Options{SegmentSize: 200}
	j, err := journal.Open(dir, o)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := journal.Open(dir, o); !errors.Is(err, journal.ErrLocked) {
		t.Errorf("second open: %v, want ErrLocked", err)
	}
	for i := range 20 {
		seq, _, err := j.AppendSync(t.Context(), journal.Kind(i), fmt.Appendf(nil, "record %d", i+1))
		if err != nil || seq != uint64(i+1) {
			t.Fatalf("append: %d, %v", seq, err)
		}
	}
	if s := j.Stats(); s.Last != 20 || s.Durable != 20 || s.Segments < 3 {
		t.Errorf("stats %+v", s)
	}
	if got, want := replay(t, j, 19), "19:record 19 20:record 20"; got != want {
		t.Errorf("replay %q, want %q", got, want)
	}
	if err := j.Checkpoint(t.Context(), 18, add(3, "state")); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := j.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	}
	for range 2 {
		if j, err = journal.Open(dir, o); err != nil {
			t.Fatal(err)
		}
		if got, want := replay(t, j, 0), "18=state 19:record 19 20:record 20"; got != want {
			t.Errorf("replay %q, want %q", got, want)
		}
		if got, want := replay(t, j, 20), "20:record 20"; got != want {
			t.Errorf("replay %q, want %q", got, want)
		}
		if s := j.Stats(); s.Snapshot != 18 || s.Durable != 20 {
			t.Errorf("stats %+v", s)
		}
		j.Close()
	}
	if _, _, err := j.Append(1, nil); !errors.Is(err, journal.ErrClosed) {
		t.Errorf("append: %v, want ErrClosed", err)
	}
	if err := j.Replay(t.Context(), 0, nil); !errors.Is(err, journal.ErrClosed) {
		t.Errorf("replay: %v, want ErrClosed", err)
	}
}

func TestRefused(t *testing.T) {
	j := open(t, journaltest.NewCrashFS(), 0)
	if _, _, err := j.Append(0xffff, nil); !errors.Is(err, journal.ErrKind) {
		t.Errorf("%v, want ErrKind", err)
	}
	if _, _, err := j.Append(1, make([]byte, journal.MaxPayload+1)); !errors.Is(err, journal.ErrTooLarge) {
		t.Errorf("%v, want ErrTooLarge", err)
	}
	if err := j.Sync(t.Context(), 1); err == nil {
		t.Error("sync of a record that does not exist succeeds")
	}
	if err := j.Checkpoint(t.Context(), 1, func(*journal.Snapshot) error { return nil }); err == nil {
		t.Error("checkpoint of a record that does not exist succeeds")
	}
	if _, _, err := j.AppendSync(t.Context(), 1, make([]byte, journal.MaxPayload)); err != nil {
		t.Errorf("largest record: %v", err)
	}
}

// Every bit of a journal whose records were acknowledged is turned in turn: Open says where,
// and changes nothing.
func TestFlippedBits(t *testing.T) {
	disk := journaltest.NewCrashFS()
	j := open(t, disk, 0)
	for i := range 4 {
		appendSync(t, j, strings.Repeat("x", i*5))
	}
	j.Close()
	whole := disk.Content(first)
	hint := disk.Content("j/durable")
	for i := range whole {
		bad := bytes.Clone(whole)
		bad[i] ^= 1 << (i % 8)
		for _, hint := range [][]byte{hint, nil} {
			disk.Corrupt(first, func([]byte) []byte { return bad })
			disk.Corrupt("j/durable", func([]byte) []byte { return hint })
			j, err := journal.Open("j", journal.Options{FS: disk})
			var corrupt *journal.CorruptError
			switch {
			case errors.As(err, &corrupt):
				if !errors.Is(err, journal.ErrCorrupt) || corrupt.File != first || corrupt.Offset > int64(i) || int64(i)-corrupt.Offset > 40 {
					t.Errorf("byte %d: %v", i, err)
				}
				if !bytes.Equal(disk.Content(first), bad) {
					t.Errorf("byte %d: the file was changed", i)
				}
			case errors.Is(err, journal.ErrVersion) && i >= 8 && i < 12:
			case err != nil:
				t.Errorf("byte %d: %v", i, err)
			case hint != nil:
				t.Errorf("byte %d: opened up to %d in spite of the hint", i, j.Last())
				j.Close()
			default:
				// Without the hint, nothing shows that the last record was synced.
				if i >= 40 && i < len(whole)-24-15 {
					t.Errorf("byte %d: opened up to %d in spite of later records", i, j.Last())
				}
				j.Close()
			}
		}
	}
}

func TestMissing(t *testing.T) {
	disk := journaltest.NewCrashFS()
	j := open(t, disk, 100)
	for range 9 {
		appendSync(t, j, strings.Repeat("y", 40))
	}
	j.Close()
	for _, name := range disk.Names() {
		if !strings.HasSuffix(name, ".log") {
			continue
		}
		c := disk.Kill()
		if err := c.Remove(name); err != nil {
			t.Fatal(err)
		}
		if _, err := journal.Open("j", journal.Options{FS: c}); !errors.Is(err, journal.ErrCorrupt) {
			t.Errorf("without %s: %v, want ErrCorrupt", name, err)
		}
	}
}

// A payload can hold what looks like records. A torn tail after it is still a torn tail.
func TestHostilePayload(t *testing.T) {
	disk := journaltest.NewCrashFS()
	j := open(t, disk, 0)
	appendSync(t, j, "a")
	for range 8 {
		if _, _, err := j.Append(1, []byte("z")); err != nil {
			t.Fatal(err)
		}
		appendSync(t, j, "b")
	}
	lookalike := disk.Content(first)[40:] // valid but for the salt
	j.Close()

	disk = journaltest.NewCrashFS()
	j = open(t, disk, 0)
	appendSync(t, j, "good")
	if _, _, err := j.Append(1, lookalike); err != nil {
		t.Fatal(err)
	}
	c := disk.Kill()
	j.Close()
	c.Corrupt(first, func(b []byte) []byte { return b[:len(b)-1] })
	j = open(t, c, 0)
	if got := replay(t, j, 0); got != "1:good" {
		t.Errorf("replay %q", got)
	}
}

func TestOtherVersion(t *testing.T) {
	disk := journaltest.NewCrashFS()
	j := open(t, disk, 0)
	appendSync(t, j, "a")
	j.Close()
	disk.Corrupt(first, func(b []byte) []byte { binary.LittleEndian.PutUint32(b[8:], 2); return b })
	before := disk.Content(first)
	if _, err := journal.Open("j", journal.Options{FS: disk}); !errors.Is(err, journal.ErrVersion) {
		t.Errorf("%v, want ErrVersion", err)
	}
	if !bytes.Equal(disk.Content(first), before) {
		t.Error("the file was changed")
	}
}

// After a failed sync the journal promises nothing any more, but does not take back what it
// has promised.
func TestFailedSync(t *testing.T) {
	for _, op := range []journaltest.Op{journaltest.JournalSync, journaltest.DirSync} {
		fs := journaltest.NewFaulty(journaltest.NewCrashFS())
		j := open(t, fs, 100)
		appendSync(t, j, strings.Repeat("a", 50))
		fs.FailAt(op, 1, syscall.EIO)
		seq, _, err := j.Append(1, make([]byte, 50))
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				if err := j.Sync(t.Context(), seq); !errors.Is(err, journal.ErrFailed) || !errors.Is(err, syscall.EIO) {
					t.Errorf("%s: sync: %v, want ErrFailed and EIO", op, err)
				}
			})
		}
		wg.Wait()
		if err := j.Sync(t.Context(), 1); err != nil {
			t.Errorf("%s: sync of what is durable: %v", op, err)
		}
		if _, _, err := j.Append(1, nil); !errors.Is(err, journal.ErrFailed) {
			t.Errorf("%s: append: %v, want ErrFailed", op, err)
		}
		if err := j.Checkpoint(t.Context(), 1, nil); !errors.Is(err, journal.ErrFailed) {
			t.Errorf("%s: checkpoint: %v, want ErrFailed", op, err)
		}
		if s := j.Stats(); s.Durable != 1 {
			t.Errorf("%s: durable %d, want 1", op, s.Durable)
		}
		if err := j.Close(); !errors.Is(err, journal.ErrFailed) {
			t.Errorf("%s: close: %v, want ErrFailed", op, err)
		}
	}
}

func TestFullDisk(t *testing.T) {
	disk := journaltest.NewCrashFS()
	fs := journaltest.NewFaulty(disk)
	j := open(t, fs, 200)
	appendSync(t, j, "1")
	for _, op := range []journaltest.Op{journaltest.JournalWrite, journaltest.JournalCreate} {
		fs.FailAt(op, 1, syscall.ENOSPC)
		if _, _, err := j.Append(1, make([]byte, 190)); !errors.Is(err, journal.ErrWrite) || !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("%s: %v, want ErrWrite and ENOSPC", op, err)
		}
	}
	appendSync(t, j, "2") // fits into the old segment
	for _, op := range []journaltest.Op{journaltest.SnapshotCreate, journaltest.SnapshotWrite, journaltest.SnapshotSync, journaltest.SnapshotRename} {
		fs.FailAt(op, 1, syscall.ENOSPC)
		err := j.Checkpoint(t.Context(), 2, add(1, "state"))
		if !errors.Is(err, journal.ErrWrite) || !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("%s: %v, want ErrWrite and ENOSPC", op, err)
		}
	}
	appendSync(t, j, "3")
	if got := replay(t, j, 0); got != "1:1 2:2 3:3" {
		t.Errorf("replay %q", got)
	}
	for _, name := range disk.Names() {
		if strings.Contains(name, ".snap") {
			t.Errorf("%s is left", name)
		}
	}
	// A tail that cannot be repaired ends it.
	fs.FailAt(journaltest.JournalWrite, 1, syscall.ENOSPC)
	fs.FailAt(journaltest.JournalTruncate, 1, syscall.EIO)
	for range 2 {
		if _, _, err := j.Append(1, nil); !errors.Is(err, journal.ErrFailed) || !errors.Is(err, syscall.EIO) {
			t.Errorf("%v, want ErrFailed and EIO", err)
		}
	}
	j.Close()
	if got := replay(t, open(t, disk, 0), 0); got != "1:1 2:2 3:3" {
		t.Errorf("replay %q", got)
	}
}

// Zeros are written ahead of the records. They are no records, whatever ends the process, and no
// disk has to have the room.
func TestRoom(t *testing.T) {
	disk := journaltest.NewCrashFS()
	fs := journaltest.NewFaulty(disk)
	j := open(t, fs, 0)
	appendSync(t, j, "1")
	killed := disk.Kill()
	if b := killed.Content(first); len(b) < 1<<16 || b[len(b)-1] != 0 {
		t.Errorf("%d bytes, want room", len(b))
	}
	k := open(t, killed, 0)
	appendSync(t, k, "2")
	if got := replay(t, k, 0); got != "1:1 2:2" {
		t.Errorf("after a kill: replay %q", got)
	}
	k.Close()
	if n := len(killed.Content(first)); n != 40+25+25 {
		t.Errorf("%d bytes after Close", n)
	}

	// Anything else behind the records is a torn tail.
	torn := disk.Kill()
	torn.Corrupt(first, func(b []byte) []byte { b[len(b)-1] = 1; return b })
	k = open(t, torn, 0)
	if n := len(torn.Content(first)); n != 40+25 {
		t.Errorf("%d bytes after a torn tail was cut", n)
	}
	k.Close()
	j.Close()

	disk = journaltest.NewCrashFS()
	fs = journaltest.NewFaulty(disk)
	j = open(t, fs, 0)
	fs.FailAt(journaltest.JournalWrite, 1, syscall.ENOSPC)
	appendSync(t, j, "1")
	appendSync(t, j, "2")
	k = open(t, disk.Kill(), 0)
	if got := replay(t, k, 0); got != "1:1 2:2" {
		t.Errorf("without room: replay %q", got)
	}
}

func TestAppendMany(t *testing.T) {
	disk := journaltest.NewCrashFS()
	fs := journaltest.NewFaulty(disk)
	j := open(t, fs, 300)
	if last, places, err := j.AppendMany(nil); last != 0 || len(places) != 0 || err != nil {
		t.Errorf("none: %d, %v, %v", last, places, err)
	}
	entries := []journal.Entry{{Kind: 1, Payload: []byte("a")}, {Kind: 2}, {Kind: 1, Payload: make([]byte, 400)}}
	last, places, err := j.AppendMany(entries)
	if err != nil || last != 3 {
		t.Fatalf("%d, %v", last, err)
	}
	fs.FailAt(journaltest.JournalWrite, 2, syscall.ENOSPC) // behind that of the new header
	if _, _, err := j.AppendMany(entries); !errors.Is(err, journal.ErrWrite) {
		t.Errorf("%v, want ErrWrite", err)
	}
	if _, _, err := j.AppendMany([]journal.Entry{{}, {Kind: 0xfffe}}); !errors.Is(err, journal.ErrKind) {
		t.Errorf("%v, want ErrKind", err)
	}
	seq, place, err := j.AppendSync(t.Context(), 1, []byte("b"))
	if err != nil || seq != 4 {
		t.Fatalf("%d, %v", seq, err)
	}
	for i, p := range append(places, place) {
		want := []byte("b")
		if i < 3 {
			want = entries[i].Payload
		}
		if b, err := j.ReadAt(p); err != nil || !bytes.Equal(b, want) {
			t.Errorf("record %d reads %q, %v", i+1, b, err)
		}
	}
	disk.Corrupt(first, func(b []byte) []byte { b[64]++; return b })
	if _, err := j.ReadAt(places[0]); !errors.Is(err, journal.ErrCorrupt) {
		t.Errorf("%v, want ErrCorrupt", err)
	}
}

// Many callers share few syncs, and each gets a number of its own.
func TestConcurrent(t *testing.T) {
	fs := journaltest.NewFaulty(journaltest.NewCrashFS())
	j := open(t, fs, 4000)
	const callers, each = 16, 50
	var wg sync.WaitGroup
	var mu sync.Mutex
	want := map[uint64]string{}
	for c := range callers {
		wg.Go(func() {
			for i := range each {
				payload := fmt.Sprintf("%d/%d", c, i)
				seq, _, err := j.AppendSync(t.Context(), 1, []byte(payload))
				if err != nil {
					t.Error(err)
					return
				}
				if d := j.Stats().Durable; d < seq {
					t.Errorf("record %d acknowledged, durable %d", seq, d)
				}
				mu.Lock()
				want[seq] = payload
				mu.Unlock()
			}
		})
	}
	wg.Go(func() {
		for range 10 {
			if s := j.Stats(); s.Durable > s.Snapshot {
				err := j.Checkpoint(t.Context(), s.Durable, func(*journal.Snapshot) error { return nil })
				if err != nil {
					t.Error(err)
				}
			}
		}
	})
	wg.Wait()
	if len(want) != callers*each {
		t.Errorf("%d numbers, want %d", len(want), callers*each)
	}
	next := j.Stats().Snapshot + 1
	err := j.Replay(t.Context(), 0, func(r journal.Record) error {
		if !r.Snapshot {
			if r.Seq != next || string(r.Payload) != want[r.Seq] {
				t.Errorf("record %d is %q, want %d %q", r.Seq, r.Payload, next, want[next])
			}
			next++
		}
		return nil
	})
	if err != nil || next != callers*each+1 {
		t.Errorf("replay to %d, %v", next, err)
	}
}

// All who wait while one sync runs are served by the next one.
func TestGroupCommit(t *testing.T) {
	disk := journaltest.NewCrashFS()
	fs := journaltest.NewFaulty(disk)
	j := open(t, fs, 0)
	const waiters = 20
	var last uint64
	for range waiters {
		var err error
		if last, _, err = j.Append(1, nil); err != nil {
			t.Fatal(err)
		}
	}
	before := fs.Count(journaltest.JournalSync)
	var wg sync.WaitGroup
	for seq := range last {
		wg.Go(func() {
			if err := j.Sync(t.Context(), seq+1); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := fs.Count(journaltest.JournalSync) - before; n != 1 {
		t.Errorf("%d syncs for records that were all there, want 1", n)
	}
}

// A wait ends with its context; the round goes on, and whoever is left of it leads it.
func TestSyncCanceled(t *testing.T) {
	disk := journaltest.NewCrashFS()
	block, blocked := make(chan struct{}), make(chan struct{})
	var once sync.Once
	j := open(t, disk, 0)
	first, _, err := j.Append(1, []byte("a"))
	if err != nil {
		t.Fatal(err)
	}
	disk.Before = func() { once.Do(func() { close(blocked); <-block }) }
	leader := make(chan error)
	go func() { leader <- j.Sync(t.Context(), first) }()
	<-blocked
	cause := errors.New("client left")
	canceled, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	if err := j.Sync(canceled, first); !errors.Is(err, cause) {
		t.Errorf("%v, want the cause", err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	last := make(chan uint64, 1)
	leaves, stays := make(chan error, 8), make(chan error, 8)
	go func() {
		<-blocked
		for range 8 {
			go func() { leaves <- j.Sync(ctx, first) }()
			go func() { stays <- j.Sync(t.Context(), first) }()
		}
		last <- first
	}()
	<-last
	cancel(cause)
	close(block)
	if err := <-leader; err != nil {
		t.Error(err)
	}
	for range 8 {
		if err := <-leaves; err != nil && !errors.Is(err, cause) {
			t.Error(err)
		}
		if err := <-stays; err != nil {
			t.Error(err)
		}
	}
}

// Callers that give up at any moment leave nobody behind who waits for ever.
func TestSyncGivenUp(t *testing.T) {
	j := open(t, journaltest.NewCrashFS(), 0)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for i := range 300 {
				seq, _, err := j.Append(1, nil)
				if err != nil {
					t.Error(err)
					return
				}
				ctx, cancel := context.WithCancel(t.Context())
				if i%2 == 0 {
					go cancel()
				}
				if err := j.Sync(ctx, seq); err != nil && i%2 != 0 {
					t.Error(err)
				}
				cancel()
			}
		})
	}
	wg.Wait()
}

func TestReplayErrors(t *testing.T) {
	j := open(t, journaltest.NewCrashFS(), 0)
	appendSync(t, j, "a")
	appendSync(t, j, "b")
	stop := errors.New("enough")
	n := 0
	if err := j.Replay(t.Context(), 0, func(journal.Record) error { n++; return stop }); err != stop || n != 1 {
		t.Errorf("%v after %d", err, n)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := j.Replay(ctx, 0, func(journal.Record) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want Canceled", err)
	}
	if got := replay(t, j, 3); got != "" {
		t.Errorf("replay behind the end: %q", got)
	}
}

// TestMain lets the test binary be a writer that another test kills.
func TestMain(m *testing.M) {
	if dir := os.Getenv("JOURNAL_TEST_WRITER"); dir != "" {
		j, err := journal.Open(dir, journal.Options{SegmentSize: 1 << 16})
		for err == nil {
			var seq uint64
			if seq, _, err = j.Append(1, make([]byte, 300)); err == nil {
				fmt.Println(seq)
			}
		}
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// A process killed at any moment loses nothing that Append has returned, and its lock.
func TestKilled(t *testing.T) {
	dir := t.TempDir()
	var least uint64
	for range 3 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "JOURNAL_TEST_WRITER="+dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		start := least
		for least < start+1000 {
			var seq uint64
			if _, err := fmt.Fscanln(out, &seq); err != nil || seq <= least {
				t.Errorf("writer says %d: %v", seq, err)
				break
			}
			least = seq
		}
		cmd.Process.Kill() //nolint:errcheck // it waits to be killed
		cmd.Wait()         //nolint:errcheck // killed
		j, err := journal.Open(dir, journal.Options{})
		if err != nil {
			t.Fatal(err)
		}
		if last := j.Last(); last < least {
			t.Errorf("journal ends at %d, %d was appended", last, least)
		}
		least = j.Last()
		j.Close()
	}
}
