package fncall

import "github.com/dsec-go/dsec/driver"

// Wrap gives a machine as Adopt would.
func (d *Driver) Wrap(m driver.Machine) driver.Caller { return wrap(m.(*machine).Machine) }
