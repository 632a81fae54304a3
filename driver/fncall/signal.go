package fncall

import (
	"strconv"

	"golang.org/x/sys/unix"
)

// signalNumber is the inverse of how guests name signals.
func signalNumber(name string) int {
	if n, err := strconv.Atoi(name); err == nil {
		return n
	}
	return int(unix.SignalNum("SIG" + name))
}
