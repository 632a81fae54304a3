// Package swap makes swap space of a node's own, so that the memory of paused
// sandboxes has somewhere to go: a compressed device in memory first, a file on
// disk behind it. It touches no other swap of the host and decides nothing
// about who is swapped; package jail does.
//
// The compressed device is a tenth of the whole. What does not compress takes
// as much memory there as it gave back, so that is the most which a full swap
// takes back of what it gives; and everything a little pause needs is answered
// without the disk.
//
// All of it is named in one folder, and found again there by the next process:
//
//	file     the swap file, nothing else uses it
//	state    which compressed device is ours, and in which life of the kernel
//
// Invariants:
//   - Make leaves nothing behind when it fails. Remove may be called at any
//     time, also for what was never made or went with a reboot.
//   - State is written before a device is used: a crash leaves at most a device
//     of size zero, which takes nothing.
//
// Read next: docs/decisions/pause.md.
package swap

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
)

const (
	fileName  = "file"
	stateName = "state"

	compressedPart = 10 // one part in so many is the compressed device

	// The compressed device is filled first. Swap of the host's own has
	// negative priorities unless somebody chose otherwise.
	compressedPriority = 100
	filePriority       = 50

	// MinSize is the least that is worth a device.
	MinSize = 16 << 20
)

// state is what the folder says.
type state struct {
	Boot string // life of the kernel in which Zram is ours
	Zram int    // number of the compressed device, -1 for none
}

// Make makes size bytes of swap and switches it on. dir is made if missing; it
// must be on a disk whose file system can hold swap files. Swap that was made
// there before and is on is left as it is. A host without compressed devices
// gets the file alone.
func Make(dir string, size int64) (err error) {
	if size < MinSize {
		return dsec.Errorf(dsec.Invalid, "swap of %d bytes is less than %d", size, MinSize)
	}
	file := filepath.Join(dir, fileName)
	if active, err := Active(dir); err != nil || active {
		return err
	}
	if err := Remove(dir); err != nil { // of an earlier life
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make swap: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("make swap: %w", err), Remove(dir))
		}
	}()
	page := int64(os.Getpagesize())
	compressed := size / compressedPart / page * page
	rest := (size - compressed) / page * page
	if err := makeFile(file, rest); err != nil {
		return err
	}
	if err := swapOn(file, filePriority); err != nil {
		return err
	}
	return makeCompressed(dir, compressed)
}

// makeFile allocates a swap file. It has no holes: the kernel writes to its
// blocks past the file system.
func makeFile(path string, size int64) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(path), &fs); err != nil {
		return err
	}
	if free := int64(fs.Bavail) * fs.Bsize; free-size < int64(fs.Blocks)*fs.Bsize/20 {
		return dsec.Errorf(dsec.Exhausted, "%d MiB of disk are free, which is too little for a swap file of %d MiB", free>>20, size>>20)
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.Fallocate(int(f.Fd()), 0, 0, size); err != nil {
		return fmt.Errorf("allocate %s: %w", path, err)
	}
	if _, err := f.WriteAt(header(size), 0); err != nil {
		return err
	}
	return f.Sync()
}

// header gives the first page of swap space: version 1, its last page, no bad
// ones, and the signature at the page's end.
func header(size int64) []byte {
	page := os.Getpagesize()
	b := make([]byte, page)
	binary.NativeEndian.PutUint32(b[1024:], 1)
	binary.NativeEndian.PutUint32(b[1028:], uint32(size/int64(page)-1))
	copy(b[page-10:], "SWAPSPACE2")
	return b
}

const zramControl = "/sys/class/zram-control/"

// makeCompressed adds a compressed device, where the kernel has them.
func makeCompressed(dir string, size int64) error {
	if _, err := os.Stat(zramControl + "hot_add"); err != nil {
		exec.Command("modprobe", "zram").Run() //nolint:errcheck // it may be built in, or absent
	}
	b, err := os.ReadFile(zramControl + "hot_add")
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("add compressed device: %w", err)
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return fmt.Errorf("add compressed device: %w", err)
	}
	boot, err := bootID()
	if err == nil {
		err = writeState(dir, state{Boot: boot, Zram: n})
	}
	if err != nil {
		return errors.Join(err, removeCompressed(n))
	}
	set := func(name, value string) error {
		if err := os.WriteFile(zramPath(n, name), []byte(value), 0); err != nil {
			return fmt.Errorf("set %s of compressed device: %w", name, err)
		}
		return nil
	}
	set("comp_algorithm", "lz4") //nolint:errcheck // the quickest; the kernel's default is as right
	if err := set("disksize", strconv.FormatInt(size, 10)); err != nil {
		return err
	}
	f, err := os.OpenFile(device(n), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(header(size), 0)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return swapOn(device(n), compressedPriority)
}

func device(n int) string { return "/dev/zram" + strconv.Itoa(n) }
func zramPath(n int, name string) string {
	return "/sys/block/zram" + strconv.Itoa(n) + "/" + name
}

