package guest

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
)

// identity is who a command runs as.
type identity struct {
	uid, gid uint32
	groups   []uint32 // with gid
	home     string
}

// maxAccounts bounds how much of /etc/passwd and /etc/group is read.
const maxAccounts = 4 << 20

// accounts reads the sandbox's /etc/passwd and /etc/group and remembers what it
// found until the files change.
type accounts struct {
	passwd, group string // paths

	mu    sync.Mutex
	stamp [2]stamp
	known map[string]identity
}

type stamp struct {
	size int64
	mod  time.Time
}

// maxKnown bounds the remembered users.
const maxKnown = 64

// lookup resolves "name", "uid", "name:group" or "uid:gid". A number needs no
// entry. An unknown name is Invalid.
func (a *accounts) lookup(user string) (identity, error) {
	now := [2]stamp{stampOf(a.passwd), stampOf(a.group)}
	a.mu.Lock()
	if a.stamp != now || len(a.known) >= maxKnown {
		a.stamp, a.known = now, nil
	}
	id, ok := a.known[user]
	a.mu.Unlock()
	if ok {
		return id, nil
	}
	id, err := resolve(user, readAccounts(a.passwd), readAccounts(a.group))
	if err != nil {
		return identity{}, err
	}
	a.mu.Lock()
	if a.stamp == now {
		if a.known == nil {
			a.known = make(map[string]identity)
		}
		a.known[user] = id
	}
	a.mu.Unlock()
	return id, nil
}

func stampOf(path string) stamp {
	i, err := os.Stat(path)
	if err != nil {
		return stamp{size: -1}
	}
	return stamp{i.Size(), i.ModTime()}
}

// readAccounts gives the beginning of a regular file; a missing or strange one
// is empty.
func readAccounts(path string) []byte {
	f, err := openRegular(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	b, _ := io.ReadAll(io.LimitReader(f, maxAccounts))
	return b
}

// openRegular opens a file for reading without ever waiting for a peer.
func openRegular(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscallNonblock, 0)
	if err != nil {
		return nil, err
	}
	if i, err := f.Stat(); err != nil || !i.Mode().IsRegular() {
		f.Close()
		return nil, errors.Join(err, fs.ErrInvalid)
	}
	return f, nil
}

// resolve is lookup on the contents of the two files.
func resolve(user string, passwd, group []byte) (identity, error) {
	name, groupName, hasGroup := strings.Cut(user, ":")
	if name == "" {
		name = "root"
	}
	id := identity{home: "/"}
	account := "" // name in passwd, by which groups list members
	found := false
	num, numErr := strconv.ParseUint(name, 10, 32)
	lines(passwd, 7, func(f [][]byte) bool {
		uid, err1 := parseID(f[2])
		gid, err2 := parseID(f[3])
		if err1 != nil || err2 != nil {
			return true
		}
		if string(f[0]) != name && (numErr != nil || uint32(num) != uid) {
			return true
		}
		id.uid, id.gid, found = uid, gid, true
		account = string(f[0])
		if h := string(f[5]); strings.HasPrefix(h, "/") {
			id.home = h
		}
		return account != name // a name wins over an account of the same number
	})
	switch {
	case found:
	case name == "root": // images without an /etc/passwd have a root
		account = "root"
		if len(passwd) == 0 {
			id.home = "/root"
			if _, err := os.Stat(id.home); err != nil {
				id.home = "/"
			}
		}
	case numErr == nil && num < 1<<32-1:
		id.uid = uint32(num)
	default:
		return id, dsec.Errorf(dsec.Invalid, "user %q does not exist", clip(name))
	}
	if hasGroup {
		gid, err := resolveGroup(groupName, group)
		if err != nil {
			return id, err
		}
		id.gid = gid
		id.groups = []uint32{gid} // as Docker has it: a named group stands alone
		return id, nil
	}
	id.groups = append(id.groups, id.gid)
	if account == "" {
		return id, nil
	}
	lines(group, 4, func(f [][]byte) bool {
		gid, err := parseID(f[2])
		if err != nil || gid == id.gid || len(id.groups) >= 65536 {
			return true
		}
		for m := range bytes.SplitSeq(f[3], []byte(",")) {
			if string(bytes.TrimSpace(m)) == account {
				id.groups = append(id.groups, gid)
				break
			}
		}
		return true
	})
	return id, nil
}

func resolveGroup(name string, group []byte) (uint32, error) {
	gid, found := uint32(0), false
	lines(group, 3, func(f [][]byte) bool {
		g, err := parseID(f[2])
		if err == nil && string(f[0]) == name {
			gid, found = g, true
			return false
		}
		return true
	})
	if found {
		return gid, nil
	}
	if n, err := strconv.ParseUint(name, 10, 32); err == nil && n < 1<<32-1 {
		return uint32(n), nil
	}
	return 0, dsec.Errorf(dsec.Invalid, "group %q does not exist", clip(name))
}

// parseID refuses the number that means "no change" to the kernel.
func parseID(b []byte) (uint32, error) {
	n, err := strconv.ParseUint(string(b), 10, 32)
	if err == nil && n == 1<<32-1 {
		err = strconv.ErrRange
	}
	return uint32(n), err
}

// lines calls f with the fields of each line that has at least n of them, until
// it returns false.
func lines(b []byte, n int, f func([][]byte) bool) {
	for l := range bytes.Lines(b) {
		l = bytes.TrimRight(l, "\r\n")
		if len(l) == 0 || l[0] == '#' || l[0] == '+' || l[0] == '-' {
			continue
		}
		if fields := bytes.Split(l, []byte(":")); len(fields) >= n && !f(fields) {
			return
		}
	}
}

// clip shortens a caller's text for an error message.
func clip(s string) string {
	if len(s) > 128 {
		return s[:128] + "..."
	}
	return s
}
