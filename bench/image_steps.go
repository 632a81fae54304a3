package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/blob"
	"github.com/dsec-go/dsec/image"
)

// The budgets of single steps.
const (
	importOfTar  = 0.5 // of the speed of tar -x
	warmOfPlain  = 0.9 // of the speed of a plain mount
	commitBudget = 2.0 // s, of commitBytes
	commitBytes  = 100_000_000
)

// ImageSteps measures an import against unpacking the same tar, reading what is
// in memory through a sandbox against a plain mount of the same files, and a
// commit. Each has its baseline in the same rounds. N is the number of rounds,
// Size that of the environment, by default 256 MiB.
func ImageSteps(ctx context.Context, o ImageOptions) (_ *Report, err error) {
	def(&o.Size, 256<<20)
	def(&o.N, 3)
	o = o.withDefaults()
	b := &imageBench{o: o, report: NewReport("image steps")}
	if l := load(); l > quietLoad*float64(b.report.Host.CPUs) {
		b.report.Note("The host was busy before the run began: %.1f processes wanted to run.", l)
	}
	n, err := b.node(ctx, "steps", "")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, n.close()) }()
	for _, step := range []func(context.Context, *imageNode) error{b.imports, b.warm, b.commits} {
		if err := step(ctx, n); err != nil {
			return nil, err
		}
	}
	return b.report, nil
}

// imports times tar -x and an import, on files that the node has not seen.
func (b *imageBench) imports(ctx context.Context, n *imageNode) error {
	tarTime, ours, ratios := &Sample{Unit: "s"}, &Sample{Unit: "s"}, &Sample{Unit: "ratio"}
	file, dir := filepath.Join(b.o.Dir, "import.tar"), filepath.Join(b.o.Dir, "extracted")
	for i := range b.o.N {
		b.o.Log("import: round %d of %d", i+1, b.o.N)
		plain, _, err := b.write(file, 1000+i)
		if err != nil {
			return err
		}
		if err := os.Mkdir(dir, 0o700); err != nil {
			return err
		}
		begin := time.Now()
		cmd := exec.CommandContext(ctx, "tar", "-xf", file, "-C", dir)
		endTogether(cmd)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("tar -x: %w: %s", err, out)
		}
		extract := time.Since(begin)
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
		f, err := os.Open(file)
		if err != nil {
			return err
		}
		begin = time.Now()
		img, err := n.Images.Upload(ctx, dsec.ImportOptions{Name: fmt.Sprintf("import-%d@1", i)}, f)
		took := time.Since(begin)
		f.Close()
		if err != nil {
			return err
		}
		tarTime.Add(extract.Seconds())
		ours.Add(took.Seconds())
		ratios.Add(extract.Seconds() / took.Seconds())
		if i == 0 {
			b.envs = append(b.envs, environment{name: img.Ref(), digest: img.Digest, plain: plain})
		}
	}
	b.report.Hold("speed of an import, of tar -x", ratios.P50(), AtLeast, importOfTar, "ratio")
	b.report.Add("import", ours)
	b.report.Add("tar -x", tarTime)
	return os.Remove(file)
}

// warm times reading all of an environment that is in memory.
func (b *imageBench) warm(ctx context.Context, n *imageNode) error {
	e := b.envs[0]
	mount, err := b.mountPlain(ctx, n, e.digest)
	if err != nil {
		return err
	}
	defer mount.Close()
	sb, err := n.Sandboxes.Create(ctx, dsec.Spec{Environment: dsec.Environment{Base: e.name}}, dsec.CreateOptions{})
	if err != nil {
		return err
	}
	defer n.Sandboxes.Stop(context.WithoutCancel(ctx), sb.ID) //nolint:errcheck // it ends with the node
	// The same program on both sides, one that copies what it reads, 8 KiB at a time: cat only
	// hands pages on to where they are dropped. Ten times, so that it is not the start of a
	// command which is measured.
	const line = "for i in 1 2 3 4 5 6 7 8 9 10; do " + staticShell + " find opt -type f -exec " + staticShell + " tail -q -c +1 {} + >/dev/null; done"
	inside := func() (time.Duration, error) {
		begin := time.Now()
		res, err := n.Commands.Run(ctx, dsec.Call{Sandbox: sb.ID}, dsec.Command{Shell: "cd / && " + line}, nil)
		if err == nil && res.Code != 0 {
			err = fmt.Errorf("read: %d: %s", res.Code, res.Err)
		}
		return time.Since(begin), err
	}
	outside := func() (time.Duration, error) {
		begin := time.Now()
		cmd := exec.CommandContext(ctx, staticShell, "sh", "-c", "cd /proc/self/fd/3 && "+line)
		cmd.ExtraFiles = []*os.File{mount}
		out, err := cmd.CombinedOutput()
		if err != nil {
			err = fmt.Errorf("read the plain mount: %w: %s", err, out)
		}
		return time.Since(begin), err
	}
	plain, ours, ratios := &Sample{Unit: "s"}, &Sample{Unit: "s"}, &Sample{Unit: "ratio"}
	for i := range b.o.N + 1 { // the first fills the memory
		out, err := outside()
		if err != nil {
			return err
		}
		in, err := inside()
		if err != nil {
			return err
		}
		if i > 0 {
			plain.Add(out.Seconds())
			ours.Add(in.Seconds())
			ratios.Add(out.Seconds() / in.Seconds())
		}
	}
	b.report.Hold("speed of warm reads in a sandbox, of a plain mount", ratios.P50(), AtLeast, warmOfPlain, "ratio")
	b.report.Add("warm read of an environment in a sandbox, ten times", ours)
	b.report.Add("warm read of a plain mount, ten times", plain)
	return nil
}

