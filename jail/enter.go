package jail

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/dsec-go/dsec"
)

// Outfit is what a shell gets while it waits: all that is a box's own and
// depends on no Spec.
type Outfit struct {
	Output *os.File // detached mount of a host folder for unlinked output files
	Cgroup Join     // how the workload's processes get into its cgroups
	Filter []byte   // seccomp program, struct sock_filter array; none when empty
	Warm   bool     // start something once, so that the first command finds the way warm
}

// Join is a workload's place in the host's cgroups, as descriptors, since the
// box has no cgroup file system.
type Join struct {
	// V1: the "tasks" files of its groups that have limits, joined once by the
	// forge; the folder below which each command gets a freezer of its own;
	// and the freezer that the forge goes back to after each fork.
	Tasks []*os.File
	Leave *os.File

	// Both: the folder for command groups.
	Commands *os.File

	// OOM counts kills: memory.oom_control or memory.events.
	OOM *os.File
}

func (j *Join) v2() bool { return j.Leave == nil }

// Setup is what makes a shell into a box: everything that depends on a Spec.
type Setup struct {
	Root     *os.File // detached mount of the root
	Hostname string
	Hosts    string   // content of /etc/hosts
	Resolv   string   // content of /etc/resolv.conf
	Env      []string // defaults of commands
	Cwd      string
	User     string
	Cells    *Cells // what Box.UseCells needs; none for a box without cells
}

func (o *Outfit) message() *message {
	m := &message{fields: []string{"dress", strconv.FormatBool(o.Warm), string(o.Filter)}}
	m.files = []*os.File{o.Output, o.Cgroup.Commands, o.Cgroup.OOM}
	if !o.Cgroup.v2() {
		m.files = append(append(m.files, o.Cgroup.Leave), o.Cgroup.Tasks...)
	}
	return m
}

func parseOutfit(m *message) (*Outfit, error) {
	if len(m.fields) != 3 || m.fields[0] != "dress" || len(m.files) < 3 {
		return nil, errMessage
	}
	o := &Outfit{Warm: m.fields[1] == "true", Filter: []byte(m.fields[2]), Output: m.files[0], Cgroup: Join{Commands: m.files[1], OOM: m.files[2]}}
	if len(m.files) > 3 {
		o.Cgroup.Leave, o.Cgroup.Tasks = m.files[3], m.files[4:]
	}
	return o, nil
}

func (s *Setup) message() *message {
	m := &message{fields: append([]string{"enter", s.Hostname, s.Hosts, s.Resolv, s.Cwd, s.User}, s.Env...)}
	m.files = []*os.File{s.Root}
	if s.Cells != nil {
		s.Cells.addTo(m)
	}
	return m
}

func parseSetup(m *message) (*Setup, error) {
	const fixed = 6
	cells, err := takeCells(m)
	if err != nil {
		return nil, err
	}
	if len(m.fields) < fixed || m.fields[0] != "enter" || len(m.files) != 1 {
		return nil, errMessage
	}
	f := m.fields
	return &Setup{Root: m.files[0], Hostname: f[1], Hosts: f[2], Resolv: f[3], Cwd: f[4], User: f[5], Env: f[fixed:], Cells: cells}, nil
}

// Dress gives the shell listening at the socket path its outfit, and returns
// when it is ready for Enter. The files stay the caller's.
func Dress(socket string, o *Outfit) error { return ask(socket, o.message()) }

// Enter hands s to a dressed shell and waits until it is a box. The file stays
// the caller's.
func Enter(socket string, s *Setup) error { return ask(socket, s.message()) }

func ask(socket string, m *message) error {
	conn, err := dial(socket, unix.SOCK_STREAM)
	if err != nil {
		return err
	}
	defer unix.Close(conn)
	tv := unix.NsecToTimeval(askTimeout.Nanoseconds())
	if err := unix.SetsockoptTimeval(conn, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		return err
	}
	if err := m.send(conn); err != nil {
		return fmt.Errorf("send to shell: %w", err)
	}
	r, err := receive(conn)
	if err != nil {
		return fmt.Errorf("wait for shell: %w", err)
	}
	defer r.close()
	if len(r.fields) != 1 {
		return errMessage
	}
	if text := r.fields[0]; text != "" {
		kind, text, _ := strings.Cut(text, " ")
		return dsec.Errorf(dsec.ParseErrorKind(kind), "%s", text)
	}
	return nil
}

