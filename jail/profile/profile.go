// Package profile compiles the seccomp filter of containers: Docker's default
// profile, taken as data from its kept module, for the capabilities of package
// jail. It is apart from jail so that the guest binary, which only installs the
// program, links neither the profile nor the compiler.
//
// One difference from Docker: 32-bit system calls are refused, so i386 programs
// do not run in containers.
//
// Read next: package jail.
package profile

import (
	"encoding/binary"
	"fmt"
	"sync"

	seccomp "github.com/elastic/go-seccomp-bpf"
	"github.com/elastic/go-seccomp-bpf/arch"
	profiles "github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec/jail"
)

// Default is the program for jail.Setup.Filter: an array of struct sock_filter
// in the host's byte order. It is compiled once.
var Default = sync.OnceValues(func() ([]byte, error) { return compile() })

// Warm is Default and setns, which a process needs that forks itself into cells
// (see jail.Box.StartWarm). To whoever has no capability, as everything in a
// cell, the call is refused by the kernel.
var Warm = sync.OnceValues(func() ([]byte, error) { return compile("setns") })

func compile(more ...string) ([]byte, error) {
	caps := capabilityNames()
	p, err := profiles.GetDefaultProfile(&specs.Spec{Process: &specs.Process{
		Capabilities: &specs.LinuxCapabilities{Bounding: caps},
	}})
	if err != nil {
		return nil, fmt.Errorf("load seccomp profile: %w", err)
	}
	if len(more) > 0 {
		p.Syscalls = append([]specs.LinuxSyscall{{Names: more, Action: specs.ActAllow}}, p.Syscalls...)
	}
	policy, err := translate(p)
	if err != nil {
		return nil, err
	}
	ins, err := policy.Assemble()
	if err != nil {
		return nil, fmt.Errorf("assemble seccomp filter: %w", err)
	}
	raw, err := bpf.Assemble(ins)
	if err != nil {
		return nil, fmt.Errorf("assemble seccomp filter: %w", err)
	}
	out := make([]byte, 0, 8*len(raw))
	for _, r := range raw {
		out = binary.NativeEndian.AppendUint16(out, r.Op)
		out = append(out, r.Jt, r.Jf)
		out = binary.NativeEndian.AppendUint32(out, r.K)
	}
	return out, nil
}

// translate turns the runtime-spec form into the compiler's. Calls that the
// compiler's table does not know get the default action: refused.
func translate(p *specs.LinuxSeccomp) (*seccomp.Policy, error) {
	info, err := arch.GetInfo("")
	if err != nil {
		return nil, err
	}
	out := &seccomp.Policy{DefaultAction: seccomp.ActionErrno} // EPERM
	// One group for each action; a call's alternatives of conditions belong in
	// one group, where they are alternatives.
	groups := map[seccomp.Action]*seccomp.SyscallGroup{}
	var order []seccomp.Action
	plain := map[string]bool{}
	for _, s := range p.Syscalls {
		action, err := translateAction(s)
		if err != nil {
			return nil, err
		}
		g := groups[action]
		if g == nil {
			g = &seccomp.SyscallGroup{Action: action}
			groups[action] = g
			order = append(order, action)
		}
		for _, n := range s.Names {
			if _, known := info.SyscallNames[n]; !known || plain[n] {
				continue
			}
			if len(s.Args) == 0 {
				plain[n] = true
				g.Names = append(g.Names, n)
				continue
			}
			cs, err := conditions(s.Args)
			if err != nil {
				return nil, fmt.Errorf("seccomp rule of %s: %w", n, err)
			}
			g.NamesWithCondtions = append(g.NamesWithCondtions, seccomp.NameWithConditions{Name: n, Conditions: cs})
		}
	}
	for _, a := range order {
		out.Syscalls = append(out.Syscalls, *groups[a])
	}
	return out, nil
}

func errno(e unix.Errno) seccomp.Action { return seccomp.Action(unix.SECCOMP_RET_ERRNO | uint32(e)) }

func translateAction(s specs.LinuxSyscall) (seccomp.Action, error) {
	switch s.Action {
	case specs.ActAllow:
		return seccomp.ActionAllow, nil
	case specs.ActErrno:
		e := unix.EPERM
		if s.ErrnoRet != nil {
			e = unix.Errno(*s.ErrnoRet)
		}
		return errno(e), nil
	}
	return 0, fmt.Errorf("seccomp action %s is not known", s.Action)
}

func conditions(args []specs.LinuxSeccompArg) (seccomp.ArgumentConditions, error) {
	var out seccomp.ArgumentConditions
	for _, a := range args {
		c := seccomp.Condition{Argument: uint32(a.Index), Value: a.Value}
		switch {
		case a.Op == specs.OpEqualTo:
			c.Operation = seccomp.Equal
		case a.Op == specs.OpNotEqual:
			c.Operation = seccomp.NotEqual
		case a.Op == specs.OpLessThan:
			c.Operation = seccomp.LessThan
		case a.Op == specs.OpMaskedEqual && a.ValueTwo == 0:
			c.Operation = seccomp.BitsNotSet
		default:
			return nil, fmt.Errorf("comparison %s is not known", a.Op)
		}
		out = append(out, c)
	}
	return out, nil
}

var names = map[int]string{
	unix.CAP_CHOWN: "CAP_CHOWN", unix.CAP_DAC_OVERRIDE: "CAP_DAC_OVERRIDE", unix.CAP_FSETID: "CAP_FSETID",
	unix.CAP_FOWNER: "CAP_FOWNER", unix.CAP_MKNOD: "CAP_MKNOD", unix.CAP_NET_RAW: "CAP_NET_RAW",
	unix.CAP_SETGID: "CAP_SETGID", unix.CAP_SETUID: "CAP_SETUID", unix.CAP_SETFCAP: "CAP_SETFCAP",
	unix.CAP_SETPCAP: "CAP_SETPCAP", unix.CAP_NET_BIND_SERVICE: "CAP_NET_BIND_SERVICE",
	unix.CAP_SYS_CHROOT: "CAP_SYS_CHROOT", unix.CAP_KILL: "CAP_KILL", unix.CAP_AUDIT_WRITE: "CAP_AUDIT_WRITE",
}

func capabilityNames() []string {
	var out []string
	for _, c := range jail.Capabilities {
		out = append(out, names[c])
	}
	return out
}
