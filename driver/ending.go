package driver

import (
	"sync"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/wire"
)

// ErrEnded is wrapped by what a machine's calls are told when it is gone or about
// to go; its Exit says why.
var ErrEnded = wire.ErrEnded

// Ended gives that error.
func Ended() error { return dsec.Errorf(dsec.Conflict, "%w", ErrEnded) }

// Ending is the end of a machine: not there yet, then final. A driver's machine
// has one, which gives it Done, Exit and AfterDone.
type Ending struct {
	done chan struct{}

	mu    sync.Mutex
	after []func() // called once done is closed
	exit  Exit
	err   error
}

// NewEnding makes that of a machine that lives.
func NewEnding() *Ending { return &Ending{done: make(chan struct{})} }

// Done is closed when the machine is gone.
func (e *Ending) Done() <-chan struct{} { return e.done }

// Exit says why it is gone; valid once Done is closed.
func (e *Ending) Exit() Exit {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.exit
}

// Failure is what went wrong when the machine was cleaned away; valid once Done
// is closed.
func (e *Ending) Failure() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.err
}

// Over reports whether the machine is gone.
func (e *Ending) Over() bool {
	select {
	case <-e.done:
		return true
	default:
		return false
	}
}

// AfterDone calls f, in a goroutine of the driver's, once Done is closed: for
// those who watch thousands of machines and would rather not wait in thousands
// of goroutines.
func (e *Ending) AfterDone(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.Over() {
		go f()
		return
	}
	e.after = append(e.after, f)
}

// Conclude ends it. It is called once.
func (e *Ending) Conclude(x Exit, err error) {
	e.mu.Lock()
	e.exit, e.err = x, err
	after := e.after
	e.after = nil
	close(e.done)
	e.mu.Unlock()
	for _, f := range after {
		f()
	}
}
