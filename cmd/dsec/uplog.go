package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// The log of a detached node is turned when it has grown this large; the one
// before is kept. It is looked at this often, so a flood between two looks makes
// it larger.
const (
	upLogMost  = 16 << 20
	upLogEvery = time.Minute
)

// boundUpLog keeps the log of a detached node short until ctx ends.
func boundUpLog(ctx context.Context, path string, told func(error)) {
	tick := time.NewTicker(upLogEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if err := turnLog(path, upLogMost, unix.Stdout, unix.Stderr); err != nil {
			told(err)
		}
	}
}

// turnLog puts a log that is larger than most aside and a new one in its place
// behind the descriptors that write to it. One that somebody else has put aside
// is left alone.
func turnLog(path string, most int64, fds ...int) error {
	named, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("turn log: %w", err)
	}
	for _, fd := range fds {
		mine, err := os.Stat(fmt.Sprintf("/proc/self/fd/%d", fd))
		if err != nil || !os.SameFile(named, mine) {
			return nil
		}
	}
	if named.Size() <= most {
		return nil
	}
	if err := os.Rename(path, path+".1"); err != nil {
		return fmt.Errorf("turn log: %w", err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("turn log: %w", err) // it goes on in the one put aside
	}
	defer f.Close()
	for _, fd := range fds {
		if err := unix.Dup3(int(f.Fd()), fd, 0); err != nil {
			return fmt.Errorf("turn log: %w", os.NewSyscallError("dup3", err))
		}
	}
	return nil
}
