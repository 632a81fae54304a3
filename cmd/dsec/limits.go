package main

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec/jail"
)

// wantFiles is how many files a node wants to have open: a sandbox takes a
// handful.
const wantFiles = 1 << 20

// raiseLimits raises what the kernel's defaults make too small for thousands
// of sandboxes, and says what it could not raise. None of it is fatal.
func raiseLimits() []error {
	var errs []error
	note := func(what string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("raise %s: %w", what, err))
		}
	}
	note("kernel.pid_max", jail.RaisePids())
	note("open files", raiseFiles(wantFiles))
	return errs
}

// raiseFiles sets this process's limit of open files.
func raiseFiles(want uint64) error {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return err
	}
	if l.Cur >= want {
		return nil
	}
	err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: want, Max: max(want, l.Max)})
	if err == nil {
		return nil
	}
	// The hard limit is another's to raise; what it allows is taken.
	l.Cur = l.Max
	if unix.Setrlimit(unix.RLIMIT_NOFILE, &l) == nil && l.Cur >= want/16 {
		return nil
	}
	return fmt.Errorf("to more than %d: %w", l.Max, err)
}
