package main

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// The Debian image is a raw disk with an old-style partition table: syslinux and
// systemd-boot in a small FAT partition, which their tools write into a file with
// nothing mounted, and the root on ext4, which mke2fs fills from a folder.
// Firmware of either age boots it, by the same kernel and initramfs.
const (
	debianRelease = "bookworm"
	debianSize    = 3 << 30 // sparse; at boot the root grows to the disk that it is given

	bootStart = 1 << 20 // bytes
	bootSize  = 63 << 20
	rootStart = bootStart + bootSize
	rootSize  = debianSize - rootStart

	guestPath = "/usr/local/sbin/dsec-guest"
)

// debianPackages are what is installed beside what Debian calls essential: an
// init system, a kernel, and what shows that a whole machine is there.
var debianPackages = []string{
	"systemd-sysv", "udev", "dbus", "linux-image-cloud-amd64", "initramfs-tools", "kmod", "fdisk", "e2fsprogs",
	"iproute2", "iptables", "procps", "qemu-guest-agent", "docker.io", "busybox-static",
}

// debianFiles are written before packages are installed.
var debianFiles = map[string]string{
	// The initramfs finds a virtio or AHCI disk with ext4, and nothing else: a
	// small one boots faster.
	"usr/share/initramfs-tools/modules.d/dsec": "virtio_pci\nvirtio_blk\nvirtio_scsi\nahci\nsd_mod\next4\n",
	"etc/initramfs-tools/conf.d/dsec":          "MODULES=list\nCOMPRESS=zstd\n",

	"etc/fstab":    "LABEL=root / ext4 defaults,errors=remount-ro 0 1\n",
	"etc/hostname": "debian\n",
	"etc/systemd/system/dsec-guest.service": `[Unit]
Description=Agent of the DSec node
After=dsec-grow.service

[Service]
ExecStart=` + guestPath + ` agent
Restart=always
RestartSec=1
KillMode=process
Delegate=yes
Slice=-.slice

[Install]
WantedBy=multi-user.target
`,
	"etc/systemd/system/dsec-grow.service": `[Unit]
Description=Grow the root to its disk
DefaultDependencies=no
After=systemd-remount-fs.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/local/sbin/dsec-grow

[Install]
WantedBy=multi-user.target
`,
	"usr/local/sbin/dsec-grow": `#!/bin/sh
# Grows the second partition of the first disk, and the root in it.
disk=/dev/$(lsblk -no PKNAME "$(findmnt -no SOURCE /)")
[ -b "$disk" ] || exit 0
echo ', +' | sfdisk --quiet --force --no-reread -N 2 "$disk" && partx -u -n 2 "$disk"
resize2fs "$(findmnt -no SOURCE /)"
exit 0
`,
	// Whoever has the screen has the machine.
	"etc/systemd/system/getty@tty1.service.d/autologin.conf": "[Service]\nExecStart=\nExecStart=-/sbin/agetty --autologin root --noclear %I $TERM\n",
}

// debianSetup runs in the new root, once all is installed.
const debianSetup = `
systemctl --quiet enable dsec-guest.service dsec-grow.service
systemctl --quiet disable docker.service containerd.service
systemctl --quiet mask apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer e2scrub_reap.service fstrim.timer \
    systemd-timesyncd.service systemd-networkd.service serial-getty@ttyS0.service dpkg-db-backup.timer systemd-pstore.service
passwd -q -d root
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /usr/share/doc/* /usr/share/man/* /usr/share/locale/* /var/log/*.log
: > /etc/machine-id
`

// debianBoot is what the boot loader reads. AppArmor is off: Debian's profiles
// would be compiled at each first boot, and Docker wants a compiler for its own.
// The processor's counter is trusted: on a busy host that emulates it the kernel
// would give it up at boot, and every copy of that machine would tick coarsely.
const debianBoot = `DEFAULT debian
PROMPT 0
TIMEOUT 0
LABEL debian
  KERNEL vmlinuz
  INITRD initrd.img
  APPEND ` + debianLine + `
`

const debianLine = "root=LABEL=root rw console=tty0 console=ttyS0 quiet loglevel=3 panic=-1 apparmor=0 tsc=reliable systemd.show_status=0"

// uefiLoader is systemd-boot, of Debian's package systemd-boot-efi.
const uefiLoader = "/usr/lib/systemd/boot/efi/systemd-bootx64.efi"

