package blob

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// staleAge is how long nobody must have written to a staging file on a shared mount, where
// locks may not reach across nodes, before it counts as left behind.
const staleAge = 24 * time.Hour

// errUsed is returned by a Staged after its Commit or Abort.
var errUsed = errors.New("staged blob is committed or aborted already")

// stagedFile is a Staged of a Folder. It holds an flock on its file as long as that is open:
// the kernel lets go of it when the process dies, however it dies.
type stagedFile struct {
	folder *Folder
	name   string
	file   *os.File // nil once used up
	hash   hash.Hash
	size   int64
	err    error // why it is used up
}

// Stage implements Stager.
func (f *Folder) Stage(ctx context.Context) (Staged, error) {
	if ctx.Err() != nil {
		return nil, fmt.Errorf("stage blob: %w", context.Cause(ctx))
	}
	s, err := f.stage()
	if err != nil {
		if gone := f.away(); gone != nil {
			err = gone
		}
		return nil, fmt.Errorf("stage blob: %w", system(err))
	}
	return s, nil
}

func (f *Folder) stage() (*stagedFile, error) {
	if err := f.step("create"); err != nil {
		return nil, err
	}
	for {
		name := filepath.Join(f.staging, rand.Text())
		file, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o444)
		if err != nil {
			return nil, err
		}
		// Between the creation and the lock a sweep may take the file for stale: it then
		// holds the lock or has unlinked the file. Both are rare, and a new name settles it.
		lockErr := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		var st unix.Stat_t
		if err := unix.Fstat(int(file.Fd()), &st); err != nil {
			file.Close()
			os.Remove(name) //nolint:errcheck // the first error counts
			return nil, err
		}
		if st.Nlink == 0 || lockErr == unix.EWOULDBLOCK {
			file.Close()
			os.Remove(name) //nolint:errcheck // most likely gone
			continue
		}
		// Any other lock error: a mount without locks. Sweep then goes by age alone.
		return &stagedFile{folder: f, name: name, file: file, hash: sha256.New()}, nil
	}
}

func (s *stagedFile) Write(p []byte) (int, error) {
	if s.file == nil {
		return 0, s.err
	}
	n, err := s.write(p)
	s.hash.Write(p[:n])
	s.size += int64(n)
	if err != nil {
		// What is on disk is of no use any more, and the disk may be full: give it back now.
		s.end(fmt.Errorf("write staged blob: %w", system(err)))
		return n, s.err
	}
	return n, nil
}

// Digest implements Named.
func (s *stagedFile) Digest() Digest { return FromHash(s.hash) }

func (s *stagedFile) write(p []byte) (int, error) {
	if err := s.folder.step("write"); err != nil {
		return 0, err
	}
	return s.file.Write(p)
}

func (s *stagedFile) Commit(ctx context.Context) (Info, error) {
	if s.file == nil {
		return Info{}, s.err
	}
	info := Info{Digest: FromHash(s.hash), Size: s.size}
	if ctx.Err() != nil {
		s.end(errUsed)
		return Info{}, fmt.Errorf("commit blob %s: %w", info.Digest, context.Cause(ctx))
	}
	err := s.publish(info.Digest)
	s.end(errUsed)
	if err == nil {
		err = s.folder.syncDir(info.Digest)
	}
	if err != nil {
		return Info{}, fmt.Errorf("commit blob %s: %w", info.Digest, system(err))
	}
	return info, nil
}

// publish gives the staged file its name. If the name is taken the other file has the same
// content, and ours goes away with end.
//
// On a shared mount the file is closed before that. Some file systems bring the data to their
// servers only then, or say only then that it did not get there. The lock goes with it, but
// there nobody sweeps what is young.
func (s *stagedFile) publish(d Digest) error {
	if err := s.folder.step("fsync"); err != nil {
		return err
	}
	if err := s.file.Sync(); err != nil {
		return err
	}
	if s.folder.shared {
		if err := s.file.Close(); err != nil {
			return err
		}
	}
	if err := s.folder.step("rename"); err != nil {
		return err
	}
	if err := s.folder.makeFan(d); err != nil {
		return err
	}
	return s.folder.move(s.name, d)
}

