package lazy

import "golang.org/x/sys/unix"

// busy reports whether somebody else has the file of a blob open: a mount that was given it as
// a plain file, in this process's life or before. Whoever holds the path may be gone long since
// and sandboxes on the mount run on, so it is the kernel that is asked: it gives a lease only on
// a file that nobody else has open. Where it gives none for another reason, nobody knows, and a
// mounted file must not be dropped.
func (e *entry) busy() bool {
	_, err := unix.FcntlInt(e.file.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	if err == nil {
		unix.FcntlInt(e.file.Fd(), unix.F_SETLEASE, unix.F_UNLCK) //nolint:errcheck // it was just given
	}
	return err != nil
}
