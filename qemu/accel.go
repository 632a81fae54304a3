package qemu

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
)

// KVM is the accelerator that runs guests on the processor itself.
const KVM = "kvm"

// kvmLimit is how long a kernel may take to boot under KVM until it is given
// up: a hundred times what one takes where KVM works.
const kvmLimit = 10 * time.Second

// Verdict is what Accelerator found out, and why.
type Verdict struct {
	Accel  string // KVM or TCG
	Detail string
}

// Accelerator says how to run a guest kernel: by KVM if the kernel really boots
// under it, else by emulation. That the device opens says little: some hosts
// have it, and a stock kernel hangs in it. The verdict is kept in cacheDir for
// the kernel and the uptime of the host.
func Accelerator(ctx context.Context, kernel, cacheDir string) (Verdict, error) {
	if err := openKVM(); err != nil {
		return Verdict{Accel: TCG, Detail: err.Error()}, nil
	}
	key, err := verdictKey(kernel)
	if err != nil {
		return Verdict{}, fmt.Errorf("choose accelerator: %w", err)
	}
	path := filepath.Join(cacheDir, "accel-"+key)
	var v Verdict
	if b, err := os.ReadFile(path); err == nil && json.Unmarshal(b, &v) == nil && (v.Accel == KVM || v.Accel == TCG) {
		return v, nil
	}
	v, err = tryKVM(ctx, kernel)
	if err != nil {
		return Verdict{}, fmt.Errorf("choose accelerator: %w", err)
	}
	b, err := json.Marshal(v)
	if err == nil {
		err = os.WriteFile(path, b, 0o600)
	}
	if err != nil {
		return Verdict{}, fmt.Errorf("keep accelerator: %w", err)
	}
	return v, nil
}

func openKVM() error {
	fd, err := unix.Open("/dev/kvm", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open /dev/kvm: %w", err)
	}
	return unix.Close(fd)
}

// verdictKey names the kernel and the boot of this host.
func verdictKey(kernel string) (string, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", err
	}
	f, err := os.Open(kernel)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	h.Write(boot)
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)[:16]), nil
}

// booted is what a kernel says that came as far as looking for its root, which
// it is not given.
const booted = "Unable to mount root fs"

// tryKVM boots the kernel with nothing else.
func tryKVM(ctx context.Context, kernel string) (Verdict, error) {
	dir, err := os.MkdirTemp("", "dsec-kvm-")
	if err != nil {
		return Verdict{}, err
	}
	defer os.RemoveAll(dir)
	files := &Files{}
	p, err := Start(ctx, Config{Dir: dir, Accel: KVM, Files: files, Args: []string{
		"-machine", "microvm", "-m", "256M", "-cpu", "host", "-serial", "chardev:console",
		"-kernel", files.OpenPath(kernel, os.O_RDONLY), "-append", "console=ttyS0 panic=-1 reboot=t",
	}})
	if ctx.Err() != nil {
		return Verdict{}, ctx.Err()
	}
	if err != nil {
		return Verdict{Accel: TCG, Detail: "KVM: " + err.Error()}, nil
	}
	defer p.Kill()
	console := p.Console
	select {
	case <-p.Done():
		if d := p.Exit().Detail; strings.Contains(d, booted) {
			return Verdict{Accel: KVM, Detail: "the guest kernel boots under it"}, nil
		}
		return Verdict{Accel: TCG, Detail: "the guest kernel does not boot under KVM: " + p.Exit().String()}, nil
	case <-time.After(kvmLimit):
		said := lastLines(console(), 1)
		if said == "" {
			said = "it printed nothing"
		}
		return Verdict{Accel: TCG, Detail: fmt.Sprintf("the guest kernel did not boot under KVM in %v: %s", kvmLimit, said)}, nil
	case <-ctx.Done():
		return Verdict{}, ctx.Err()
	}
}

// Features probes what this package needs of the host. Whether a guest boots
// under KVM is known after the first start of one, see Accelerator.
func Features() []dsec.FeatureStatus {
	qemu := dsec.FeatureStatus{Name: "qemu", Cost: "no sandbox of kind microvm or fullvm can be made"}
	if path, err := exec.LookPath(Program); err != nil {
		qemu.Detail = Program + " is not installed"
	} else if out, err := exec.Command(path, "--version").Output(); err != nil {
		qemu.Detail = fmt.Sprintf("run %s: %v", path, err)
	} else {
		line, _, _ := strings.Cut(string(out), "\n")
		qemu = dsec.FeatureStatus{Name: "qemu", OK: true, Detail: line}
	}
	kvm := dsec.FeatureStatus{Name: "kvm", Cost: "virtual machines are emulated: the same, some fifteen times slower"}
	if err := openKVM(); errors.Is(err, os.ErrNotExist) {
		kvm.Detail = "there is no /dev/kvm"
	} else if err != nil {
		kvm.Detail = err.Error()
	} else {
		kvm = dsec.FeatureStatus{Name: "kvm", OK: true, Detail: "/dev/kvm opens; a guest that does not boot under it is emulated"}
	}
	return []dsec.FeatureStatus{qemu, kvm}
}
