package e2e_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/client"
	driver "github.com/dsec-go/dsec/driver/container"
	"github.com/dsec-go/dsec/driver/drivertest"
)

// patience is how long a condition may take to come true.
const patience = 20 * time.Second

// node is a "dsec up" on folders of its own, and a client of it.
type node struct {
	dir, data, home string
	guest           string // its own name of the guest program, by which its processes are told
	listen          string
	flags           []string // further ones of dsec up
	vars            []string // further variables of its processes
	meminfo         string   // file that the node's processes see as /proc/meminfo; "" for the host's
	proc            *exec.Cmd
	exited          chan struct{}
	log             buffer
	url, token      string
	transport       *http.Transport
	dsec.Services
}

// newNode makes the folders; start starts it.
func newNode(dir, data string) (*node, error) {
	n := &node{dir: dir, data: data, home: filepath.Join(dir, "home"), guest: filepath.Join(dir, "dsec-guest"), listen: "127.0.0.1:0"}
	if err := os.MkdirAll(n.home, 0o700); err != nil {
		return nil, err
	}
	return n, os.Link(filepath.Join(programs, "dsec-guest"), n.guest)
}

// own gives a started node with the busybox image that ends with the test and
// must leave nothing.
func own(t *testing.T) *node {
	t.Helper()
	n := unstarted(t)
	must(t, n.start())
	n.importBusybox(t)
	return n
}

// unstarted is own before its start. Such tests wait for disks and restarts more
// than they compute, so they run side by side, after those of the shared node.
func unstarted(t *testing.T) *node {
	t.Helper()
	t.Parallel()
	return fresh(t)
}

// fresh is unstarted for a test that has another node already.
func fresh(t *testing.T) *node {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("feature root: a node makes namespaces and mounts")
	}
	dir := t.TempDir()
	n, err := newNode(filepath.Join(dir, "node"), filepath.Join(dir, "data"))
	must(t, err)
	t.Cleanup(func() {
		if err := n.end(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("log of the node:\n%s", n.log.tail())
		}
	})
	return n
}

func (n *node) importBusybox(t *testing.T) {
	t.Helper()
	must(t, n.run(bytes.NewReader(drivertest.BusyboxTar(t)), "image", "import", "-", "--name", busybox).fault())
}

// image gives what a node knows of an image.
func (n *node) image(t *testing.T, name string) (img dsec.Image) {
	t.Helper()
	must(t, json.Unmarshal([]byte(n.dsec(t, "image", "inspect", name, "--json")), &img))
	return img
}

// take names an image of another node that has the same store.
func (n *node) take(t *testing.T, from *node, name string) {
	t.Helper()
	n.dsec(t, "image", "import", "layer:"+from.image(t, name).Digest, "--name", name)
}

// start runs dsec up until it serves.
func (n *node) start() error {
	n.proc = exec.Command(filepath.Join(programs, "dsec"), "up", "--data", n.data, "--guest", n.guest, "--listen", n.listen)
	n.proc.Args = append(n.proc.Args, n.flags...)
	if n.meminfo != "" {
		// A mount namespace of its own: nobody else sees the figures.
		line := `mount --make-rprivate / && mount --bind "$0" /proc/meminfo && exec "$@"`
		n.proc = exec.Command("/bin/sh", append([]string{"-c", line, n.meminfo}, n.proc.Args...)...)
	}
	n.proc.Env = n.env()
	n.proc.Stderr = &n.log
	n.proc.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a Ctrl-C is for the test
	if n.meminfo != "" {
		n.proc.SysProcAttr.Unshareflags = syscall.CLONE_NEWNS
	}
	out, err := n.proc.StdoutPipe()
	if err != nil {
		return err
	}
	if err := n.proc.Start(); err != nil {
		return err
	}
	n.exited = make(chan struct{})
	lines := bufio.NewReader(out)
	line, err := lines.ReadString('\n')
	go func() {
		io.Copy(io.Discard, lines)
		n.proc.Wait()
		close(n.exited)
	}()
	_, rest, found := strings.Cut(line, "serves at ")
	if err != nil || !found {
		n.kill()
		return fmt.Errorf("dsec up said %q: %s", line, n.log.tail())
	}
	n.url, _, _ = strings.Cut(rest, ",")
	n.listen = strings.TrimPrefix(n.url, "http://") // the same after a restart
	token, err := os.ReadFile(filepath.Join(n.data, "token"))
	if err != nil {
		return err
	}
	n.token = strings.TrimSpace(string(token))
	n.Services, n.transport, err = n.client()
	return err
}

