package microvm

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// A guest's memory that machines share lies in a file without a name, in the
// host's memory, sealed: whoever maps it, a QEMU that a guest has taken over
// included, can only read it, or write to a copy of a page of its own. On disk
// there is a copy for the node's next start.

// memoryName is what the names of such files begin with.
const memoryName = "dsec-memory-"

// newMemory makes a memory file of the size, all zeros and writable.
func newMemory(name string, size int64) (*os.File, error) {
	fd, err := unix.MemfdCreate(memoryName+name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("make guest memory: %w", err)
	}
	f := os.NewFile(uintptr(fd), "memory")
	// Whoever holds a descriptor may open it again: QEMU opens what it maps,
	// as a user that owns nothing.
	err = f.Chmod(0o666)
	if err == nil {
		err = f.Truncate(size)
	}
	if err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_GROW|unix.F_SEAL_SHRINK)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("make guest memory: %w", err)
	}
	return f, nil
}

// seal makes memory unchangeable. Nobody may map it for writing then.
func seal(f *os.File) error {
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_WRITE|unix.F_SEAL_SEAL); err != nil {
		return fmt.Errorf("seal guest memory: %w", err)
	}
	return nil
}

// again opens a descriptor's file once more, for somebody who closes it.
func again(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// reopened opens a descriptor's file anew, with an offset of its own.
func reopened(f *os.File, flags int) (*os.File, error) {
	return os.OpenFile("/proc/self/fd/"+strconv.Itoa(int(f.Fd())), flags, 0)
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// copySparse copies size bytes from the beginning of one file to that of
// another, but for what both have as holes, and gives the checksum of places
// and contents that were copied. to must be empty; it gets the size.
func copySparse(to, from *os.File, size int64) (sum uint32, err error) {
	if to != nil {
		if err := to.Truncate(size); err != nil && !errors.Is(err, unix.EPERM) { // sealed at its size
			return 0, err
		}
	}
	err = eachData(from, size, func(b []byte, off int64) error {
		sum, err = copyPages(to, b, off, sum)
		return err
	})
	return sum, err
}

// eachData calls f with what of the first size bytes of a file is no hole.
func eachData(from *os.File, size int64, f func(b []byte, off int64) error) error {
	buf := make([]byte, maxRun)
	for off := int64(0); off < size; {
		start, err := unix.Seek(int(from.Fd()), off, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil
		}
		if err != nil {
			return err
		}
		end, err := unix.Seek(int(from.Fd()), start, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		for off = start; off < min(end, size); {
			n, err := from.ReadAt(buf[:min(maxRun, min(end, size)-off)], off)
			if n == 0 && err != nil {
				return fmt.Errorf("read %s: %w", from.Name(), err)
			}
			if err := f(buf[:n], off); err != nil {
				return err
			}
			off += int64(n)
		}
	}
	return nil
}

const page = 4096

var zeros [page]byte

// copyPages writes the pages that are not all zeros, and sums them up with
// where they are: files that differ in their holes alone have the same sum.
func copyPages(to *os.File, b []byte, off int64, sum uint32) (uint32, error) {
	for begin := 0; begin < len(b); {
		end := begin
		for end < len(b) && string(b[end:min(end+page, len(b))]) != string(zeros[:min(page, len(b)-end)]) {
			end = min(end+page, len(b))
		}
		if end == begin {
			begin = min(begin+page, len(b))
			continue
		}
		for p := begin; p < end; p += page {
			at := off + int64(p)
			place := [8]byte{byte(at >> 12), byte(at >> 20), byte(at >> 28), byte(at >> 36), byte(at >> 44)}
			sum = crc32.Update(crc32.Update(sum, castagnoli, place[:]), castagnoli, b[p:min(p+page, end)])
		}
		if to != nil {
			if _, err := to.WriteAt(b[begin:end], off+int64(begin)); err != nil {
				return 0, err
			}
		}
		begin = end
	}
	return sum, nil
}

// checksum is the sum of a whole small file.
func checksum(f *os.File) (uint32, error) {
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return 0, err
	}
	h := crc32.New(castagnoli)
	if _, err := io.Copy(h, f); err != nil {
		return 0, err
	}
	_, err := f.Seek(0, io.SeekStart)
	return h.Sum32(), err
}
