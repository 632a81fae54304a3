package blob_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/blob/blobtest"
)

// staged returns the names in the staging folder below dir.
func staged(t testing.TB, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(dir, "staging"))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// Every step of a write fails in turn: the error comes out, no file stays, a retry works.
func TestFolderFaults(t *testing.T) {
	dir := t.TempDir()
	f, err := blob.OpenFolder(dir)
	if err != nil {
		t.Fatal(err)
	}
	for i, op := range []string{"create", "write", "fsync", "rename", "syncdir"} {
		for _, how := range []string{"put", "stage"} {
			t.Run(op+"/"+how, func(t *testing.T) {
				data := blobtest.Data(uint64(20+i), 600_000+len(how))
				d := blob.Of(data)
				write := func() error {
					if how == "put" {
						return f.Put(t.Context(), d, bytes.NewReader(data))
					}
					w, err := f.Stage(t.Context())
					if err != nil {
						return err
					}
					if _, err := w.Write(data); err != nil {
						if _, cerr := w.Commit(t.Context()); !errors.Is(cerr, syscall.EIO) {
							t.Errorf("commit after failed write: %v", cerr)
						}
						return err
					}
					_, err = w.Commit(t.Context())
					return err
				}
				f.SetFault(func(got string) error {
					if got == op {
						return syscall.EIO
					}
					return nil
				})
				if err := write(); !errors.Is(err, syscall.EIO) {
					t.Errorf("%v, want EIO", err)
				}
				if op == "syncdir" { // visible, not promised; a repeated Put must not promise either
					if err := write(); !errors.Is(err, syscall.EIO) {
						t.Errorf("repeated: %v, want EIO", err)
					}
				} else if _, err := f.Stat(t.Context(), d); !errors.Is(err, blob.ErrNotFound) {
					t.Errorf("stat: %v, want ErrNotFound", err)
				}
				if names := staged(t, dir); len(names) != 0 {
					t.Errorf("left in staging: %v", names)
				}
				f.SetFault(nil)
				if err := write(); err != nil {
					t.Errorf("retry: %v", err)
				}
				if _, err := blob.ReadAll(t.Context(), f, d); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// A real full disk.
func TestFolderFullDisk(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mount("blob-test", dir, "tmpfs", 0, "size=2m"); err != nil {
		t.Skipf("feature mount (tmpfs, needs root): %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	f, err := blob.OpenFolder(dir)
	if err != nil {
		t.Fatal(err)
	}
	small, big := blobtest.Data(30, 100_000), blobtest.Data(31, 8<<20)
	if _, err := blob.PutBytes(t.Context(), f, big); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("put: %v, want ENOSPC", err)
	}
	w, err := f.Stage(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if n, err := w.Write(big); !errors.Is(err, syscall.ENOSPC) || n >= len(big) {
		t.Errorf("write: %d, %v, want ENOSPC", n, err)
	}
	if names := staged(t, dir); len(names) != 0 {
		t.Errorf("left in staging: %v", names)
	}
	if err := w.Abort(); err != nil {
		t.Errorf("abort: %v", err)
	}
	if _, err := blob.PutBytes(t.Context(), f, small); err != nil {
		t.Errorf("put after full disk: %v", err)
	}
	if n := blobtest.Count(t, f); n != 1 {
		t.Errorf("%d blobs, want 1", n)
	}
}

// TestMain lets the test binary be a writer that another test kills.
func TestMain(m *testing.M) {
	if dir := os.Getenv("BLOB_TEST_WRITER"); dir != "" {
		f, err := blob.OpenFolder(dir)
		if err == nil {
			var w blob.Staged
			if w, err = f.Stage(context.Background()); err == nil {
				_, err = w.Write(make([]byte, 100_000))
			}
		}
		fmt.Println("staged", err)
		select {} // until killed
	}
	os.Exit(m.Run())
}

// Opening removes what a killed writer left and leaves living writers alone, also when
// they are in this process.
func TestFolderSweep(t *testing.T) {
	dir := t.TempDir()
	f, err := blob.OpenFolder(dir)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "BLOB_TEST_WRITER="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	dead := false
	kill := func() {
		if !dead {
			dead = true
			cmd.Process.Kill() //nolint:errcheck // it waits to be killed
			cmd.Wait()         //nolint:errcheck // killed
		}
	}
	defer kill()
	line := make([]byte, 100)
	n, err := out.Read(line)
	if err != nil || string(line[:n]) != "staged <nil>\n" {
		t.Fatalf("writer: %q, %v", line[:n], err)
	}

	w, err := f.Stage(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write([]byte("alive")); err != nil {
		t.Fatal(err)
	}
	if _, err := blob.OpenFolder(dir); err != nil {
		t.Fatal(err)
	}
	if names := staged(t, dir); len(names) != 2 {
		t.Errorf("staging has %v, want both living writers", names)
	}
	kill()
	if _, err := blob.OpenFolder(dir); err != nil {
		t.Fatal(err)
	}
	if names := staged(t, dir); len(names) != 1 {
		t.Errorf("staging has %v, want the living writer", names)
	}
	if _, err := w.Commit(t.Context()); err != nil {
		t.Errorf("commit: %v", err)
	}
}

func TestFolderFormat(t *testing.T) {
	dir := t.TempDir()
	if _, err := blob.OpenFolder(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "format"), []byte("dsec blob folder 2\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := blob.OpenFolder(dir); err == nil {
		t.Errorf("a newer format is opened")
	}
}

// Two Folders on one mount, as on two nodes.
func TestFolderShared(t *testing.T) {
	dir := t.TempDir()
	a, err := blob.OpenFolder(dir)
	if err != nil {
		t.Fatal(err)
	}
	b, err := blob.OpenFolder(dir)
	if err != nil {
		t.Fatal(err)
	}
	data := blobtest.Data(40, 100_000)
	wa, err := a.Stage(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	wb, err := b.Stage(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range []blob.Staged{wa, wb} {
		if _, err := w.Write(data); err != nil {
			t.Fatal(err)
		}
	}
	for _, w := range []blob.Staged{wa, wb} {
		if info, err := w.Commit(t.Context()); err != nil || info.Digest != blob.Of(data) {
			t.Errorf("commit: %v, %v", info, err)
		}
	}
	for _, f := range []*blob.Folder{a, b} {
		if _, err := blob.ReadAll(t.Context(), f, blob.Of(data)); err != nil {
			t.Error(err)
		}
	}
	if names := staged(t, dir); len(names) != 0 {
		t.Errorf("left in staging: %v", names)
	}
}

// TestFolderDeleteIdle steps between the moments of a deletion.
func TestFolderDeleteIdle(t *testing.T) {
	data := blobtest.Data(1, 3000)
	d := blob.Of(data)
	old := time.Now().Add(-2 * time.Hour)
	open := func(t *testing.T) (*blob.Folder, string) {
		f, err := blob.OpenFolder(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := blob.PutBytes(t.Context(), f, data); err != nil {
			t.Fatal(err)
		}
		path, err := f.LocalPath(t.Context(), d)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, old, old); err != nil {
			t.Fatal(err)
		}
		return f, path
	}
	there := func(t *testing.T, f *blob.Folder, want bool) {
		t.Helper()
		b, err := blob.ReadAll(t.Context(), f, d)
		if want && !bytes.Equal(b, data) || !want && !errors.Is(err, blob.ErrNotFound) {
			t.Errorf("read %d bytes, %v; want it there: %v", len(b), err, want)
		}
	}
	t.Run("touched before its name is taken", func(t *testing.T) {
		f, _ := open(t)
		f.SetFault(func(op string) error {
			if op == "aside" {
				return f.Touch(t.Context(), d)
			}
			return nil
		})
		if gone, err := f.DeleteIdle(t.Context(), d, time.Hour); gone || err != nil {
			t.Errorf("gone %v, %v", gone, err)
		}
		there(t, f, true)
	})
	t.Run("touched after that", func(t *testing.T) {
		f, _ := open(t)
		f.SetFault(func(op string) error {
			if op == "look" {
				if err := f.Touch(t.Context(), d); !errors.Is(err, blob.ErrNotFound) {
					t.Errorf("touch: %v, want ErrNotFound", err)
				}
			}
			return nil
		})
		if gone, err := f.DeleteIdle(t.Context(), d, time.Hour); !gone || err != nil {
			t.Errorf("gone %v, %v", gone, err)
		}
		there(t, f, false)
	})
	t.Run("put after that", func(t *testing.T) {
		f, _ := open(t)
		f.SetFault(func(op string) error {
			if op == "look" {
				f.SetFault(nil)
				_, err := blob.PutBytes(t.Context(), f, data)
				return err
			}
			return nil
		})
		if _, err := f.DeleteIdle(t.Context(), d, time.Hour); err != nil {
			t.Error(err)
		}
		there(t, f, true)
	})
	t.Run("time in the future", func(t *testing.T) {
		f, path := open(t)
		future := time.Now().Add(1000 * time.Hour)
		if err := os.Chtimes(path, future, future); err != nil {
			t.Fatal(err)
		}
		if gone, err := f.DeleteIdle(t.Context(), d, time.Hour); gone || err != nil {
			t.Errorf("gone %v, %v", gone, err)
		}
		st, err := os.Stat(path)
		if err != nil || time.Until(st.ModTime()) > time.Minute {
			t.Errorf("time is %v, %v", st.ModTime(), err)
		}
	})
}
