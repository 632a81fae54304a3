package container

import (
	"context"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/jail"
)

// Crash lets go of everything as the end of the process would: shells stay,
// machines stay, nothing is told.
func (d *Driver) Crash() {
	d.mu.Lock()
	d.closed = true
	for _, m := range d.machines {
		m.client.Close()
	}
	d.mu.Unlock()
	close(d.stop)
	d.sweeping.Wait()
	d.watch.close()
	for _, s := range d.pool.close() {
		s.pidfd.Close()
	}
	d.holder.Close()
}

// KillGuest ends a guest as a fault in it would, and returns when it is gone.
func (m *machine) KillGuest() error {
	f := jail.OpenProcess(m.shell.pid, jail.StartTime(m.shell.pid))
	defer f.Close()
	if err := unix.Kill(m.shell.pid, unix.SIGKILL); err != nil {
		return err
	}
	return waitPidfd(f, endTimeout)
}

// KillHolder ends the holder, and returns when it is gone.
func (d *Driver) KillHolder() error {
	if err := unix.Kill(d.holder.Pid(), unix.SIGKILL); err != nil {
		return err
	}
	return waitGone(d.holder.Pid())
}

// HalfPause does the first step of a pause, and no more.
func (m *machine) HalfPause(ctx context.Context) error { return m.client.StopClocks(ctx) }

// Break makes the next start fail behind a stage.
func (d *Driver) Break(stage string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fault = func(at string) error {
		if at != stage {
			return nil
		}
		d.fault = nil
		return dsec.Errorf(dsec.Unavailable, "broken behind %s", at)
	}
}
