//go:build stores

package s3_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/blob/blobtest"
	"github.com/dsec-go/dsec/blob/s3/s3test"
)

func TestSeaweedConformance(t *testing.T) {
	cluster := s3test.Seaweed(t)
	t.Run("S3", func(t *testing.T) {
		blobtest.Run(t, func(t *testing.T) blob.Store {
			s := open(t, cluster.Config(cluster.Addr, prefix()))
			s.SetPageSize(7)
			return s
		})
	})
	dir := cluster.Mount(t)
	t.Run("Mount", func(t *testing.T) {
		blobtest.Run(t, func(t *testing.T) blob.Store {
			f, err := blob.OpenFolder(filepath.Join(dir, prefix()))
			if err != nil {
				t.Fatal(err)
			}
			return f
		})
	})
	t.Run("Faults", func(t *testing.T) {
		blobtest.RunFaults(t, func(t *testing.T) blobtest.Faults {
			wire := blobtest.NewWire(t, cluster.Addr)
			c := cluster.Config(wire.Addr(), prefix())
			c.Stall, c.Retry, c.PartSize = 500*time.Millisecond, hasty, 5<<20
			return blobtest.Faults{Store: blob.NewRetrying(open(t, c), hasty), Wire: wire}
		})
	})
	t.Run("Parts", func(t *testing.T) {
		c := cluster.Config(cluster.Addr, prefix())
		c.PartSize = 5 << 20
		s := open(t, c)
		data := blobtest.Data(1, 17<<20)
		w, err := s.Stage(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(data); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := blob.ReadAll(t.Context(), s, blob.Of(data)); err != nil {
			t.Error(err)
		}
	})
}

// A volume server dies while blobs are read and written, by S3 and through the mount. Nobody
// gets an error or a wrong byte, and nothing that was promised is lost.
func TestSeaweedLosesAServer(t *testing.T) {
	cluster := s3test.Seaweed(t)
	patient := blob.Retry{For: time.Minute}
	c := cluster.Config(cluster.Addr, "lost")
	c.Retry, c.PartSize = patient, 5<<20
	bucket := blob.NewRetrying(open(t, c), patient)
	folder, err := blob.OpenFolder(filepath.Join(cluster.Mount(t), "folder"))
	if err != nil {
		t.Fatal(err)
	}
	mount := blob.NewRetrying(folder, patient)

	const writers, each, killAt = 3, 12, 20
	var puts atomic.Int64
	var wg sync.WaitGroup
	for name, s := range map[string]blob.Store{"bucket": bucket, "mount": mount} {
		for w := range writers {
			wg.Go(func() {
				var mine []blob.Digest
				for i := range each {
					data := blobtest.Data(uint64(1000*w+i+len(name)*10_000), 500_000+i*700_000)
					d := blob.Of(data)
					if err := s.Put(t.Context(), d, bytes.NewReader(data)); err != nil {
						t.Errorf("%s: put: %v", name, err)
						continue
					}
					mine = append(mine, d)
					if puts.Add(1) == killAt {
						cluster.Kill(t, 1)
					}
					if _, err := blob.ReadAll(t.Context(), s, mine[i%len(mine)]); err != nil {
						t.Errorf("%s: read: %v", name, err)
					}
				}
				for _, d := range mine {
					if _, err := blob.ReadAll(t.Context(), s, d); err != nil {
						t.Errorf("%s: read at the end: %v", name, err)
					}
				}
			})
		}
	}
	wg.Wait()
	if n := puts.Load(); n < killAt {
		t.Errorf("only %d puts, nobody was killed", n)
	}
	for name, s := range map[string]blob.Store{"bucket": bucket, "mount": mount} {
		if n := blobtest.Count(t, s); n != writers*each {
			t.Errorf("%s: %d blobs, want %d", name, n, writers*each)
		}
	}
}

// A blob on the mount is the data device of an EROFS layer as it is, also with a server less.
func TestSeaweedHoldsLayers(t *testing.T) {
	cluster := s3test.Seaweed(t)
	work := t.TempDir()
	src := filepath.Join(work, "src")
	if err := os.Mkdir(src, 0o755); err != nil {
		t.Fatal(err)
	}
	const files = 40
	for i := range files {
		if err := os.WriteFile(filepath.Join(src, fmt.Sprint(i)), blobtest.Data(uint64(i), 1000+i*20_000), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	meta, data := filepath.Join(work, "meta"), filepath.Join(work, "data")
	if out, err := exec.Command("mkfs.erofs", "--quiet", "--blobdev="+data, "--chunksize=4096", meta, src).CombinedOutput(); errors.Is(err, exec.ErrNotFound) {
		t.Skipf("feature mkfs.erofs: %v", err)
	} else if err != nil {
		t.Fatalf("mkfs.erofs: %v\n%s", err, out)
	}
	b, err := os.ReadFile(data)
	if err != nil {
		t.Fatal(err)
	}
	// Written by S3, read through the mount: one store.
	s := open(t, cluster.Config(cluster.Addr, "layers"))
	d, err := blob.PutBytes(t.Context(), s, b)
	if err != nil {
		t.Fatal(err)
	}
	folder, err := blob.OpenFolder(filepath.Join(cluster.Mount(t), "layers"))
	if err != nil {
		t.Fatal(err)
	}
	device, err := folder.LocalPath(t.Context(), d)
	if err != nil {
		t.Fatal(err)
	}
	dir := mountErofs(t, meta, device)
	for i := range files {
		if i == files/2 {
			cluster.Kill(t, 2)
		}
		got, err := os.ReadFile(filepath.Join(dir, fmt.Sprint(i)))
		if err != nil || !bytes.Equal(got, blobtest.Data(uint64(i), 1000+i*20_000)) {
			t.Errorf("file %d: %d bytes, %v", i, len(got), err)
		}
	}
}

func mountErofs(t *testing.T, meta, device string) string {
	t.Helper()
	dir := t.TempDir()
	fsfd, err := unix.Fsopen("erofs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		t.Skipf("feature EROFS: %v", err)
	}
	defer unix.Close(fsfd)
	for _, step := range []func() error{
		func() error { return unix.FsconfigSetString(fsfd, "source", meta) },
		func() error { return unix.FsconfigSetFlag(fsfd, "ro") },
		func() error { return unix.FsconfigSetString(fsfd, "device", device) },
		func() error { return unix.FsconfigCreate(fsfd) },
	} {
		if err := step(); err != nil {
			msg := make([]byte, 300)
			n, _ := unix.Read(fsfd, msg)
			t.Fatalf("mount EROFS: %v: %s", err, msg[:max(n, 0)])
		}
	}
	mfd, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_RDONLY)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(mfd)
	if err := unix.MoveMount(mfd, "", unix.AT_FDCWD, dir, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	return dir
}

func BenchmarkSeaweed(b *testing.B) {
	cluster := s3test.Seaweed(b)
	benchmark(b, open(b, cluster.Config(cluster.Addr, "bench")))
	folder, err := blob.OpenFolder(filepath.Join(cluster.Mount(b), "folder"))
	if err != nil {
		b.Fatal(err)
	}
	b.Run("Mount", func(b *testing.B) { benchmark(b, folder) })
}