// client gives a client with connections of its own.
func (n *node) client() (dsec.Services, *http.Transport, error) {
	tr := client.NewTransport()
	s, err := client.Open(client.Config{URL: n.url, Token: n.token, Transport: tr})
	return s, tr, err
}

func (n *node) another(t *testing.T) dsec.Services {
	t.Helper()
	s, tr, err := n.client()
	must(t, err)
	t.Cleanup(tr.CloseIdleConnections)
	return s
}

// kill ends the process as a crash does.
func (n *node) kill() {
	n.proc.Process.Kill()
	<-n.exited
}

// end takes the node down and says what is left of it.
func (n *node) end() error {
	if n.transport != nil {
		n.transport.CloseIdleConnections()
	}
	if n.proc == nil {
		return nil
	}
	err := n.run(nil, "down", "--data", n.data, "--guest", n.guest).fault()
	select {
	case <-n.exited:
	case <-time.After(patience):
		n.kill()
		err = errors.Join(err, errors.New("dsec up did not end with dsec down"))
	}
	var left []string
	if !until(func() bool { left = n.left(); return len(left) == 0 }) {
		err = errors.Join(err, fmt.Errorf("left behind:\n%s", strings.Join(left, "\n")))
	}
	return err
}

// left lists what of the node is still on the host: processes, control groups,
// mounts, descriptors, and files where boxes had theirs.
func (n *node) left() []string {
	out := n.boxes()
	for _, pid := range pids() {
		base := "/proc/" + pid
		if exe, _ := os.Readlink(base + "/exe"); strings.HasPrefix(exe, n.dir+"/") {
			out = append(out, "process "+pid+" "+exe)
		}
		fds, _ := filepath.Glob(base + "/fd/*")
		for _, fd := range fds {
			if to, _ := os.Readlink(fd); pid != strconv.Itoa(os.Getpid()) && strings.HasPrefix(to, n.data+"/") {
				out = append(out, "descriptor "+fd+" "+to)
			}
		}
	}
	filepath.WalkDir(filepath.Join(n.data, "container"), func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			out = append(out, "file "+path)
		}
		return nil
	})
	return out
}

// boxes lists what boxes have on the host beside their files.
func (n *node) boxes() []string {
	var out []string
	for _, pid := range n.members() {
		out = append(out, fmt.Sprint("process ", pid))
	}
	if instance, err := os.ReadFile(filepath.Join(n.data, "instance")); err == nil {
		for _, pattern := range []string{"/sys/fs/cgroup/dsec-%s*", "/sys/fs/cgroup/*/dsec-%s*"} {
			groups, _ := filepath.Glob(fmt.Sprintf(pattern, strings.TrimSpace(string(instance))))
			out = append(out, groups...)
		}
	}
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, n.data+"/container/") || strings.Contains(line, n.data+"/blobs/") {
			out = append(out, "mount "+strings.TrimSpace(line))
		}
	}
	return out
}

func pids() []string {
	var out []string
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err == nil {
			out = append(out, e.Name())
		}
	}
	return out
}

// anonymous is the memory of the node's process that no file backs, in bytes.
func (n *node) anonymous(t *testing.T) int64 {
	t.Helper()
	return anonymous(t, n.proc.Process.Pid)
}

func anonymous(t *testing.T, pid int) int64 {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	must(t, err)
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); f[0] == "RssAnon:" {
			kib, err := strconv.ParseInt(f[1], 10, 64)
			must(t, err)
			return kib << 10
		}
	}
	t.Fatalf("no RssAnon of process %d", pid)
	return 0
}