// answer takes one message from the listening socket, does what it asks for,
// and tells the host how that went. It waits in the poller: a thread that
// blocks in the kernel keeps the runtime's monitor awake, in every shell of the
// pool.
func answer(listener *os.File, do func(*message) error) error {
	raw, err := listener.SyscallConn()
	if err != nil {
		return err
	}
	conn := -1
	var acceptErr error
	err = raw.Read(func(fd uintptr) bool {
		conn, _, acceptErr = unix.Accept4(int(fd), unix.SOCK_CLOEXEC)
		return acceptErr != unix.EAGAIN && acceptErr != unix.EINTR
	})
	if err = errors.Join(err, acceptErr); err != nil {
		return fmt.Errorf("accept host: %w", err)
	}
	defer unix.Close(conn)
	m, err := receive(conn)
	if err != nil {
		return err
	}
	text := ""
	if err = do(m); err != nil {
		text = dsec.KindOf(err).String() + " " + err.Error()
	}
	if e := (&message{fields: []string{text}}).send(conn); err == nil {
		err = e
	}
	return err
}

// Dress waits on the listening, non-blocking socket for an outfit and puts it
// on. warm is called with the box if the outfit asks for it. What cannot be
// carried out is answered and returned; the process is of no use afterwards.
func (sh *Shell) Dress(listener *os.File, warm func(*Box, *Outfit) error) (box *Box, o *Outfit, err error) {
	err = answer(listener, func(m *message) (err error) {
		if o, err = parseOutfit(m); err != nil {
			return err
		}
		var key forkKey
		if err = sh.forge.do(func() (err error) { key, err = dress(o); return err }); err != nil {
			return err
		}
		box = &Box{forge: sh.forge, own: sh.own, cgroup: o.Cgroup, key: key}
		if o.Warm {
			return warm(box, o)
		}
		return nil
	})
	return box, o, err
}

// Enter waits on the listening, non-blocking socket for a root and what comes
// with it, and changes to it. It is answered and returned as with Dress.
func (sh *Shell) Enter(listener *os.File) (s *Setup, err error) {
	err = answer(listener, func(m *message) (err error) {
		if s, err = parseSetup(m); err != nil {
			return err
		}
		if err := sh.enter(s); err != nil {
			return err
		}
		return sh.forge.do(confine)
	})
	return s, err
}

