package microvm

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
)

// blanks gives empty ext4 file systems: one is made for each size, kept, and
// copied, which takes no time since it is nearly all holes.
type blanks struct {
	dir string

	mu    sync.Mutex
	order []int64 // sizes that are kept, the latest used last
}

// maxBlanks is how many sizes are kept.
const maxBlanks = 16

// minDisk is the smallest file system that is worth the name.
const minDisk = 1 << 20

// make writes an empty file system of exactly size bytes into a new file.
func (b *blanks) make(path string, size int64) error {
	size = max(size&^(page-1), minDisk)
	if size > diskSlot {
		return dsec.Errorf(dsec.Invalid, "a microVM's disk has at most %d TiB", int64(diskSlot)>>40)
	}
	from, err := b.get(size)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer to.Close()
	if _, err := copySparse(to, from, size); err != nil {
		return noSpace(fmt.Errorf("make disk: %w", err))
	}
	return nil
}

// get opens the empty file system of a size.
func (b *blanks) get(size int64) (*os.File, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	path := filepath.Join(b.dir, "ext4-"+strconv.FormatInt(size, 10))
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		if err := makeBlank(path, size); err != nil {
			return nil, err
		}
		f, err = os.Open(path)
	}
	if err != nil {
		return nil, err
	}
	for i, s := range b.order {
		if s == size {
			b.order = append(b.order[:i], b.order[i+1:]...)
			break
		}
	}
	b.order = append(b.order, size)
	if len(b.order) > maxBlanks {
		os.Remove(filepath.Join(b.dir, "ext4-"+strconv.FormatInt(b.order[0], 10))) //nolint:errcheck // it is made again
		b.order = b.order[1:]
	}
	return f, nil
}

// makeBlank runs mkfs. There is no journal: a machine whose host crashed is
// gone, and one that is saved has all in order. Tables are left to be holes.
func makeBlank(path string, size int64) error {
	tmp := path + ".new"
	f, err := os.Create(tmp)
	if err != nil {
		return err
	}
	defer os.Remove(tmp) //nolint:errcheck // renamed when all went well
	err = f.Truncate(size)
	if err = errors.Join(err, f.Close()); err != nil {
		return noSpace(fmt.Errorf("make file system: %w", err))
	}
	mkfs := exec.Command("mkfs.ext4", "-q", "-F", "-m", "0", "-b", "4096", "-I", "256",
		"-O", "^has_journal,^resize_inode,uninit_bg", "-E", "nodiscard,lazy_itable_init=1,root_owner=0:0", tmp)
	mkfs.Env = append(os.Environ(), "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin")
	if out, err := mkfs.CombinedOutput(); err != nil {
		return noSpace(fmt.Errorf("make file system: %w: %s", err, out))
	}
	return os.Rename(tmp, path)
}

// noSpace says of a full disk that it is one.
func noSpace(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return dsec.Errorf(dsec.Exhausted, "no space is left on the host's disk: %w", err)
	}
	return err
}
