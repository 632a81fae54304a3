package container

import (
	"fmt"
	"os"

	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/jail"
	"github.com/dsec-go/dsec/jail/profile"
	"github.com/dsec-go/dsec/rootfs"
)

// cells opens what the box of s needs to run each command in a cell over the
// layers of r. The caller closes it.
func cells(s *shell, r driver.Root) (_ *jail.Cells, err error) {
	c, err := s.group.Cells(base(s.slot))
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			c.Close()
		}
	}()
	if c.Filter, err = profile.Warm(); err != nil {
		return nil, err
	}
	userns, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", s.pid))
	if err != nil {
		return nil, err
	}
	defer userns.Close()
	if r.Dir != "" {
		m, err := rootfs.MountFolder(r.Dir, userns)
		if err != nil {
			return nil, err
		}
		c.Lowers = []*os.File{m}
		return c, nil
	}
	c.Lowers, err = rootfs.Mapped(r.Layers, userns)
	return c, err
}
