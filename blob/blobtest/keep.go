package blobtest

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/dsec-go/dsec/blob"
)

// testKeep goes by ages that no test has to wait for: everything is younger than an hour,
// and nothing is younger than one that has not begun.
func testKeep(t *testing.T, s blob.Store) {
	k := s.(blob.Keeper)
	const long, never = time.Hour, -time.Hour
	data := Data(1, 5000)
	d := put(t, s, data)
	if err := k.Touch(t.Context(), d); err != nil {
		t.Fatalf("touch: %v", err)
	}
	if gone, err := k.DeleteIdle(t.Context(), d, long); gone || err != nil {
		t.Fatalf("delete of what is young: %v, %v", gone, err)
	}
	if got := get(t, s, d, 0, -1); !bytes.Equal(got, data) {
		t.Error("a touched blob has other bytes")
	}
	if gone, err := k.DeleteIdle(t.Context(), d, never); !gone || err != nil {
		t.Fatalf("delete of what is old: %v, %v", gone, err)
	}
	wantAbsent(t, s, d)
	if gone, err := k.DeleteIdle(t.Context(), d, never); gone || err != nil {
		t.Errorf("delete of what is absent: %v, %v", gone, err)
	}
	if err := k.Touch(t.Context(), d); !errors.Is(err, blob.ErrNotFound) {
		t.Errorf("touch of what is absent: %v", err)
	}
	put(t, s, data)
	if got := get(t, s, d, 0, -1); !bytes.Equal(got, data) {
		t.Error("a blob that is put again has other bytes")
	}

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := k.Touch(ctx, d); !errors.Is(err, context.Canceled) {
		t.Errorf("touch, canceled: %v", err)
	}
	if _, err := k.DeleteIdle(ctx, d, 0); !errors.Is(err, context.Canceled) {
		t.Errorf("delete, canceled: %v", err)
	}
	if err := k.Touch(t.Context(), "sha256:../../x"); !errors.Is(err, blob.ErrDigest) {
		t.Errorf("touch of a malformed digest: %v", err)
	}
	if _, err := k.DeleteIdle(t.Context(), "sha256:../../x", 0); !errors.Is(err, blob.ErrDigest) {
		t.Errorf("delete of a malformed digest: %v", err)
	}
	if w, ok := s.(blob.Sweeper); ok {
		if err := w.Sweep(t.Context(), long); err != nil {
			t.Errorf("sweep: %v", err)
		}
		if got := get(t, s, d, 0, -1); !bytes.Equal(got, data) {
			t.Error("a sweep took a blob")
		}
	}
}