// uefiFiles are what UEFI firmware boots by, beside what is there for syslinux:
// the loader where firmware looks for one on any disk, and what it reads.
var uefiFiles = map[string]string{
	"loader/loader.conf":         "timeout 0\n",
	"loader/entries/debian.conf": "title Debian\nlinux /vmlinuz\ninitrd /initrd.img\noptions " + debianLine + "\n",
}

// debian leaves a disk image of a Debian system with the guest program in it.
// All but that program is made once and kept in the cache.
func (t tool) debian(ctx context.Context, args []string) error {
	f := flag.NewFlagSet("vmimage debian", flag.ContinueOnError)
	out := f.String("o", filepath.Join(t.out, "debian.img"), "`file` to write")
	bin := f.String("bin", "bin", "`folder` of dsec-guest")
	if err := f.Parse(args); err != nil {
		return err
	}
	base := filepath.Join(t.cache, "debian-"+debianKey()+".img")
	if _, err := os.Stat(base); err != nil {
		if err := t.makeDebian(ctx, base); err != nil {
			return fmt.Errorf("make Debian: %w", err)
		}
	}
	program, err := os.ReadFile(filepath.Join(*bin, "dsec-guest"))
	if err != nil {
		return err
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %q %s", debianKey(), uefiFiles, program))
	mark := *out + ".of"
	if b, err := os.ReadFile(mark); err == nil && string(b) == hex.EncodeToString(sum[:]) {
		if _, err := os.Stat(*out); err == nil {
			return nil
		}
	}
	part := *out + ".part"
	defer os.Remove(part)
	if _, err := command(ctx, t.cache, "cp", "--sparse=always", "--reflink=auto", base, part); err != nil {
		return err
	}
	if err := putFile(ctx, part, filepath.Join(*bin, "dsec-guest")); err != nil {
		return err
	}
	if err := t.putLoader(ctx, part); err != nil {
		return fmt.Errorf("make the image bootable by UEFI: %w", err)
	}
	if err := os.Rename(part, *out); err != nil {
		return err
	}
	return os.WriteFile(mark, []byte(hex.EncodeToString(sum[:])), 0o644)
}

// debianKey names what the image is made from.
func debianKey() string {
	h := sha256.New()
	fmt.Fprintf(h, "1 %q %d %q %q %q %q", debianRelease, debianSize, debianPackages, debianFiles, debianSetup, debianBoot)
	return hex.EncodeToString(h.Sum(nil)[:6])
}

// putFile puts the guest program into an image, with nothing mounted.
func putFile(ctx context.Context, image, program string) error {
	abs, err := filepath.Abs(program)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "debugfs", "-w", "-f", "-", fmt.Sprintf("%s?offset=%d", image, rootStart))
	cmd.Stdin = strings.NewReader("write " + abs + " " + guestPath + "\nset_inode_field " + guestPath + " mode 0100755\nstat " + guestPath + "\n")
	text, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(text), "Mode:  0755") {
		return fmt.Errorf("put the guest program into the image: %v: %s", err, text)
	}
	return nil
}

