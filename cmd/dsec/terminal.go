package main

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/term"

	"github.com/dsec-go/dsec"
)

// terminalOf gives the descriptor behind a reader or writer if it is a
// terminal.
func terminalOf(x any) (fd int, ok bool) {
	f, ok := x.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return 0, false
	}
	return int(f.Fd()), true
}

// terminalSize is the size of the terminal that the user looks at; the usual
// 80 by 24 when there is none.
func (a *app) terminalSize() dsec.WinSize {
	for _, x := range []any{a.Stdout, a.Stdin, a.Stderr} {
		if fd, ok := terminalOf(x); ok {
			if w, h, err := term.GetSize(fd); err == nil && w > 0 && h > 0 {
				return dsec.WinSize{Rows: uint16(h), Cols: uint16(w)}
			}
		}
	}
	return dsec.WinSize{Rows: 24, Cols: 80}
}

// rawInput puts the terminal of standard input into raw mode, if there is one,
// and returns the function that restores it.
func (a *app) rawInput() (restore func(), err error) {
	fd, ok := terminalOf(a.Stdin)
	if !ok {
		return func() {}, nil
	}
	old, err := term.MakeRaw(fd)
	if err != nil {
		return nil, fmt.Errorf("set terminal: %w", err)
	}
	return sync.OnceFunc(func() { _ = term.Restore(fd, old) }), nil
}

// progress is one line on a terminal that says what is going on. On anything
// else it prints nothing.
type progress struct {
	w    io.Writer // nil when not on a terminal
	last time.Time
	on   bool // a line stands
}

// progress starts a line on standard error.
func (a *app) progress() *progress {
	p := &progress{}
	if _, ok := terminalOf(a.Stderr); ok {
		p.w = a.Stderr
	}
	return p
}

// show replaces the line, at most ten times a second.
func (p *progress) show(format string, args ...any) {
	if p.w == nil || time.Since(p.last) < 100*time.Millisecond {
		return
	}
	p.last, p.on = time.Now(), true
	fmt.Fprintf(p.w, "\r\x1b[K"+format, args...)
}

// clear removes the line.
func (p *progress) clear() {
	if p.on {
		fmt.Fprint(p.w, "\r\x1b[K")
		p.on = false
	}
}
