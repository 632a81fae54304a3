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

// Setup is what makes a shell into a box: everything that depends on a Spec.
type Setup struct {
	Root     *os.File // detached mount of the root
	Output   *os.File // detached mount of a host folder for unlinked output files
	Cgroup   Join     // how the workload's processes get into its cgroups
	Filter   []byte   // seccomp program, struct sock_filter array; none when empty
	Hostname string
	Hosts    string   // content of /etc/hosts
	Resolv   string   // content of /etc/resolv.conf
	Env      []string // defaults of commands
	Cwd      string
	User     string
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

// fields and files of a Setup message; the counts are checked on receipt.
func (s *Setup) message() *message {
	m := &message{fields: []string{"setup", s.Hostname, s.Hosts, s.Resolv, s.Cwd, s.User, string(s.Filter),
		strconv.Itoa(len(s.Cgroup.Tasks)), strconv.FormatBool(s.Cgroup.v2())}}
	m.fields = append(m.fields, s.Env...)
	m.files = []*os.File{s.Root, s.Output, s.Cgroup.Commands, s.Cgroup.OOM}
	if !s.Cgroup.v2() {
		m.files = append(m.files, s.Cgroup.Leave)
	}
	m.files = append(m.files, s.Cgroup.Tasks...)
	return m
}

func parseSetup(m *message) (*Setup, error) {
	const fixed = 9
	if len(m.fields) < fixed || m.fields[0] != "setup" {
		return nil, errMessage
	}
	s := &Setup{Hostname: m.fields[1], Hosts: m.fields[2], Resolv: m.fields[3], Cwd: m.fields[4], User: m.fields[5],
		Filter: []byte(m.fields[6]), Env: m.fields[fixed:]}
	tasks, err := strconv.Atoi(m.fields[7])
	want := 5 + tasks
	if m.fields[8] == "true" {
		want = 4
	}
	if err != nil || len(m.files) != want {
		return nil, errMessage
	}
	s.Root, s.Output = m.files[0], m.files[1]
	s.Cgroup.Commands, s.Cgroup.OOM = m.files[2], m.files[3]
	if len(m.files) > 4 {
		s.Cgroup.Leave, s.Cgroup.Tasks = m.files[4], m.files[5:]
	}
	return s, nil
}

// Enter hands s to the shell listening at the socket path and waits until it
// is a box. The files stay the caller's.
func Enter(socket string, s *Setup) error {
	conn, err := dial(socket, unix.SOCK_STREAM)
	if err != nil {
		return err
	}
	defer unix.Close(conn)
	tv := unix.NsecToTimeval(enterTimeout.Nanoseconds())
	if err := unix.SetsockoptTimeval(conn, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		return err
	}
	if err := s.message().send(conn); err != nil {
		return fmt.Errorf("send setup: %w", err)
	}
	r, err := receive(conn)
	if err != nil {
		return fmt.Errorf("wait for the box: %w", err)
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

// Receive waits on the listening socket for one Enter and makes the shell into
// a box. A Setup that cannot be carried out is answered and returned; the
// process is of no use afterwards.
func (sh *Shell) Receive(listener int) (*Box, *Setup, error) {
	var conn int
	var err error
	for {
		if conn, _, err = unix.Accept4(listener, unix.SOCK_CLOEXEC); !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return nil, nil, err
	}
	defer unix.Close(conn)
	m, err := receive(conn)
	if err != nil {
		return nil, nil, err
	}
	s, err := parseSetup(m)
	if err != nil {
		m.close()
		return nil, nil, err
	}
	box, err := sh.enter(s)
	answer := ""
	if err != nil {
		answer = dsec.KindOf(err).String() + " " + err.Error()
	}
	if e := (&message{fields: []string{answer}}).send(conn); err == nil {
		err = e
	}
	return box, s, err
}

func (sh *Shell) enter(s *Setup) (*Box, error) {
	if err := sh.root(s); err != nil {
		return nil, err
	}
	if err := unix.Sethostname([]byte(s.Hostname)); err != nil {
		return nil, fmt.Errorf("set hostname: %w", err)
	}
	if err := sh.forge.do(func() error { return dress(s) }); err != nil {
		return nil, err
	}
	return &Box{forge: sh.forge, own: sh.own, cgroup: s.Cgroup}, nil
}

// root attaches the root and moves the prepared parts into it.
func (sh *Shell) root(s *Setup) error {
	err := unix.MoveMount(int(s.Root.Fd()), "", unix.AT_FDCWD, stageRoot, unix.MOVE_MOUNT_F_EMPTY_PATH)
	s.Root.Close()
	if err != nil {
		return fmt.Errorf("attach root: %w", err)
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
	return pivot(stageRoot)
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
	if err := mount("etc", stageEtc, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "size=256k,mode=755"); err != nil {
		return err
	}
	for _, f := range [][2]string{{"hosts", s.Hosts}, {"hostname", s.Hostname + "\n"}, {"resolv.conf", s.Resolv}} {
		if err := os.WriteFile(stageEtc+"/"+f[0], []byte(f[1]), 0o644); err != nil {
			return err
		}
		to, err := inside(etc, f[0], unix.O_PATH)
		if errors.Is(err, unix.ENOENT) {
			to, err = inside(etc, f[0], unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY)
		}
		if err != nil {
			continue
		}
		err = bindFile(stageEtc+"/"+f[0], to)
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
func dress(s *Setup) error {
	for _, t := range s.Cgroup.Tasks {
		if err := joinTasks(t); err != nil {
			return err
		}
		t.Close()
	}
	s.Cgroup.Tasks = nil
	if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
		return fmt.Errorf("unshare cgroup namespace: %w", err)
	}
	// A keyring of its own, so that it does not possess the host's.
	unix.KeyctlJoinSessionKeyring("") //nolint:errcheck // absent in kernels without keys
	if err := dropBounding(); err != nil {
		return err
	}
	if len(s.Filter) > 0 {
		if err := installFilter(s.Filter); err != nil {
			return err
		}
	}
	return dropCapabilities()
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
