package blobtest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/dsec-go/dsec/blob"
)

// Faults is a store together with what a test may do to it. A field that is nil is
// something that cannot happen to this store.
type Faults struct {
	// Store is empty and as patient as one in use: it comes over an interruption of some
	// ten milliseconds and gives up one that does not end, within a second or so.
	Store blob.Store

	// Wire is what lies between the store and its server.
	Wire *Wire

	// Damage changes the stored bytes of a blob behind the store's back.
	Damage func(t *testing.T, d blob.Digest, change func([]byte) []byte)

	// Fill leaves room for less than 4 MiB until drain is called.
	Fill func(t *testing.T) (drain func())
}

// RunFaults checks what a store does when things go wrong around it: it comes over what
// passes, says what does not, and never hands out or shows anything but the right bytes. Each
// call of newFaults returns an empty store.
func RunFaults(t *testing.T, newFaults func(t *testing.T) Faults) {
	f := newFaults(t)
	run := func(name string, test func(t *testing.T, f Faults)) {
		t.Run(name, func(t *testing.T) { test(t, newFaults(t)) })
	}
	if f.Wire != nil {
		run("GetBreaks", testGetBreaks)
		run("GetLost", testGetLost)
		run("PutBreaks", testPutBreaks)
		run("PutLost", testPutLost)
		run("Silence", testSilence)
		run("Slow", testSlow)
	}
	if f.Damage != nil {
		run("Truncated", testTruncated)
		run("WrongBytes", testWrongBytes)
	}
	if f.Fill != nil {
		run("Full", testFull)
	}
}

const faultSize = 3 << 20

// The server dies in the middle of a read and comes back.
func testGetBreaks(t *testing.T, f Faults) {
	data := Data(50, faultSize)
	d := put(t, f.Store, data)
	for _, r := range []struct{ off, n, cut int64 }{
		{0, -1, 1 << 20}, {0, faultSize, 2 << 20}, {1 << 20, 1 << 20, 300_000}, {0, -1, 0},
	} {
		cuts := f.Wire.Cuts()
		f.Wire.CutAfter(r.cut, 2)
		want := data[r.off:]
		if r.n >= 0 {
			want = want[:r.n]
		}
		if got := get(t, f.Store, d, r.off, r.n); !bytes.Equal(got, want) {
			t.Errorf("%v: %d bytes, want %d, or other content", r, len(got), len(want))
		}
		if f.Wire.Cuts() != cuts+1 {
			t.Errorf("%v: the wire was not cut", r)
		}
	}
	f.Wire.CutAfter(0, 2)
	if info, err := f.Store.Stat(t.Context(), d); err != nil || info.Size != faultSize {
		t.Errorf("stat: %v, %v", info, err)
	}
	f.Wire.CutAfter(0, 2)
	if n := Count(t, f.Store); n != 1 {
		t.Errorf("%d blobs, want 1", n)
	}
	f.Wire.CutAfter(0, 2)
	if err := f.Store.Delete(t.Context(), d); err != nil {
		t.Errorf("delete: %v", err)
	}
	wantAbsent(t, f.Store, d)
}

// The server dies in the middle of a read and stays away.
func testGetLost(t *testing.T, f Faults) {
	data := Data(51, faultSize)
	d := put(t, f.Store, data)
	f.Wire.CutAfter(1<<20, -1)
	got, err := read(t.Context(), f.Store, d)
	if !errors.Is(err, blob.ErrUnavailable) {
		t.Errorf("%d bytes, %v, want ErrUnavailable", len(got), err)
	}
	if !bytes.HasPrefix(data, got) || len(got) == len(data) {
		t.Errorf("%d bytes, or others than it has", len(got))
	}
	if _, err := f.Store.Stat(t.Context(), d); !errors.Is(err, blob.ErrUnavailable) || errors.Is(err, blob.ErrNotFound) {
		t.Errorf("stat: %v, want ErrUnavailable", err)
	}
	// Who leaves does not wait for the end of patience.
	cause := errors.New("trainer left")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	if _, err := f.Store.Stat(ctx, d); !errors.Is(err, cause) {
		t.Errorf("stat: %v, want the cause", err)
	}
	f.Wire.Heal()
	if got, err := read(t.Context(), f.Store, d); err != nil || !bytes.Equal(got, data) {
		t.Errorf("then %d bytes, %v", len(got), err)
	}
}

// The server dies in the middle of a write and comes back.
func testPutBreaks(t *testing.T, f Faults) {
	for i, cut := range []int64{0, 1000, 1 << 20, faultSize - 1} {
		data := Data(uint64(52+i), faultSize)
		cuts := f.Wire.Cuts()
		f.Wire.CutAfter(cut, 2)
		d := put(t, f.Store, data)
		if f.Wire.Cuts() != cuts+1 {
			t.Errorf("%d: the wire was not cut", cut)
		}
		if got := get(t, f.Store, d, 0, -1); !bytes.Equal(got, data) {
			t.Errorf("%d: other content", cut)
		}
	}
	if n := Count(t, f.Store); n != 4 {
		t.Errorf("%d blobs, want 4", n)
	}
}

