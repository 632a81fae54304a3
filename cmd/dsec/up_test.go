package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-go/dsec"
	"github.com/dsec-go/dsec/client"
)

// asProgram makes this test binary the dsec program itself, for tests that
// need a process to kill.
const asProgram = "DSEC_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	os.Exit(m.Run())
}

// world is a data folder, a home and the guest program.
type world struct {
	epoch             string // of the job that its command lines own
	t                 *testing.T
	data, home, guest string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("feature root: a node makes namespaces and mounts")
	}
	dir := t.TempDir()
	w := &world{t: t, data: filepath.Join(dir, "data"), home: filepath.Join(dir, "home"), guest: filepath.Join(dir, "dsec-guest")}
	program, err := builtGuest()
	if err != nil {
		t.Fatal(err)
	}
	// Its own copy, so that its processes are told from another test's.
	if err := os.WriteFile(w.guest, program, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if hasNode(w.data) {
			w.run("down", "--data", w.data, "--guest", w.guest)
		}
	})
	return w
}

// builtGuest gives the guest program, built once.
var builtGuest = sync.OnceValues(func() ([]byte, error) {
	dir, err := os.MkdirTemp("", "dsec-guest-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "dsec-guest")
	build := exec.Command("go", "build", "-o", path, "../dsec-guest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build guest: %w\n%s", err, out)
	}
	return os.ReadFile(path)
})

func (w *world) getenv(name string) string {
	switch name {
	case "HOME":
		return w.home
	case "DSEC_JOB_EPOCH":
		return w.epoch
	}
	return ""
}

// start runs a command line of dsec with this world's context file.
func (w *world) start(args ...string) *session {
	s := newSession(nil)
	s.Getenv, s.Connect = w.getenv, client.Open
	s.code = s.start(args...)
	return s
}

// run runs a command line to its end and gives its output, trimmed.
func (w *world) run(args ...string) string {
	w.t.Helper()
	s := w.start(args...)
	if code := <-s.code; code != 0 {
		w.t.Errorf("dsec %s: status %d: %s", strings.Join(args, " "), code, s.err)
	}
	return strings.TrimSpace(s.out.String())
}

// up starts a node in this process and waits until it serves.
func (w *world) up() *session {
	w.t.Helper()
	s := w.start("up", "--data", w.data, "--guest", w.guest, "--listen", "127.0.0.1:0")
	s.out.await(w.t, "serves at")
	return s
}

// rootfs gives a folder to make an image of: one static program and a file.
func (w *world) rootfs() string {
	w.t.Helper()
	dir := w.t.TempDir()
	program, err := os.ReadFile(w.guest)
	if err != nil {
		w.t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "bin"), 0o755); err != nil {
		w.t.Fatal(err)
	}
	for name, data := range map[string][]byte{"bin/hello": program, "note": []byte("from the image\n")} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o755); err != nil {
			w.t.Fatal(err)
		}
	}
	return dir
}

// left gives what of the node's is still there: processes, control groups and
// mounts, by the name of its data folder and its instance.
func (w *world) left() []string {
	w.t.Helper()
	var found []string
	instance, err := os.ReadFile(filepath.Join(w.data, instanceFile))
	if err != nil {
		w.t.Fatal(err)
	}
	for _, pattern := range []string{"/sys/fs/cgroup/dsec-%s*", "/sys/fs/cgroup/*/dsec-%s*"} {
		groups, err := filepath.Glob(fmt.Sprintf(pattern, strings.TrimSpace(string(instance))))
		if err != nil {
			w.t.Fatal(err)
		}
		found = append(found, groups...)
	}
	// The holder, guests and workloads alike are in the node's groups.
	procs, err := filepath.Glob("/proc/[0-9]*/cgroup")
	if err != nil {
		w.t.Fatal(err)
	}
	for _, p := range procs {
		if b, err := os.ReadFile(p); err == nil && strings.Contains(string(b), "/dsec-"+strings.TrimSpace(string(instance))) {
			found = append(found, p)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		w.t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, w.data) {
			found = append(found, line)
		}
	}
	return found
}

