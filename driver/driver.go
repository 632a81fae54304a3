// Package driver is the contract between a node and the things that run
// sandboxes on it: Driver starts a Machine from a Config, Machine is the live
// object that owns processes and mounts. Powers that only some kinds have are
// extra interfaces found by assertion, as io.WriterTo is.
//
// A driver knows no images, no tokens and no tables: a Root is mounts or a
// folder, so its test needs a temporary directory only. It keeps what it must
// know to find a machine again in its own folder; what a sandbox is for is the
// edge's business.
//
// Invariants, checked for every driver by package drivertest:
//   - Start leaves nothing behind when it fails: no process, mount, cgroup,
//     file, descriptor.
//   - A machine outlives the process that started it. Adopt finds it again.
//   - Stop is idempotent and returns when nothing of the machine is left.
//   - Done is closed exactly once, after which Exit is final.
//
// Read next: driver/container, then package edge.
package driver

import (
	"context"
	"os"
	"time"

	"github.com/dsec-go/dsec"
)

// Config is everything a machine is started from. The driver owns none of the
// files in it and keeps none after Start returns.
type Config struct {
	ID        dsec.SandboxID
	Root      Root
	Resources dsec.Resources // all fields set
	Hostname  string
	Guest     GuestConfig

	// Cells asks for a guest that runs every command in a pristine room of its
	// own, see Celler. A driver that cannot have it ignores this.
	Cells bool
}

// Root is what the machine sees as its file system: one of Dir, Disk, and
// layers with a writable layer of the driver's making on top. The layers come
// in the form that the driver asks for, see Rooted.
type Root struct {
	Dir    string       // a folder used in place and writable; for tests and first steps
	Layers []*os.File   // FormMounts: detached read-only mounts, lowest first, shared with other machines
	Files  []LayerFiles // FormFiles: the same as local files, lowest first
	Disk   string       // FormDisk: path of a disk image, which is not written to
}

// LayerFiles is one layer as verified local files, which do not change while a
// machine that was started from them is alive. Laid end to end, Meta and then
// Data, they are one EROFS image without further devices: the flat form of
// docs/formats/layer.md.
type LayerFiles struct {
	Digest string // of its manifest
	Meta   string
	Data   []string
}

// RootForm is how a driver wants an environment.
type RootForm int

// The forms of a Root.
const (
	FormMounts RootForm = iota // mounts of this kernel
	FormFiles                  // files, for a kernel that mounts them itself
	FormDisk                   // a whole disk image
)

// Rooted is a driver that wants another form than FormMounts.
type Rooted interface {
	RootForm() RootForm
}

// GuestConfig is what the guest needs to run commands: the defaults of those
// that name none.
type GuestConfig struct {
	Env  []string // NAME=value
	Cwd  string
	User string
}

// Stage names one timed step of Start, for the stage times of a creation.
type Stage = dsec.Stage

// Driver starts and finds machines of one kind. It is safe for concurrent use.
type Driver interface {
	// Kind is the kind of sandbox it runs.
	Kind() dsec.Kind

	// Start makes a machine whose guest answers. It is Invalid for a root that
	// cannot be used, Exhausted when the host is out of something, Unsupported
	// when the host lacks a needed feature. ctx governs the start only, not
	// the machine's life.
	Start(ctx context.Context, c Config) (Machine, error)

	// Adopt returns the machines that outlived an earlier process of this
	// node, and removes what is left of those that did not. It is called once,
	// before Start.
	Adopt(ctx context.Context) ([]Machine, error)

	// Close gives back what the driver holds for machines to come. Machines
	// that run go on.
	Close() error
}

// Machine is one running sandbox. It is safe for concurrent use.
type Machine interface {
	ID() dsec.SandboxID

	// Guest gives the services of the agent inside. They stay usable over
	// reconnections; once the machine is gone every call is Conflict.
	Guest() Guest

	// Stages are the timed steps of its start; none for an adopted machine.
	Stages() []Stage

	// Usage reports what it uses now. It is cheap: a few file reads.
	Usage(ctx context.Context) (dsec.Usage, error)

	// Stop ends it, whatever the workload does, and returns when nothing of it
	// is left. On a machine that is gone it is a no-op.
	Stop(ctx context.Context) error

	// Done is closed when the machine is gone, by Stop or by itself.
	Done() <-chan struct{}

	// Exit says why it is gone; valid once Done is closed.
	Exit() Exit
}

