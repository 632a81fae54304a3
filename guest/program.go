package guest

import (
	"errors"
	"maps"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/dsec-go/dsec"
	"golang.org/x/sys/unix"
)

const (
	defaultPath     = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	shell           = "/bin/sh"
	syscallNonblock = unix.O_NONBLOCK
)

// environ composes the environment of a command: the sandbox's, then the
// command's own; later entries win. PATH and HOME are always there, TERM on a
// terminal.
func environ(base []string, own map[string]string, home string, tty bool) []string {
	out := make([]string, 0, len(base)+len(own)+3)
	at := make(map[string]int, cap(out))
	set := func(name, entry string) {
		if i, ok := at[name]; ok {
			out[i] = entry
			return
		}
		at[name] = len(out)
		out = append(out, entry)
	}
	for _, e := range base {
		if name, _, ok := strings.Cut(e, "="); ok && name != "" {
			set(name, e)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(own)) {
		set(name, name+"="+own[name])
	}
	def := func(name, value string) {
		if _, ok := at[name]; !ok {
			set(name, name+"="+value)
		}
	}
	def("PATH", defaultPath)
	def("HOME", home)
	if tty {
		def("TERM", "xterm")
	}
	return out
}

func getenv(env []string, name string) string {
	for _, e := range env {
		if v, ok := strings.CutPrefix(e, name+"="); ok {
			return v
		}
	}
	return ""
}

// checkDir finds out before anything runs that a working directory is none.
func checkDir(dir string) error {
	i, err := os.Stat(dir)
	switch {
	case errors.Is(err, unix.ENOENT):
		return dsec.Errorf(dsec.Invalid, "working directory %q: no such directory", clip(dir))
	case err != nil:
		return dsec.Errorf(dsec.Invalid, "working directory %q: %w", clip(dir), errors.Unwrap(err))
	case !i.IsDir():
		return dsec.Errorf(dsec.Invalid, "working directory %q is not a directory", clip(dir))
	}
	return nil
}

// findProgram looks a program up as execvp does: a name with a slash is taken
// as it is, any other is searched in the folders of searchPath. The error is
// ENOENT, EACCES or EISDIR.
func findProgram(name, searchPath, dir string, id identity) (string, error) {
	if strings.Contains(name, "/") {
		if name[0] != '/' {
			name = dir + "/" + name
		}
		return name, executable(name, id)
	}
	failure := unix.ENOENT
	for p := range strings.SplitSeq(searchPath, ":") {
		if p == "" || p[0] != '/' {
			p = path.Join(dir, p)
		}
		file := p + "/" + name
		switch err := executable(file, id); {
		case err == nil:
			return file, nil
		case errors.Is(err, unix.EACCES):
			failure = unix.EACCES
		}
	}
	return name, failure
}

// executable reports what execve would say of the file itself. Folders on the
// way are the kernel's to judge.
func executable(file string, id identity) error {
	var st unix.Stat_t
	if err := unix.Stat(file, &st); err != nil {
		return err
	}
	switch {
	case st.Mode&unix.S_IFMT == unix.S_IFDIR:
		return unix.EISDIR
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return unix.EACCES
	}
	bits := st.Mode & 0o111
	switch {
	case id.uid == 0:
	case id.uid == st.Uid:
		bits &= 0o100
	case slices.Contains(id.groups, st.Gid):
		bits &= 0o010
	default:
		bits &= 0o001
	}
	if bits == 0 && !hasACL(file) {
		return unix.EACCES
	}
	return nil
}

// hasACL reports whether more than the mode bits decide.
func hasACL(file string) bool {
	n, err := unix.Getxattr(file, "system.posix_acl_access", nil)
	return err == nil && n > 0
}

// notStarted tells the outcome of a failed exec: status and detail as a shell
// has them. ok is false if the command could start another time.
func notStarted(err error) (code int, detail string, ok bool) {
	var errno unix.Errno
	if !errors.As(err, &errno) {
		return 0, "", false
	}
	switch errno {
	case unix.EAGAIN, unix.ENOMEM, unix.EMFILE, unix.ENFILE, unix.EINTR, unix.ENOSPC:
		return 0, "", false
	case unix.ENOENT, unix.ENOTDIR:
		return 127, "no such file or directory", true
	case unix.ENOEXEC:
		return 126, "exec format error: neither a program for this machine nor a script that begins with #!", true
	case unix.E2BIG:
		return 126, "argument list too long", true
	}
	return 126, errno.Error(), true
}
