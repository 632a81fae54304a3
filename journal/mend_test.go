package journal_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dsec-go/dsec/journal"
)

// grown makes a journal in dir of several segments behind a snapshot, and says what
// is in each record.
func grown(t *testing.T, dir string) map[uint64]string {
	t.Helper()
	ctx := context.Background()
	j, err := journal.Open(dir, journal.Options{SegmentSize: 2000})
	if err != nil {
		t.Fatal(err)
	}
	want := map[uint64]string{}
	put := func(n int) {
		for i := range n {
			text := fmt.Sprintf("record %d %s", i, strings.Repeat("x", i*7%90))
			seq, _, err := j.AppendSync(ctx, 1, []byte(text))
			if err != nil {
				t.Fatal(err)
			}
			want[seq] = text
		}
	}
	put(20)
	if err := j.Checkpoint(ctx, 20, func(s *journal.Snapshot) error {
		for i := range 30 {
			if _, err := s.Add(1, fmt.Appendf(nil, "state %d", i)); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	put(60)
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	return want
}

// reading is what a replay gives.
type reading struct {
	state, lostState int
	records          map[uint64]string
	lost             map[uint64]bool
	last             uint64
}

func readAll(t *testing.T, dir string) (r reading, err error) {
	t.Helper()
	j, err := journal.Open(dir, journal.Options{SegmentSize: 2000})
	if err != nil {
		return r, err
	}
	defer j.Close()
	r.records, r.lost = map[uint64]string{}, map[uint64]bool{}
	if err := j.Replay(context.Background(), 0, func(rec journal.Record) error {
		switch {
		case rec.Kind == journal.KindLost && rec.Snapshot:
			r.lostState++
		case rec.Kind == journal.KindLost:
			r.lost[rec.Seq] = true
		case rec.Snapshot:
			r.state++
		default:
			r.records[rec.Seq] = string(rec.Payload)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if _, _, err := j.AppendSync(context.Background(), 1, []byte("goes on")); err != nil {
		t.Errorf("append to a mended journal: %v", err)
	}
	r.last = j.Last() - 1
	return r, nil
}

func copyFiles(t *testing.T, from string) string {
	t.Helper()
	to := t.TempDir()
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
	return to
}

func glob(t *testing.T, dir, pattern string) []string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// TestMend damages a journal in all ways that a disk or a hand does. What Open refuses opens after
// Mend, has each record as it was or as lost, and lost are no more than were touched.
func TestMend(t *testing.T) {
	whole := t.TempDir()
	want := grown(t, whole)
	files := append(glob(t, whole, "*.log"), glob(t, whole, "*.snap")...)
	if len(files) < 4 {
		t.Fatalf("only the files %q", files)
	}
	r := rand.New(rand.NewPCG(1, 2))
	refused := 0
	for i := range 400 {
		dir := copyFiles(t, whole)
		path := filepath.Join(dir, filepath.Base(files[r.IntN(len(files))]))
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		what := fmt.Sprintf("%d: %s of %d bytes", i, filepath.Base(path), len(b))
		most := 2 // records that a byte can touch
		before := append([]byte(nil), b...)
		switch at := r.IntN(len(b)); i % 4 {
		case 0, 1:
			b[at] ^= 1 << r.IntN(8)
			what += fmt.Sprintf(", a bit at %d", at)
			if at < 40 {
				most = 100 // the header
			}
		case 2:
			n := min(len(b)-at, 1+r.IntN(300))
			clear(b[at : at+n])
			what += fmt.Sprintf(", %d zeros at %d", n, at)
			most = 100
		case 3:
			b = b[:at]
			what += fmt.Sprintf(", cut at %d", at)
			most = 100
		}
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		// Another version is not damage.
		if len(b) >= 12 && string(b[8:12]) != string(before[8:12]) {
			continue
		}
		_, openErr := readAll(t, copyFiles(t, dir))
		if openErr != nil && !errors.Is(openErr, journal.ErrCorrupt) {
			t.Fatalf("%s: open: %v", what, openErr)
		}
		done, err := journal.Mend(dir, journal.Options{})
		if err != nil {
			t.Fatalf("%s: mend: %v", what, err)
		}
		if (openErr == nil) != (len(done) == 0) {
			t.Errorf("%s: opens with %v, and mend did %+v", what, openErr, done)
		}
		got, err := readAll(t, dir)
		if err != nil {
			t.Errorf("%s: a mended journal: %v", what, err)
			continue
		}
		if openErr == nil {
			continue
		}
		refused++
		if kept, err := os.ReadFile(done[0].Aside); err != nil || string(kept) != string(b) {
			t.Errorf("%s: what was damaged is not kept: %v", what, err)
		}
		lost := len(got.lost) + got.lostState
		if lost > most || got.last != 80 {
			t.Errorf("%s: %d records are lost, the last is %d", what, lost, got.last)
		}
		var counted uint64
		for _, m := range done {
			counted += m.Lost
		}
		// A damaged cut or end of a snapshot is no record that anybody has lost.
		if uint64(lost) != counted && got.lostState == 0 && strings.HasSuffix(path, ".log") {
			t.Errorf("%s: %d are lost and %d are told", what, lost, counted)
		}
		if got.state+got.lostState < 30 && most < 100 {
			t.Errorf("%s: %d of the snapshot and %d lost", what, got.state, got.lostState)
		}
		for seq := uint64(21); seq <= 80; seq++ {
			if text, ok := got.records[seq]; got.lost[seq] == ok || ok && text != want[seq] {
				t.Errorf("%s: record %d is %q, lost %v", what, seq, text, got.lost[seq])
			}
		}
		again, err := journal.Mend(dir, journal.Options{})
		if err != nil || len(again) > 0 {
			t.Errorf("%s: mended twice: %+v, %v", what, again, err)
		}
	}
	if refused < 100 {
		t.Errorf("only %d of the journals were refused", refused)
	}
}

// TestMendWithoutSegment: one that is missing in the middle is all lost; the one before has its marks.
func TestMendWithoutSegment(t *testing.T) {
	dir := t.TempDir()
	grown(t, dir)
	all := glob(t, dir, "*.log")
	if err := os.Remove(all[1]); err != nil {
		t.Fatal(err)
	}
	var c *journal.CorruptError
	if _, err := readAll(t, dir); !errors.As(err, &c) {
		t.Fatalf("opened: %v", err)
	}
	done, err := journal.Mend(dir, journal.Options{})
	if err != nil || len(done) != 1 || done[0].File != all[0] || done[0].Lost == 0 {
		t.Fatalf("%+v, %v", done, err)
	}
	got, err := readAll(t, dir)
	if err != nil || uint64(len(got.lost)) != done[0].Lost || len(got.lost)+len(got.records) != 60 {
		t.Errorf("%d lost, %d records, %v", len(got.lost), len(got.records), err)
	}
}

// TestLostReachesEveryOwner, once: a checkpoint of all of them forgets it.
func TestLostReachesEveryOwner(t *testing.T) {
	dir, ctx := t.TempDir(), context.Background()
	j, err := journal.Open(dir, journal.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 9 {
		if _, _, err := j.AppendSync(ctx, journal.Kind(1+i%2), fmt.Append(nil, "payload ", i)); err != nil {
			t.Fatal(err)
		}
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	path := glob(t, dir, "*.log")[0]
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	b[strings.Index(string(b), "payload 4")] ^= 1
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := journal.Mend(dir, journal.Options{}); err != nil {
		t.Fatal(err)
	}
	if _, _, err := (&journal.Journal{}).Append(journal.KindLost, nil); !errors.Is(err, journal.ErrKind) {
		t.Errorf("a mark can be appended: %v", err)
	}
	for round, want := range []string{"2L2 2L2", "S S"} {
		j, err := journal.Open(dir, journal.Options{})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for k := journal.Kind(1); k <= 2; k++ {
			o, err := j.Own(journal.Claim{Kinds: []journal.Kind{k}, Save: func(s *journal.Section) error {
				s.Cut()
				_, err := s.Add(k, []byte("state"))
				return err
			}})
			if err != nil {
				t.Fatal(err)
			}
			before, behind, lost := 0, 0, ""
			if err := o.Replay(ctx, func(r journal.Record) error {
				switch {
				case r.Kind == journal.KindLost:
					lost += "L"
				case r.Snapshot:
					lost += "S"
				case lost == "":
					before++
				default:
					behind++
				}
				return nil
			}); err != nil {
				t.Fatal(err)
			}
			if text := lost; strings.Contains(lost, "L") {
				got = append(got, fmt.Sprint(before, text, behind))
			} else {
				got = append(got, text)
			}
			if k == 2 {
				if err := o.Checkpoint(ctx); err != nil {
					t.Fatal(err)
				}
			}
		}
		if all := strings.Join(got, " "); all != want {
			t.Errorf("round %d: %s, want %s", round, all, want)
		}
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
