package guest

import (
	"strconv"
	"strings"
	"syscall"

	"github.com/dsec-go/dsec"
	"golang.org/x/sys/unix"
)

// maxSignal is the highest signal of Linux.
const maxSignal = 64

// parseSignal reads "TERM", "SIGTERM" or "15".
func parseSignal(s string) (syscall.Signal, error) {
	if n, err := strconv.Atoi(s); err == nil {
		if n >= 1 && n <= maxSignal {
			return syscall.Signal(n), nil
		}
	} else {
		name := strings.ToUpper(s)
		if !strings.HasPrefix(name, "SIG") {
			name = "SIG" + name
		}
		if sig := unix.SignalNum(name); sig != 0 {
			return sig, nil
		}
	}
	return 0, dsec.Errorf(dsec.Invalid, "signal %q is not a name or a number from 1 to %d", clip(s), maxSignal)
}

// signalName gives "TERM"; a real-time signal has only its number.
func signalName(sig syscall.Signal) string {
	if n := unix.SignalName(sig); n != "" {
		return strings.TrimPrefix(n, "SIG")
	}
	return strconv.Itoa(int(sig))
}