// move renames a staged file to the name of d unless that is taken. From may stay behind.
func (f *Folder) move(from string, d Digest) error {
	to := f.path(d)
	err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
	switch err {
	case nil, unix.EEXIST:
		return nil
	case unix.EINVAL, unix.ENOSYS, unix.ENOTSUP:
		// NFS and many FUSE mounts do not know the flag. A second name does not replace either.
	default:
		return err
	}
	switch err := unix.Link(from, to); err {
	case nil, unix.EEXIST:
		return nil
	case unix.EPERM, unix.EINVAL, unix.ENOSYS, unix.ENOTSUP, unix.EMLINK:
		// Nor do all know that.
	default:
		return err
	}
	// Two writers can get past this line. Then one file replaces its equal, and who has the
	// other one open keeps it, or opens the new one (see fileRange).
	if _, err := os.Stat(to); err == nil {
		return nil
	}
	err = os.Rename(from, to)
	if errors.Is(err, os.ErrNotExist) {
		// A request that was sent twice because its answer was lost finds its own work.
		if _, serr := os.Stat(to); serr == nil {
			return nil
		}
	}
	return err
}

func (s *stagedFile) Abort() error {
	if s.file == nil {
		return nil
	}
	return s.end(errUsed)
}

// end lets go of the file. Its name is removed before the lock goes, and finding no such
// name is fine: publish has moved it.
func (s *stagedFile) end(why error) error {
	err := os.Remove(s.name)
	if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	s.file.Close() //nolint:errcheck // what counts was synced, or is thrown away
	s.file, s.err = nil, why
	return err
}

// sweep removes what dead writers left in staging. On a local file system a lock that can
// be taken proves that the writer is gone; on any other the file must also be old, by the
// server's clock and not by ours. What cannot be removed now is left for the next Open.
func (f *Folder) sweep() {
	entries, err := os.ReadDir(f.staging)
	if err != nil || len(entries) == 0 {
		return
	}
	var now time.Time
	if f.shared {
		if now, err = f.serverTime(); err != nil {
			return
		}
	}
	for _, e := range entries {
		name := filepath.Join(f.staging, e.Name())
		if st, err := e.Info(); err != nil || f.shared && now.Sub(st.ModTime()) < staleAge {
			continue
		}
		file, err := os.OpenFile(name, os.O_RDWR, 0) // NFS locks only what is open for writing
		if err != nil {
			file, err = os.Open(name)
		}
		if err != nil {
			continue
		}
		if err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil || f.shared && err != unix.EWOULDBLOCK {
			os.Remove(name) //nolint:errcheck // next time
		}
		file.Close()
	}
}

// serverTime is the clock that stamps the files of the mount.
func (f *Folder) serverTime() (time.Time, error) {
	probe, err := os.CreateTemp(f.staging, "clock-*")
	if err != nil {
		return time.Time{}, err
	}
	defer os.Remove(probe.Name()) //nolint:errcheck // swept one day
	defer probe.Close()
	// Some hosts stamp a new file themselves until something is written.
	if _, err := probe.WriteString("."); err != nil {
		return time.Time{}, err
	}
	if err := probe.Sync(); err != nil {
		return time.Time{}, err
	}
	st, err := probe.Stat()
	if err != nil {
		return time.Time{}, err
	}
	return st.ModTime(), nil
}

// isLocal reports whether dir lies on a file system that only this kernel mounts.
func isLocal(dir string) bool {
	var st unix.Statfs_t
	if unix.Statfs(dir, &st) != nil {
		return false
	}
	switch st.Type {
	case unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC,
		unix.TMPFS_MAGIC, unix.OVERLAYFS_SUPER_MAGIC, unix.F2FS_SUPER_MAGIC:
		return true
	}
	return false
}