// Guest is the agent inside a machine. Calls on it carry no sandbox ID.
type Guest interface {
	Commands() dsec.Commands
	Files() dsec.Files
	Ports() dsec.Ports

	// Activity reports what the guest is doing, for idle times and adoption.
	Activity(ctx context.Context) (Activity, error)

	// Forget says that the answers of steps are safe with the caller and need
	// not be kept. It is for whoever answers their repetition from then on.
	Forget(ctx context.Context, steps []dsec.Step) error

	// Subscribe calls f on each change of the number of running commands, from
	// a goroutine of the connection, until the machine is gone. f must not
	// block. At most one subscriber.
	Subscribe(f func(Activity))
}

// Inlet is a Guest whose workload can call the host through a port of its
// loopback.
type Inlet interface {
	// Listen opens the port; it stays open for the life of the machine, and to
	// open it again is nothing new. Conflict if the workload has it.
	Listen(ctx context.Context, port int) error

	// Accept waits for the next connection to it, over reconnections to the
	// guest. Connections that nobody waits for queue up in the sandbox, to a
	// small number, and outlive the process of the node.
	Accept(ctx context.Context, port int) (dsec.PortConn, error)
}

// Activity is the guest's own count of what runs.
type Activity = dsec.Activity

// Charged is a machine whose processes lie in a control group. Its name is
// what their /proc/PID/cgroup begins with, of two parts: NODE/SLOT.
type Charged interface {
	Group() string
}

// Exit says how a machine ended.
type Exit struct {
	Cause  dsec.Cause
	Detail string
	Usage  dsec.Usage // last figures
	At     time.Time
}

// Pauser is a machine whose workload can stand still.
type Pauser interface {
	// Pause stops every process of the workload where it is and returns once
	// all stand still; their timeouts do not pass meanwhile. When it fails the
	// workload runs on. A machine that is gone is Conflict. The guest keeps
	// answering, but what starts something waits for Resume; where the guest
	// stands still too, as in a virtual machine, every call waits.
	Pause(ctx context.Context) error

	// Resume lets the workload go on. When it fails the machine is still
	// paused, and it may be tried again.
	Resume(ctx context.Context) error

	// Paused reports whether the machine was paused, also by an earlier process
	// of the node.
	Paused() bool
}

// Reclaimer is a Pauser that can give the memory of a paused machine back.
type Reclaimer interface {
	// Reclaim gives back target bytes, or a little more, or all it can where
	// target is 0 or the host cannot choose, and returns how many bytes came
	// back. It takes about a second for a few hundred megabytes and ends early,
	// without an error, when the machine is resumed or gone; one that is not
	// paused gives nothing. At most one call at a time does anything.
	Reclaim(ctx context.Context, target int64) (int64, error)
}

// SnapshotInfo describes a saved state.
type SnapshotInfo struct {
	Memory bool  // running processes are in it, not files alone
	Bytes  int64 // that its files take on disk
}

// Snapshotter is a machine whose state can be saved while it lives. It stands
// still for the shortest time that makes the state consistent, and runs on
// after it, also when the saving failed. A paused machine can be saved too and
// stays paused.
type Snapshotter interface {
	// Snapshot writes the state into dir, an empty folder that the caller made
	// and owns: removing it is all that a failure needs. The files are the
	// driver's own, complete in themselves but for the machine's Root, and say
	// their version. A full disk is Exhausted.
	Snapshot(ctx context.Context, dir string) (SnapshotInfo, error)
}

// Restorer is a driver that can start a machine from a saved state.
type Restorer interface {
	// Restore is Start from the files of a Snapshot, whose Root c must name; it
	// is a new machine with an identity of its own: host name, machine ID, clock
	// and random pool. What was running in it runs on if the snapshot holds
	// memory. A damaged snapshot or one of another version is Invalid, with the
	// version's name. The files are not changed and not needed after the return.
	Restore(ctx context.Context, c Config, dir string) (Machine, error)
}

// Forker is a machine that can become several.
type Forker interface {
	// Fork starts one machine for each Config, whose Root and Resources are the
	// parent's, as Restore from a snapshot of this moment does, sharing what the
	// host can share. The parent runs on. Either all children are started or,
	// with an error, nothing is left of any.
	Fork(ctx context.Context, children []Config) ([]Machine, error)
}

// Screen is a machine that has a display, a keyboard and a pointer.
type Screen interface {
	// Screenshot gives what the display shows, as PNG.
	Screenshot(ctx context.Context) ([]byte, error)

	// Input plays events one after the other. A key or button that the machine
	// does not have is Invalid, and none of the events is played.
	Input(ctx context.Context, events []dsec.InputEvent) error
}

// Upper is a machine whose writable layer can be read from outside: what a
// commit walks.
type Upper interface {
	// Upper gives the folder of the writable layer and the first host uid of
	// the machine's range. The folder is valid until the machine is gone.
	Upper() (dir string, idBase uint32)

	// Freeze stops every process of the workload and returns the function that
	// lets them go on.
	Freeze(ctx context.Context) (thaw func() error, err error)
}
