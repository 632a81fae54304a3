package trajectory_test

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/journal"
	"github.com/dsec-go/dsec/journal/journaltest"
	"github.com/dsec-go/dsec/trajectory"
)

// TestSealed runs many steps, so that most are in segments, with checkpoints in
// between and a command that is open all the time.
func TestSealed(t *testing.T) {
	r := newRig(t)
	r.tune = func(c *trajectory.Config) { c.SealBytes = 4 << 10 }
	r.open()
	id := r.create()
	long, err := r.Commands.Start(t.Context(), step(id, "long", 1), sh("hang"))
	if err != nil {
		t.Fatal(err)
	}
	const many = 60
	for n := range uint64(many) {
		r.run(step(id, "s", n), fmt.Sprintf("echo %d", n))
		if n%20 == 19 {
			if err := r.log.Tidy(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if n == 30 || n == 45 {
			if err := r.node.Close(); err != nil { // it writes a checkpoint
				t.Fatal(err)
			}
			r.kill(process)
			r.open()
		}
	}
	check := func(when string) {
		t.Helper()
		for n := range uint64(many) {
			if res := r.run(step(id, "s", n), fmt.Sprintf("echo %d", n)); !res.Replayed || string(res.Out) != fmt.Sprintf("%d\n", n) {
				t.Fatalf("%s: step %d: %+v", when, n, res)
			}
		}
		if all := r.records(id); len(all) < 2*many+2 {
			t.Fatalf("%s: %d records", when, len(all))
		}
	}
	check("alive")
	if n := count(t, r.store); n < 3 {
		t.Fatalf("%d segments, want some", n)
	}
	// The open command is found again, and its answer belongs to its request.
	if err := r.Commands.Signal(t.Context(), dsec.Call{Sandbox: id}, long.ID, "KILL"); err != nil {
		t.Fatal(err)
	}
	res, err := r.Commands.Run(t.Context(), step(id, "long", 1), sh("hang"), nil)
	if err != nil || res.Signal != "KILL" || res.ID != long.ID {
		t.Fatalf("%+v %v", res, err)
	}
	if err := r.log.Tidy(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.kill(process)
	r.open()
	check("killed")
	if _, err := r.Sandboxes.Stop(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if err := r.log.Tidy(t.Context()); err != nil {
		t.Fatal(err)
	}
	check("archived")
	r.close()
}

func count(t *testing.T, s blob.Store) (n int) {
	t.Helper()
	for _, err := range s.List(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		n++
	}
	return n
}

// TestNodeLost reads the trajectory of an ended sandbox when its node's disk is
// gone, from the store and the list of archives.
func TestNodeLost(t *testing.T) {
	r := newRig(t).open()
	id := r.create()
	r.run(step(id, "s", 1), fmt.Sprintf("yes %d", 100<<10))
	if _, err := r.Sandboxes.Stop(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	want := ops(r.records(id))
	if err := r.log.Tidy(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.kill(func(*journaltest.CrashFS) *journaltest.CrashFS { return journaltest.NewCrashFS() })
	r.open()
	if got := ops(r.records(id)); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	body, err := r.Trajectories.Body(t.Context(), id, 3)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := io.Copy(io.Discard, body); err != nil || n < 100<<10 {
		t.Errorf("%d bytes of output, %v", n, err)
	}
	_, err = r.Trajectories.Head(t.Context(), id+"x")
	wantKind(t, "an unknown sandbox", err, dsec.NotFound)
	r.close()
}

// TestExpired deletes trajectories that are old, with their bodies, and only
// those.
func TestExpired(t *testing.T) {
	r := newRig(t)
	r.tune = func(c *trajectory.Config) { c.Keep = 1 }
	r.open()
	big := fmt.Sprintf("yes %d", 100<<10)
	old, kept := r.create(), r.create()
	r.run(step(old, "s", 1), big)
	if _, err := r.Sandboxes.Stop(t.Context(), old); err != nil {
		t.Fatal(err)
	}
	if err := r.log.Tidy(t.Context()); err != nil { // it is archived after the look for old ones, or dropped at once
		t.Fatal(err)
	}
	if err := r.log.Tidy(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, err := r.Trajectories.Head(t.Context(), old)
	wantKind(t, "an expired trajectory", err, dsec.NotFound)
	if n := count(t, r.store); n != 0 {
		t.Fatalf("%d blobs are left", n)
	}
	r.run(step(kept, "s", 1), big)
	r.kill(process)
	r.open()
	if err := r.log.Tidy(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, err = r.Trajectories.Head(t.Context(), old)
	wantKind(t, "an expired trajectory", err, dsec.NotFound)
	if res := r.run(step(kept, "s", 1), big); !res.Replayed || len(res.Out) != 100<<10 {
		t.Fatalf("%+v", res)
	}
	r.close()
}

// TestLargeOutput keeps what does not fit a record in a blob, and tells of what
// the command's own limit dropped.
func TestLargeOutput(t *testing.T) {
	r := newRig(t).open()
	id := r.create()
	const size = 6 << 20
	cmd := dsec.Command{Shell: fmt.Sprintf("yes %d", size)}
	first, err := r.Commands.Run(t.Context(), step(id, "s", 1), cmd, nil)
	if err != nil || first.Stdout.Total != size {
		t.Fatalf("%+v %v", first.CommandStatus, err)
	}
	r.kill(process)
	r.open()
	res, err := r.Commands.Run(t.Context(), step(id, "s", 1), cmd, nil)
	if err != nil || !res.Replayed || !bytes.Equal(res.Out, first.Out[:dsec.MaxRunOutput]) || len(res.Out) != dsec.MaxRunOutput || res.Stdout != first.Stdout {
		t.Fatalf("%d bytes, %+v %v", len(res.Out), res.Stdout, err)
	}
	// The guest goes, the output stays.
	if _, err := r.Sandboxes.Stop(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	b, err := r.Commands.Read(t.Context(), dsec.Call{Sandbox: id}, res.ID, dsec.Stdout, size-10, 100)
	if err != nil || string(b) != "y\ny\ny\ny\ny\n" {
		t.Fatalf("%q %v", b, err)
	}
	for _, bad := range []struct {
		stream dsec.Stream
		offset int64
		most   int
	}{{dsec.Stdout, -1, 1}, {dsec.Stdout, 0, -1}, {0, 0, 1}, {9, 0, 1}} {
		if b, err := r.Commands.Read(t.Context(), dsec.Call{Sandbox: id}, res.ID, bad.stream, bad.offset, bad.most); dsec.KindOf(err) != dsec.Invalid {
			t.Errorf("%+v: %q %v", bad, b, err)
		}
	}
	r.close()
}

// TestFilesSteps repeats writes with the same and with another content.
func TestFilesSteps(t *testing.T) {
	r := newRig(t).open()
	id := r.create()
	write := func(content string) error {
		_, err := r.Files.Write(t.Context(), step(id, "s", 1), dsec.FileOp{Path: "/f"}, dsec.WriteOptions{}, strings.NewReader(content))
		return err
	}
	if err := write("one"); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Files.Write(t.Context(), dsec.Call{Sandbox: id}, dsec.FileOp{Path: "/f"}, dsec.WriteOptions{}, strings.NewReader("two")); err != nil {
		t.Fatal(err)
	}
	r.kill(process)
	r.open()
	if err := write("one"); err != nil {
		t.Fatal(err)
	}
	in, err := r.Files.Read(t.Context(), dsec.Call{Sandbox: id}, dsec.FileOp{Path: "/f"}, dsec.ReadRange{})
	if err != nil {
		t.Fatal(err)
	}
	if b, _ := io.ReadAll(in); string(b) != "two" {
		t.Errorf("the step was carried out again: %q", b)
	}
	wantKind(t, "another content", write("three"), dsec.Diverged, "content")
	r.close()
}

// fullDisk is a disk that can be full.
type fullDisk struct {
	journal.FS
	full atomic.Bool
}

type fullFile struct {
	journal.File
	d *fullDisk
}

func (d *fullDisk) Create(name string) (journal.File, error) {
	f, err := d.FS.Create(name)
	return &fullFile{f, d}, err
}

func (d *fullDisk) Open(name string) (journal.File, error) {
	f, err := d.FS.Open(name)
	return &fullFile{f, d}, err
}

func (f *fullFile) WriteAt(p []byte, off int64) (int, error) {
	if f.d.full.Load() {
		return 0, syscall.ENOSPC
	}
	return f.File.WriteAt(p, off)
}

// TestFullDisk refuses what would begin something, lets go on what runs, and
// recovers by itself.
func TestFullDisk(t *testing.T) {
	r := newRig(t)
	disk := &fullDisk{}
	r.fs = func(fs journal.FS) journal.FS { disk.FS = fs; return disk }
	r.open()
	id := r.create()
	type end struct {
		res dsec.Result
		err error
	}
	ended := make(chan end, 1)
	go func() {
		res, err := r.Commands.Run(t.Context(), step(id, "s", 1), sh("sleep 0.1"), nil)
		ended <- end{res, err}
	}()
	eventually(t, "the command", func() bool { return r.inGuest(id) == 1 })
	disk.full.Store(true)
	_, err := r.Commands.Run(t.Context(), step(id, "s", 2), sh("true"), nil)
	wantKind(t, "exec", err, dsec.Unavailable, "no space left")
	_, err = r.Sandboxes.Create(t.Context(), dsec.Spec{Environment: dsec.Environment{Base: "b"}}, dsec.CreateOptions{})
	wantKind(t, "create", err, dsec.Unavailable)
	eventually(t, "an answer that cannot be recorded", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return len(r.faults) > 0
	})
	select {
	case e := <-ended:
		t.Fatalf("answered %+v before it was recorded", e)
	default:
	}
	disk.full.Store(false)
	if e := <-ended; e.err != nil || e.res.Outcome != dsec.Exited {
		t.Fatalf("%+v", e)
	}
	r.run(step(id, "s", 2), "true")
	if got := ops(r.records(id)); got != "create command command= command command=" {
		t.Error(got)
	}
	r.close()
}

// TestVerify changes, drops and moves records.
func TestVerify(t *testing.T) {
	r := newRig(t).open()
	id := r.create()
	for n := range uint64(3) {
		r.run(step(id, "s", n), fmt.Sprintf("echo %d", n))
	}
	var raws [][]byte
	for _, rec := range r.records(id) {
		raws = append(raws, rec.Raw)
	}
	head, _ := r.Trajectories.Head(t.Context(), id)
	r.close()
	check := func(all [][]byte) error {
		v := trajectory.NewVerifier(id)
		for _, b := range all {
			if err := v.Add(b); err != nil {
				return err
			}
		}
		return v.End(head)
	}
	if err := check(raws); err != nil {
		t.Fatal(err)
	}
	edit := func(i int, f func([]byte) []byte) [][]byte {
		all := append([][]byte(nil), raws...)
		all[i] = f(bytes.Clone(all[i]))
		return all
	}
	for _, c := range []struct {
		name string
		all  [][]byte
		want string
	}{
		{"altered", edit(3, func(b []byte) []byte { return bytes.Replace(b, []byte("echo 1"), []byte("echo 9"), 1) }), "record 5 does not follow from record 4"},
		{"altered answer", edit(6, func(b []byte) []byte { b[len(b)-2] ^= 1; return b }), "record 7, the last, was changed"},
		{"dropped", append(append([][]byte(nil), raws[:2]...), raws[3:]...), "record 2 is followed by record 4"},
		{"end dropped", raws[:5], "records 6 to 7 are missing"},
		{"swapped", append([][]byte{raws[0], raws[2], raws[1]}, raws[3:]...), "record 1 is followed by record 3"},
		{"first dropped", raws[1:], "record 0 is followed by record 2"},
		{"added", append(append([][]byte(nil), raws...), raws[6]), "record 7 is followed by record 7"},
		{"cut", edit(2, func(b []byte) []byte { return b[:40] }), "malformed"},
		{"version", edit(2, func(b []byte) []byte { b[0] = 9; return b }), "format 9"},
	} {
		if err := check(c.all); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
}

// TestCorruptSegment names the segment whose bytes changed.
func TestCorruptSegment(t *testing.T) {
	r := newRig(t).open()
	id := r.create()
	r.run(step(id, "s", 1), "echo 1")
	if _, err := r.Sandboxes.Stop(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if err := r.log.Tidy(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.close()
	var good []byte
	for info, err := range r.store.List(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		in, err := r.store.Get(t.Context(), info.Digest, 0, -1)
		if err != nil {
			t.Fatal(err)
		}
		good, _ = io.ReadAll(in)
	}
	for _, at := range []int{0, 9, 40, len(good) / 2, len(good) - 30, len(good) - 1} {
		b := bytes.Clone(good)
		b[at] ^= 0x40
		if err := trajectory.CheckSegment(context.Background(), b); err == nil {
			t.Errorf("byte %d changed and nobody noticed", at)
		}
	}
	for _, n := range []int{0, 10, 16, len(good) - 1} {
		if err := trajectory.CheckSegment(context.Background(), good[:n]); err == nil {
			t.Errorf("cut to %d bytes and nobody noticed", n)
		}
	}
	if err := trajectory.CheckSegment(context.Background(), good); err != nil {
		t.Error(err)
	}
}

func FuzzDecode(f *testing.F) {
	r := newRig(f).open()
	id := r.create()
	r.run(step(id, "s", 1), "echo 1")
	for _, rec := range r.records(id) {
		f.Add(rec.Raw)
	}
	r.close()
	f.Add([]byte{1})
	f.Fuzz(func(t *testing.T, b []byte) {
		id, rec, err := trajectory.Decode(b)
		if err == nil && (rec.Seq == 0 || len(id) > 255 || !bytes.Equal(rec.Raw, b)) {
			t.Fatalf("%+v", rec)
		}
	})
}

func FuzzSegment(f *testing.F) {
	r := newRig(f).open()
	id := r.create()
	r.run(step(id, "s", 1), "echo 1")
	r.Sandboxes.Stop(f.Context(), id)
	r.log.Tidy(f.Context())
	r.close()
	for info := range r.store.List(f.Context()) {
		in, _ := r.store.Get(f.Context(), info.Digest, 0, -1)
		b, _ := io.ReadAll(in)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		trajectory.CheckSegment(context.Background(), b) // it must not panic, nor take long
	})
}

var manySteps = flag.Int("steps", 20_000, "how many steps TestManySteps records")

// TestManySteps records many tiny steps in one sandbox, and answers some of them
// from the segments after a restart.
func TestManySteps(t *testing.T) {
	r := newRig(t)
	r.dir = t.TempDir()
	r.fs = func(journal.FS) journal.FS { return journal.HostFS }
	r.open()
	id := r.create()
	var next atomic.Int64
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			for {
				n := next.Add(1)
				if n > int64(*manySteps) || t.Failed() {
					return
				}
				if _, err := r.Commands.Run(t.Context(), step(id, "s", uint64(n)), sh("true"), nil); err != nil {
					t.Errorf("step %d: %v", n, err)
				}
			}
		})
	}
	wg.Wait()
	if err := r.log.Tidy(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.driver.Detach()
	r.close()
	r.open()
	for _, n := range []int{1, *manySteps / 2, *manySteps} {
		if res := r.run(step(id, "s", uint64(n)), "true"); !res.Replayed {
			t.Errorf("step %d ran again", n)
		}
	}
	if h, err := r.Trajectories.Head(t.Context(), id); err != nil || h.Seq != uint64(1+2**manySteps) {
		t.Errorf("%+v %v", h, err)
	}
	r.close()
}
