package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/dsec-go/dsec"
)

// boxTTL ends what a killed benchmark left on a server that is not its own.
const boxTTL = 2 * time.Hour

// importers is how many workspaces are uploaded at a time.
const importers = 8

// ours runs boxes through the services of a server.
type ours struct {
	services dsec.Services
	prefix   string // of image names
	label    string // in reports; default dsec

	mu     sync.Mutex
	ids    map[int]dsec.SandboxID
	images []string
}

// newOurs uploads the base image.
func newOurs(ctx context.Context, s dsec.Services, base []byte) (*ours, error) {
	o := &ours{services: s, prefix: "bench-" + strconv.Itoa(os.Getpid()), ids: map[int]dsec.SandboxID{}}
	return o, o.upload(ctx, o.base(), dsec.Base, base)
}

func (o *ours) name() string {
	if o.label != "" {
		return o.label
	}
	return "dsec"
}

func (o *ours) base() string           { return o.prefix + "-base@1" }
func (o *ours) workspace(n int) string { return o.prefix + "-w" + strconv.Itoa(n) + "@1" }

func (o *ours) upload(ctx context.Context, name string, role dsec.Role, content []byte) error {
	_, err := o.services.Images.Upload(ctx, dsec.ImportOptions{Name: name, Role: role}, bytes.NewReader(content))
	if err != nil {
		return fmt.Errorf("import %s: %w", name, err)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.images = append(o.images, name)
	return nil
}

func (o *ours) prepare(ctx context.Context, from, to int) error {
	return parallel(ctx, importers, from, to, func(ctx context.Context, n int) error {
		return o.upload(ctx, o.workspace(n), dsec.Workspace, workspaceTar(n))
	})
}

func (o *ours) create(ctx context.Context, n int) ([]dsec.Stage, error) {
	return o.createOn(ctx, n, n)
}

// createOn makes box n on another box's workspace.
func (o *ours) createOn(ctx context.Context, n, workspace int) ([]dsec.Stage, error) {
	b, err := o.services.Sandboxes.Create(ctx, dsec.Spec{
		Environment: dsec.Environment{Base: o.base(), Workspace: o.workspace(workspace)},
		Resources:   limits(n),
		TTL:         boxTTL,
	}, dsec.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("create sandbox: %w", err)
	}
	o.mu.Lock()
	o.ids[n] = b.ID
	o.mu.Unlock()
	return append(b.Stages, dsec.Stage{Name: "node in all", Took: b.Took}), nil
}

func (o *ours) id(n int) dsec.SandboxID {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.ids[n]
}

func (o *ours) exec(ctx context.Context, n int, out io.Writer, argv ...string) error {
	on := dsec.Call{Sandbox: o.id(n)}
	if out != nil {
		return o.stream(ctx, on, out, argv)
	}
	r, err := o.services.Commands.Run(ctx, on, dsec.Command{Argv: argv}, nil)
	if err != nil {
		return fmt.Errorf("run %s: %w", argv[0], err)
	}
	return succeeded(argv[0], r.CommandStatus)
}

// stream runs a command and reads its output as it comes.
func (o *ours) stream(ctx context.Context, on dsec.Call, out io.Writer, argv []string) error {
	st, err := o.services.Commands.Start(ctx, on, dsec.Command{Argv: argv, Output: dsec.MaxOutput})
	if err != nil {
		return fmt.Errorf("start %s: %w", argv[0], err)
	}
	for e, err := range o.services.Commands.Attach(ctx, on, st.ID, 0) {
		switch {
		case err != nil:
			return fmt.Errorf("read output of %s: %w", argv[0], err)
		case e.Status != nil:
			return succeeded(argv[0], *e.Status)
		case e.Gap > 0:
			return fmt.Errorf("output of %s has lost %d bytes", argv[0], e.Gap)
		}
		if _, err := out.Write(e.Data); err != nil {
			return err
		}
	}
	return fmt.Errorf("output of %s ended without a status", argv[0])
}

func succeeded(program string, s dsec.CommandStatus) error {
	if s.Outcome != dsec.Exited || s.Code != 0 {
		return fmt.Errorf("%s ended as %s with %d: %s", program, s.Outcome, s.Code, s.Detail)
	}
	return nil
}

func (o *ours) destroy(ctx context.Context, n int) error {
	if _, err := o.services.Sandboxes.Stop(ctx, o.id(n)); err != nil {
		return fmt.Errorf("stop sandbox: %w", err)
	}
	o.mu.Lock()
	delete(o.ids, n)
	o.mu.Unlock()
	return nil
}

// close ends what is left and takes the images back. A server that is gone has
// nothing left to end.
func (o *ours) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	o.mu.Lock()
	left := make([]int, 0, len(o.ids))
	for n := range o.ids {
		left = append(left, n)
	}
	images := o.images
	o.mu.Unlock()
	err := parallel(ctx, importers, 0, len(left), func(ctx context.Context, i int) error {
		return o.destroy(ctx, left[i])
	})
	if err == nil {
		err = parallel(ctx, importers, 0, len(images), func(ctx context.Context, i int) error {
			return o.services.Images.Remove(ctx, images[i])
		})
	}
	if err == nil {
		_, err = o.services.Images.Collect(ctx, dsec.CollectOptions{})
	}
	var e *dsec.Error
	if errors.As(err, &e) && e.Kind == dsec.Unavailable {
		return nil
	}
	return err
}
