package image_test

import (
	"io"
	"os"
	"os/exec"
	"testing"

	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/image"
)

// benchTar names a large tar to import, such as one of a Debian system; without
// it one is made of what this host has.
const benchTar = "DSEC_BENCH_TAR"

// archiveFile gives a tar of some gigabytes of a real system.
func archiveFile(b *testing.B) (path string, size int64) {
	b.Helper()
	if path = os.Getenv(benchTar); path == "" {
		path = b.TempDir() + "/usr.tar"
		if out, err := exec.Command("tar", "-C", "/", "-cf", path, "usr/share", "usr/lib/x86_64-linux-gnu").CombinedOutput(); err != nil {
			b.Skipf("tar: %v: %s", err, out)
		}
	}
	st, err := os.Stat(path)
	must(b, err)
	return path, st.Size()
}

// BenchmarkImport compares importing a tar with unpacking it, each to files that
// are there to stay.
func BenchmarkImport(b *testing.B) {
	path, size := archiveFile(b)
	b.Run("tar", func(b *testing.B) {
		b.SetBytes(size)
		for b.Loop() {
			dir := b.TempDir()
			f, err := os.Open(path)
			must(b, err)
			cmd := exec.Command("tar", "-C", dir, "-xf", "-")
			cmd.Stdin = f
			if out, err := cmd.CombinedOutput(); err != nil {
				b.Fatalf("tar: %v\n%s", err, out)
			}
			f.Close()
			b.StopTimer()
			must(b, os.RemoveAll(dir))
			b.StartTimer()
		}
	})
	for name, pack := range map[string]image.Packing{"plain": image.None, "packed": image.Zstd} {
		for _, index := range []string{"", "index"} {
			b.Run(name+index, func(b *testing.B) {
				b.SetBytes(size)
				for b.Loop() {
					b.StopTimer()
					dir := b.TempDir()
					store, err := blob.OpenFolder(dir)
					must(b, err)
					opts := image.LibraryOptions{Pack: pack}
					if index != "" {
						opts.Index = b.TempDir()
					}
					lib := image.New(store, opts)
					f, err := os.Open(path)
					must(b, err)
					b.StartTimer()
					l, err := lib.Upload(b.Context(), struct{ io.Reader }{f}, image.Options{})
					must(b, err)
					b.StopTimer()
					f.Close()
					lib.Close()
					b.ReportMetric(float64(l.Manifest.Stored())/float64(l.Manifest.Size), "stored/size")
					must(b, os.RemoveAll(dir))
					b.StartTimer()
				}
			})
		}
	}
}
