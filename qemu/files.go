package qemu

import (
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec/jail"
)

// Files are what a process is born with. Each method takes the file over and
// gives the text by which an argument names it; the first error is kept and
// is what Start returns. The zero value is ready.
type Files struct {
	list []passed
	err  error
}

type passed struct {
	file *os.File
	set  bool
}

// firstFD is the number of the first descriptor: after input, output and error.
const firstFD = 3

func (f *Files) add(file *os.File, set bool) int {
	f.list = append(f.list, passed{file, set})
	return len(f.list) - 1
}

// Set passes a file that QEMU opens as a block device, a log or an extent of a
// disk: the text is a path. QEMU takes it only if it was opened as it would
// itself: for reading where the device is read-only, else for both.
func (f *Files) Set(file *os.File) string {
	return "/dev/fdset/" + strconv.Itoa(f.add(file, true))
}

// SetPath is Set of the file at path, opened with the flags.
func (f *Files) SetPath(path string, flags int) string {
	file, err := os.OpenFile(path, flags, 0)
	if err != nil {
		f.fail(err)
		return ""
	}
	return f.Set(file)
}

// FD passes a descriptor; the text is its number.
func (f *Files) FD(file *os.File) string { return strconv.Itoa(firstFD + f.add(file, false)) }

// Path passes a file that QEMU opens by path with no care for sets: a kernel,
// the file under its memory. It opens the file again, and its user must be
// allowed to, but needs no right to any folder.
func (f *Files) Path(file *os.File) string { return "/proc/self/fd/" + f.FD(file) }

// OpenPath is Path of the file at path, opened with the flags.
func (f *Files) OpenPath(path string, flags int) string {
	file, err := os.OpenFile(path, flags, 0)
	if err != nil {
		f.fail(err)
		return ""
	}
	return f.Path(file)
}

// Listen passes a new listening socket at path, for a chardev's fd property
// with server=on,wait=off. A stale socket of that name is replaced.
func (f *Files) Listen(path string) string {
	os.Remove(path) //nolint:errcheck // none is as good
	l, err := jail.ListenPath(path, unix.SOCK_STREAM)
	if err != nil {
		f.fail(err)
		return ""
	}
	return f.FD(l)
}

func (f *Files) fail(err error) {
	if f.err == nil {
		f.err = err
	}
}

// args are the arguments that make sets.
func (f *Files) args() []string {
	var out []string
	for i, p := range f.list {
		if p.set {
			out = append(out, "-add-fd", "fd="+strconv.Itoa(firstFD+i)+",set="+strconv.Itoa(i))
		}
	}
	return out
}

// Close closes what is passed, in this process.
func (f *Files) Close() {
	for _, p := range f.list {
		p.file.Close()
	}
	f.list = nil
}