// Remove switches off what Make made and deletes it. Pages in it are read back
// first, which takes a while and needs memory for them; without it the swap
// stays on.
func Remove(dir string) error {
	s, err := readState(dir)
	if err != nil {
		return fmt.Errorf("remove swap: %w", err)
	}
	boot, err := bootID()
	if err != nil {
		return fmt.Errorf("remove swap: %w", err)
	}
	if s.Zram >= 0 && s.Boot == boot {
		if err := removeCompressed(s.Zram); err != nil {
			return fmt.Errorf("remove swap: %w", err)
		}
	}
	file := filepath.Join(dir, fileName)
	if err := swapOff(file); err != nil {
		return fmt.Errorf("remove swap: %w", err)
	}
	for _, path := range []string{filepath.Join(dir, stateName), file, dir} {
		err := os.Remove(path)
		if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ENOTEMPTY) {
			return fmt.Errorf("remove swap: %w", err)
		}
	}
	return nil
}

func removeCompressed(n int) error {
	if err := swapOff(device(n)); err != nil {
		return err
	}
	if err := os.WriteFile(zramPath(n, "reset"), []byte("1"), 0); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("reset compressed device: %w", err)
	}
	err := os.WriteFile(zramControl+"hot_remove", []byte(strconv.Itoa(n)), 0)
	if err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("remove compressed device: %w", err)
	}
	return nil
}

// Active reports whether the swap of a folder is on.
func Active(dir string) (bool, error) {
	file, err := filepath.Abs(filepath.Join(dir, fileName))
	if err != nil {
		return false, err
	}
	all, err := Devices()
	for _, d := range all {
		if d.Path == file {
			return true, err
		}
	}
	return false, err
}

// Compressed tells how much memory the folder's compressed device takes now,
// and how many bytes of pages it holds; both are 0 without one.
func Compressed(dir string) (taken, held int64, err error) {
	s, err := readState(dir)
	if err != nil || s.Zram < 0 {
		return 0, 0, err
	}
	b, err := os.ReadFile(zramPath(s.Zram, "mm_stat"))
	if err != nil {
		return 0, 0, fmt.Errorf("measure compressed device: %w", err)
	}
	f := strings.Fields(string(b))
	if len(f) < 3 {
		return 0, 0, fmt.Errorf("measure compressed device: mm_stat is %q", b)
	}
	held, _ = strconv.ParseInt(f[0], 10, 64)
	taken, _ = strconv.ParseInt(f[2], 10, 64)
	return taken, held, nil
}

// Device is one swap device or file of the host.
type Device struct {
	Path string
	Size int64 // bytes
	Used int64
}

// Devices lists what is on.
func Devices() ([]Device, error) {
	b, err := os.ReadFile("/proc/swaps")
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil // a kernel without swap
	}
	if err != nil {
		return nil, fmt.Errorf("list swap: %w", err)
	}
	return parseSwaps(b), nil
}

// parseSwaps reads /proc/swaps: a heading, then path, type, KiB, KiB used and
// priority of each. White space in a path is written in octal.
func parseSwaps(b []byte) []Device {
	var out []Device
	for i, line := range bytes.Split(b, []byte("\n")) {
		f := strings.Fields(string(line))
		if i == 0 || len(f) < 4 {
			continue
		}
		size, _ := strconv.ParseInt(f[2], 10, 64)
		used, _ := strconv.ParseInt(f[3], 10, 64)
		out = append(out, Device{Path: unescape(f[0]), Size: size << 10, Used: used << 10})
	}
	return out
}

func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// Feature says whether the host has swap.
func Feature() dsec.FeatureStatus {
	f := dsec.FeatureStatus{
		Name: "swap",
		Cost: "a paused sandbox gives back the pages of its files and keeps its memory; dsec doctor --fix or dsec up --swap SIZE makes some",
	}
	all, err := Devices()
	if err != nil {
		f.Detail = err.Error()
		return f
	}
	if len(all) == 0 {
		f.Detail = "none is on"
		return f
	}
	var size, used int64
	for _, d := range all {
		size += d.Size
		used += d.Used
	}
	f.OK, f.Detail = true, fmt.Sprintf("%d MiB, %d of them used", size>>20, used>>20)
	return f
}

func swapOn(path string, priority int) error {
	const prefer = 0x8000
	p, err := unix.BytePtrFromString(path)
	if err != nil {
		return err
	}
	if _, _, errno := unix.Syscall(unix.SYS_SWAPON, uintptr(unsafe.Pointer(p)), uintptr(prefer|priority), 0); errno != 0 {
		return fmt.Errorf("switch swap %s on: %w", path, errno)
	}
	return nil
}

// swapOff switches a device off; one that is not on, or not there, is fine.
func swapOff(path string) error {
	p, err := unix.BytePtrFromString(path)
	if err != nil {
		return err
	}
	_, _, errno := unix.Syscall(unix.SYS_SWAPOFF, uintptr(unsafe.Pointer(p)), 0, 0)
	if errno != 0 && errno != unix.EINVAL && errno != unix.ENOENT {
		return fmt.Errorf("switch swap %s off: %w", path, errno)
	}
	return nil
}

func readState(dir string) (state, error) {
	s := state{Zram: -1}
	b, err := os.ReadFile(filepath.Join(dir, stateName))
	if errors.Is(err, os.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(b, &s); err != nil {
		// Half a write: the device was not in use yet.
		return state{Zram: -1}, nil //nolint:nilerr
	}
	return s, nil
}

func writeState(dir string, s state) error {
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, stateName), b, 0o600)
}

func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(b)), err
}
