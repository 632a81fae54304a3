package initramfs

import (
	"fmt"
	"io"
)

// Archive writes a cpio archive of the form that the kernel unpacks: "newc",
// headers of hexadecimal text, everything on multiples of four bytes.
// Folders come before what is in them; all belongs to root. The first error is
// kept, and Close tells it.
type Archive struct {
	w    io.Writer
	err  error
	size int64
	ino  int
}

// The file types of a mode.
const (
	typeFolder = 0o040000
	typeDevice = 0o020000 // of characters
	typeFile   = 0o100000
	typeLink   = 0o120000
)

// NewArchive begins an archive.
func NewArchive(w io.Writer) *Archive { return &Archive{w: w} }

// Folder adds a folder. Names do not begin with a slash.
func (a *Archive) Folder(name string) { a.entry(name, typeFolder|0o755, 0, 0, nil) }

// Link adds a symbolic link.
func (a *Archive) Link(name, target string) { a.entry(name, typeLink|0o777, 0, 0, []byte(target)) }

// File adds a file.
func (a *Archive) File(name string, mode int, data []byte) {
	a.entry(name, typeFile|mode, 0, 0, data)
}

// Device adds a device node of the kind of characters.
func (a *Archive) Device(name string, mode, major, minor int) {
	a.entry(name, typeDevice|mode, major, minor, nil)
}

func (a *Archive) entry(name string, mode, major, minor int, data []byte) {
	a.ino++
	a.write(fmt.Appendf(nil, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
		a.ino, mode, 0, 0, 1, 0, len(data), 0, 0, major, minor, len(name)+1, 0, name))
	a.pad(4)
	a.write(data)
	a.pad(4)
}

func (a *Archive) write(b []byte) {
	if a.err == nil {
		var n int
		n, a.err = a.w.Write(b)
		a.size += int64(n)
	}
}

func (a *Archive) pad(to int64) { a.write(make([]byte, (to-a.size%to)%to)) }

// Close ends the archive, not what it is written to.
func (a *Archive) Close() error {
	a.entry("TRAILER!!!", 0, 0, 0, nil)
	a.pad(512)
	return a.err
}
