package trajectory_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/trajectory"
)

// rotten is a store whose blobs are given through rot once it is set.
type rotten struct {
	*blob.Memory
	rot atomic.Pointer[func([]byte) ([]byte, error)]
}

func (s *rotten) Get(ctx context.Context, d blob.Digest, off, n int64) (io.ReadCloser, error) {
	in, err := s.Memory.Get(ctx, d, off, n)
	rot := s.rot.Load()
	if err != nil || rot == nil {
		return in, err
	}
	defer in.Close()
	b, err := io.ReadAll(in)
	if err == nil {
		b, err = (*rot)(bytes.Clone(b))
	}
	return io.NopCloser(bytes.NewReader(b)), err
}

// TestDamagedOutputIsNoAnswer: what the store gives in place of the recorded output is never
// taken for it, whoever asks, and a store that is away is not called damage.
func TestDamagedOutputIsNoAnswer(t *testing.T) {
	r := newRig(t)
	store := &rotten{Memory: r.store}
	r.tune = func(c *trajectory.Config) { c.Store = store }
	r.open()
	id := r.create()
	line := fmt.Sprintf("yes %d", 200<<10)
	done := r.run(step(id, "s", 1), line)
	all := r.records(id)
	answer := all[len(all)-1].Seq
	on := dsec.Call{Sandbox: id}
	asks := map[string]func() error{
		"run": func() error {
			_, err := r.Commands.Run(t.Context(), step(id, "s", 1), sh(line), nil)
			return err
		},
		"attach": func() (err error) {
			for _, err = range r.Commands.Attach(t.Context(), on, done.ID, 0) {
			}
			return err
		},
		"attach from behind": func() (err error) {
			for _, err = range r.Commands.Attach(t.Context(), on, done.ID, 190<<10) {
			}
			return err
		},
		"read": func() error {
			_, err := r.Commands.Read(t.Context(), on, done.ID, dsec.Stdout, 0, 10)
			return err
		},
		"body": func() error {
			in, err := r.Trajectories.Body(t.Context(), id, answer)
			if err != nil {
				return err
			}
			defer in.Close()
			_, err = io.Copy(io.Discard, in)
			return err
		},
	}
	for name, ask := range asks {
		if err := ask(); err != nil {
			t.Errorf("%s of sound output: %v", name, err)
		}
	}
	for _, x := range []struct {
		name string
		rot  func([]byte) ([]byte, error)
		want dsec.ErrorKind
	}{
		{"a bit of the last byte", func(b []byte) ([]byte, error) { b[len(b)-1] ^= 1; return b, nil }, dsec.Lost},
		{"a byte of data", func(b []byte) ([]byte, error) { b[100] = 'z'; return b, nil }, dsec.Lost},
		{"a frame's length", func(b []byte) ([]byte, error) { b[4] ^= 0x80; return b, nil }, dsec.Lost},
		{"a frame's stream", func(b []byte) ([]byte, error) { b[0] = 9; return b, nil }, dsec.Lost},
		{"cut", func(b []byte) ([]byte, error) { return b[:len(b)/2], nil }, dsec.Lost},
		{"nothing", func(b []byte) ([]byte, error) { return nil, nil }, dsec.Lost},
		{"more", func(b []byte) ([]byte, error) { return append(b, b...), nil }, dsec.Lost},
		{"missing", func([]byte) ([]byte, error) { return nil, blob.ErrNotFound }, dsec.Lost},
		{"away", func([]byte) ([]byte, error) { return nil, errors.New("connection refused") }, dsec.Unavailable},
	} {
		store.rot.Store(&x.rot)
		for name, ask := range asks {
			err := ask()
			if err == nil || dsec.KindOf(err) != x.want || !strings.Contains(err.Error(), "output of record ") {
				t.Errorf("%s: %s: %v, want %v naming the record", x.name, name, err, x.want)
			}
		}
	}
	store.rot.Store(nil)
	r.close()
}
