package microvm

import (
	"context"
	"io"
	"os"
	"path/filepath"

	"github.com/dsec-go/dsec/qemu"
	"github.com/dsec-go/dsec/vm"
	"github.com/dsec-go/dsec/wire"
)

// Crash lets go of everything as the end of the process would: machines stay,
// those of the pool too, and nothing is told.
func (d *Driver) Crash() {
	d.mu.Lock()
	d.closed = true
	var ms []*machine
	for _, m := range d.machines {
		ms = append(ms, m)
	}
	d.mu.Unlock()
	d.end()
	close(d.pool.stop)
	d.pool.run.Wait()
	d.working.Wait()
	for _, r := range d.pool.sizes {
		for _, g := range r.slots {
			g.ctl.Close()
			g.control.Close()
			g.frames.Close()
			g.proc.Release()
		}
	}
	for _, m := range ms {
		m.detach()
	}
	for _, t := range d.templates {
		t.close()
	}
}

// BreakAt makes the next start fail at a place.
func (d *Driver) BreakAt(place string, err error) {
	d.fault = func(at string) error {
		if at != place {
			return nil
		}
		d.fault = nil
		return err
	}
}

// KillGuest ends the machine's process as a fault would.
func (m *machine) KillGuest() error {
	m.slot.process().Kill()
	return nil
}

// Pid is the process of a machine.
func (m *machine) Pid() int { return m.slot.process().Pid() }

// Dir is the machine's folder.
func (m *machine) Dir() string { return m.slot.dir }

// TemplateMemory are the files of the saved guests' memory.
func (d *Driver) TemplateMemory() []string {
	out, _ := filepath.Glob(filepath.Join(d.config.Dir, templateDir, "*", templateMemory))
	return out
}

// LoadedTemplates names the saved guests whose memory is kept.
func (d *Driver) LoadedTemplates() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var out []string
	for _, t := range d.templates {
		out = append(out, t.ID)
	}
	return out
}

// DropTemplates gives up the memory of all saved guests.
func (d *Driver) DropTemplates() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for s, t := range d.templates {
		t.close()
		delete(d.templates, s)
	}
}

// Ready counts the machines of the pool.
func (d *Driver) Ready() int {
	d.pool.mu.Lock()
	defer d.pool.mu.Unlock()
	n := 0
	for _, r := range d.pool.sizes {
		n += len(r.slots)
	}
	return n
}

// TemplateID is what a saved guest says of itself.
func (d *Driver) TemplateID(path string) string {
	b, _ := os.ReadFile(filepath.Join(filepath.Dir(path), templateInfo))
	return string(b)
}

// ReadPages is for fuzzing.
var ReadPages = readPages

// ParseManifest is for fuzzing.
func ParseManifest(b []byte) error {
	_, err := parseManifest(b)
	return err
}

// Askers are calls on a channel at path, as a machine makes them.
func Askers(path string) []func(context.Context) error {
	return []func(context.Context) error{
		func(ctx context.Context) error {
			c := vm.NewClient(qemu.NewPort(path).Dial)
			defer c.Close()
			_, err := c.Ping(ctx)
			return err
		},
		func(ctx context.Context) error {
			p := qemu.NewPort(path)
			c := wire.NewClient(wire.Options{Dial: func(ctx context.Context) (io.ReadWriteCloser, error) {
				raw, err := p.Dial(ctx)
				if err != nil {
					return nil, err
				}
				return vm.Dial(ctx, raw)
			}})
			defer c.Close()
			_, err := c.Activity(ctx)
			return err
		},
	}
}
