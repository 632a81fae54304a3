package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
)

// runcFirstID is where the ids of all runc's boxes start. Sharing one range
// spares it the shifting of its root.
const runcFirstID = 0x7e00_0000

// runc runs boxes with the runtime of that name: the same namespaces with a
// user namespace of 65,536 ids, limits, an overlay as root. Two things are in
// its favour: overlays and configurations are made before its clock runs, and
// it gets no seccomp filter.
type runc struct {
	program string
	dir     string
	group   string
	spec    []byte // its own default configuration
}

// newRunc prepares dir, which any account can search. A host without runc is Unsupported.
func newRunc(ctx context.Context, dir string, base []byte) (*runc, error) {
	program, err := exec.LookPath("runc")
	if err != nil {
		return nil, dsec.Errorf(dsec.Unsupported, "this host has no runc to compare with: install the package runc")
	}
	r := &runc{program: program, dir: dir, group: "dsec-runc-" + strconv.Itoa(os.Getpid())}
	// The boxes' root reaches its own root folder by path.
	if err := os.MkdirAll(filepath.Join(dir, "base"), 0o711); err != nil {
		return nil, err
	}
	if err := unpack(base, filepath.Join(dir, "base"), runcFirstID); err != nil {
		return nil, fmt.Errorf("unpack root: %w", err)
	}
	if err := r.run(ctx, nil, "spec", "--bundle", dir); err != nil {
		return nil, err
	}
	r.spec, err = os.ReadFile(filepath.Join(dir, "config.json"))
	return r, err
}

func (r *runc) name() string        { return "runc" }
func (r *runc) id(n int) string     { return r.group + "-" + strconv.Itoa(n) }
func (r *runc) bundle(n int) string { return filepath.Join(r.dir, strconv.Itoa(n)) }
func (r *runc) rootfs(n int) string { return filepath.Join(r.bundle(n), "rootfs") }
func (r *runc) state() string       { return filepath.Join(r.dir, "state") }

func (r *runc) prepare(_ context.Context, from, to int) error {
	for n := from; n < to; n++ {
		for _, d := range []string{"", "rootfs", "upper", "work"} {
			if err := os.MkdirAll(filepath.Join(r.bundle(n), d), 0o711); err != nil {
				return err
			}
		}
		if err := os.Chown(filepath.Join(r.bundle(n), "upper"), runcFirstID, runcFirstID); err != nil {
			return err
		}
		options := fmt.Sprintf("lowerdir=%s/base,upperdir=%[2]s/upper,workdir=%[2]s/work,volatile", r.dir, r.bundle(n))
		if err := unix.Mount("overlay", r.rootfs(n), "overlay", 0, options); err != nil {
			return fmt.Errorf("mount root of runc box: %w", err)
		}
		config, err := runcConfig(r.spec, r.group, n)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(r.bundle(n), "config.json"), config, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// runcConfig makes runc's own default configuration into that of box n.
func runcConfig(spec []byte, group string, n int) ([]byte, error) {
	var c struct {
		OCIVersion json.RawMessage   `json:"ociVersion"`
		Process    map[string]any    `json:"process"`
		Root       map[string]any    `json:"root"`
		Hostname   string            `json:"hostname"`
		Mounts     []json.RawMessage `json:"mounts"`
		Linux      map[string]any    `json:"linux"`
	}
	if err := json.Unmarshal(spec, &c); err != nil {
		return nil, fmt.Errorf("read runc's default configuration: %w", err)
	}
	if c.Process == nil || c.Root == nil || c.Linux == nil {
		return nil, errors.New("runc's default configuration lacks process, root or linux")
	}
	c.Process["terminal"] = false
	c.Process["args"] = []string{binPause}
	c.Root["readonly"] = false
	ids := []map[string]any{{"containerID": 0, "hostID": runcFirstID, "size": 65536}}
	c.Linux["uidMappings"], c.Linux["gidMappings"] = ids, ids
	var namespaces []map[string]string
	for _, t := range []string{"pid", "network", "ipc", "uts", "mount", "cgroup", "user"} {
		namespaces = append(namespaces, map[string]string{"type": t})
	}
	c.Linux["namespaces"] = namespaces
	c.Linux["cgroupsPath"] = "/" + group + "/" + strconv.Itoa(n)
	l := limits(n)
	c.Linux["resources"] = map[string]any{
		"memory": map[string]any{"limit": l.Memory},
		"cpu":    map[string]any{"quota": int64(l.CPU * 100_000), "period": 100_000},
		"pids":   map[string]any{"limit": l.Pids},
	}
	return json.Marshal(c)
}

func (r *runc) create(ctx context.Context, n int) ([]dsec.Stage, error) {
	begin := time.Now()
	if err := r.run(ctx, nil, "create", "--bundle", r.bundle(n), r.id(n)); err != nil {
		return nil, err
	}
	created := time.Since(begin)
	err := r.run(ctx, nil, "start", r.id(n))
	return []dsec.Stage{{Name: "runc create", Took: created}, {Name: "runc start", Took: time.Since(begin) - created}}, err
}

func (r *runc) exec(ctx context.Context, n int, out io.Writer, argv ...string) error {
	return r.run(ctx, out, append([]string{"exec", r.id(n)}, argv...)...)
}

func (r *runc) destroy(ctx context.Context, n int) error {
	if err := r.run(ctx, nil, "delete", "--force", r.id(n)); err != nil {
		return err
	}
	if err := unix.Unmount(r.rootfs(n), unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount root of runc box: %w", err)
	}
	return os.RemoveAll(r.bundle(n))
}

// close ends boxes that an interrupted run left.
func (r *runc) close() error {
	ctx := context.Background()
	var errs []error
	states, _ := os.ReadDir(r.state())
	for _, s := range states {
		errs = append(errs, r.run(ctx, nil, "delete", "--force", s.Name()))
	}
	return errors.Join(append(errs, removeGroups(r.group), unmountBelow(r.dir), os.RemoveAll(r.dir))...)
}

// run executes runc. A box started by create inherits its output, so that is
// /dev/null, and the reason of a failure comes from runc's log.
func (r *runc) run(ctx context.Context, out io.Writer, args ...string) error {
	log, err := os.CreateTemp(r.dir, "log-")
	if err != nil {
		return err
	}
	defer os.Remove(log.Name())
	defer log.Close()
	cmd := exec.CommandContext(ctx, r.program, append([]string{"--root", r.state(), "--log", log.Name()}, args...)...)
	cmd.Stdout = out
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		text, _ := io.ReadAll(log)
		return fmt.Errorf("runc %s: %w: %s", args[0], err, bytes.TrimSpace(text))
	}
	return nil
}