// members gives the processes in the node's control groups: the holder, guests
// and workloads.
func (n *node) members() []int {
	instance, err := os.ReadFile(filepath.Join(n.data, "instance"))
	if err != nil {
		return nil
	}
	var out []int
	for _, pid := range pids() {
		groups, _ := os.ReadFile("/proc/" + pid + "/cgroup")
		if bytes.Contains(groups, append([]byte("/dsec-"), bytes.TrimSpace(instance)...)) {
			p, _ := strconv.Atoi(pid)
			out = append(out, p)
		}
	}
	slices.Sort(out)
	return out
}

// guests gives the guests of sandboxes and of shells that wait for one. Their
// program is the holder's copy.
func (n *node) guests() []int {
	return slices.DeleteFunc(n.members(), func(pid int) bool {
		exe, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
		name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		return exe != "/bin/dsec-guest" || string(name) != "dsec-guest\n" // not a reaper
	})
}

// settle waits until the node keeps as many shells ready as it wants to, each
// with a descriptor.
func (n *node) settle(t *testing.T) {
	t.Helper()
	eventually(t, "a full pool", func() bool {
		alive, err := n.Sandboxes.List(ctx(t), dsec.Filter{})
		return err == nil && len(n.guests()) == len(alive)+driver.DefaultPool
	})
}

// metric reads one figure of /metrics.
func (n *node) metric(t *testing.T, name string) int {
	t.Helper()
	_, body := n.get(t, "/metrics")
	for line := range strings.Lines(body) {
		if v, ok := strings.CutPrefix(line, name+" "); ok {
			f, err := strconv.ParseFloat(strings.TrimSpace(v), 64)
			must(t, err)
			return int(f)
		}
	}
	t.Fatalf("/metrics has no %s", name)
	return 0
}

func (n *node) get(t *testing.T, path string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx(t), http.MethodGet, n.url+path, nil)
	must(t, err)
	req.Close = true
	res, err := http.DefaultClient.Do(req)
	must(t, err)
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	must(t, err)
	return res.StatusCode, string(b)
}

// env is what the programs of a node's user see.
func (n *node) env() []string {
	return append(append(os.Environ(), "HOME="+n.home, "XDG_CONFIG_HOME=", "DSEC_URL=", "DSEC_TOKEN="), n.vars...)
}

// result is how a command line of dsec ended.
type result struct {
	args     []string
	code     int
	out, err string
	cause    error // it could not be run at all
}

func (r result) fault() error {
	if r.cause == nil && r.code == 0 {
		return nil
	}
	return fmt.Errorf("dsec %s: status %d: %s%w", strings.Join(r.args, " "), r.code, r.err, errors.Join(r.cause))
}

// command prepares a command line of dsec. It is killed when it does not end.
func (n *node) command(args ...string) (*exec.Cmd, context.CancelFunc) {
	c, cancel := context.WithTimeout(context.Background(), time.Minute)
	cmd := exec.CommandContext(c, filepath.Join(programs, "dsec"), args...)
	cmd.Env = n.env()
	cmd.Dir = n.home
	return cmd, cancel
}

// run runs a command line of dsec to its end.
func (n *node) run(stdin io.Reader, args ...string) result {
	cmd, cancel := n.command(args...)
	defer cancel()
	return finish(cmd, stdin)
}

func finish(cmd *exec.Cmd, stdin io.Reader) result {
	var out, errs bytes.Buffer
	cmd.Stdin = stdin
	if cmd.Stdout == nil {
		cmd.Stdout = &out
	}
	cmd.Stderr = &errs
	err := cmd.Run()
	r := result{args: cmd.Args[1:], code: cmd.ProcessState.ExitCode(), out: out.String(), err: errs.String()}
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		r.cause = err
	}
	return r
}