// The server dies in the middle of a write and stays away.
func testPutLost(t *testing.T, f Faults) {
	data := Data(60, faultSize)
	f.Wire.CutAfter(1<<20, -1)
	if _, err := blob.PutBytes(t.Context(), f.Store, data); !errors.Is(err, blob.ErrUnavailable) {
		t.Errorf("put: %v, want ErrUnavailable", err)
	}
	f.Wire.Heal()
	wantAbsent(t, f.Store, blob.Of(data))
	if got := get(t, f.Store, put(t, f.Store, data), 0, -1); !bytes.Equal(got, data) {
		t.Errorf("other content")
	}
}

// The server stops saying anything, with every connection standing.
func testSilence(t *testing.T, f Faults) {
	data := Data(61, faultSize)
	d := put(t, f.Store, data)
	f.Wire.HoldAfter(1 << 20)
	if got, err := read(t.Context(), f.Store, d); !errors.Is(err, blob.ErrUnavailable) || !bytes.HasPrefix(data, got) {
		t.Errorf("%d bytes, %v, want ErrUnavailable", len(got), err)
	}
	other := Data(62, faultSize)
	if _, err := blob.PutBytes(t.Context(), f.Store, other); !errors.Is(err, blob.ErrUnavailable) {
		t.Errorf("put: %v, want ErrUnavailable", err)
	}
	f.Wire.Heal()
	if got := get(t, f.Store, d, 0, -1); !bytes.Equal(got, data) {
		t.Errorf("other content")
	}
	put(t, f.Store, other)
}

// A slow server is not a dead one, however long it takes.
func testSlow(t *testing.T, f Faults) {
	data := Data(63, 1<<20)
	d := put(t, f.Store, data)
	f.Wire.Pace(1 << 20)
	if got := get(t, f.Store, d, 0, -1); !bytes.Equal(got, data) {
		t.Errorf("other content")
	}
	put(t, f.Store, Data(64, 1<<20))
}

// Somebody has cut off a stored blob.
func testTruncated(t *testing.T, f Faults) {
	data := Data(65, 300_000)
	d := put(t, f.Store, data)
	f.Damage(t, d, func(b []byte) []byte { return b[:200_000] })
	if got, err := read(t.Context(), f.Store, d); len(got) > 200_000 || !bytes.HasPrefix(data, got) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if _, err := blob.ReadAll(t.Context(), f.Store, d); err == nil {
		t.Errorf("read as if nothing was")
	}
	v := blob.NewVerified(f.Store)
	if got, err := read(t.Context(), v, d); !errors.Is(err, blob.ErrCorrupt) {
		t.Errorf("verified: %d bytes, %v, want ErrCorrupt", len(got), err)
	}
	if r, err := f.Store.Get(t.Context(), d, 150_000, 100_000); err == nil {
		got, rerr := io.ReadAll(r)
		r.Close()
		if err = rerr; !bytes.HasPrefix(data[150_000:], got) {
			t.Errorf("range: other content")
		}
		if err == nil {
			t.Errorf("range over the end: %d bytes and no error", len(got))
		}
	} else if !errors.Is(err, blob.ErrRange) && !errors.Is(err, blob.ErrCorrupt) {
		t.Errorf("range over the end: %v", err)
	}
}

// Somebody has changed a stored blob.
func testWrongBytes(t *testing.T, f Faults) {
	data := Data(66, 300_000)
	d := put(t, f.Store, data)
	f.Damage(t, d, func(b []byte) []byte {
		b[250_000] ^= 1
		return b
	})
	if _, err := blob.ReadAll(t.Context(), f.Store, d); !errors.Is(err, blob.ErrCorrupt) {
		t.Errorf("%v, want ErrCorrupt", err)
	}
	if got, err := read(t.Context(), blob.NewVerified(f.Store), d); !errors.Is(err, blob.ErrCorrupt) {
		t.Errorf("verified: %d bytes, %v, want ErrCorrupt", len(got), err)
	}
	// Repair is delete and put.
	if err := f.Store.Delete(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	put(t, f.Store, data)
	if got := get(t, f.Store, d, 0, -1); !bytes.Equal(got, data) {
		t.Errorf("other content after repair")
	}
}

// The store has no more room.
func testFull(t *testing.T, f Faults) {
	kept := put(t, f.Store, Data(67, 1000))
	drain := f.Fill(t)
	big := Data(68, 8<<20)
	if _, err := blob.PutBytes(t.Context(), f.Store, big); !errors.Is(err, blob.ErrFull) && !errors.Is(err, blob.ErrUnavailable) {
		t.Errorf("put: %v, want ErrFull, or ErrUnavailable of a server that does not say more", err)
	}
	wantAbsent(t, f.Store, blob.Of(big))
	get(t, f.Store, kept, 0, -1)
	// What was begun is given back, by a server in its own time.
	for until := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		_, err := blob.PutBytes(t.Context(), f.Store, Data(69, 100_000))
		if err == nil {
			break
		}
		if !errors.Is(err, blob.ErrFull) && !errors.Is(err, blob.ErrUnavailable) || time.Now().After(until) {
			t.Fatalf("put of 100000 bytes after what was too large: %v", err)
		}
	}
	drain()
	if got := get(t, f.Store, put(t, f.Store, big), 0, -1); !bytes.Equal(got, big) {
		t.Errorf("other content")
	}
}

// read returns what came before the error, too.
func read(ctx context.Context, s blob.Store, d blob.Digest) ([]byte, error) {
	r, err := s.Get(ctx, d, 0, -1)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}
