// Package jail puts one process tree in a box made by the kernel: user, mount,
// pid, network, ipc, uts and cgroup namespaces, a root of its own, limits, a
// seccomp filter and few capabilities. It knows no images and no protocol.
//
// Three programs take part; the first two are the small guest binary.
//
//	host side (the edge)   Holder asks for shells, Group sets limits, Dress and Enter
//	holder                 ServeHold: forks shells into fresh namespaces; survives the edge
//	shell, then box        Serve and Dress: all that depends on no Spec; Enter: the root
//
// The holder exists because a fork into a new user namespace copies the
// forking program's page tables: cheap for a program of one megabyte, dear for
// the edge. It is logic-free and lives in a mount namespace that holds nothing
// but /proc, /sys and a few device nodes, so a shell inherits no host mount.
//
// A shell is pid 1 of a pid namespace of its own. The workload lives one
// namespace below, under a reaper that is a forked, never executed copy of the
// shell running raw system calls: it costs a few pages. So the workload sees
// neither the guest nor its files, and ending the shell ends everything: when
// its pidfd is readable, the kernel has killed and collected the whole tree.
//
// One locked thread of the shell, the forge, sits in the workload's cgroups,
// wears its seccomp filter and has only its capabilities, in a Landlock domain
// where the kernel has that. It does nothing but fork, and what it forks inherits
// all of that: nothing is ever moved between cgroups, which costs ten
// milliseconds on a quiet host. On v2 the kernel forks into a command's cgroup;
// fork.go says how that passes the filter.
//
// Invariants:
//   - A command's group (a freezer on v1, a cgroup on v2) contains all its
//     descendants, also after setsid; Kill ends them all.
//   - No descriptor but 0, 1 and 2 reaches a command.
//   - The guest binary has no path in the box, is not dumpable, and its process
//     sits in the node's guest cgroup, not in the workload's.
//
// Read next: box.go (starting commands), prepare.go, holder.go; then package
// driver/container, which owns the order of things on the host.
package jail
