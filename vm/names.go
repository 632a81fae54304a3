package vm

// Names that both sides of a virtual machine know.
const (
	// ControlPort and WirePort are the names of the two virtio-serial ports: one
	// for the calls of this package, one for the frames of package wire.
	ControlPort = "dsec.control"
	WirePort    = "dsec.wire"

	// InitProgram is the guest program in a microVM's initramfs.
	InitProgram = "/init"

	// ModulesDir holds a microVM's kernel modules, BootList in it names those
	// that are loaded at once, one a line in the order of their needs.
	ModulesDir = "/modules"
	BootList   = "boot"

	// YieldWord on the kernel's command line makes the agent wait for what runs
	// instead of interrupting it: on an emulated processor going back and forth
	// between two address spaces is most of what a short command costs.
	YieldWord = "dsec.yield"
)

// Folders are those of an initramfs, each behind its parent.
var Folders = []string{"/dev", "/proc", "/sys", "/sbin", ModulesDir}
