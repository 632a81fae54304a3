package guest_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/guest"
)

// lines gives n lines of 100 bytes each, so that any part tells where it is
// from.
func lines(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "%099d\n", i)
	}
	return b.String()
}

const seqLine = `awk 'BEGIN{for(i=0;i<%d;i++) printf "%%099d\n", i}'`

func (b *box) readAll(id dsec.CommandID, s dsec.Stream, off int64, chunk int) string {
	b.Helper()
	var out strings.Builder
	for {
		p, err := b.Commands().Read(b.Context(), nobody, id, s, off+int64(out.Len()), chunk)
		if err != nil {
			b.Fatal(err)
		}
		if len(p) == 0 {
			return out.String()
		}
		out.Write(p)
	}
}

func TestOutputPaging(t *testing.T) {
	for name, opt := range map[string]func(*guest.Options){
		"file":   func(*guest.Options) {},
		"memory": func(o *guest.Options) { o.Output = nil },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t, opt)
			for _, n := range []int{1, 3, 40, 41, 42, 600, 50_000} {
				want := lines(n)
				r := b.run(sh(fmt.Sprintf(seqLine, n)), "")
				out := want
				if len(out) > dsec.MaxRunOutput {
					out = out[:dsec.MaxRunOutput]
				}
				if string(r.Out) != out || r.Stdout != (dsec.StreamStat{Total: int64(len(want)), Kept: int64(len(want))}) || r.Stdout.Truncated() {
					t.Fatalf("%d lines: got %d bytes, %+v", n, len(r.Out), r.Stdout)
				}
				if got := b.readAll(r.ID, dsec.Stdout, 0, 70_001); got != want {
					t.Fatalf("%d lines: paged %d bytes", n, len(got))
				}
				if got := b.readAll(r.ID, dsec.Stdout, 50, 1<<20); got != want[50:] {
					t.Fatalf("%d lines: from 50 %d bytes", n, len(got))
				}
				if a := b.attach(r.ID, 77); a.out != want[77:] || a.gap != 0 {
					t.Fatalf("%d lines: attached %d bytes", n, len(a.out))
				}
				if got := b.readAll(r.ID, dsec.Stderr, 0, 100); got != "" {
					t.Fatalf("stderr %q", got)
				}
			}
		})
	}
}

// Two streams in small pieces: each is whole, and so is the order.
func TestOutputInterleaved(t *testing.T) {
	b := newBox(t)
	r := b.run(sh(`i=0; while [ $i -lt 3000 ]; do echo o$i; echo e$i >&2; i=$((i+1)); done`), "")
	var out, errs strings.Builder
	for i := range 3000 {
		fmt.Fprintf(&out, "o%d\n", i)
		fmt.Fprintf(&errs, "e%d\n", i)
	}
	if string(r.Out) != out.String() || string(r.Err) != errs.String() {
		t.Fatal("run differs")
	}
	if got := b.readAll(r.ID, dsec.Stderr, 0, 999); got != errs.String() {
		t.Fatal("paged stderr differs")
	}
	if got := b.readAll(r.ID, dsec.Stderr, 5000, 999); got != errs.String()[5000:] {
		t.Fatal("paged stderr from the middle differs")
	}
	for _, off := range []int64{0, 1, 9_999, 20_000} {
		a := b.attach(r.ID, off)
		if int64(len(a.out)+len(a.err)) != int64(out.Len()+errs.Len())-off || !strings.HasSuffix(out.String(), a.out) || !strings.HasSuffix(errs.String(), a.err) {
			t.Fatalf("attached from %d: %d and %d", off, len(a.out), len(a.err))
		}
	}
}

func TestTruncation(t *testing.T) {
	b := newBox(t)
	const limit = 100_000
	want := lines(5000)
	r := b.run(dsec.Command{Shell: fmt.Sprintf(seqLine, 5000) + "; echo end >&2", Output: limit}, "")
	if r.Stdout != (dsec.StreamStat{Total: 500_000, Kept: limit}) || !r.Stdout.Truncated() || r.Stderr != (dsec.StreamStat{Total: 4, Kept: 4}) {
		t.Fatalf("%+v %+v", r.Stdout, r.Stderr)
	}
	if string(r.Out) != want[:limit] || string(r.Err) != "end\n" {
		t.Fatalf("%d bytes, %q", len(r.Out), r.Err)
	}
	if got := b.readAll(r.ID, dsec.Stdout, 0, 1<<20); got != want[:limit] {
		t.Fatalf("the beginning has %d bytes", len(got))
	}
	if got := b.readAll(r.ID, dsec.Stdout, 500_000-dsec.OutputTail, 1<<20); got != want[500_000-dsec.OutputTail:] {
		t.Fatalf("the tail has %d bytes", len(got))
	}
	a := b.attach(r.ID, 0)
	if a.out != want[:limit]+want[500_000-dsec.OutputTail:] || a.err != "end\n" || a.gap != 500_000-dsec.OutputTail-limit || a.next != 500_004 {
		t.Fatalf("attached: %d bytes, gap %d, end %d", len(a.out), a.gap, a.next)
	}
	// Both streams over their limits, in turns.
	r = b.run(dsec.Command{Shell: `i=0; while [ $i -lt 400 ]; do printf '%099d\n' $i; printf '%049d\n' $i >&2; i=$((i+1)); done`, Output: 5000}, "")
	if r.Stdout != (dsec.StreamStat{Total: 40_000, Kept: 5000}) || r.Stderr != (dsec.StreamStat{Total: 20_000, Kept: 5000}) {
		t.Fatalf("%+v %+v", r.Stdout, r.Stderr)
	}
	if a := b.attach(r.ID, 0); a.gap != 0 || len(a.out) != 40_000 || len(a.err) != 20_000 || a.out != lines(400) {
		t.Fatalf("all fits in the tails: gap %d, %d, %d", a.gap, len(a.out), len(a.err))
	}
}

