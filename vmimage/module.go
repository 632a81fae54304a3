package main

import (
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/dsec-go/dsec/vm/initramfs"
)

// wanted are the modules that are kept, with what they need: those that a
// machine boots with, and those that the kernel asks for when a workload uses
// what they are for. The rest of Debian's is for hardware.
func wanted() []string {
	return append(slices.Clone(initramfs.Boot),
		// Docker, iptables, tunnels, loop devices and such in a sandbox.
		"loop", "tun", "veth", "bridge", "br_netfilter", "dummy", "macvlan", "vxlan", "wireguard",
		"nf_tables", "nft_compat", "nft_chain_nat", "nft_ct", "nft_masq", "nft_nat", "nft_redir", "nft_log", "nft_limit",
		"nft_reject_inet", "nft_reject_ipv4", "nft_fib_inet", "nf_conntrack_netlink", "nf_nat",
		"ip_tables", "iptable_filter", "iptable_nat", "iptable_mangle", "ip6_tables", "ip6table_filter", "ip6table_nat",
		"xt_conntrack", "xt_MASQUERADE", "xt_addrtype", "xt_nat", "xt_tcpudp", "xt_mark", "xt_comment", "xt_limit",
		"xt_multiport", "xt_owner", "xt_state", "xt_REDIRECT", "xt_set", "ipt_REJECT",
		"squashfs", "isofs", "vfat", "9p", "9pnet_virtio", "cuse", "virtiofs", "zram", "lzo_rle", "brd", "nbd", "dm_mod", "dm_crypt")
}

// writeModules decompresses the named modules of a kernel, whose package has
// them in from, and those they need into dir, with an index. Names that the
// kernel lacks, or has built in, are passed over.
//
// The package has no modules.dep, which is made at installation, so the files
// themselves are asked.
func writeModules(ctx context.Context, from, dir string, names []string) error {
	files := map[string]string{}
	err := filepath.WalkDir(from, func(path string, e fs.DirEntry, err error) error {
		if name, _, ok := strings.Cut(filepath.Base(path), ".ko"); ok && err == nil && !e.IsDir() {
			files[moduleName(name)] = path
		}
		return err
	})
	if err != nil {
		return err
	}
	part := dir + ".part"
	if err := os.RemoveAll(part); err != nil {
		return err
	}
	defer os.RemoveAll(part)
	if err := os.Mkdir(part, 0o755); err != nil {
		return err
	}
	seen := map[string]bool{}
	var index initramfs.Index
	var add func(name string) error
	add = func(name string) error {
		file := files[name]
		if seen[name] || file == "" { // built in, or not of this version
			return nil
		}
		seen[name] = true
		b, err := decompress(ctx, file)
		if err != nil {
			return err
		}
		m, err := parseModule(name, b)
		if err != nil {
			return fmt.Errorf("module %s: %w", name, err)
		}
		for _, n := range m.Needs {
			if err := add(n); err != nil {
				return err
			}
		}
		m.Needs = slices.DeleteFunc(m.Needs, func(n string) bool { return files[n] == "" })
		index = append(index, m)
		return os.WriteFile(filepath.Join(part, name+".ko"), b, 0o644)
	}
	for _, name := range names {
		if err := add(name); err != nil {
			return err
		}
	}
	if len(index) == 0 {
		return errors.New("the kernel's package has no module that is wanted")
	}
	if err := os.WriteFile(filepath.Join(part, initramfs.IndexFile), index.Append(nil), 0o644); err != nil {
		return err
	}
	return os.Rename(part, dir)
}

// moduleName is how the kernel writes a name.
func moduleName(s string) string { return strings.ReplaceAll(s, "-", "_") }

func decompress(ctx context.Context, file string) ([]byte, error) {
	tool := map[string]string{".xz": "xz", ".zst": "zstd", ".gz": "gzip"}[filepath.Ext(file)]
	if tool == "" {
		return os.ReadFile(file)
	}
	b, err := exec.CommandContext(ctx, tool, "-dc", file).Output()
	if err != nil {
		return nil, fmt.Errorf("decompress %s: %w", file, err)
	}
	return b, nil
}

// parseModule reads the section in which a module describes itself: strings of
// the form name=value.
func parseModule(name string, b []byte) (initramfs.Module, error) {
	m := initramfs.Module{Name: name}
	f, err := elf.NewFile(bytes.NewReader(b))
	if err != nil {
		return m, err
	}
	s := f.Section(".modinfo")
	if s == nil {
		return m, errors.New("no .modinfo")
	}
	info, err := s.Data()
	if err != nil {
		return m, err
	}
	for _, line := range strings.Split(string(info), "\x00") {
		key, value, _ := strings.Cut(line, "=")
		switch key {
		case "depends":
			for _, n := range strings.Split(value, ",") {
				if n != "" {
					m.Needs = append(m.Needs, moduleName(n))
				}
			}
		case "softdep":
			// "pre: a b post: c"; what comes after is not needed for loading.
			_, pre, _ := strings.Cut(value, "pre:")
			pre, _, _ = strings.Cut(pre, "post:")
			for _, n := range strings.Fields(pre) {
				m.Needs = append(m.Needs, moduleName(n))
			}
		case "alias":
			// Patterns are of hardware that a machine does not grow, but for
			// those whose wildcard is only at the end of a bus's name.
			if !strings.ContainsAny(value, "*?[ ") {
				m.Aliases = append(m.Aliases, moduleName(value))
			}
		}
	}
	return m, nil
}
