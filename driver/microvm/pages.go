package microvm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A machine's memory is saved and loaded from outside, page by page, while its
// QEMU stands still: the kernel knows which pages differ from the saved guest
// that the machine is a copy of, and only those need to be kept. QEMU's own
// saving knows of no copies and writes everything.
//
// The form is that of a sparse file of the memory's size.

// bits of /proc/PID/pagemap
const (
	pagePresent = 1 << 63
	pageSwapped = 1 << 62
	pageOfFile  = 1 << 61 // not a copy of the process's own
)

// memoryAt finds where a process has the guest's memory: the one writable
// mapping of that size of a file of ours.
func memoryAt(pid int, size int64) (uint64, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/maps")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) < 6 || !strings.HasPrefix(f[5], "/memfd:"+memoryName) || !strings.HasPrefix(f[1], "rw") {
			continue
		}
		lo, hi, _ := strings.Cut(f[0], "-")
		a, err1 := strconv.ParseUint(lo, 16, 64)
		z, err2 := strconv.ParseUint(hi, 16, 64)
		if err1 == nil && err2 == nil && z-a == uint64(size) {
			return a, nil
		}
	}
	return 0, fmt.Errorf("find the guest's memory in process %d: no mapping of %d bytes", pid, size)
}

// choice of pages.
type choice int

const (
	allPages choice = iota // that are not zeros
	ownPages               // that are copies of the process's own, zeros or not
)

// pageWriter takes runs of pages.
type pageWriter interface {
	writePages(b []byte, off int64) error
}

// savePages reads a standing process's memory at addr into w.
func savePages(pid int, addr uint64, size int64, which choice, w pageWriter) error {
	mem, err := os.Open("/proc/" + strconv.Itoa(pid) + "/mem")
	if err != nil {
		return err
	}
	defer mem.Close()
	flags, err := pageFlags(pid, addr, size)
	if err != nil {
		return err
	}
	own := which == ownPages
	if !own {
		if err := markData(pid, addr, size, flags); err != nil {
			return err
		}
	}
	wanted := func(e uint64) bool {
		return e&(pagePresent|pageSwapped) != 0 && (!own || e&pageOfFile == 0)
	}
	buf := make([]byte, 1<<20)
	n := size / page
	for i := int64(0); i < n; {
		if !wanted(flags[i]) {
			i++
			continue
		}
		j := i + 1
		for j < n && wanted(flags[j]) && (j-i)*page < int64(len(buf)) {
			j++
		}
		b := buf[:(j-i)*page]
		if _, err := mem.ReadAt(b, int64(addr)+i*page); err != nil {
			return fmt.Errorf("read guest memory: %w", err)
		}
		if own {
			err = w.writePages(b, i*page)
		} else {
			err = eachRun(b, i*page, w.writePages)
		}
		if err != nil {
			return noSpace(fmt.Errorf("save guest memory: %w", err))
		}
		i = j
	}
	return nil
}

// markData marks as present what the file under a mapping holds. Its holes are
// not read: the kernel would fill them with pages.
func markData(pid int, addr uint64, size int64, flags []uint64) error {
	f, err := os.Open(fmt.Sprintf("/proc/%d/map_files/%x-%x", pid, addr, addr+uint64(size)))
	if err != nil {
		return fmt.Errorf("open guest memory: %w", err)
	}
	defer f.Close()
	for off := int64(0); off < size; {
		begin, err := unix.Seek(int(f.Fd()), off, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil
		}
		if err == nil {
			off, err = unix.Seek(int(f.Fd()), begin, unix.SEEK_HOLE)
		}
		if err != nil {
			return err
		}
		for i := begin / page; i < min(off, size)/page; i++ {
			flags[i] |= pagePresent
		}
	}
	return nil
}

