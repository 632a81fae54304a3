package fullvm

import (
	"errors"

	"github.com/dsec-go/dsec/driver"
)

// FailAt makes the next start fail at a place.
func (d *Driver) FailAt(place string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fault = func(p string) error {
		if p != place {
			return nil
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		d.fault = nil
		return errors.New("injected")
	}
}

// Crash lets go of everything as the end of the node's process does.
func (d *Driver) Crash() { d.Close() } //nolint:errcheck // never fails

// Console is what the guest printed.
func Console(m driver.Machine) string { return m.(*machine).slot.process().Console() }

// Pid is the machine's process.
func Pid(m driver.Machine) int { return m.(*machine).slot.process().Pid() }

// Slot is the machine's folder.
func Slot(m driver.Machine) string { return m.(*machine).slot.dir }

// KeptAgent is the agent found at the start.
func KeptAgent(m driver.Machine) Agent { return m.(*machine).slot.agent }

// MaxAnswer is for tests of its bound.
const MaxAnswer = maxAnswer
