package blob

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// Keeper is a Store that knows when each blob was last written or wanted, by whatever node,
// so that one node can delete what is garbage while another finds a use for it.
type Keeper interface {
	// Touch notes that a blob is wanted. It is ErrNotFound if it is absent.
	Touch(ctx context.Context, d Digest) error

	// DeleteIdle deletes a blob unless it was written or touched less than age ago, by the
	// store's clock, and reports whether it did. One that is absent is no error. A time that
	// lies in the future by more than age is a clock's mistake: it becomes now.
	DeleteIdle(ctx context.Context, d Digest, age time.Duration) (gone bool, err error)
}

// Sweeper is a Store in which writers that died may have left what List does not show. Sweep
// removes what nobody has written to for age. It may list, so it belongs into garbage
// collection.
type Sweeper interface {
	Sweep(ctx context.Context, age time.Duration) error
}

// idleMark begins the name that a blob has in staging while DeleteIdle decides on it.
const idleMark = "idle-"

// Touch implements Keeper. The file gets the time of the host that serves it.
func (f *Folder) Touch(ctx context.Context, d Digest) error {
	if err := begin(ctx, d); err != nil {
		return err
	}
	now := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Nsec: unix.UTIME_NOW}}
	if err := unix.UtimesNanoAt(unix.AT_FDCWD, f.path(d), now, 0); err != nil {
		return f.lookup("touch", d, err)
	}
	return nil
}

// DeleteIdle implements Keeper. It takes the blob's name away before it looks a second time:
// whoever touched it until then is seen, and whoever comes later finds it absent.
func (f *Folder) DeleteIdle(ctx context.Context, d Digest, age time.Duration) (gone bool, err error) {
	if err := begin(ctx, d); err != nil {
		return false, err
	}
	now, err := f.now()
	if err != nil {
		return false, fmt.Errorf("delete blob %s: %w", d, system(err))
	}
	path := f.path(d)
	st, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, f.lookup("stat", d, err)
	}
	if st.ModTime().After(now.Add(max(age, time.Minute))) {
		return false, f.Touch(ctx, d)
	}
	if now.Sub(st.ModTime()) < age {
		return false, nil
	}
	aside := filepath.Join(f.staging, idleMark+d.Hex())
	if err := f.step("aside"); err != nil {
		return false, err
	}
	if err := os.Rename(path, aside); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return false, nil
		}
		return false, fmt.Errorf("delete blob %s: %w", d, system(err))
	}
	if err := f.step("look"); err != nil {
		return false, err
	}
	if st, err := os.Stat(aside); err == nil && now.Sub(st.ModTime()) < age {
		// Somebody wants it after all.
		if err := f.move(aside, d); err != nil {
			return false, fmt.Errorf("keep blob %s: %w", d, system(err))
		}
		os.Remove(aside) //nolint:errcheck // gone already, unless somebody has put it anew
		return false, nil
	}
	if err := os.Remove(aside); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, fmt.Errorf("delete blob %s: %w", d, system(err))
	}
	return true, nil
}

// now is the time by the clock that stamps the files.
func (f *Folder) now() (time.Time, error) {
	if !f.shared {
		return time.Now(), nil
	}
	f.clock.Lock()
	defer f.clock.Unlock()
	// A probe for each blob would cost more than the blobs; clocks drift slowly.
	if time.Since(f.probed) > time.Minute {
		server, err := f.serverTime()
		if err != nil {
			return time.Time{}, err
		}
		f.probed, f.ahead = time.Now(), time.Until(server)
	}
	return time.Now().Add(f.ahead), nil
}

// Sweep implements Sweeper. What a writer that lives has open on a local file system is
// left, whatever its age; on a mount age is at least a day.
func (f *Folder) Sweep(ctx context.Context, _ time.Duration) error {
	if ctx.Err() != nil {
		return fmt.Errorf("sweep: %w", context.Cause(ctx))
	}
	f.sweep()
	return nil
}

// touch, deleteIdle and sweep are for decorators.