// mountPlain mounts the files of a layer as anybody could.
func (b *imageBench) mountPlain(ctx context.Context, n *imageNode, digest string) (*os.File, error) {
	store, err := blob.OpenFolder(filepath.Join(n.server.data(), "blobs"))
	if err != nil {
		return nil, err
	}
	files, err := image.New(store, image.LibraryOptions{}).Open(ctx, blob.Digest(digest))
	if err != nil {
		return nil, err
	}
	fs, err := unix.Fsopen("erofs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("open erofs: %w", err)
	}
	defer unix.Close(fs)
	err = unix.FsconfigSetString(fs, "source", files.Meta)
	for _, d := range files.Data {
		err = errors.Join(err, unix.FsconfigSetString(fs, "device", d))
	}
	if err = errors.Join(err, unix.FsconfigSetFlag(fs, "ro"), unix.FsconfigCreate(fs)); err != nil {
		return nil, fmt.Errorf("mount erofs: %w", err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("mount erofs: %w", err)
	}
	return os.NewFile(uintptr(fd), "mount"), nil
}

// commits times commits of what was just written, and how long the workload
// stands still for them: a process in the sandbox looks at the clock all the time.
func (b *imageBench) commits(ctx context.Context, n *imageNode) error {
	took, still := &Sample{Unit: "s"}, Millis()
	for i := range b.o.N {
		b.o.Log("commit: round %d of %d", i+1, b.o.N)
		sb, err := n.Sandboxes.Create(ctx, dsec.Spec{Environment: dsec.Environment{Base: b.envs[0].name}}, dsec.CreateOptions{})
		if err != nil {
			return err
		}
		run := func(line string) (string, error) {
			res, err := n.Commands.Run(ctx, dsec.Call{Sandbox: sb.ID}, dsec.Command{Shell: line}, nil)
			if err == nil && res.Code != 0 {
				err = fmt.Errorf("%q: %d: %s", line, res.Code, res.Err)
			}
			return string(res.Out), err
		}
		_, err = run(fmt.Sprintf("mkdir /work; for i in $(/bin/busybox seq 100); do /bin/busybox head -c %d /dev/urandom >/work/$i; done", commitBytes/100))
		if err == nil {
			_, err = run("(while read -r t _ </proc/uptime; do echo $t; /bin/busybox usleep 5000; done >/dev/shm/ticks 2>/dev/null) </dev/null >/dev/null 2>&1 &")
		}
		if err != nil {
			return err
		}
		begin := time.Now()
		if _, err := n.Sandboxes.Commit(ctx, sb.ID, fmt.Sprintf("commit-%d@1", i)); err != nil {
			return err
		}
		took.Add(time.Since(begin).Seconds())
		ticks, err := run("cat /dev/shm/ticks")
		if err != nil {
			return err
		}
		still.Add(longestGap(ticks) * 1000)
		if _, err := n.Sandboxes.Stop(ctx, sb.ID); err != nil {
			return err
		}
	}
	b.report.Hold("commit of 100 MB changed", took.P50(), AtMost, commitBudget, "s")
	b.report.Add("commit of 100 MB changed", took)
	b.report.Add("the workload stands still for it, in steps of 10 ms", still)
	return nil
}

// longestGap gives the longest time between two lines of seconds.
func longestGap(ticks string) (longest float64) {
	last := -1.0
	for line := range strings.Lines(ticks) {
		t, err := strconv.ParseFloat(strings.TrimSpace(line), 64)
		if err != nil {
			continue
		}
		if last >= 0 {
			longest = max(longest, t-last)
		}
		last = t
	}
	return longest
}
