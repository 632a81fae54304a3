package main

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
)

// holeSize is the size and alignment of what becomes a hole when it is all
// zeros.
const holeSize = 64 << 10

var zeros [holeSize]byte

// copySparse copies r into f, which is new and empty. Blocks of zeros become
// holes: what was sparse in a sandbox is so here, whatever carried it.
func copySparse(f *os.File, r io.Reader) error {
	buf := make([]byte, holeSize)
	size := int64(0)
	for end := false; !end; {
		n := 0
		for n < len(buf) && !end {
			m, err := r.Read(buf[n:])
			n += m
			if end = err == io.EOF; err != nil && !end {
				return err
			}
		}
		if !bytes.Equal(buf[:n], zeros[:n]) {
			if _, err := f.WriteAt(buf[:n], size); err != nil {
				return err
			}
		}
		size += int64(n)
	}
	return f.Truncate(size)
}

// reason gives err without the path of what a system call was about, for
// messages that name another: the one that the user gave.
func reason(err error) error {
	var p *fs.PathError
	var l *os.LinkError
	switch {
	case errors.As(err, &p):
		return p.Err
	case errors.As(err, &l):
		return l.Err
	}
	return err
}