func TestUpOutlivesItself(t *testing.T) {
	w := newWorld(t)
	up := w.up()
	if got := w.run("image", "import", w.rootfs(), "--name", "tiny@1"); got != "tiny@1" {
		t.Fatalf("import gave %q", got)
	}
	id := w.run("create", "--image", "tiny", "--label", "who=me", "--memory", "64M")
	if got := w.run("exec", id, "hello", "version"); !strings.HasPrefix(got, "dsec-guest ") {
		t.Errorf("exec gave %q", got)
	}
	if got := w.run("cp", id+":/note", "-"); got != "from the image" {
		t.Errorf("cp gave %q", got)
	}
	if got := w.run("run", "tiny", "--", "/bin/hello", "version"); !strings.HasPrefix(got, "dsec-guest ") {
		t.Errorf("run gave %q", got)
	}
	missing := w.start("exec", id, "no-such-program")
	if code := <-missing.code; code != 127 {
		t.Errorf("a missing program ended with %d: %s", code, missing.err)
	}
	w.run("cp", filepath.Join(w.rootfs(), "note"), id+":/added")
	if got := w.run("commit", id, "tiny-more@1"); got != "tiny-more@1" {
		t.Errorf("commit gave %q", got)
	}
	second := w.run("create", "--image", "tiny", "--workspace", "tiny-more")
	if got := w.run("cp", second+":/added", "-"); got != "from the image" {
		t.Errorf("the committed file holds %q", got)
	}
	w.run("stop", second)

	// What the server says of itself needs no token.
	c, err := (&app{Getenv: w.getenv}).readContext()
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		"/healthz": `"sandboxes":1`, "/metrics": `dsec_sandbox_ended_total{cause="user",kind="container"} 2`,
	} {
		if body := get(t, c.URL+path); !strings.Contains(body, want) {
			t.Errorf("%s has no %s:\n%s", path, want, body)
		}
	}
	if body := get(t, c.URL+"/dsec.v1.Sandboxes/List"); !strings.Contains(body, "unauthenticated") {
		t.Errorf("a call without a token got %s", body)
	}

	// A second node of the folder is refused and harms nothing.
	other := w.start("up", "--data", w.data, "--guest", w.guest, "--listen", "127.0.0.1:0")
	if code := <-other.code; code != 1 || !strings.Contains(other.err.String(), errInUse.Error()) {
		t.Errorf("a second up ended with %d: %s", code, other.err)
	}

	up.signals <- os.Interrupt
	if code := <-up.code; code != 0 {
		t.Errorf("up ended with %d: %s", code, up.err)
	}
	if !strings.Contains(up.out.String(), "dsec: 1 sandboxes run on") {
		t.Errorf("up said %q", up.out)
	}

	up = w.up()
	if got := w.run("ls", "-q"); got != id {
		t.Errorf("after a restart ls gave %q, want %s", got, id)
	}
	if got := w.run("exec", id, "hello", "version"); !strings.HasPrefix(got, "dsec-guest ") {
		t.Errorf("after a restart exec gave %q", got)
	}
	if got := w.run("run", "tiny", "--", "hello", "version"); !strings.HasPrefix(got, "dsec-guest ") {
		t.Errorf("after a restart run gave %q", got)
	}
	w.run("down", "--data", w.data)
	if code := <-up.code; code != 0 || !strings.Contains(up.out.String(), "taken down") {
		t.Errorf("up ended with %d: %s%s", code, up.out, up.err)
	}
	if left := w.left(); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	if c, err := (&app{Getenv: w.getenv}).readContext(); err != nil || c != (serverContext{}) {
		t.Errorf("the context file is still there: %+v, %v", c, err)
	}

	// Images outlive the node, ended sandboxes stay listed.
	up = w.up()
	if got := w.run("image", "ls"); !strings.Contains(got, "tiny@1") {
		t.Errorf("images: %s", got)
	}
	if got := w.run("ls", "--all"); !strings.Contains(got, "node-down") {
		t.Errorf("sandboxes: %s", got)
	}
	w.run("down", "--data", w.data)
	<-up.code
}

func TestDownEndsWhatAKilledNodeLeft(t *testing.T) {
	w := newWorld(t)
	cmd := exec.Command(os.Args[0], "up", "--data", w.data, "--guest", w.guest, "--listen", "127.0.0.1:0")
	cmd.Env = append(os.Environ(), asProgram+"=1", "HOME="+w.home, "XDG_CONFIG_HOME=")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		cmd.Wait()
		t.Fatalf("up said nothing: %s", &stderr)
	}
	if !strings.Contains(line, "serves at") {
		t.Errorf("up said %q", line)
	}
	w.run("image", "import", w.rootfs(), "--name", "tiny")
	w.run("create", "--image", "tiny")
	if len(w.left()) == 0 {
		t.Fatal("nothing is found of a node that runs")
	}
	cmd.Process.Kill()
	cmd.Wait()

	// The context file is stale now; that is said, not hung on.
	s := w.start("ls")
	if code := <-s.code; code != 1 || !strings.Contains(s.err.String(), "is `dsec up` running?") {
		t.Errorf("ls ended with %d: %s", code, s.err)
	}
	down := w.start("down", "--data", w.data, "--guest", w.guest)
	if code := <-down.code; code != 0 || down.out.String()+down.err.String() != "" {
		t.Errorf("down ended with %d and said %q", code, down.out.String()+down.err.String())
	}
	if left := w.left(); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	w.run("down", "--data", w.data, "--guest", w.guest) // nothing to do is no fault
}