func touch(ctx context.Context, s Store, d Digest) error {
	k, ok := s.(Keeper)
	if !ok {
		return fmt.Errorf("touch blob on %T: %w", s, errors.ErrUnsupported)
	}
	return k.Touch(ctx, d)
}

func deleteIdle(ctx context.Context, s Store, d Digest, age time.Duration) (bool, error) {
	k, ok := s.(Keeper)
	if !ok {
		return false, fmt.Errorf("delete idle blob on %T: %w", s, errors.ErrUnsupported)
	}
	return k.DeleteIdle(ctx, d, age)
}

func sweep(ctx context.Context, s Store, age time.Duration) error {
	if w, ok := s.(Sweeper); ok {
		return w.Sweep(ctx, age)
	}
	return nil
}

// Touch implements Keeper if the store below does. Otherwise it is errors.ErrUnsupported.
func (s *Retrying) Touch(ctx context.Context, d Digest) error {
	return s.retry.Do(ctx, func(ctx context.Context) error { return touch(ctx, s.store, d) })
}

// DeleteIdle implements Keeper if the store below does. Otherwise it is
// errors.ErrUnsupported.
func (s *Retrying) DeleteIdle(ctx context.Context, d Digest, age time.Duration) (gone bool, err error) {
	err = s.retry.Do(ctx, func(ctx context.Context) error {
		gone, err = deleteIdle(ctx, s.store, d, age)
		return err
	})
	return gone, err
}

// Sweep implements Sweeper as far as the store below does.
func (s *Retrying) Sweep(ctx context.Context, age time.Duration) error {
	return s.retry.Do(ctx, func(ctx context.Context) error { return sweep(ctx, s.store, age) })
}

// Touch implements Keeper if the slow store does. Otherwise it is errors.ErrUnsupported.
func (c *Cached) Touch(ctx context.Context, d Digest) error { return touch(ctx, c.slow, d) }

// DeleteIdle implements Keeper if the slow store does. Otherwise it is
// errors.ErrUnsupported. What goes there goes here.
func (c *Cached) DeleteIdle(ctx context.Context, d Digest, age time.Duration) (bool, error) {
	gone, err := deleteIdle(ctx, c.slow, d, age)
	if err != nil || !gone {
		return gone, err
	}
	if err := c.fast.Delete(ctx, d); err != nil {
		return true, err
	}
	c.room.gone(d)
	return true, nil
}

// Sweep implements Sweeper as far as the two stores do.
func (c *Cached) Sweep(ctx context.Context, age time.Duration) error {
	return errors.Join(sweep(ctx, c.slow, age), sweep(ctx, c.fast, age))
}

// Touch implements Keeper if the store below does. Otherwise it is errors.ErrUnsupported.
func (l *Limited) Touch(ctx context.Context, d Digest) error {
	if err := l.enter(ctx); err != nil {
		return err
	}
	defer l.leave()
	return touch(ctx, l.store, d)
}

// DeleteIdle implements Keeper if the store below does. Otherwise it is
// errors.ErrUnsupported.
func (l *Limited) DeleteIdle(ctx context.Context, d Digest, age time.Duration) (bool, error) {
	if err := l.enter(ctx); err != nil {
		return false, err
	}
	defer l.leave()
	return deleteIdle(ctx, l.store, d, age)
}

// Sweep implements Sweeper as far as the store below does.
func (l *Limited) Sweep(ctx context.Context, age time.Duration) error {
	return sweep(ctx, l.store, age)
}

// Touch implements Keeper if the store below does. Otherwise it is errors.ErrUnsupported.
func (v Verified) Touch(ctx context.Context, d Digest) error { return touch(ctx, v.Store, d) }

// DeleteIdle implements Keeper if the store below does. Otherwise it is
// errors.ErrUnsupported.
func (v Verified) DeleteIdle(ctx context.Context, d Digest, age time.Duration) (bool, error) {
	return deleteIdle(ctx, v.Store, d, age)
}

// Sweep implements Sweeper as far as the store below does.
func (v Verified) Sweep(ctx context.Context, age time.Duration) error {
	return sweep(ctx, v.Store, age)
}