// enter attaches the root, moves the prepared parts into it, puts it over the
// shell's own root and changes to it.
//
// It does not pivot. That walks every thread of the host, and letting the old
// root go waits for a grace period of the kernel; both grow dear on a node with
// thousands of boxes. The old root stays below: read-only, with nothing of the
// host in it, and out of reach, since the new root is mounted on its top: a
// ".." that leaves a chroot ends there, and only CAP_SYS_ADMIN could unmount it.
// The reaper shares the shell's root and follows it.
func (sh *Shell) enter(s *Setup) error {
	if s.Root != nil { // else it is attached already
		err := unix.MoveMount(int(s.Root.Fd()), "", unix.AT_FDCWD, stageRoot, unix.MOVE_MOUNT_F_EMPTY_PATH)
		s.Root.Close()
		if err != nil {
			return fmt.Errorf("attach root: %w", err)
		}
	}
	root, err := unix.Open(stageRoot, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(root)
	for _, p := range [][2]string{{stageDev, "dev"}, {stageProc, "proc"}, {stageSys, "sys"}} {
		if err := moveInto(root, p[0], p[1]); err != nil {
			return err
		}
	}
	if err := etcFiles(root, s); err != nil {
		return err
	}
	if err := unix.Mount(stageRoot, "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("cover the shell's root: %w", err)
	}
	if err := unix.Fchdir(root); err != nil {
		return err
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("change root: %w", err)
	}
	if err := unix.Sethostname([]byte(s.Hostname)); err != nil {
		return fmt.Errorf("set hostname: %w", err)
	}
	unix.Umask(0o022) // a login's; the holder's own of 0 would make every file of a command writable to all
	return nil
}

// confine is the last that happens to the calling thread, the forge's, before it
// forks the workload.
func confine() error {
	root, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(root)
	if err := landlock(root); err != nil {
		return err
	}
	return dropCapabilities()
}

// inside opens name below root, and nothing else: no symlink of the image is
// followed.
func inside(root int, name string, flags uint64) (int, error) {
	return unix.Openat2(root, name, &unix.OpenHow{
		Flags: flags | unix.O_CLOEXEC, Mode: 0o644 * (flags >> 6 & 1), // a mode only with O_CREAT
		Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_BENEATH,
	})
}

func moveInto(root int, from, name string) error {
	to, err := inside(root, name, unix.O_PATH|unix.O_DIRECTORY)
	if errors.Is(err, unix.ENOENT) {
		if err := unix.Mkdirat(root, name, 0o755); err != nil {
			return fmt.Errorf("make /%s: %w", name, err)
		}
		to, err = inside(root, name, unix.O_PATH|unix.O_DIRECTORY)
	}
	if err != nil {
		return dsec.Errorf(dsec.Invalid, "the root's /%s is not a folder: %w", name, err)
	}
	defer unix.Close(to)
	if err := unix.MoveMount(unix.AT_FDCWD, from, to, "", unix.MOVE_MOUNT_T_EMPTY_PATH); err != nil {
		return fmt.Errorf("move %s to /%s: %w", from, name, err)
	}
	return nil
}

// etcFiles puts the three files that depend on the sandbox over those of the
// image. They are mounts, so that no commit picks them up. An image without
// /etc gets none; a name that is a symlink or a folder is left alone.
func etcFiles(root int, s *Setup) error {
	etc, err := inside(root, "etc", unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return nil
	}
	defer unix.Close(etc)
	for _, f := range [][2]string{{"hosts", s.Hosts}, {"hostname", s.Hostname + "\n"}, {"resolv.conf", s.Resolv}} {
		if err := os.WriteFile(stageFiles+"/"+f[0], []byte(f[1]), 0o644); err != nil {
			return err
		}
		to, err := inside(etc, f[0], unix.O_PATH)
		if errors.Is(err, unix.ENOENT) {
			to, err = inside(etc, f[0], unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY)
		}
		if err != nil {
			continue
		}
		err = bindFile(stageFiles+"/"+f[0], to)
		unix.Close(to)
		if err != nil {
			return err
		}
	}
	return nil
}

func bindFile(from string, to int) error {
	var st unix.Stat_t
	if err := unix.Fstat(to, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return err
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, from, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return fmt.Errorf("clone %s: %w", from, err)
	}
	defer unix.Close(fd)
	if err := unix.MoveMount(fd, "", to, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach %s: %w", from, err)
	}
	return nil
}

// dress gives the calling thread, the forge's, the workload's cgroups, filter
// and capabilities. The filter goes in while the thread still has
// CAP_SYS_ADMIN, without no_new_privs: sudo and su work in a box.
func dress(o *Outfit) (k forkKey, err error) {
	for _, t := range o.Cgroup.Tasks {
		if err := joinTasks(t); err != nil {
			return k, err
		}
		t.Close()
	}
	o.Cgroup.Tasks = nil
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, workloadSlack, 0, 0, 0); err != nil {
		return k, fmt.Errorf("set timer slack: %w", err)
	}
	// On v2 a fork into a command's group must see both that and its own, where
	// the host's hierarchy is mounted with nsdelegate: there the workload can
	// read what its group is called, and no more.
	if !o.Cgroup.v2() {
		if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
			return k, fmt.Errorf("unshare cgroup namespace: %w", err)
		}
	}
	// A keyring of its own, so that it does not possess the host's.
	unix.KeyctlJoinSessionKeyring("") //nolint:errcheck // absent in kernels without keys
	if err := dropBounding(); err != nil {
		return k, err
	}
	if len(o.Filter) > 0 {
		if o.Cgroup.v2() {
			if k, err = newForkKey(); err != nil {
				return k, err
			}
			o.Filter = k.admit(o.Filter)
		}
		if err := installFilter(o.Filter); err != nil {
			return k, err
		}
		o.Filter = nil
	}
	return k, dropCapabilities(unix.CAP_SYS_ADMIN) // for confine
}

func joinTasks(f *os.File) error {
	if _, err := unix.Pwrite(int(f.Fd()), []byte("0"), 0); err != nil {
		return fmt.Errorf("join %s: %w", f.Name(), err)
	}
	return nil
}

func installFilter(program []byte) error {
	const size = int(unsafe.Sizeof(unix.SockFilter{}))
	if len(program)%size != 0 {
		return errMessage
	}
	prog := unix.SockFprog{Len: uint16(len(program) / size), Filter: (*unix.SockFilter)(unsafe.Pointer(&program[0]))}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&prog)))
	if errno != 0 {
		return fmt.Errorf("install seccomp filter: %w", errno)
	}
	return nil
}