// eachRun calls f with the pages that are not zeros.
func eachRun(b []byte, off int64, f func([]byte, int64) error) error {
	for begin := 0; begin < len(b); {
		end := begin
		for end < len(b) && !bytes.Equal(b[end:end+page], zeros[:]) {
			end += page
		}
		if end == begin {
			begin += page
			continue
		}
		if err := f(b[begin:end], off+int64(begin)); err != nil {
			return err
		}
		begin = end
	}
	return nil
}

func pageFlags(pid int, addr uint64, size int64) ([]uint64, error) {
	f, err := os.Open("/proc/" + strconv.Itoa(pid) + "/pagemap")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	flags := make([]uint64, size/page)
	raw := unsafe.Slice((*byte)(unsafe.Pointer(&flags[0])), len(flags)*8)
	if _, err := io.ReadFull(io.NewSectionReader(f, int64(addr/page*8), int64(len(raw))), raw); err != nil {
		return nil, fmt.Errorf("read page map: %w", err)
	}
	if hostIsLittleEndian() {
		return flags, nil
	}
	return nil, errors.New("read page map: this host's byte order is not supported")
}

func hostIsLittleEndian() bool {
	var b [2]byte
	binary.NativeEndian.PutUint16(b[:], 1)
	return b[0] == 1
}

// A page file holds runs of pages: eight bytes of offset, eight of length, and
// the bytes; the end is a run of length 0 whose offset is the memory's size.
// It holds no holes, so that pages of zeros that hide others are not lost.
type pageFile struct {
	w io.Writer
}

func (p *pageFile) writePages(b []byte, off int64) error {
	var head [16]byte
	binary.LittleEndian.PutUint64(head[:8], uint64(off))
	binary.LittleEndian.PutUint64(head[8:], uint64(len(b)))
	for _, part := range [][]byte{head[:], b} {
		if _, err := p.w.Write(part); err != nil {
			return err
		}
	}
	return nil
}

// end marks a file as whole.
func (p *pageFile) end(size int64) error {
	var head [16]byte
	binary.LittleEndian.PutUint64(head[:8], uint64(size))
	_, err := p.w.Write(head[:])
	return err
}

// maxRun is the longest run that a reader takes.
const maxRun = 1 << 20

var errPages = errors.New("the saved memory is damaged")

// readPages calls f with the runs of a page file for a memory of size bytes.
func readPages(r io.Reader, size int64, f func(b []byte, off int64) error) error {
	buf := make([]byte, maxRun)
	var last int64
	for {
		var head [16]byte
		if _, err := io.ReadFull(r, head[:]); err != nil {
			return fmt.Errorf("%w: %w", errPages, err)
		}
		off, n := binary.LittleEndian.Uint64(head[:8]), binary.LittleEndian.Uint64(head[8:])
		if n == 0 && off == uint64(size) {
			return nil
		}
		if n == 0 || n > maxRun || n%page != 0 || off%page != 0 || off < uint64(last) || off > uint64(size) || n > uint64(size)-off {
			return fmt.Errorf("%w: %d bytes at %d", errPages, n, off)
		}
		last = int64(off + n)
		if _, err := io.ReadFull(r, buf[:n]); err != nil {
			return fmt.Errorf("%w: %w", errPages, err)
		}
		if err := f(buf[:n], int64(off)); err != nil {
			return err
		}
	}
}

// memoryFile is a pageWriter into a memory file.
type memoryFile struct{ f *os.File }

func (m memoryFile) writePages(b []byte, off int64) error {
	_, err := m.f.WriteAt(b, off)
	return err
}

// loadPages writes the runs of a page file into a standing process's memory.
func loadPages(pid int, addr uint64, size int64, r io.Reader) error {
	mem, err := os.OpenFile("/proc/"+strconv.Itoa(pid)+"/mem", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer mem.Close()
	return readPages(r, size, func(b []byte, off int64) error {
		if _, err := mem.WriteAt(b, int64(addr)+off); err != nil {
			return fmt.Errorf("write guest memory: %w", err)
		}
		return nil
	})
}