// A detached node is another process, which is this test's program.
func TestDetach(t *testing.T) {
	w := newWorld(t)
	t.Setenv(asProgram, "1")
	t.Setenv("HOME", w.home)
	t.Setenv("XDG_CONFIG_HOME", "")
	args := []string{"up", "--detach", "--data", w.data, "--guest", w.guest, "--listen", "127.0.0.1:0"}
	said := w.run(args...)
	c, err := (&app{Getenv: w.getenv}).readContext()
	if err != nil || !strings.Contains(said, "serves at "+c.URL+",") {
		t.Errorf("up said %q, the context file %+v, %v", said, c, err)
	}
	if got := w.run("node", "ls"); !strings.Contains(got, "container") {
		t.Errorf("node ls gave %q", got)
	}
	second := w.start(args...)
	if code := <-second.code; code != 1 || !strings.HasSuffix(second.err.String(), errInUse.Error()+"\n") {
		t.Errorf("a second up ended with %d: %s", code, second.err)
	}
	w.run("down", "--data", w.data)
	if b, err := os.ReadFile(filepath.Join(w.data, upLog)); err != nil || !strings.Contains(string(b), "serves at "+c.URL) {
		t.Errorf("the log holds %q, %v", b, err)
	}
}

func TestOperatorTokenIsRenewed(t *testing.T) {
	w := newWorld(t)
	secret := func() string {
		c, err := (&app{Getenv: w.getenv}).readContext()
		if err != nil {
			t.Fatal(err)
		}
		return c.Token
	}
	up := w.up()
	first := secret()
	up.signals <- os.Interrupt
	<-up.code
	up = w.up()
	if secret() != first {
		t.Error("a restart changed the token")
	}
	s := w.start("token", "revoke", operatorTokenName)
	if code := <-s.code; code != 1 || !strings.Contains(s.err.String(), "the last with the right admin") || !strings.Contains(s.err.String(), "dsec token create") {
		t.Errorf("the last operator token was revoked: %d, %s", code, s.err.String())
	}
	w.run("token", "create", "second", "--right", "admin")
	w.run("token", "revoke", operatorTokenName)
	up.signals <- os.Interrupt
	<-up.code
	up = w.up()
	if secret() == first {
		t.Error("a revoked token is handed out again")
	}
	var list []struct{ Name string }
	if err := json.Unmarshal([]byte(w.run("token", "ls", "--json")), &list); err != nil || len(list) != 2 {
		t.Errorf("tokens: %v, %v", list, err)
	}
	w.run("down", "--data", w.data)
	<-up.code
}

func get(t *testing.T, url string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestDynamicGuest refuses a guest that would not start in an empty root.
func TestDynamicGuest(t *testing.T) {
	if err := checkStatic("/bin/true"); err == nil || !strings.Contains(err.Error(), "CGO_ENABLED=0") {
		t.Errorf("a dynamic program: %v", err)
	}
	if err := checkStatic("/bin/busybox"); err != nil {
		t.Errorf("a static one: %v", err)
	}
}

// TestRefusals tries what is wrong with the words of a command alone.
func TestRefusals(t *testing.T) {
	w := newWorld(t)
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	up := "up --data " + w.data + " --guest " + w.guest
	for _, c := range []struct{ args, want string }{
		{"down --data " + t.TempDir(), "not the data folder of a node"},
		{up + " --listen :0", "is not HOST:PORT"},
		{up + " --listen 127.0.0.1:99999", "invalid port"},
		{up + " --listen " + busy.Addr().String(), "address already in use"},
		{"up --listen 127.0.0.1:0 --data " + w.data + " --guest /bin/true", "/bin/true is not a dsec-guest"},
		{"up --listen 127.0.0.1:0 --data " + w.data + " --guest /bin/none", "no such file"},
		{"ls --state sleeping", "not one of creating"},
	} {
		s := w.start(strings.Fields(c.args)...)
		if code := <-s.code; code == 0 || !strings.Contains(s.err.String(), c.want) {
			t.Errorf("dsec %s: status %d, %q, want %q", c.args, code, s.err.String(), c.want)
		}
	}
	if _, err := os.Stat(w.data); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("what was refused made the data folder: %v", err)
	}
}

// connect opens the services of a server through the client.
func connect(url, token string) (dsec.Services, error) {
	return client.Open(client.Config{URL: url, Token: token})
}
