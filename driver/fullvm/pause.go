package fullvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/dsec-go/dsec/driver"
	"github.com/dsec-go/dsec/qemu"
	"github.com/dsec-go/dsec/vm"
)

var _ driver.Pauser = (*machine)(nil)

// undoTimeout bounds what sets right what went wrong.
const undoTimeout = 30 * time.Second

// Pause implements driver.Pauser: the machine's memory goes to its folder, and
// its process ends. Time does not pass for the guest until Resume.
func (m *machine) Pause(ctx context.Context) error {
	m.moving.Lock()
	defer m.moving.Unlock()
	if err := m.gone(); err != nil {
		return err
	}
	if m.Paused() {
		return nil
	}
	ctx, cancel := m.both(ctx)
	defer cancel()
	m.usage()
	m.slot.stand()
	file := m.slot.path(memoryFile)
	err := os.RemoveAll(file)
	if err == nil {
		err = m.slot.save(ctx, file, qemu.SaveOptions{})
	}
	if err == nil {
		err = m.setPaused(true)
	}
	if err != nil {
		os.Remove(file) //nolint:errcheck // the next pause does
		return m.judge(errors.Join(fmt.Errorf("pause: %w", err), m.goOn()))
	}
	m.leave()
	return nil
}

// leave ends the process without the machine ending. Requires: m.moving held.
func (m *machine) leave() {
	p := m.slot.process()
	m.mu.Lock()
	m.leaving = p
	m.mu.Unlock()
	m.slot.setProcess(nil)
	if p != nil {
		p.Kill()
	}
}

// goOn lets a machine that still has its process run on.
func (m *machine) goOn() error {
	ctx, cancel := context.WithTimeout(context.Background(), undoTimeout)
	defer cancel()
	var err error
	if p := m.slot.process(); p != nil {
		err = p.Cont(ctx)
	}
	m.slot.control.Resume()
	m.slot.frames.Resume()
	return err
}

// Resume implements driver.Pauser.
func (m *machine) Resume(ctx context.Context) error {
	m.moving.Lock()
	defer m.moving.Unlock()
	if err := m.gone(); err != nil {
		return err
	}
	if !m.Paused() {
		return nil
	}
	ctx, cancel := m.both(ctx)
	defer cancel()
	st := m.state()
	if err := roomFor(ram(st.Resources) + overhead); err != nil {
		return err
	}
	file := m.slot.path(memoryFile)
	// What was saved is valid until the machine has run on: the disk is the same.
	err := m.slot.load(ctx, launch{resources: st.Resources}, file, qemu.SaveOptions{})
	if err == nil {
		if err = m.setPaused(false); err != nil {
			m.leave()
		}
	}
	if err != nil {
		return m.judge(fmt.Errorf("resume: %w", err))
	}
	m.follow()
	os.Remove(file) //nolint:errcheck // the next pause does
	m.slot.control.Resume()
	m.wake(ctx)
	m.slot.frames.Resume()
	return nil
}

// wakeTimeout bounds how long a guest that was asleep is told so.
const wakeTimeout = 30 * time.Second

// wake tells the guest's agent that time has passed. One that does not answer is
// left alone: its machine runs.
func (m *machine) wake(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, wakeTimeout)
	defer cancel()
	m.guest.wake(ctx)
}

// Paused implements driver.Pauser.
func (m *machine) Paused() bool { return m.state().Paused }

// state gives a copy of what is written down.
func (m *machine) state() state {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.st
}

// setPaused writes down whether the machine has a process.
func (m *machine) setPaused(paused bool) error {
	st := m.state()
	st.Paused = paused
	if err := writeState(m.slot.dir, st); err != nil {
		return err
	}
	m.mu.Lock()
	m.st = st
	m.mu.Unlock()
	return nil
}

// wake gives the guest the time, by the agent that it has.
func (g *guest) wake(ctx context.Context) {
	switch g.agent(ctx) {
	case DsecGuest:
		if r, err := restored(); err == nil {
			g.m.slot.ctl.Restored(ctx, vm.Restored{Now: r.Now, Seed: r.Seed}) //nolint:errcheck // see machine.wake
		}
	case QemuGuest:
		g.qga.setTime(ctx, time.Now()) //nolint:errcheck // see machine.wake
	}
}
