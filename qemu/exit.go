package qemu

import (
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Reason says why a process ended.
type Reason int

// The reasons.
const (
	Unknown    Reason = iota // it was not seen
	PoweredOff               // the guest turned its machine off
	Reset                    // the guest reset its machine, which ends it
	Panicked                 // the guest's kernel said so
	Killed                   // by a signal that Exit.Signal names
	Failed                   // QEMU gave up: see Detail
	Quit                     // the monitor was asked to
)

var reasonNames = [...]string{
	"ended", "the guest powered off", "the guest reset its machine", "the guest's kernel panicked", "killed", "QEMU failed", "it was told to quit",
}

// String gives it as part of a sentence.
func (r Reason) String() string { return reasonNames[r] }

// Exit is how a process ended.
type Exit struct {
	Reason Reason
	Signal syscall.Signal // of Killed
	Detail string         // the last words of console or standard error; may be empty
}

// String gives it as part of a sentence.
func (e Exit) String() string {
	s := e.Reason.String()
	if e.Reason == Killed && e.Signal != 0 {
		s += " by " + unix.SignalName(e.Signal)
	}
	if e.Detail != "" {
		s += ": " + e.Detail
	}
	return s
}

// Exit says how the process ended; valid once Done is closed.
func (p *Process) Exit() Exit {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.exit
}

// note keeps what an event says about the end to come.
func (p *Process) note(e Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch e.Name {
	case "SHUTDOWN":
		var d struct{ Reason string }
		e.Into(&d) //nolint:errcheck // an empty reason is as good
		p.reason = d.Reason
	case "GUEST_PANICKED", "GUEST_CRASHLOADED":
		p.panic = true
	}
}

// panics are the words by which consoles tell of the end.
var panics = []string{"Kernel panic - not syncing", "Kernel panic", "end Kernel panic"}

// ended is called once, when the process is gone. The status is known to a
// parent only.
func (p *Process) ended(status syscall.WaitStatus, known bool) {
	if m := p.Monitor(); m != nil {
		m.drain() // its last event says why
	}
	console, stderr := p.Console(), p.Stderr()
	p.mu.Lock()
	e := Exit{}
	switch {
	case known && status.Signaled():
		e.Reason, e.Signal = Killed, status.Signal()
	case p.panic, p.reason == "guest-panic":
		e.Reason = Panicked
	case p.reason == "guest-shutdown":
		e.Reason = PoweredOff
	case p.reason == "guest-reset", p.reason == "subsystem-reset":
		e.Reason = Reset
	case p.reason == "host-qmp-quit":
		e.Reason = Quit
	case p.reason == "host-signal":
		e.Reason, e.Signal = Killed, syscall.SIGTERM
	case known && status.ExitStatus() != 0:
		e.Reason = Failed
	}
	if line := panicLine(console); line != "" {
		e.Detail = line
		if e.Reason == Reset || e.Reason == Unknown || e.Reason == PoweredOff {
			e.Reason = Panicked
		}
	} else if e.Reason != Killed && e.Reason != PoweredOff {
		e.Detail = lastLines(stderr, 2)
	}
	p.exit = e
	p.mu.Unlock()
	p.log.close()
	close(p.done)
}

// panicLine is the line of a console that tells of a kernel's panic.
func panicLine(console string) string {
	for _, words := range panics {
		if i := strings.Index(console, words); i >= 0 {
			line, _, _ := strings.Cut(console[i:], "\n")
			return strings.TrimSpace(printable(line))
		}
	}
	return ""
}
