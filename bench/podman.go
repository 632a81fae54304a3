package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"

	"github.com/dsec-go/dsec"
)

// podman runs boxes with the program of that name, in a store of its own. Its
// boxes have no user namespace, as its users mostly run it, and no network.
type podman struct {
	program string
	dir     string
	prefix  string
	image   string
}

// newPodman imports the base image. A host without podman is Unsupported.
func newPodman(ctx context.Context, dir string, base []byte) (*podman, error) {
	program, err := exec.LookPath("podman")
	if err != nil {
		return nil, dsec.Errorf(dsec.Unsupported, "this host has no podman to compare with: install the package podman")
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	p := &podman{program: program, dir: dir, prefix: "dsec-podman-" + strconv.Itoa(os.Getpid()), image: "localhost/bench:1"}
	content := filepath.Join(dir, "base.tar")
	if err := os.WriteFile(content, base, 0o600); err != nil {
		return nil, err
	}
	return p, p.run(ctx, nil, "import", content, p.image)
}

func (p *podman) name() string    { return "podman" }
func (p *podman) id(n int) string { return p.prefix + "-" + strconv.Itoa(n) }

func (p *podman) prepare(context.Context, int, int) error { return nil }

func (p *podman) create(ctx context.Context, n int) ([]dsec.Stage, error) {
	l := limits(n)
	return nil, p.run(ctx, nil, "run", "--detach", "--name", p.id(n), "--network=none", "--log-driver=none", "--cgroup-parent=/"+p.prefix,
		"--memory", strconv.FormatInt(l.Memory, 10), "--cpus", strconv.FormatFloat(l.CPU, 'f', 3, 64),
		"--pids-limit", strconv.Itoa(l.Pids), p.image, binPause)
}

func (p *podman) exec(ctx context.Context, n int, out io.Writer, argv ...string) error {
	return p.run(ctx, out, append([]string{"exec", p.id(n)}, argv...)...)
}

func (p *podman) destroy(ctx context.Context, n int) error {
	return p.run(ctx, nil, "rm", "--force", "--time=0", p.id(n))
}

// close ends every box of this store and deletes it.
func (p *podman) close() error {
	ctx := context.Background()
	return errors.Join(
		p.run(ctx, nil, "rm", "--all", "--force", "--time=0"),
		p.run(ctx, nil, "rmi", "--all", "--force"),
		removeGroups(p.prefix),
		unmountBelow(p.dir),
		os.RemoveAll(p.dir))
}

func (p *podman) run(ctx context.Context, out io.Writer, args ...string) error {
	cmd := exec.CommandContext(ctx, p.program, append([]string{
		"--root", filepath.Join(p.dir, "store"), "--runroot", filepath.Join(p.dir, "run"), "--tmpdir", filepath.Join(p.dir, "tmp"),
		"--storage-driver=overlay", "--cgroup-manager=cgroupfs", "--events-backend=none",
	}, args...)...)
	// A file: a box's monitor inherits it, and the end of a pipe would be its end.
	log, err := os.CreateTemp(p.dir, "log-")
	if err != nil {
		return err
	}
	defer os.Remove(log.Name())
	defer log.Close()
	cmd.Stdout, cmd.Stderr = out, log
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		text, _ := os.ReadFile(log.Name())
		return fmt.Errorf("podman %s: %w: %s", args[0], err, bytes.TrimSpace(text))
	}
	return nil
}