// putLoader puts what UEFI firmware boots by into an image.
func (t tool) putLoader(ctx context.Context, image string) error {
	work, err := os.MkdirTemp(t.cache, "loader-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	at := fmt.Sprintf("%s@@%d", image, bootStart)
	if _, err := command(ctx, work, "mmd", "-i", at, "::EFI", "::EFI/BOOT", "::loader", "::loader/entries"); err != nil {
		return err
	}
	from := map[string]string{"EFI/BOOT/BOOTX64.EFI": uefiLoader}
	for name, text := range uefiFiles {
		from[name] = filepath.Join(work, filepath.Base(name))
		if err := os.WriteFile(from[name], []byte(text), 0o644); err != nil {
			return err
		}
	}
	for name, file := range from {
		if _, err := command(ctx, work, "mcopy", "-i", at, file, "::"+name); err != nil {
			return err
		}
	}
	return nil
}

// makeDebian makes the image without the guest program.
func (t tool) makeDebian(ctx context.Context, image string) (err error) {
	fmt.Fprintln(os.Stderr, "installing a Debian system into an image")
	work, err := os.MkdirTemp(t.cache, "debian-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	files := filepath.Join(work, "files")
	for name, text := range debianFiles {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(files, name)), 0o755); err != nil {
			return err
		}
		mode := os.FileMode(0o644)
		if strings.HasPrefix(text, "#!") {
			mode = 0o755
		}
		if err := os.WriteFile(filepath.Join(files, name), []byte(text), mode); err != nil {
			return err
		}
	}
	root := filepath.Join(work, "root")
	setup := filepath.Join(work, "setup")
	if err := os.WriteFile(setup, []byte(debianSetup), 0o644); err != nil {
		return err
	}
	arguments := []string{
		"--quiet", "--mode=root", "--variant=minbase", "--format=directory", "--include=" + strings.Join(debianPackages, ","),
		"--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/locale/*",
		"--essential-hook=cp -a " + files + "/. \"$1\"",
		"--customize-hook=chroot \"$1\" sh -e < " + setup,
		debianRelease, root,
	}
	if own := aptSources(ctx, debianRelease); own != "" {
		arguments = append(arguments, own)
	}
	if _, err := command(ctx, work, "mmdebstrap", arguments...); err != nil {
		return err
	}
	part := filepath.Join(work, "image")
	if err := writeDisk(part); err != nil {
		return err
	}
	for name, text := range map[string]string{"syslinux.cfg": debianBoot} {
		if err := os.WriteFile(filepath.Join(work, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	at := fmt.Sprintf("%s@@%d", part, bootStart)
	for _, c := range [][]string{
		{"mformat", "-i", at, "-T", fmt.Sprint(bootSize / 512), "-h", "255", "-s", "63", "-v", "BOOT", "::"},
		{"mcopy", "-i", at, filepath.Join(work, "syslinux.cfg"), "::syslinux.cfg"},
		{"mcopy", "-i", at, filepath.Join(root, "vmlinuz"), "::vmlinuz"},
		{"mcopy", "-i", at, filepath.Join(root, "initrd.img"), "::initrd.img"},
		{"syslinux", "--install", "--offset", fmt.Sprint(bootStart), part},
		{"mke2fs", "-q", "-F", "-t", "ext4", "-L", "root", "-d", root, "-E", fmt.Sprintf("offset=%d,lazy_itable_init=1", rootStart), part, fmt.Sprintf("%dk", rootSize/1024)},
	} {
		if _, err := command(ctx, work, c[0], c[1:]...); err != nil {
			return err
		}
	}
	return os.Rename(part, image)
}

// mbrCode is the program that starts the active partition's.
const mbrCode = "/usr/lib/SYSLINUX/mbr.bin"

// writeDisk makes an empty disk with its partition table.
func writeDisk(path string) error {
	code, err := os.ReadFile(mbrCode)
	if err != nil {
		return err
	}
	if len(code) > 440 {
		return errors.New("the boot program does not fit its place")
	}
	var table [512]byte
	copy(table[:], code)
	copy(table[440:], "dsec") // the disk's name
	for i, p := range []struct {
		active, kind byte
		start, size  int64
	}{{0x80, 0x0e, bootStart, bootSize}, {0, 0x83, rootStart, rootSize}} {
		e := table[446+16*i:]
		e[0], e[4] = p.active, p.kind
		copy(e[1:], []byte{0xfe, 0xff, 0xff}) // no cylinders: by sector alone
		copy(e[5:], []byte{0xfe, 0xff, 0xff})
		binary.LittleEndian.PutUint32(e[8:], uint32(p.start/512))
		binary.LittleEndian.PutUint32(e[12:], uint32(p.size/512))
	}
	table[510], table[511] = 0x55, 0xaa
	if err := os.WriteFile(path, table[:], 0o644); err != nil {
		return err
	}
	return os.Truncate(path, debianSize)
}

// aptSources gives this machine's own apt sources of a Debian release, so that a
// mirror set up here is used; empty when there are none, which leaves the
// choice to mmdebstrap.
func aptSources(ctx context.Context, release string) string {
	out, err := command(ctx, ".", "apt-get", "indextargets",
		"--format", "$(ORIGIN) $(CODENAME) deb $(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages")
	if err != nil {
		return ""
	}
	var lines []string
	main := false
	for line := range strings.Lines(string(out)) {
		origin, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		codename, source, _ := strings.Cut(rest, " ")
		if origin == "Debian" && strings.HasPrefix(codename, release) {
			main = main || codename == release
			lines = append(lines, source)
		}
	}
	if !main {
		return ""
	}
	return strings.Join(lines, "\n")
}
