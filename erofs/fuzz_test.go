package erofs_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"hash/crc32"
	"io"
	"testing"

	"github.com/dsec-go/dsec/erofs"
)

func sha(b []byte) erofs.Sum { return sha256.Sum256(b) }

// small is an image with one of most things, for damaging.
func small(t testing.TB) []byte {
	t.Helper()
	tree := erofs.New()
	dev := &erofs.Device{Tag: "t", Blocks: 64}
	for name, n := range map[string]*erofs.Inode{
		"file":   {Mode: 0o100644, Size: 9000, Extents: []erofs.Extent{{Count: 3, Device: dev, Start: 1}}},
		"sparse": {Mode: 0o100644, Size: 90000, Extents: []erofs.Extent{{File: 4, Count: 1, Device: dev}, {File: 9, Count: 2, Device: dev, Start: 7}}},
		"d/link": {Mode: 0o120777, Target: "../file"},
		"d/null": {Mode: 0o020666, Major: 1, Minor: 3, Xattrs: map[string]string{"user.a": "b", "system.posix_acl_access": "x"}},
		"d/fifo": {Mode: 0o010600},
	} {
		if err := tree.Add(name, n); err != nil {
			t.Fatal(err)
		}
	}
	im, err := tree.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return im.Meta
}

// reseal makes the superblock's checksum fit again.
func reseal(meta []byte) {
	if len(meta) < 4096 {
		return
	}
	copy(meta[1028:1032], []byte{0, 0, 0, 0})
	sum := ^crc32.Checksum(meta[1024:4096], crc32.MakeTable(crc32.Castagnoli))
	copy(meta[1028:1032], []byte{byte(sum), byte(sum >> 8), byte(sum >> 16), byte(sum >> 24)})
}

// decodes reports what must hold for any input.
func decodes(t *testing.T, meta []byte) {
	t.Helper()
	tree, err := erofs.Decode(meta)
	if err != nil {
		if !errors.Is(err, erofs.ErrCorrupt) && !errors.Is(err, erofs.ErrUnsupported) {
			t.Errorf("untyped error: %v", err)
		}
		return
	}
	im, err := tree.Encode()
	if err != nil {
		if !errors.Is(err, erofs.ErrInvalid) && !errors.Is(err, erofs.ErrTooBig) {
			t.Errorf("encode again: %v", err)
		}
		return
	}
	if _, err := erofs.Decode(im.Meta); err != nil {
		t.Errorf("decode again: %v", err)
	}
}

// TestDamage flips every byte of a small image that means something.
func TestDamage(t *testing.T) {
	meta := small(t)
	if _, err := erofs.Decode(meta); err != nil {
		t.Fatal(err)
	}
	for i := 1024; i < len(meta); i++ {
		for _, x := range []byte{0x01, 0x80, 0xff} {
			b := bytes.Clone(meta)
			b[i] ^= x
			if i < 4096 {
				if _, err := erofs.Decode(b); !errors.Is(err, erofs.ErrCorrupt) && !(i >= 1032 && i < 1036) {
					t.Fatalf("byte %d of the superblock's block: %v", i, err)
				}
				reseal(b)
			}
			decodes(t, b)
		}
	}
	for n := 0; n < len(meta); n += 100 {
		if _, err := erofs.Decode(meta[:n]); !errors.Is(err, erofs.ErrCorrupt) {
			t.Errorf("%d of %d bytes: %v", n, len(meta), err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(small(f))
	f.Add(make([]byte, 8192))
	f.Fuzz(func(t *testing.T, meta []byte) {
		reseal(meta)
		decodes(t, meta)
	})
}

func FuzzFromTar(f *testing.F) {
	f.Add(tarOf(f, entry{name: "a/b", body: "x"}, entry{name: "a/.wh.c"}, entry{name: "l", kind: '2', link: "a"}, entry{name: "l/b", kind: '1', link: "a/b"}).Bytes())
	f.Fuzz(func(t *testing.T, b []byte) {
		blob := erofs.NewBlob(io.Discard, erofs.BlobOptions{Limit: 1 << 24})
		tree, err := erofs.FromTar(context.Background(), bytes.NewReader(b), blob, erofs.TarOptions{Budget: &erofs.Budget{Bytes: 1 << 26, Entries: 1000, Meta: 1 << 20}})
		if err != nil {
			if !errors.Is(err, erofs.ErrCorrupt) && !errors.Is(err, erofs.ErrInvalid) &&
				!errors.Is(err, erofs.ErrUnsupported) && !errors.Is(err, erofs.ErrTooBig) {
				t.Errorf("untyped error: %v", err)
			}
			return
		}
		if _, _, err := blob.Finish(); err != nil {
			t.Fatal(err)
		}
		im, err := tree.Encode()
		if err != nil {
			t.Fatalf("encode: %v", err)
		}
		if _, err := erofs.Decode(im.Meta); err != nil {
			t.Fatalf("decode: %v", err)
		}
		if _, err := erofs.Merge(tree, tree); err != nil && !errors.Is(err, erofs.ErrInvalid) {
			t.Fatalf("merge: %v", err)
		}
	})
}
