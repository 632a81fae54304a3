package e2e_test

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"strings"
	"testing"

	"github.com/dsec-go/dsec"
)

var keptOutput = flag.Int64("kept-output", 64<<20, "bytes that TestGigabyteOfOutput keeps of its gigabyte")

// TestGigabyteOfOutput lets a command print a gigabyte. What is kept of it is
// recorded, read in pages and answered again from the record, byte by byte, and
// the node does not grow with it.
func TestGigabyteOfOutput(t *testing.T) {
	const size = int64(1 << 30)
	kept := *keptOutput
	line := []byte(strings.Repeat("all the numbers ", 32)) // long ones are fast
	line[len(line)-1] = '\n'
	n := shared(t)
	sb := n.create(t, plain())
	n.sh(t, sb.ID, "true")
	cmd := dsec.Command{Shell: fmt.Sprintf("yes '%s' | head -c %d; echo an end >&2", line[:len(line)-1], size), Output: kept}
	before := n.anonymous(t)
	grown := func(when string) {
		t.Helper()
		if m := n.anonymous(t); m > before+128<<20 {
			t.Errorf("%s: the node has grown by %d MiB", when, (m-before)>>20)
		}
	}
	st, err := n.Commands.Start(ctx(t), step(sb.ID, 1), cmd)
	must(t, err)
	end, err := n.Commands.Wait(ctx(t), on(sb.ID), st.ID)
	must(t, err)
	if end.Outcome != dsec.Exited || end.Code != 0 || end.Stdout != (dsec.StreamStat{Total: size, Kept: kept}) || end.Stderr.Kept != 7 {
		t.Fatalf("%+v", end)
	}
	grown("recorded")
	right := func(data []byte, at int64) bool {
		for len(data) > 0 {
			want := line[at%int64(len(line)):]
			k := min(len(want), len(data))
			if !bytes.Equal(data[:k], want[:k]) {
				return false
			}
			data, at = data[k:], at+int64(k)
		}
		return true
	}
	whole := func(c context.Context, s dsec.Commands, from int64) {
		t.Helper()
		at, missed, other := from, int64(0), ""
		for o, err := range s.Attach(c, on(sb.ID), st.ID, from) {
			must(t, err)
			at, missed = at+o.Gap, missed+o.Gap
			switch {
			case o.Stream == dsec.Stderr:
				other += string(o.Data)
			case !right(o.Data, at):
				t.Fatalf("other bytes at %d", at)
			default:
				at += int64(len(o.Data))
			}
		}
		if at != size || other != "an end\n" {
			t.Errorf("%d bytes and %q", at, other)
		}
		if want := max(0, size-dsec.OutputTail-max(from, kept)); missed != want {
			t.Errorf("%d bytes are missing, want %d", missed, want)
		}
	}
	whole(ctx(t), n.Commands, 0)
	grown("read")
	for _, at := range []int64{0, 5, kept / 3, kept - 7, size - 7, size} {
		b, err := n.Commands.Read(ctx(t), on(sb.ID), st.ID, dsec.Stdout, at, 100_000)
		must(t, err)
		want := size - at // of the last bytes
		if at < kept {
			want = min(100_000, kept-at)
		}
		if int64(len(b)) != want || !right(b, at) {
			t.Errorf("a page at %d has %d bytes, want %d", at, len(b), want)
		}
	}
	res, err := n.Commands.Run(ctx(t), step(sb.ID, 1), cmd, nil)
	must(t, err)
	if !res.Replayed || res.ID != st.ID || len(res.Out) != dsec.MaxRunOutput || !right(res.Out, 0) || string(res.Err) != "an end\n" {
		t.Errorf("answered again: %d bytes, %q, %+v", len(res.Out), res.Err, res.CommandStatus)
	}
	n.stop(t, sb.ID)
	whole(ctx(t), n.Commands, size-1<<20) // the sandbox has gone, the record has it
	grown("in the end")
}