// dsec runs a command line that must succeed and gives its output, trimmed.
func (n *node) dsec(t *testing.T, args ...string) string {
	t.Helper()
	r := n.run(nil, args...)
	must(t, r.fault())
	return strings.TrimSpace(r.out)
}

// plain is the Spec of a sandbox that a test does not care about.
func plain() dsec.Spec {
	return dsec.Spec{Environment: dsec.Environment{Base: busybox}, Resources: dsec.Resources{CPU: 2, Memory: 256 << 20, Pids: 256}}
}

// create makes a sandbox that ends with the test.
func (n *node) create(t *testing.T, spec dsec.Spec) dsec.Sandbox {
	t.Helper()
	sb, err := n.Sandboxes.Create(ctx(t), spec, dsec.CreateOptions{})
	must(t, err)
	t.Cleanup(func() { n.stop(t, sb.ID) })
	return sb
}

func (n *node) stop(t *testing.T, id dsec.SandboxID) dsec.Sandbox {
	t.Helper()
	c, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	sb, err := n.Sandboxes.Stop(c, id)
	if err != nil {
		t.Errorf("stop: %v", err)
	}
	return sb
}

// sh runs a shell line to its end.
func (n *node) sh(t *testing.T, id dsec.SandboxID, line string) dsec.Result {
	t.Helper()
	r, err := n.Commands.Run(ctx(t), on(id), dsec.Command{Shell: line, Timeout: 30 * time.Second}, nil)
	if err != nil {
		t.Fatalf("run %q: %v", line, err)
	}
	return r
}

func (n *node) begin(t *testing.T, id dsec.SandboxID, c dsec.Command) dsec.CommandStatus {
	t.Helper()
	st, err := n.Commands.Start(ctx(t), on(id), c)
	if err != nil {
		t.Fatalf("start: %v", err)
	}
	return st
}

// attached is all that an Attach gave.
type attached struct {
	out, err []byte
	gap      int64
	status   dsec.CommandStatus
}

// follow attaches until the end and checks the stream's own promises.
func follow(c context.Context, s dsec.Commands, call dsec.Call, id dsec.CommandID) (attached, error) {
	var a attached
	var next int64
	ends := 0
	for o, err := range s.Attach(c, call, id, 0) {
		if err != nil {
			return a, err
		}
		if ends > 0 {
			return a, errors.New("an event after the last one")
		}
		if len(o.Data) > 0 || o.Gap > 0 {
			if o.Offset != next+o.Gap {
				return a, fmt.Errorf("offset %d after %d with a gap of %d", o.Offset, next, o.Gap)
			}
			next = o.Offset + int64(len(o.Data))
		}
		a.gap += o.Gap
		if o.Stream == dsec.Stderr {
			a.err = append(a.err, o.Data...)
		} else {
			a.out = append(a.out, o.Data...)
		}
		if o.Status != nil {
			a.status = *o.Status
			ends++
		}
	}
	if ends != 1 {
		return a, fmt.Errorf("the stream had %d ends", ends)
	}
	return a, nil
}

func on(id dsec.SandboxID) dsec.Call { return dsec.Call{Sandbox: id} }

func ctx(t *testing.T) context.Context {
	t.Helper()
	c, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return c
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantKind(t *testing.T, what string, err error, kinds ...dsec.ErrorKind) {
	t.Helper()
	if err == nil || !slices.Contains(kinds, dsec.KindOf(err)) {
		t.Errorf("%s: error %v is %v, want %v", what, err, dsec.KindOf(err), kinds)
	}
}

// until polls a condition and reports whether it came true in time.
func until(f func() bool) bool {
	limit := time.Now().Add(patience)
	for !f() {
		if time.Now().After(limit) {
			return false
		}
		<-time.After(10 * time.Millisecond)
	}
	return true
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	if !until(f) {
		t.Fatalf("never happened: %s", what)
	}
}

// buffer is what a process wrote, for several readers.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// tail is its last few KiB.
func (b *buffer) tail() string {
	s := b.String()
	return s[max(0, len(s)-8<<10):]
}
