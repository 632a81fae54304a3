package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/dsec-go/dsec"
)

// SaveOptions say how a machine is saved.
type SaveOptions struct {
	// IgnoreShared leaves memory out that is mapped shared from a file, which
	// is then part of what is saved: some ten kilobytes and milliseconds
	// instead of all of the memory. Load must be told the same.
	IgnoreShared bool
}

// Stop makes the machine stand still.
func (p *Process) Stop(ctx context.Context) error { return p.Execute(ctx, "stop", nil, nil) }

// Cont lets the machine run: after Stop, Save or Load.
func (p *Process) Cont(ctx context.Context) error { return p.Execute(ctx, "cont", nil, nil) }

// Status is QEMU's word for what the machine does: running, paused, inmigrate,
// postmigrate, shutdown, internal-error, io-error, ...
func (p *Process) Status(ctx context.Context) (string, error) {
	var r struct{ Status string }
	err := p.Execute(ctx, "query-status", nil, &r)
	return r.Status, err
}

// Save stops the machine and writes its state, disks apart, into the file. The
// machine stands still after it, whether it failed or not, until Cont. The
// file's full disk is Exhausted.
func (p *Process) Save(ctx context.Context, file *os.File, o SaveOptions) error {
	if err := p.Stop(ctx); err != nil {
		return err
	}
	if err := p.prepareMigration(ctx, o); err != nil {
		return err
	}
	if err := p.passFile(ctx, "save", file); err != nil {
		return err
	}
	if err := p.Execute(ctx, "migrate", map[string]any{"uri": "fd:save"}, nil); err != nil {
		return err
	}
	err := p.waitMigration(ctx)
	if err != nil && ctx.Err() != nil {
		// It must not go on writing into a file that its owner gave up.
		cancel, done := context.WithTimeout(context.WithoutCancel(ctx), cancelTimeout)
		defer done()
		p.Execute(cancel, "migrate_cancel", nil, nil) //nolint:errcheck // the first error says more
		p.waitMigration(cancel)                       //nolint:errcheck // canceled is what it says
	}
	if err != nil {
		if fullDisk(file) {
			return dsec.Errorf(dsec.Exhausted, "save the machine: no space is left on the host's disk")
		}
		return fmt.Errorf("save the machine: %w", err)
	}
	return nil
}

// Load reads a saved state into an Incoming process of the same Args. The
// machine stands still until Cont. A state that does not fit is Invalid, and
// QEMU is gone then.
func (p *Process) Load(ctx context.Context, file *os.File, o SaveOptions) error {
	if err := p.prepareMigration(ctx, o); err != nil {
		return err
	}
	if err := p.passFile(ctx, "load", file); err != nil {
		return err
	}
	err := p.Execute(ctx, "migrate-incoming", map[string]any{"uri": "fd:load"}, nil)
	if err == nil {
		err = p.waitMigration(ctx)
	}
	if err == nil {
		return nil
	}
	select {
	case <-p.done: // QEMU ends when it cannot read a state
		return dsec.Errorf(dsec.Invalid, "load the machine: %s", p.Exit().Detail)
	default:
	}
	var failed migrationError
	if errors.As(err, &failed) {
		return dsec.Errorf(dsec.Invalid, "load the machine: %w", err)
	}
	return fmt.Errorf("load the machine: %w", err)
}

// unlimited is as fast as the disk is. QEMU's own default is 128 MiB a second.
const unlimited = 1 << 40

const cancelTimeout = 10 * time.Second

func (p *Process) prepareMigration(ctx context.Context, o SaveOptions) error {
	caps := []map[string]any{{"capability": "x-ignore-shared", "state": o.IgnoreShared}}
	if err := p.Execute(ctx, "migrate-set-capabilities", map[string]any{"capabilities": caps}, nil); err != nil {
		return err
	}
	return p.Execute(ctx, "migrate-set-parameters", map[string]any{"max-bandwidth": int64(unlimited)}, nil)
}

// migrationError is QEMU's word that a migration failed.
type migrationError string

// Error gives QEMU's words.
func (e migrationError) Error() string { return string(e) }

// waitMigration polls until the migration of the process has ended.
func (p *Process) waitMigration(ctx context.Context) error {
	for pause := time.Millisecond; ; pause = min(pause*3/2, 20*time.Millisecond) {
		var r struct {
			Status string
			Desc   string `json:"error-desc"`
		}
		if err := p.Execute(ctx, "query-migrate", nil, &r); err != nil {
			return err
		}
		switch r.Status {
		case "completed":
			return nil
		case "failed", "cancelled":
			if r.Desc == "" {
				r.Desc = "QEMU's migration " + r.Status
			}
			return migrationError(r.Desc)
		}
		select {
		case <-time.After(pause):
		case <-p.done:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