// Readers see everything while a command runs far beyond its limit, slow and
// absent ones do not hold it up, and those who leave do not harm others.
func TestReaders(t *testing.T) {
	b := newBox(t)
	const n = 20_000
	st := b.start(dsec.Command{Shell: "read go; " + fmt.Sprintf(seqLine, n), Stdin: dsec.StdinPipe})
	want := lines(n)
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			if a := b.attach(st.ID, 0); a.out != want {
				t.Errorf("reader got %d bytes", len(a.out))
			}
		})
	}
	for range 9 { // these leave in the middle
		wg.Go(func() {
			seen := 0
			for o := range b.Commands().Attach(b.Context(), nobody, st.ID, 0) {
				if seen += len(o.Data); seen > 100_000 {
					break
				}
			}
		})
	}
	// One stops reading altogether.
	ctx, cancel := context.WithCancel(b.Context())
	stuck := make(chan struct{})
	wg.Go(func() {
		for range b.Commands().Attach(ctx, nobody, st.ID, 0) {
			<-stuck
		}
	})
	b.write(st.ID, 0, "\n", true)
	if st := b.wait(st.ID); st.Stdout.Total != n*100 {
		t.Fatalf("%+v", st)
	}
	cancel()
	close(stuck)
	wg.Wait()
}

// A disk that is full flags the output and harms nothing else.
func TestOutputDiskFull(t *testing.T) {
	dir := t.TempDir()
	mount := dir + "/small"
	os.Mkdir(mount, 0o755)
	if err := mountTmpfs(mount, "size=256k"); err != nil {
		t.Skip("needs to mount a tmpfs:", err)
	}
	defer unmount(mount)
	f, err := os.Open(mount)
	if err != nil {
		t.Fatal(err)
	}
	b := newBox(t, func(o *guest.Options) { o.Output = f })
	defer f.Close()
	const n = 10_000
	r := b.run(sh(fmt.Sprintf(seqLine, n)+"; echo x >&2"), "")
	if r.Outcome != dsec.Exited || r.Code != 0 || r.Stdout.Total != n*100 || !r.Stdout.Truncated() || r.Stdout.Kept > 256<<10 || r.Stdout.Kept < 100<<10 {
		t.Fatalf("%+v", r.CommandStatus)
	}
	if want := lines(n); string(r.Out) != want[:r.Stdout.Kept] {
		t.Fatal("what is kept differs")
	}
	a := b.attach(r.ID, 0)
	if a.gap == 0 || !strings.HasSuffix(a.out, fmt.Sprintf("%099d\n", n-1)) {
		t.Fatalf("gap %d", a.gap)
	}
	b.agent.Close() // before the mount goes
}

// Ten thousand readers that go away leave nothing.
func TestAbandonedReaders(t *testing.T) {
	b := newBox(t)
	st := b.start(dsec.Command{Argv: []string{"cat"}, Stdin: dsec.StdinPipe})
	b.write(st.ID, 0, "x", false)
	for range b.Commands().Attach(b.Context(), nobody, st.ID, 0) {
		break
	}
	before := leftovers()
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			for range 200 {
				for range b.Commands().Attach(b.Context(), nobody, st.ID, 0) {
					break
				}
			}
		})
	}
	wg.Wait()
	if err := settled(before); err != nil {
		t.Fatal(err)
	}
	b.write(st.ID, 1, "", true)
	b.wait(st.ID)
}

func TestForgetting(t *testing.T) {
	b := newBox(t)
	const extra = 20
	var firstID dsec.CommandID
	for i := range dsec.CommandsKept + extra {
		r := b.run(dsec.Command{Argv: []string{"/no/such"}}, "") // quick
		if i == 0 {
			firstID = r.ID
		}
	}
	l, err := b.Commands().List(b.Context(), nobody)
	if err != nil || len(l) != dsec.CommandsKept {
		t.Fatalf("%d %v", len(l), err)
	}
	_, err = b.Commands().Wait(b.Context(), nobody, firstID)
	wantKind(t, err, dsec.NotFound)
}

func TestBigArguments(t *testing.T) {
	b := newBox(t)
	args := []string{"printf", "%s"}
	for range 15 {
		args = append(args, strings.Repeat("y", 100<<10))
	}
	r := b.run(dsec.Command{Argv: args}, "")
	if r.Stdout.Total != 15*100<<10 || !bytes.Equal(r.Out, bytes.Repeat([]byte("y"), 1500<<10)) {
		t.Fatalf("%+v %s", r.Stdout, r.Detail)
	}
	if len(r.Command.Argv) != 2 {
		t.Fatalf("the record has %d arguments", len(r.Command.Argv))
	}
}
