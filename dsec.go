// Package dsec holds the words and the contracts of DSec, the sandbox platform
// on which language-model agents are trained and evaluated.
//
// A sandbox is one isolated computer. A Spec says what is wanted; a Sandbox is
// the record of what became of it. The services a caller uses are small
// interfaces: Sandboxes, Commands, Files, Ports, Images, Tokens, Nodes. The
// edge, the api and the Go client all satisfy them, so a program can work with
// a cluster, with one node or with a node in its own process through the same
// types.
//
// What this package does not do: it has no I/O, starts nothing and imports the
// standard library only. Wire types live in rpc, kernel resources in jail,
// rootfs and driver.
//
// Invariants:
//   - Every Spec field has a default that Spec.WithDefaults fills in and
//     Spec.Check validates; both are pure.
//   - An Error carries one ErrorKind. The kinds mean the same on both ends of a
//     connection; Retryable follows from the kind alone.
//   - A command's own exit status, signal or timeout is an outcome in its
//     CommandStatus, never an Error.
//   - Byte counts are bytes, times are UTC, durations are time.Duration, CPU is
//     in cores.
//
// Read next: docs/ARCHITECTURE.md, then packages driver and edge.
package dsec

// Version names this build of the protocol and the programs. It is reported by
// "dsec version" and by every server in its health answer.
const Version = "0.1.0"

// Kind says how a sandbox is isolated. Switching is one field of a Spec.
type Kind string

// The kinds of sandbox.
const (
	Container Kind = "container" // namespaces, cgroups and seccomp on a layered root
	MicroVM   Kind = "microvm"   // an own kernel, restored from a warm snapshot
	FullVM    Kind = "fullvm"    // firmware, disk image, screen
	FnCall    Kind = "fncall"    // a pre-warmed reusable sandbox, pristine for each call
)

// Kinds lists every kind in the order they are documented.
var Kinds = []Kind{Container, MicroVM, FullVM, FnCall}

// Check reports whether k is one of Kinds.
func (k Kind) Check() error {
	for _, x := range Kinds {
		if k == x {
			return nil
		}
	}
	return Errorf(Invalid, "kind %q is not one of container, microvm, fullvm, fncall", string(k))
}
