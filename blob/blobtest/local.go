package blobtest

import (
	"bytes"
	"errors"
	"os"
	"testing"

	"github.com/dsec-go/dsec/blob"
)

func testLocalPath(t *testing.T, s blob.Store) {
	local := s.(blob.LocalPather)
	data := Data(16, 5000)
	if _, err := local.LocalPath(t.Context(), blob.Of(data)); !errors.Is(err, blob.ErrNotFound) {
		t.Errorf("local path: %v, want ErrNotFound", err)
	}
	if _, err := local.LocalPath(t.Context(), "sha256:../x"); !errors.Is(err, blob.ErrDigest) {
		t.Errorf("local path: %v, want ErrDigest", err)
	}
	path, err := local.LocalPath(t.Context(), put(t, s, data))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, data) {
		t.Errorf("file has %d bytes, %v", len(got), err)
	}
}
