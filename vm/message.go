package vm

import (
	"context"
	"time"

	"github.com/dsec-go/dsec"
)

// Version is the version of the control protocol. Ends of different versions
// refuse each other with Unsupported.
const Version = 1

// Handler is what a guest does for its host. The calls of one connection come
// one after the other.
type Handler interface {
	// Ping answers when the guest is ready for the others.
	Ping(ctx context.Context) (Info, error)

	// Warm does once what Enter and a command do, and undoes it, so that the
	// emulator and the kernel find their way warm. The parts of a Setup that
	// it needs are the disks; none of it is kept. It is done before Enter, any
	// number of times.
	Warm(ctx context.Context, s Setup) error

	// Again makes the machine as if nothing had been done to it: whatever was
	// mounted and started since its boot ends, the guest program too, and
	// another of its kind takes its place. The connection ends; who wants to
	// know when it is over pings. It lets a machine that is about to stand still
	// do once, for practice, all that it will do in earnest.
	Again(ctx context.Context) error

	// Enter makes the machine a sandbox: it mounts the root, and from its end
	// on the wire port is served. It is done once; a second is Conflict. What
	// cannot be mounted is Invalid.
	Enter(ctx context.Context, s Setup) error

	// Restored tells a machine that it has been asleep, or is a copy of one
	// that was: it sets the clock, stirs the random pool and takes on an
	// identity. It is done before Enter or after it.
	Restored(ctx context.Context, r Restored) (Clock, error)

	// Freeze makes the writable disks consistent and holds back what would
	// change them until Thaw. Freezing what is frozen is nothing new, nor is
	// thawing what is not.
	Freeze(ctx context.Context) error
	Thaw(ctx context.Context) error

	// Usage reports what the workload uses. Commands is 0: package wire counts
	// those.
	Usage(ctx context.Context) (dsec.Usage, error)

	// Sync writes the writable disks out.
	Sync(ctx context.Context) error

	// PowerOff syncs and ends the machine; the answer may not arrive.
	PowerOff(ctx context.Context) error
}

// Info is what a guest says of itself.
type Info struct {
	Version string        // of the guest program
	Kernel  string        // its release
	Entered bool          // Enter was done
	Boot    time.Duration // from the kernel's start to the guest's readiness
}

// Setup is everything of a sandbox that a machine's guest needs to know. An
// agent inside a guest operating system takes Env, Cwd, User and Hostname and
// ignores the rest.
type Setup struct {
	Layers []Extent // of the root, lowest first; FormFiles' flat images
	Upper  string   // disk of the writable layer, with an ext4 file system
	Output string   // disk of recorded output, with an ext4 file system; in memory without

	Hostname string
	Hosts    string // content of /etc/hosts
	Resolv   string // content of /etc/resolv.conf
	Machine  string // content of /etc/machine-id, 32 hexadecimal digits; made up without

	Env  []string // NAME=value
	Cwd  string
	User string

	Limits Limits
}

// Extent is a part of a disk. Disks are named by their serial number; the
// persistent-memory devices, which have none, pmem0, pmem1 and so on.
type Extent struct {
	Disk   string
	Offset int64 // bytes, a multiple of 4096
	Size   int64 // bytes, a multiple of 4096; 0 for all of the disk
	DAX    bool  // mount it without a page cache of the guest's
}

// Limits are those of the workload inside its machine: below the machine's own,
// so that it is the workload that meets them and not the agent. 0 is none.
type Limits struct {
	Memory int64   // bytes
	CPU    float64 // cores
	Pids   int     // processes and threads
}

// Restored is what a machine cannot know after it was asleep.
type Restored struct {
	Now      time.Time // the time when this is sent
	Seed     []byte    // at least MinSeed bytes from the host's random pool
	Hostname string    // empty leaves it
	Hosts    string    // content of /etc/hosts; empty leaves it
	Machine  string    // content of /etc/machine-id; empty leaves it
}

// MinSeed is how many bytes of seed a guest asks for.
const MinSeed = 32

// Clock is what a guest's clock showed when it had been set.
type Clock struct {
	Now    time.Time
	Source string // its clock source: one that follows the host's time does not need stepping
}

// Limits of messages.
const (
	maxMessage = 4 << 20
	maxLayers  = 1024
	maxEnv     = 4096
)

// call names an operation. The values never change meaning within a Version.
type call uint8

const (
	cPing call = iota + 1
	cWarm
	cEnter
	cRestored
	cFreeze
	cThaw
	cUsage
	cSync
	cPowerOff
	cAgain
)
