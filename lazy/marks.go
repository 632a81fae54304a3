package lazy

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec/erofs"
)

// The file of marks of a blob: a magic word with its version, the boot it was written in, and
// one byte for each chunk. A mark is written when the chunk's bytes are. Within a boot the
// kernel keeps that order for whoever reads, however the writer ended; over a boot nobody does.
const (
	marksSuffix = ".marks"
	marksMagic  = "dsec-marks 1\n"
	bootBytes   = 64
	marksHeader = len(marksMagic) + bootBytes
)

// mark is what is known of one chunk.
type mark byte

const (
	absent  mark = 0
	kept    mark = 1 // written and checked in this boot
	suspect mark = 2 // of an earlier boot: checked when it is first read
)

// open opens or makes the files of a blob of that size; of 0, of the size its file has.
func (e *entry) open(cfg Config, size int64) (err error) {
	defer func() {
		if err != nil {
			e.close()
			e.file, e.marks = nil, nil
		}
	}()
	flags := os.O_RDWR
	if size > 0 {
		flags |= os.O_CREATE
	}
	if e.file, err = os.OpenFile(e.path(cfg.Dir), flags, 0o600); err != nil {
		return err
	}
	if size == 0 {
		size = e.size()
	}
	if size <= 0 {
		return errors.New("an empty file")
	}
	if e.marks, err = os.OpenFile(e.path(cfg.Dir)+marksSuffix, flags, 0o600); err != nil {
		return err
	}
	e.plain, e.state = size, make([]mark, chunksOf(size))
	boot := make([]byte, bootBytes)
	copy(boot, cfg.Boot)
	b, err := io.ReadAll(io.LimitReader(e.marks, int64(marksHeader+len(e.state)+1)))
	if err != nil {
		return err
	}
	right := len(b) == marksHeader+len(e.state) && string(b[:len(marksMagic)]) == marksMagic && e.size() == size
	if !right {
		if err := e.file.Truncate(0); err != nil {
			return err
		}
	} else {
		same := string(b[len(marksMagic):marksHeader]) == string(boot)
		for i, m := range b[marksHeader:] {
			switch {
			case mark(m) == kept && same:
				e.state[i] = kept
				e.sure++
			case mark(m) == kept || mark(m) == suspect:
				e.state[i] = suspect
			}
			if e.state[i] != absent {
				e.have += e.sizeOf(i)
			}
		}
	}
	if err := e.file.Truncate(size); err != nil {
		return err
	}
	e.sweep()
	// Suspicion is written before the boot's name is, which would lift it.
	out := append([]byte(marksMagic), make([]byte, bootBytes)...)
	for _, m := range e.state {
		out = append(out, byte(m))
	}
	if _, err := e.marks.WriteAt(out, 0); err != nil {
		return fmt.Errorf("write marks: %w", err)
	}
	if err := e.marks.Truncate(int64(len(out))); err != nil {
		return fmt.Errorf("write marks: %w", err)
	}
	_, err = e.marks.WriteAt(boot, int64(len(marksMagic)))
	return err
}

// sweep gives back what lies in the file beside its chunks: pages that an earlier process knew.
func (e *entry) sweep() {
	var st unix.Stat_t
	if unix.Fstat(int(e.file.Fd()), &st) != nil || st.Blocks*512 <= e.have {
		return
	}
	for i := 0; i < len(e.state); {
		j := i
		for j < len(e.state) && e.state[j] == absent {
			j++
		}
		if j > i { // what cannot be given back is overwritten some day
			unix.Fallocate(int(e.file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, //nolint:errcheck
				int64(i)*erofs.ChunkSize, int64(j-i)*erofs.ChunkSize)
		}
		i = max(j, i+1)
	}
}

// sizeOf is the bytes of a chunk.
func (e *entry) sizeOf(i int) int64 { return min(erofs.ChunkSize, e.plain-int64(i)*erofs.ChunkSize) }

// set notes a mark on the disk too. A mark that cannot be written there costs a fetch later.
// Requires: e.mu held.
func (e *entry) set(i int, m mark) error {
	if e.state[i] == m {
		return nil
	}
	if _, err := e.marks.WriteAt([]byte{byte(m)}, int64(marksHeader+i)); err != nil {
		return err
	}
	n := e.sizeOf(i)
	switch {
	case e.state[i] == absent:
		e.have += n
	case m == absent:
		e.have -= n
	}
	if m == kept {
		e.sure++
	} else if e.state[i] == kept {
		e.sure--
	}
	e.state[i] = m
	e.pages.changed()
	return nil
}

// forget makes all chunks absent: first the word, then the bytes. If the word cannot be
// taken back nothing is, except that a truncated file of marks is believed by nobody.
// Requires: e.mu held.
func (e *entry) forget() {
	if _, err := e.marks.WriteAt(make([]byte, len(e.state)), int64(marksHeader)); err != nil {
		if e.marks.Truncate(0) != nil {
			return
		}
	}
	clear(e.state)
	clear(e.guesses.open)
	clear(e.pages.here)
	e.have, e.sure = 0, 0
	size := e.size()
	if unix.Fallocate(int(e.file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, size) != nil {
		// Nobody reads it, and nothing is in it any more.
		if e.file.Truncate(0) == nil {
			e.file.Truncate(size) //nolint:errcheck // the next read finds it too short, and fetches
		}
	}
}
