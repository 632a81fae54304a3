package dsec_test

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/dsec-go/dsec"
)

func TestOutputFrames(t *testing.T) {
	big := bytes.Repeat([]byte("x"), 3<<20)
	in := []dsec.Output{
		{Stream: dsec.Stdout, Data: []byte("one")},
		{Stream: dsec.Stderr, Data: []byte("two")},
		{Stream: dsec.Stdout, Offset: 6, Data: big},
		{Stream: dsec.Stdout, Gap: 100, Data: []byte("tail")},
		{Gap: 7},
	}
	var frames []byte
	for _, o := range in {
		frames = dsec.AppendOutput(frames, o)
	}
	var out, err bytes.Buffer
	var gap, end int64
	for o, e := range dsec.ReadOutput(bytes.NewReader(frames)) {
		if e != nil {
			t.Fatal(e)
		}
		if o.Offset != end+o.Gap {
			t.Fatalf("an event at %d after %d with a gap of %d", o.Offset, end, o.Gap)
		}
		end = o.Offset + int64(len(o.Data))
		gap += o.Gap
		if o.Stream == dsec.Stderr {
			err.Write(o.Data)
		} else {
			out.Write(o.Data)
		}
	}
	if out.String() != "one"+string(big)+"tail" || err.String() != "two" || gap != 107 || end != int64(10+len(big)+107) {
		t.Errorf("%d bytes, %q, gap %d, end %d", out.Len(), err.String(), gap, end)
	}
	for n := 1; n <= 8; n++ { // the last frame has nine bytes
		var last error
		for _, e := range dsec.ReadOutput(bytes.NewReader(frames[:len(frames)-n])) {
			last = e
		}
		if dsec.KindOf(last) != dsec.Invalid || last == nil {
			t.Errorf("frames cut by %d bytes: %v", n, last)
		}
	}
}

func FuzzReadOutput(f *testing.F) {
	f.Add(dsec.AppendOutput(nil, dsec.Output{Stream: dsec.Stdout, Data: []byte("x")}))
	f.Add(dsec.AppendOutput(nil, dsec.Output{Stream: dsec.Stderr, Gap: 5}))
	junk := make([]byte, 100)
	r := rand.New(rand.NewPCG(1, 1))
	for i := range junk {
		junk[i] = byte(r.Uint32())
	}
	f.Add(junk)
	f.Fuzz(func(t *testing.T, b []byte) {
		var again []byte
		for o, err := range dsec.ReadOutput(bytes.NewReader(b)) {
			if err != nil {
				if dsec.KindOf(err) != dsec.Invalid {
					t.Fatal(err)
				}
				return
			}
			again = dsec.AppendOutput(again, o)
		}
		if end := len(again); end > len(b) {
			t.Fatalf("%d bytes became %d", len(b), end)
		}
	})
}
